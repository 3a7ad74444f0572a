"""SGLang's component for plain KV, aware of the second layer: locks reach a mix's members, and comings and goings are told.

Replaces ``sglang.srt.mem_cache.unified_cache.components.full.FullComponent`` (``CacheInitParams.component_registry_override``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, IncLockRefResult, InsertResult
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase, ComponentType, EvictLayer
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_lora_tree.radix.lora_node_hooks import LoraNode
from sglang_lora_tree.radix.plain_component_hooks import PlainComponent

if TYPE_CHECKING:
    from sglang_lora_tree.radix.tree_core_hooks import LoraTreeCore


class LoraFullComponent(PlainComponent):
    """See the module's docstring."""

    tree_core: LoraTreeCore

    # ---- Locks reach a mix's members ----

    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: IncLockRefResult, lock_host: bool = False
    ) -> IncLockRefResult:
        result = super().acquire_component_lock(node, result, lock_host)
        if not lock_host:
            mix = self._mix_above(node)
            if mix is not None and mix.node.component_data[self.component_type].lock_ref == 1:
                present = (self.tree_core.lora_nodes.get(member) for member in mix.members)
                mix.locked_members = [owner.node for owner in present if owner is not None]
                for owner_node in mix.locked_members:
                    super().acquire_component_lock(owner_node, IncLockRefResult())
                    self.tree_core._update_evictable_leaf_sets(owner_node)
        return result

    def release_component_lock(
        self, node: UnifiedTreeNode, params: DecLockRefParams | None, lock_host: bool = False
    ) -> None:
        mix = None if lock_host else self._mix_above(node)
        super().release_component_lock(node, params, lock_host)
        if mix is not None and mix.node.component_data[self.component_type].lock_ref == 0:
            locked, mix.locked_members = mix.locked_members, []
            for owner_node in locked:
                super().release_component_lock(owner_node, None)

    def _mix_above(self, node: UnifiedTreeNode) -> LoraNode | None:
        lora_node = self.tree_core.lora_node_of(node)
        return lora_node if lora_node is not None and lora_node.is_mix else None

    # ---- Coming and going ----

    def commit_hicache_transfer(
        self,
        node: UnifiedTreeNode,
        phase: CacheTransferPhase,
        transfers: Sequence[Any] = (),
        *,
        cache_actions: list[Any],
        insert_result: InsertResult | None = None,
        pool_storage_result: Any = None,
    ) -> None:
        super().commit_hicache_transfer(
            node,
            phase,
            list(transfers),
            cache_actions=cache_actions,
            insert_result=insert_result,
            pool_storage_result=pool_storage_result,
        )
        if phase == CacheTransferPhase.LOAD_BACK and transfers and transfers[0].device_indices is not None:
            for node_id in transfers[0].nodes_to_load or ():
                lora_node = self.tree_core.find(node_id)
                if lora_node is not None:
                    self.tree_core.note_resident(lora_node)

    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[Any],
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        core = self.tree_core
        lora_node = core.find(node.id) if node.parent is core.virtual_root else None
        if lora_node is not None and target is not EvictLayer.HOST and lora_node.is_resident:
            assert lora_node.resident_mixes == 0, f"{lora_node.identity} leaves below a resident mix"
            core.note_evicted(lora_node)
        return super().evict_component(node, device_frees, host_frees, cache_actions, target)
