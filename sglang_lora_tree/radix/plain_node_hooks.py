"""SGLang's tree node for a plain KV pool, and how keys are compared with the edges that lead to nodes.

Replaces ``sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeNode`` (by inheritance, in ``plain_core_hooks``), and
``RadixKey.child_key_at`` and ``RadixKey.match_at`` of ``sglang.srt.mem_cache.radix_cache`` in our walks.
"""

from __future__ import annotations

import ctypes
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentData, ComponentType, get_and_increase_time_counter
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_lora_tree.radix.policies import Usage

_SHORT = 4096  # tokens up to which comparing arrays is quickest
_compare_memory = ctypes.PyDLL(None).memcmp
_compare_memory.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_NO_LINKS: list[UnifiedTreeNode | None] = []


def child_key(key: RadixKey, offset: int, page_size: int) -> Any:
    """``RadixKey.child_key_at``, without its checks in the usual case."""
    if page_size > 1 or key.is_bigram or key.cache_salt is not None:
        return key.child_key_at(offset, page_size)
    token = key.token_ids[offset]
    return token if key.extra_key is None else (key.extra_key, token)


def common_prefix(edge: RadixKey, key: RadixKey, offset: int, page_size: int) -> int:
    """Tokens that ``edge`` shares with ``key`` from ``offset`` on, in whole pages; ``RadixKey.match_at`` with less copying."""
    left, right = edge.token_ids, key.token_ids
    if edge.is_bigram or key.is_bigram or left.itemsize != 8 or right.itemsize != 8:
        return edge.match_at(key, offset, page_size)
    length = min(len(edge), len(key) - offset)
    # Most edges match whole, and comparing arrays is quickest for the short ones.
    if length <= _SHORT and length == len(left) and left == right[offset : offset + length]:
        return length // page_size * page_size
    ours, theirs = left.buffer_info()[0], right.buffer_info()[0] + 8 * offset
    if length > _SHORT and not _compare_memory(ours, theirs, 8 * length):
        return length // page_size * page_size
    low, high = 0, length + 1  # the first difference, if any, is in low ... high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if _compare_memory(ours + 8 * low, theirs + 8 * low, 8 * (middle - low)):
            high = middle
        else:
            low = middle
    return low // page_size * page_size


class PlainNode(UnifiedTreeNode):
    """SGLang's node with room for one component's data, and without links of lists that a plain pool has not."""

    def __init__(self, tree_components: tuple[ComponentType, ...], priority: int, usage: Usage) -> None:
        self.children: dict[Any, UnifiedTreeNode] = {}
        self.parent = None
        self.key = None
        self.component_types = tree_components
        self.component_data = [ComponentData()]
        # SGLang's clock gives numpy scalars, which compare several times slower than floats.
        self.last_access_time = float(get_and_increase_time_counter())
        self.creation_time = float(get_and_increase_time_counter())
        self.hash_value = None
        self.event_hash_value = None
        self.hit_count = 0
        self._tlru_cached_prefix_len = 0
        self._tlru_history_len = 0
        self.external_cache_stored = False
        self.priority = priority
        self.lru_prev = self.lru_next = _NO_LINKS
        self.id = UnifiedTreeNode.counter
        UnifiedTreeNode.counter += 1
        self.write_through_pending_id = None
        self.load_back_pending_id = None
        self.rotation_base = None
        self.usage = usage
