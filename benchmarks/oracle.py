"""What a policy that knows the future would do: a bound for the policies that do not."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.workloads import Job
from sglang_lora_tree.radix.identity import identity_of
from sglang_lora_tree.radix.policies import Node, Policy, RetentionPolicy, RetentionState

_NEVER = 1 << 40
_LORA_NODE = "lora-node:"  # keys of the tree's second layer


class Oracle(Policy):
    """Belady's rule: whatever is used again last leaves first. Blind to sizes and costs.

    Args:
        uses: (adapter, token) or (adapter, None) -> numbers of the jobs that use it, rising.
        number: adapter identity -> its number.
        upcoming: number of the first job that has not come to the tree yet.
    """

    def __init__(
        self,
        state: RetentionState,
        uses: dict[tuple[int, int | None], list[int]],
        number: dict[str, int],
        upcoming: Callable[[], int],
    ) -> None:
        super().__init__(state)
        self._uses, self._number, self._upcoming = uses, number, upcoming

    def static_key(self, node: Node) -> Any:
        return -self._next_use(node), node.last_access_time

    def _next_use(self, node: Any) -> int:
        name = node.key.extra_key.removeprefix(_LORA_NODE)
        is_adapter = name != node.key.extra_key
        adapter = self._number[name if is_adapter else identity_of(name)]
        token = None if is_adapter else node.key.token_ids[0]
        uses = self._uses.get((adapter, token), [])
        place = bisect.bisect_left(uses, self._upcoming())
        return uses[place] if place < len(uses) else _NEVER


def uses_of(jobs: Sequence[Job]) -> dict[tuple[int, int | None], list[int]]:
    """Who uses what, and when, for :class:`Oracle`."""
    uses: dict[tuple[int, int | None], list[int]] = {}
    for number, job in enumerate(jobs):
        uses.setdefault((job.adapter, None), []).append(number)
        for token in job.prompt:
            uses.setdefault((job.adapter, token), []).append(number)
    return uses


def make_oracle(jobs: Sequence[Job], number: dict[str, int]) -> Callable[[RetentionState], RetentionPolicy]:
    """A policy for one run of ``jobs``. Jobs are taken to come to the tree in order of arrival."""
    uses = uses_of(jobs)
    return lambda state: Oracle(state, uses, number, lambda: state.requests)
