"""The trees that the tree benchmark compares, behind one set of calls, each call timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_lora_tree.radix import cache_hooks
from sglang_lora_tree.radix.eval import EvalParameters
from sglang_lora_tree.radix.identity import adapter_identity, namespace_key
from sglang_lora_tree.radix.lora_component_hooks import LoraFullComponent
from sglang_lora_tree.radix.policies import POLICIES, RetentionState
from sglang_lora_tree.radix.tree_core_hooks import TREE_CORE_NAME

OURS, DEFAULT, PYTHON = "lora_tree", "rust", "python"
NUM_ADAPTERS = 100
ADAPTER_SLOTS = 640  # Llama-3-8B, rank 16, all linear layers
BYTES_PER_SLOT = 131_072  # Llama-3-8B
POOL_SLOTS = 40_000_000  # room for all
LOW_LORA = 30.0  # adapters that a batch needs
REQUESTS_PER_PLAN = 2  # 20 requests a second, a plan each tenth

IDENTITIES = [adapter_identity(f"{number:064x}") for number in range(NUM_ADAPTERS)]
NAMESPACES = [namespace_key(identity, None) for identity in IDENTITIES]


class SlotCounter:
    """Stands in for the pool's allocator: hands out nothing, counts what comes back."""

    device = "cpu"

    def __init__(self) -> None:
        self.freed = 0

    def free_segment(self, indices: Any, start_pos: int) -> None:
        self.freed += len(indices)

    def available_size(self) -> int:
        return self.freed

    def mamba_full_cache_donor(self) -> None:
        return None


class HollowValue:
    """Slot numbers without storage: what a walk costs when copying them is free."""

    def __init__(self, length: int) -> None:
        self._length = length

    @property
    def shape(self) -> tuple[int]:
        return (self._length,)

    def __len__(self) -> int:
        return self._length

    numel = __len__

    def __getitem__(self, part: slice) -> HollowValue:
        return HollowValue(len(range(*part.indices(self._length))))

    def clone(self) -> HollowValue:
        return self


class System:
    """One tree under test, and the times it took: kind of call -> list of (wall, cpu) in seconds.

    Args:
        policy: one of SGLang's.
        ours_policy: one of ours instead (``radix.policies.POLICIES``).
        hollow: without storage for slot numbers.
    """

    def __init__(self, name: str, policy: str = "lru", hollow: bool = False, ours_policy: str | None = None) -> None:
        self.name = name
        self.hollow = hollow
        self.ours_policy = ours_policy
        self._num_plans = self._num_calls = 0
        self.times: dict[str, list[tuple[float, float]]] = {}
        self.allocator = SlotCounter()
        ours = name == OURS
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            eviction_policy=policy,
            tree_components=(ComponentType.FULL,),
            component_registry_override={ComponentType.FULL: LoraFullComponent} if ours else None,
            tree_core_backend=TREE_CORE_NAME if ours else name,
        )
        cache_hooks.register()
        self.cache: Any = (cache_hooks.LoraTreeCache if ours else UnifiedRadixCache)(params)
        assert type(self.cache.tree_core).__name__ == {
            OURS: "LoraTreeCore",
            DEFAULT: "RustUnifiedTreeCore",
            PYTHON: "UnifiedTreeCore",
        }[name], f"{name} fell back to {type(self.cache.tree_core).__name__}"
        if ours:
            core = self.cache.tree_core
            for identity in IDENTITIES:
                lora_node = core.add_adapter(identity, torch.arange(ADAPTER_SLOTS))
                # What the end of a load does, without a host pool to load from.
                core._unevict_node_on_insert(lora_node.node, torch.arange(ADAPTER_SLOTS))
                core.note_resident(lora_node)
                self.cache.inc_lock_ref(lora_node.node.id)
        if ours_policy is not None:
            state = RetentionState(BYTES_PER_SLOT, POOL_SLOTS, resident_adapters=NUM_ADAPTERS)
            self.cache.tree_core.set_policy(POLICIES[ours_policy](state), state)
            self.plan()

    def plan(self) -> None:
        """A plan comes, a tenth of a second after the one before it; only policies of ours look at it."""
        if self.ours_policy is not None:
            self._num_plans += 1
            parameters = EvalParameters(version=self._num_plans, now=self._num_plans / 10, low_lora=LOW_LORA)
            self.cache.tree_core.set_eval_parameters(parameters)

    def _note_request(self) -> None:
        self._num_calls += 1
        if self._num_calls % REQUESTS_PER_PLAN == 0:
            self.plan()

    @property
    def num_nodes(self) -> int:
        return len(self.cache.tree_core._node_arena)

    def timed(self, kind: str, call: Callable[[], Any]) -> Any:
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call()
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        self.times.setdefault(kind, []).append((wall / 1e9, cpu / 1e9))
        return result

    def serve(self, tokens: Any, adapter: int, priority: int = 0) -> None:
        """What a request does: match, lock, insert, unlock."""
        self._note_request()
        cache, namespace = self.cache, NAMESPACES[adapter]
        match = MatchPrefixParams(key=RadixKey(tokens, namespace))
        found = self.timed("match", lambda: cache.match_prefix(match))
        lock = self.timed("lock", lambda: cache.inc_lock_ref(found.last_device_node)).to_dec_params()
        insert = self._insertion(tokens, adapter, priority, found.device_prefix_len)
        self.timed("insert", lambda: cache.insert(insert))
        self.timed("unlock", lambda: cache.dec_lock_ref(found.last_device_node, lock))
        both = zip(self.times["match"][-1], self.times["insert"][-1], strict=True)
        self.times.setdefault("match_insert", []).append((sum(next(both)), sum(next(both))))

    def fill(self, tokens: Any, adapter: int, priority: int = 0) -> None:
        self._note_request()
        self.cache.insert(self._insertion(tokens, adapter, priority, 0))

    def fill_host(self, tokens: Any, adapter: int) -> None:
        self._note_request()
        core, key = self.cache.tree_core, RadixKey(tokens, NAMESPACES[adapter])
        core.insert_host(core.root_node_handle(key.extra_key), key, torch.arange(len(tokens)), [""] * len(tokens))

    def _insertion(self, tokens: Any, adapter: int, priority: int, prefix: int) -> InsertParams:
        value: Any = HollowValue(len(tokens)) if self.hollow else torch.arange(len(tokens))
        key = RadixKey(tokens, NAMESPACES[adapter])
        return InsertParams(key=key, value=value, prev_prefix_len=prefix, priority=priority)

    def percentile(self, kind: str, share: float, clock: int) -> float:
        """Milliseconds; share 1.0 is the slowest call."""
        times = sorted(pair[clock] for pair in self.times[kind])
        return 1e3 * times[min(len(times) - 1, int(share * len(times)))]
