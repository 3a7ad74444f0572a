"""A node of the tree's second layer: an adapter, or a mix of adapters.

Reads ``sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeNode``: whose slots it has on either tier, and its locks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


@dataclass(eq=False)
class LoraNode:
    """What the tree knows of a node of the second layer, beside SGLang's node itself."""

    identity: str
    node: UnifiedTreeNode
    members: tuple[str, ...] = ()
    """Identities of a mix's adapters; empty for an adapter."""
    resident_mixes: int = 0
    """Mix nodes on the GPU that need this adapter."""
    registered: bool = True
    """False once no name refers to it: its subtree is the first to go."""
    visits: int = 0
    locked_members: list[UnifiedTreeNode] = field(default_factory=list)
    """Members that this mix's lock has locked (those in the tree when it was taken)."""

    @property
    def is_mix(self) -> bool:
        return bool(self.members)

    @property
    def is_resident(self) -> bool:
        return self.node.component_data[BASE_COMPONENT_TYPE].value is not None

    @property
    def is_locked(self) -> bool:
        """In use, or held, with all that it depends on."""
        return self.node.component_data[BASE_COMPONENT_TYPE].lock_ref > 0

    @property
    def device_slots(self) -> torch.Tensor | None:
        return self.node.component_data[BASE_COMPONENT_TYPE].value

    @property
    def host_slots(self) -> torch.Tensor | None:
        return self.node.component_data[BASE_COMPONENT_TYPE].host_value


@dataclass
class ResidencyListener:
    """Who wants to know when an adapter comes to, or leaves, the GPU or the tree."""

    on_resident: Callable[[LoraNode], None] = field(default=lambda _: None)
    on_evicted: Callable[[LoraNode], None] = field(default=lambda _: None)
    on_removed: Callable[[LoraNode], None] = field(default=lambda _: None)
