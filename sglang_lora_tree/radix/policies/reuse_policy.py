"""Our own policy: what a slot saves, by the reuse that this traffic shows."""

from __future__ import annotations

from typing import Any

from sglang_lora_tree.radix.policies.base import Node, Policy, RetentionState
from sglang_lora_tree.radix.reuse import ReuseTable


class Reuse(Policy):
    """What a slot saves: expected uses per request (``reuse``) x seconds that a use would cost, for every slot held.

    Ours. Against Eval: by slot rather than by node, so large nodes earn their place; recency from the gaps that this
    traffic has, by kind of node, instead of a fixed exponential; time the GPU spends computing KV again delays everybody,
    and counts so. Needs no plan.
    """

    classes = True
    _USES = (0, 1, 1, 2, 3, 3)  # number of uses -> class; more: 4

    def __init__(self, state: RetentionState, delayed: float = 16.0, depths: int = 4) -> None:
        super().__init__(state)
        self._depths = depths
        self._table = ReuseTable((5 * depths, 5))  # KV and adapters: of these, by depth and uses
        self._delayed = delayed

    def static_key(self, node: Node) -> Any:
        return node.usage.last_look, node.last_access_time

    def _kind(self, node: Node) -> int:
        uses = node.usage.uses
        group = self._depths if node.usage.is_adapter else min(node.usage.depth, self._depths - 1)
        return 5 * group + (self._USES[uses] if uses < len(self._USES) else 4)

    def class_of(self, node: Node) -> Any:
        return self._kind(node), node.evicted, node.backuped

    def value(self, known: Any, lowest: Node) -> float:
        cost = self.state.cost(lowest) / len(lowest.key)
        if not lowest.usage.is_adapter and (lowest.evicted or not lowest.backuped):
            cost *= self._delayed
        return cost * self._table.value(known[0], self.state.requests - lowest.usage.last_look)

    def moment(self) -> Any:
        return self.state.requests, self.state.plans, self._table.version

    def on_use(self, node: Node) -> None:
        usage = node.usage
        if usage.uses > 1:  # a first use ends no stay
            usage.uses -= 1
            self._table.note(self._kind(node), self.state.requests - usage.last_request, used=True)
            usage.uses += 1
        else:
            usage.depth = 0 if node.parent is None else node.parent.usage.depth + 1

    def on_remove(self, node: Node) -> None:
        self._table.note(self._kind(node), self.state.requests - node.usage.last_request, used=False)
