"""Invalid KV, counted a few nodes at a time: the scheduler loop never walks a large tree at once."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_lora_tree.radix.lora_node_hooks import LoraNode
from sglang_lora_tree.radix.tree_core_hooks import LoraTreeCore

NODES_PER_STEP = 1_000


class InvalidKvAudit:
    """Goes round and round through the KV nodes of adapters and mixes that are not on the GPU.

    KV of a resident adapter cannot be invalid, so a round visits only what hangs below an absent one.
    """

    def __init__(self, core: LoraTreeCore) -> None:
        self._core = core
        self._start()

    def _start(self) -> None:
        self._root = self._core.virtual_root
        self._last_round = 0
        self._found = 0
        self._walk = self._rounds()

    def step(self, budget: int = NODES_PER_STEP) -> int:
        """Look at up to ``budget`` nodes, or at all if they are fewer.

        Returns:
            Tokens of invalid KV (invariant 2: always 0): the last whole round's count, or this round's if it is higher.
        """
        if self._root is not self._core.virtual_root:
            self._start()  # a flush: the nodes of the walk under way are gone
        for _ in range(budget):
            if not next(self._walk):
                break
        return max(self._last_round, self._found)

    def _rounds(self) -> Iterator[bool]:
        """Yield True for each node, False at the end of each round."""
        core = self._core
        while True:
            for lora_node in list(core.lora_nodes.values()):
                if not self._is_absent(lora_node):
                    continue
                for node in core.subtree(lora_node):
                    value = node.component_data[0].value
                    # The tree changes between steps, so the adapter is looked at again.
                    if value is not None and node is not lora_node.node and self._is_absent(lora_node):
                        self._found += len(value)
                    yield True
            self._last_round, self._found = self._found, 0
            yield False

    def _is_absent(self, lora_node: LoraNode) -> bool:
        return not (lora_node.is_resident and all(self._core.is_resident(member) for member in lora_node.members))
