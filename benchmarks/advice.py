"""What the advisor brings in unasked, on the simulated server (``benchmarks.simulator``).

What is real: the reporter's rows, the mirror, the planner, the swapper and ``Residency.swap_in_node``. What is not: messages,
which arrive at once, and the tiers below ``Residency``, which are the simulator's. Plans are followed in their list of
swap-ins only: adapters that waiting requests need are not fetched ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.residency import Residency
from sglang_lora_tree.radix.tiers import Counters
from sglang_lora_tree.scheduling.advisor import VISIT_WINDOW
from sglang_lora_tree.scheduling.mirror import Mirror
from sglang_lora_tree.scheduling.planner import Planner
from sglang_lora_tree.scheduling.protocol import Report
from sglang_lora_tree.scheduling.reporter import Reporter
from sglang_lora_tree.scheduling.swapper import Swapper, SwapperCounters

if TYPE_CHECKING:
    from sglang_lora_tree.radix.cache_hooks import LoraTreeCache
    from sglang_lora_tree.radix.lora_node_hooks import LoraNode


class _Residency(Residency):
    """What the reporter and the swapper ask of the real one, over the simulator's cache.

    Args:
        on_copy: told the node whose copy has been started.
    """

    def __init__(self, cache: LoraTreeCache, on_copy: Callable[[int], None]) -> None:
        self.cache, self.core, self.counters = cache, cache.tree_core, Counters()
        self.release_ahead: Callable[[], bool] = lambda: False
        self._kv_in_flight: dict[int, str] = {}
        self._on_copy = on_copy

    def swap_in_ahead(self, identity: str, room: int) -> LoraNode | None:
        lora_node = self.core.lora_nodes[identity]
        return lora_node if self.cache.start_load(lora_node.node.id) else None

    def swap_in_node(self, node_id: int, room: int, busy: Callable[[], Iterable[str]]) -> bool:
        if not super().swap_in_node(node_id, room, busy):
            return False
        self._kv_in_flight.clear()  # the simulator keeps the times itself
        self._on_copy(node_id)
        return True


@dataclass
class _Client:
    """Whom the reporter reports to."""

    epoch: int = 1
    needs_reset: bool = True
    collect: Callable[[], Report | None] = lambda: None
    _numbers: Iterable[int] = field(default_factory=itertools.count)

    @property
    def next_sequence(self) -> int:
        return next(iter(self._numbers))


class Advice:
    """One advisor and one swapper.

    Args:
        cache: of the simulated server; its ``is_load_path_idle`` must tell the simulated link's state.
        settings: ``swap_in_below``, ``grace_seconds`` and Eval's.
        busy: identities that running requests compute under.
        on_copy: told the node whose copy has been started.
    """

    def __init__(
        self,
        cache: LoraTreeCache,
        settings: Settings,
        busy: Callable[[], Iterable[str]],
        on_copy: Callable[[int], None],
    ) -> None:
        residency = _Residency(cache, on_copy)
        client: Any = _Client()
        self._reporter = Reporter(residency, client)
        self._mirror = Mirror(VISIT_WINDOW)
        self._planner = Planner(settings, client.epoch)
        self._swapper = Swapper(residency, settings, busy)

    @property
    def counters(self) -> SwapperCounters:
        return self._swapper.counters

    @property
    def has_more(self) -> bool:
        """Whether the plan names more nodes."""
        return self._swapper.num_left > 0

    @property
    def has_room(self) -> bool:
        """Whether less of the pool is in use than ``swap_in_below``."""
        return self._swapper.spare_slots > 0

    def note_queued(self, request: Any) -> None:
        """A request joined the queue."""
        self._reporter.note_queued(request)

    def note_admitted(self, requests: Iterable[Any]) -> None:
        """Requests left the queue."""
        self._reporter.note_admitted(requests)

    def plan(self, now: float, waiting: Sequence[Any], num_running: int) -> None:
        """All changes are reported, and a new plan rules."""
        self._reporter.step(now, waiting, num_running)
        self._mirror.apply(self._reporter.collect())
        while not self._reporter.is_done:
            self._mirror.apply(self._reporter.collect())
        self._swapper.follow(self._planner.plan(self._mirror))

    def step(self, now: float) -> None:
        """Once per step of the loop: at most one copy is started."""
        self._swapper.step(now)
