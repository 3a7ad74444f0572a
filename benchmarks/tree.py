"""The tree beside SGLang's: match, insert, lock, evict per request, on the Mooncake conversation trace with 100 adapters.

Three systems see the same calls in one process: SGLang's default tree (``UnifiedRadixCache`` over its Rust core), ours
(``LoraTreeCache``, adapters as resident LoRA nodes) and SGLang's python core. They take turns request by request in a
rotating order, one thread, with the garbage collector at rest. Calls go through the cache, as the scheduler's do; slots
come from a counter, so that the pool's allocator (the same for all) is not measured. Node counts are reached with other
users' copies of the trace at 8 tokens a block; the timed requests have the trace's full length.

Run: ``python -m benchmarks.tree`` (``--quick`` for a look). Writes results/tree_cpu.json. Wall and CPU time are both
taken; on a machine busier than its cores the CPU time is the number that is reported (each record says which).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from benchmarks import results
from benchmarks.trace import Request, copies, find_trace, make_trace, read_trace
from sglang_lora_tree.radix import cache_hooks
from sglang_lora_tree.radix.identity import adapter_identity, namespace_key
from sglang_lora_tree.radix.tree_core_hooks import TREE_CORE_NAME, LoraFullComponent

NUM_ADAPTERS = 100
ADAPTER_SLOTS = 640  # Llama-3-8B, rank 16, all linear layers
FILL_BLOCK = 8
SIZES = (1_000, 10_000, 100_000)
POLICIES = ("lru", "lfu", "slru", "fifo", "mru", "filo", "priority")
OURS, DEFAULT, PYTHON = "lora_tree", "rust", "python"

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
    """One tree under test, and the times it took: kind of call -> list of (wall, cpu) in seconds."""

    def __init__(self, name: str, policy: str = "lru", hollow: bool = False) -> None:
        self.name = name
        self.hollow = hollow
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
        self.cache.insert(self._insertion(tokens, adapter, priority, 0))

    def fill_host(self, tokens: Any, adapter: int) -> None:
        core, key = self.cache.tree_core, RadixKey(tokens, NAMESPACES[adapter])
        core.insert_host(core.root_node_handle(key.extra_key), key, torch.arange(len(tokens)), [])

    def _insertion(self, tokens: Any, adapter: int, priority: int, prefix: int) -> InsertParams:
        value: Any = HollowValue(len(tokens)) if self.hollow else torch.arange(len(tokens))
        key = RadixKey(tokens, NAMESPACES[adapter])
        return InsertParams(key=key, value=value, prev_prefix_len=prefix, priority=priority)

    def percentile(self, kind: str, share: float, clock: int) -> float:
        """Milliseconds; share 1.0 is the slowest call."""
        times = sorted(pair[clock] for pair in self.times[kind])
        return 1e3 * times[min(len(times) - 1, int(share * len(times)))]


class Workload:
    """The trace as calls: history and timed window of one user population, and filler from others."""

    def __init__(self, trace: list[Request], window: int) -> None:
        half = len(trace) // 2
        self.window = trace[half : half + window]
        wanted = {request.conversation for request in self.window}
        self.history = [request for request in trace[:half] if request.conversation in wanted]
        self._filler = copies(trace)
        self._count = 0

    def filler(self) -> Iterator[tuple[Any, int, int]]:
        for copy, request in self._filler:
            self._count += 1
            adapter = (request.conversation + 37 * copy) % NUM_ADAPTERS
            yield request.tokens(FILL_BLOCK, copy + 1), adapter, self._count % 10

    def full(self, requests: Sequence[Request]) -> Iterator[tuple[Any, int]]:
        for request in requests:
            yield request.tokens(), request.conversation % NUM_ADAPTERS


def rotating(systems: Sequence[System], turn: int) -> list[System]:
    """The systems in another order each turn, so that none always runs after the same neighbour."""
    shift = turn % len(systems)
    return [*systems[shift:], *systems[:shift]]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(systems: Sequence[System], workload: Workload, num_nodes: int) -> None:
    """History, then other users until the trees have ``num_nodes``; one request in five comes back (a hit)."""
    counter = next(system for system in systems if system.name != DEFAULT)
    for tokens, adapter in workload.full(workload.history):
        for system in systems:
            system.fill(tokens, adapter)
    top_up(systems, workload, num_nodes, counter)


def top_up(systems: Sequence[System], workload: Workload, num_nodes: int, counter: System) -> None:
    again: list[tuple[Any, int, int]] = []
    if counter.num_nodes >= num_nodes:
        return
    for number, call in enumerate(workload.filler()):
        for system in systems:
            system.fill(*call)
        if number % 5 == 0:
            again.append(call)
        if len(again) > 50:
            for system in systems:
                system.fill(*again[0])
            again.pop(0)
        if counter.num_nodes >= num_nodes:
            return


def run_requests(systems: Sequence[System], workload: Workload) -> None:
    for turn, (tokens, adapter) in enumerate(workload.full(workload.window)):
        for system in rotating(systems, turn):
            system.serve(tokens, adapter)


def run_evictions(
    systems: Sequence[System], workload: Workload, num_nodes: int, calls: int, num_tokens: int, python_calls: int
) -> None:
    """Timed evictions; after each, fillers come in until the trees are back at their size. The python core, whose calls
    take long at 100,000 nodes, takes part in ``python_calls`` of them."""
    kind = f"evict_{num_tokens}"
    counter = next(system for system in systems if system.name == OURS)
    for turn in range(calls):
        for system in rotating(systems, turn):
            if system.name != PYTHON or turn < python_calls:
                params = EvictParams(num_tokens=num_tokens)
                system.timed(kind, lambda s=system, p=params: s.cache.evict(p))
        for system in rotating(systems, turn):
            if system.name != PYTHON or turn < python_calls:
                params = EvictParams(num_tokens=num_tokens)
                system.timed(f"{kind}_for_alloc", lambda s=system, p=params: s.cache.evict_for_alloc(p))
        top_up(systems, workload, num_nodes, counter)


def run_host_evictions(systems: Sequence[System], calls: int, python_calls: int) -> None:
    for num_tokens in (20, 2_000):
        for turn in range(calls):
            for system in rotating(systems, turn):
                if system.name != PYTHON or turn < python_calls:
                    system.timed(f"evict_host_{num_tokens}", lambda s=system, n=num_tokens: s.cache.evict_host(n))
