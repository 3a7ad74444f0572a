"""SGLang's component for plain KV: what a node has on either tier, and who leaves when the cache asks one by one.

Replaces methods of ``sglang.srt.mem_cache.unified_cache.components.full.FullComponent``; ``lora_component_hooks`` builds on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.unified_cache.cache_action import ComponentAction, FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.components import ComponentType, EvictLayer, FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

if TYPE_CHECKING:
    from sglang_lora_tree.radix.plain_core_hooks import PlainTreeCore

_DEVICE, _HOST = EvictLayer.DEVICE, EvictLayer.HOST  # looking a flag up by its class is slow


class PlainComponent(FullComponent):
    """SGLang's component for plain KV, with victims from the ordered index."""

    tree_core: PlainTreeCore

    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[Any],
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        data = node.component_data[self.component_type]
        freed = host_freed = 0
        # Layers are compared by identity: a flag's "in" costs more than the rest of this.
        if target is not _HOST and data.value is not None:
            self.tree_core.policy.on_evict(node)
            device_frees[self.component_type].append(data.value)
            freed = data.value.numel()
            self.tree_core.component_evictable_size_[self.component_type] -= freed
        if target is not _DEVICE and data.host_value is not None:
            host_freed = data.host_value.numel()
            host_frees[self.component_type].append(data.host_value)
            data.host_value = None
        return freed, host_freed

    def _evict_device_start(self, request_cnt: int) -> None:
        self._evict_device_request_cnt = request_cnt
        self._evict_device_last_node = None
        self._evict_device_heap: list[Any] = []
        self._offered: list[UnifiedTreeNode] = []

    def _evict_device_next_node(
        self,
        tracker: dict[ComponentType, int],
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[Any],
    ) -> int | None:
        if tracker[self.component_type] >= self._evict_device_request_cnt:
            return None
        node = self.tree_core.evictable_device_leaves.pop_lowest()
        if node is None:
            return None
        self._offered.append(node)
        return node.id

    def _evict_device_end(self) -> None:
        for node in self._offered:  # the cache may have declined some
            self.tree_core.evictable_device_leaves.refresh(node)
        self._offered = []

    def drive_host_eviction(
        self,
        num_tokens: int,
        tracker: dict[ComponentType, int],
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[Any],
    ) -> None:
        while tracker[self.component_type] < num_tokens:
            node = self.tree_core.evictable_host_leaves.pop_lowest()
            if node is None:
                break
            self.tree_core._evict_host_leaf(node, tracker, device_frees, host_frees, cache_actions=cache_actions)

    # One tensor of slots instead of one per victim: a pool takes as long for one slot as for hundreds.

    def free_host_values(self, host_values: list[torch.Tensor]) -> None:
        if self._full_kv_pool_host is not None:
            super().free_host_values([torch.cat(host_values)] if len(host_values) > 1 else host_values)

    def apply_component_action(self, action: ComponentAction) -> None:
        if isinstance(action, FreeComponentDeviceSlot) and len(action.indices) > 1:
            action = FreeComponentDeviceSlot([torch.cat(action.indices)], component_type=action.component_type)
        super().apply_component_action(action)
