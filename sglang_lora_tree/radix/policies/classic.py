"""Policies that others have described, for comparison; each says what is simplified."""

from __future__ import annotations

from typing import Any

from sglang_lora_tree.radix.policies.base import Node, Policy, RetentionState


class Stock(Policy):
    """One of SGLang's own (seam: ``sglang.srt.mem_cache.evict_policy``)."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(RetentionState())
        self.static_key = strategy.get_priority  # type: ignore[method-assign]


class Branch(Policy):
    """ELORA's BFS: whole LoRA branches, least recently used first. Simplified: no more of a branch than is needed."""

    def static_key(self, node: Node) -> Any:
        owner = getattr(node, "lora_node", None)
        return (node if owner is None else owner.node).last_access_time, node.last_access_time


class Gdsf(Policy):
    """Greedy-Dual-Size-Frequency (Cherkasova 1998): L + uses x cost / size; L is the value of the last victim."""

    def __init__(self, state: RetentionState) -> None:
        super().__init__(state)
        self._inflation = 0.0

    def static_key(self, node: Node) -> Any:
        base = self._inflation if node.usage.note is None else node.usage.note
        return base + self._worth(node), node.last_access_time

    def _worth(self, node: Node) -> float:
        return max(node.usage.uses, 1) * self.state.cost(node) / len(node.key)

    def on_use(self, node: Node) -> None:
        node.usage.note = self._inflation

    def on_evict(self, node: Node) -> None:
        self._inflation = max(self._inflation, self.static_key(node)[0])


class Rrip(Policy):
    """Static RRIP with 2 bits (Jaleel et al., ISCA 2010): new nodes are predicted to come back late, used ones soon.

    Ageing all nodes by one step is a step of a shared counter back from theirs; ties leave in order of their last touch.
    """

    _LATE, _DISTANT = 2, 3

    def __init__(self, state: RetentionState) -> None:
        super().__init__(state)
        self._steps = 0

    def static_key(self, node: Node) -> Any:
        note = node.usage.note
        return self._steps - self._LATE if note is None else note, node.last_access_time

    def on_use(self, node: Node) -> None:
        usage = node.usage
        usage.note = self._steps - self._LATE if usage.uses <= 1 else self._steps

    def on_evict(self, node: Node) -> None:
        # Everybody was aged until the victim was distant.
        self._steps = max(self._steps, self.static_key(node)[0] + self._DISTANT)
