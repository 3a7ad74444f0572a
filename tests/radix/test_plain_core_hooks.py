"""Our tree core and SGLang's own give the same answers to the same calls: matches, frees, victims in order, the whole tree."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_lora_tree.radix import cache_hooks
from sglang_lora_tree.radix.lora_component_hooks import LoraFullComponent
from sglang_lora_tree.radix.tree_core_hooks import TREE_CORE_NAME

POLICIES = ["lru", "lfu", "slru", "fifo", "mru", "filo", "priority", "tlru"]

tokens = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=24)
namespaces = st.sampled_from([None, "x"])
amounts = st.integers(1, 30)
calls = st.one_of(
    st.tuples(st.just("insert"), tokens, namespaces, st.integers(0, 3), st.integers(0, 24)),
    st.tuples(st.just("insert"), tokens, namespaces, st.integers(0, 3), st.just(0)),
    st.tuples(st.just("insert_host"), tokens, namespaces),
    st.tuples(st.just("match"), tokens, namespaces),
    st.tuples(st.just("lock"), tokens, namespaces),
    st.tuples(st.just("unlock"), st.integers(0, 5)),
    st.tuples(st.just("evict"), amounts),
    st.tuples(st.just("evict_for_alloc"), amounts),
    st.tuples(st.just("evict_host"), amounts),
)


class Slots:
    """An allocator that notes what is freed, in order."""

    device = "cpu"

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free_segment(self, indices: torch.Tensor, start_pos: int) -> None:
        self.freed.extend(indices.tolist())

    def available_size(self) -> int:
        return len(self.freed)

    def mamba_full_cache_donor(self) -> None:
        return None


class Subject:
    """A cache under test; every call returns what can be compared."""

    def __init__(self, ours: bool, policy: str, page_size: int, hicache: bool) -> None:
        cache_hooks.register()
        self.slots = Slots()
        self.page_size = page_size
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.slots,
            page_size=page_size,
            eviction_policy=policy,
            eviction_policy_config={"threshold": 12, "next_prompt_estimate": 2} if policy == "tlru" else None,
            tree_components=(ComponentType.FULL,),
            component_registry_override={ComponentType.FULL: LoraFullComponent} if ours else None,
            tree_core_backend=TREE_CORE_NAME if ours else "python",
        )
        self.cache: Any = (cache_hooks.LoraTreeCache if ours else UnifiedRadixCache)(params)
        self.core = self.cache.tree_core
        self.next_slot = 1
        self.locks: list[tuple[int, Any]] = []
        if hicache:
            self.core.set_hicache_enabled()
            self.core.write_through_threshold = 1 << 30  # there is nothing to copy with

    def new_slots(self, count: int) -> torch.Tensor:
        self.next_slot += count
        return torch.arange(self.next_slot - count, self.next_slot)

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def insert(self, words: list[int], namespace: str | None, priority: int, prefix: int) -> Any:
        key = RadixKey(array("q", words), namespace)
        params = InsertParams(key=key, value=self.new_slots(len(words)), priority=priority, prev_prefix_len=prefix)
        result = self.cache.insert(params)
        return result.prefix_len, self.path(result.last_device_node)

    def insert_host(self, words: list[int], namespace: str | None) -> Any:
        words = words[: len(words) // self.page_size * self.page_size]
        key, slots = RadixKey(array("q", words), namespace), self.new_slots(len(words))
        if not self.core.enable_hicache or not words:
            return None
        result = self.core.insert_host(self.core.root_node_handle(), key, slots, ["hash"] * (len(words) // self.page_size))
        return result.prefix_len, result.host_insert_dropped

    def match(self, words: list[int], namespace: str | None) -> Any:
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", words), namespace)))
        nodes = (result.last_device_node, result.last_host_node, result.best_match_node)
        last = result.last_visited_node_id
        lengths = (result.device_prefix_len, result.host_hit_length, result.full_kv_hit_length)
        return lengths, [self.path(node) for node in nodes], None if last is None else self.path(last)

    def lock(self, words: list[int], namespace: str | None) -> None:
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", words), namespace)))
        node = result.last_device_node
        self.locks.append((node, self.cache.inc_lock_ref(node).to_dec_params()))

    def unlock(self, which: int) -> None:
        if self.locks:
            self.cache.dec_lock_ref(*self.locks.pop(which % len(self.locks)))

    def evict(self, count: int) -> int:
        return self.cache.evict(EvictParams(num_tokens=count)).num_tokens_evicted

    def evict_for_alloc(self, count: int) -> int:
        return self.cache.evict_for_alloc(EvictParams(num_tokens=count)).num_tokens_evicted

    def evict_host(self, count: int) -> int:
        return self.cache.evict_host(count)

    def path(self, node_id: int) -> list[int]:
        node, words = self.core.node_by_id(node_id), []
        while node.parent is not None:
            words = list(node.key.token_ids) + words
            node = node.parent
        return words

    def state(self) -> Any:
        return (
            self.slots.freed,
            self.core.full_evictable_size(),
            self.core.full_protected_size(),
            sorted(self.path(node.id) for node in self.core.evictable_device_leaves),
            sorted(self.path(node.id) for node in self.core.evictable_host_leaves),
            self._dump(self.core.root_node),
        )

    def _dump(self, node: Any) -> Any:
        data = node.component_data[ComponentType.FULL]
        return (
            list(node.key.token_ids),
            None if data.value is None else list(map(int, data.value)),
            None if data.host_value is None else data.host_value.tolist(),
            (data.lock_ref, data.host_lock_ref, node.hit_count),
            node.priority if node.parent is not None else 0,
            [(key, self._dump(child)) for key, child in node.children.items()],
        )


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([1, 2]), st.booleans(), st.lists(calls, min_size=1, max_size=60))
def test_same_answers_as_sglang_core(policy: str, page_size: int, hicache: bool, script: list[Any]) -> None:
    ours = Subject(True, policy, page_size, hicache)
    theirs = Subject(False, policy, page_size, hicache)
    for name, *arguments in script:
        assert ours.call(name, *arguments) == theirs.call(name, *arguments), f"{name}{tuple(arguments)}"
        assert ours.state() == theirs.state(), f"after {name}{tuple(arguments)}"
