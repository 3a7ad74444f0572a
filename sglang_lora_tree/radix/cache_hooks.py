"""SGLang's prefix cache over the LoRA tree, and what ``residency`` needs of it in plain words.

Replaces, through ``register_radix_cache_backend("lora_tree", ...)``, ``sglang.srt.mem_cache.unified_radix_cache.
UnifiedRadixCache`` by :class:`LoraTreeCache`: the slots of a request's path end at its LoRA node (``path_device_indices``),
a flush tells ``residency`` (``reset``), an allocation that finds nothing left to evict first takes back what waiting
requests hold, then, for whoever cannot do without, what copies under way lock (``evict_for_alloc``, ``last_resort``), and it
is known which adapters come in with which batch (``ready_to_load_host_cache``). The rest, HiCache included, is SGLang's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_lora_tree.config import Settings, current_settings
from sglang_lora_tree.radix.agreement import find_same
from sglang_lora_tree.radix.identity import identity_of
from sglang_lora_tree.radix.layout import PoolShape
from sglang_lora_tree.radix.lora_component_hooks import LoraFullComponent
from sglang_lora_tree.radix.lora_node_hooks import LoraNode
from sglang_lora_tree.radix.policies import DEFAULT_POLICY, POLICIES, RetentionState
from sglang_lora_tree.radix.tree_core_hooks import TREE_CORE_NAME, LoraTreeCore

CACHE_NAME = "lora_tree"
_SERVED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Moves:
    """What came to the GPU, or left it, since start; adapters and KV often go together."""

    slots: int = 0
    adapter_slots: int = 0
    seconds: float = 0.0
    adapter_seconds: float = 0.0
    """The adapters' share of the time, by their share of the slots."""

    def add(self, slots: int, adapter_slots: int, seconds: float) -> None:
        self.slots += slots
        self.adapter_slots += adapter_slots
        self.seconds += seconds
        self.adapter_seconds += seconds * adapter_slots / max(slots, 1)


class LoraTreeCache(UnifiedRadixCache):
    """The prefix cache; all calls come from the scheduler thread."""

    tree_core: LoraTreeCore

    def __init__(self, params: Any) -> None:
        self.on_reset: Callable[[], None] = lambda: None
        self.on_shortage: Callable[[], bool] = lambda: False
        self.last_resorts = 0
        """How often somebody who could not do without waited for copies, so that their slots could be evicted."""
        self._is_last_resort = False
        self.delay_loads = 0
        self.delayed_loads: list[tuple[int, Any]] = []
        self.waits_by_layer = False
        """Whether a prefill waits, layer by layer, for the adapters that come in with it (``composite.layer_wait_hooks``)."""
        self.coming: list[LoraNode] = []
        """Adapters whose copy SGLang has started for the batch that it has formed last."""
        self.num_came_with_batch = 0
        """Adapters, since start."""
        self._awaited: set[int] = set()
        """Nodes of adapters in copies under way that a forward pass waits for: what runs after it finds them whole."""
        self.load_bytes = 0
        self.moved_in, self.moved_out = Moves(), Moves()
        self.evicted_adapter_slots = 0
        """What ``moved_out`` will have counted after the eviction under way."""
        super().__init__(params)

    def init_hicache(self, server_args: Any, params: Any) -> None:
        super().init_hicache(server_args, params)
        # SGLang skips loads of fewer than 10 slots in silence; a small adapter or a mix node's page is fewer.
        self.load_back_threshold = 1

    def reset(self) -> None:
        if getattr(self, "cache_controller", None) is not None:
            self._finish_copies()  # SGLang only forgets them, and they would write over whoever has their slots next
        super().reset()
        self.coming = []
        self._awaited.clear()
        self.on_reset()

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """What PUT /hicache/storage-backend asks for in a running server: refused, as at the start."""
        return False, "--lora-tree: a storage backend would take adapter rows for KV; run without one"

    def path_device_indices(self, node: int) -> torch.Tensor:
        return self.tree_core.collect_full_device_indices(node, self.tree_core.anchor_of(node))

    def _evict_components(
        self,
        request_by_type: dict[ComponentType, int],
        tracker: dict[ComponentType, int],
        available_size_targets: dict[ComponentType, tuple[ComponentType, int]] | None = None,
        **kwargs: Any,
    ) -> None:
        if available_size_targets is not None or self.tree_core.is_write_back:
            super()._evict_components(request_by_type, tracker, available_size_targets, **kwargs)
        else:
            # A number is wanted and nothing must be copied out first: one call, instead of two and a look around per victim.
            self._take_victims(self.tree_core.drive_device_eviction(request_by_type[ComponentType.FULL]), tracker)

    def _take_victims(self, result: Any, tracker: dict[ComponentType, int]) -> None:
        self._apply_eviction_result(result)
        if self._tracks_write_through_unbacked_evictions():
            self._record_dropped_tokens(result.unbacked_tokens, reason="write_through_unbacked_eviction")
        self._accumulate_tracker(tracker, result.tracker)

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        # In the pools we serve every evicted slot is one more to allocate, so that the number to evict is known and need
        # not be found by looking at the allocator after every victim.
        assert kwargs.get("allocation_reclaim_satisfied") is None, "only hybrid pools reclaim jointly, and they are refused"
        wanted = self.num_free_slots + params.num_tokens
        result = self.evict(params)
        if self.num_free_slots < wanted:
            more = super().evict_for_alloc(EvictParams(num_tokens=wanted - self.num_free_slots), **kwargs)
            result.num_tokens_evicted += more.num_tokens_evicted
        for take_back in (self.on_shortage, self._wait_for_copies) if self._is_last_resort else (self.on_shortage,):
            while (missing := params.num_tokens - result.num_tokens_evicted) > 0 and take_back():
                more = super().evict_for_alloc(EvictParams(num_tokens=missing), **kwargs)
                result.num_tokens_evicted += more.num_tokens_evicted
        return result

    @contextmanager
    def last_resort(self) -> Iterator[None]:
        """Inside, an allocation that finds no slots waits for the copies under way (milliseconds) and evicts what they lock.

        Only for whoever would be aborted, or stop the server, without them: while requests wait for adapters there is
        nearly always a copy under way, and taking it away again costs them far more than it gives.
        """
        assert not self._is_last_resort, "last resorts do not nest"
        self._is_last_resort = True
        try:
            yield
        finally:
            self._is_last_resort = False

    def _wait_for_copies(self) -> bool:
        was_any = self._finish_copies()
        self.last_resorts += was_any
        return was_any

    def _finish_copies(self) -> bool:
        """Bring every copy under way to its end; True if there was any."""
        controller = self.cache_controller
        controller.load_queue.extend(load for _, load in self.delayed_loads)
        self.delayed_loads = []
        if not (controller.load_queue or controller.ack_load_queue or self.ongoing_write_through):
            return False
        while controller.load_queue or controller.ack_load_queue:
            self.loading_check(finish_count=len(controller.ack_load_queue))
            self.submit_loads()
        self.writing_check(write_back=True)
        return True

    def look_ahead(self, key: RadixKey) -> None:
        """A request that will be looking for ``key`` waits: what it will find counts as used now."""
        self.touch_prefix(key)
        lora_nodes = self.tree_core.lora_nodes
        mix = lora_nodes.get(identity_of(key.extra_key))
        for member in () if mix is None else mix.members:
            if member in lora_nodes:  # host memory may have dropped it; the mix, off the GPU, outlives it there
                self.tree_core.touch(lora_nodes[member].node)

    # ---- What residency asks for ----

    @property
    def pool(self) -> MHATokenToKVPool:
        return self.token_to_kv_pool_allocator.get_kvcache()

    @property
    def pool_shape(self) -> PoolShape:
        pool = self.pool
        return PoolShape(
            num_layers=len(pool.k_buffer), width=pool.head_num * pool.head_dim, page_size=self.page_size
        )

    @property
    def num_pool_slots(self) -> int:
        """All slots that requests and adapters share."""
        return self.token_to_kv_pool_allocator.size

    @property
    def num_free_slots(self) -> int:
        return self.token_to_kv_pool_allocator.available_size()

    @property
    def host_pool(self) -> Any:
        return self.host_pool_group.anchor_entry.host_pool

    def host_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The host pool's K and V, each (L, slots, W)."""
        host = self.host_pool
        return host.k_buffer.flatten(2), host.v_buffer.flatten(2)

    def allocate_host(self, num_slots: int) -> torch.Tensor | None:
        """Host slots, after evicting the least valuable host leaves, and GPU leaves above them, as far as needed."""
        host = self.host_pool
        if host.available_size() < num_slots:
            self.evict_host(num_slots - host.available_size())
        while host.available_size() < num_slots:
            # Host copies of what is on the GPU are not host leaves: make some.
            evicted = self.evict(EvictParams(num_tokens=num_slots - host.available_size())).num_tokens_evicted
            freed = self.evict_host(num_slots - host.available_size())
            if evicted == 0 and freed == 0:
                return None
        return host.alloc(num_slots)

    def free_host(self, slots: torch.Tensor) -> None:
        self.host_pool.free(slots)

    def allocate_device(self, num_slots: int) -> torch.Tensor | None:
        """Device slots, after evicting the least valuable leaves as far as needed."""
        if self.num_free_slots < num_slots:
            self.evict_for_alloc(EvictParams(num_tokens=num_slots - self.num_free_slots))
        return self.token_to_kv_pool_allocator.alloc(num_slots)

    def evict_some(self, num_slots: int) -> int:
        """Evict the least valuable leaves; returns how many slots came free."""
        return self.evict(EvictParams(num_tokens=num_slots)).num_tokens_evicted

    def evict_adapter(self, lora_node: LoraNode) -> None:
        """Take an adapter that nobody uses off the GPU, with all KV and mixes that need it."""
        assert not lora_node.is_locked, f"{lora_node.identity} is in use"
        victims = iter(self.tree_core.device_nodes_of(lora_node))
        start, tracker = time.perf_counter(), {ComponentType.FULL: 0}
        self._take_victims(self.tree_core.drive_device_eviction(self.num_pool_slots, victims), tracker)
        self.update_eviction_metrics(tracker[ComponentType.FULL], start)

    def has_load_slot(self) -> bool:
        """Whether one more load may be started and still leave a batch's own load its place (SGLang allows three)."""
        return len(self.cache_controller.ack_load_queue) < self.cache_controller.layer_done_counter.num_counters - 1

    def is_load_path_idle(self) -> bool:
        """Whether nothing is being copied to the GPU, or waits for it."""
        return not (self.cache_controller.ack_load_queue or self.cache_controller.load_queue or self.delayed_loads)

    def start_load(self, node_id: int) -> bool:
        """Start the copy of a node, and of what is missing above it, without a batch to wait for it; False: no room."""
        assert self.is_load_path_idle(), "a copy without a batch must not carry others along"
        if not self.load_back(node_id):
            return False
        self.submit_loads()
        return True

    def is_in_flight(self, node_id: int) -> bool:
        """Whether a node is being copied to the GPU."""
        return node_id in self.ongoing_load_back

    def hold_node(self, node_id: int) -> Callable[[], None]:
        """Lock a node on the GPU, with all that it depends on; returns what undoes it."""
        receipt = self.inc_lock_ref(node_id).to_dec_params()
        return lambda: (self.dec_lock_ref(node_id, receipt), None)[1]

    def start_swap_in(self, lora_node: LoraNode) -> bool:
        """Queue the copy of an adapter from host to GPU; False if there is no room even after eviction."""
        assert not lora_node.is_resident, f"{lora_node.identity} is on the GPU already"
        if not self.load_back(lora_node.node.id):
            return False
        if self.delay_loads:
            self._delay_last_load(lora_node)
        return True

    def _delay_last_load(self, lora_node: LoraNode) -> None:
        """For tests: keep the copy just queued back, and let whoever reads the rows too early read NaN."""
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer[lora_node.device_slots] = torch.nan
        self.delayed_loads.append((self.delay_loads, self.cache_controller.load_queue.pop()))

    def advance_delayed_loads(self) -> None:
        """One loop step has passed for the loads that are kept back."""
        self.delayed_loads = [(steps - 1, load) for steps, load in self.delayed_loads]
        while self.delayed_loads and self.delayed_loads[0][0] <= 0 and self.has_load_slot():
            self.cache_controller.load_queue.append(self.delayed_loads.pop(0)[1])
            self.submit_loads()

    def loading_check(self, finish_count: int | None = None) -> None:
        """Count what finished loads moved, and how long that took where the device keeps time."""
        queue = self.cache_controller.ack_load_queue
        before = list(queue)
        super().loading_check(finish_count)
        for ack in before[: len(before) - len(queue)]:
            self._awaited.difference_update(ack.node_ids)
            seconds = ack.start_event.elapsed_time(ack.finish_event) / 1e3 if ack.timing_enabled else 0.0
            loaded = (self.tree_core.find(node_id) for node_id in ack.node_ids)
            adapter_slots = sum(len(node.node.key) for node in loaded if node is not None and not node.is_mix)
            self.load_bytes += ack.num_bytes
            self.moved_in.add(ack.num_tokens, adapter_slots, seconds)

    def update_eviction_metrics(self, num_evicted: int, start_time: float) -> None:
        """What SGLang calls after each eviction from the GPU; it keeps only what adapters and KV took together."""
        super().update_eviction_metrics(num_evicted, start_time)
        if num_evicted > 0:
            adapter_slots = self.evicted_adapter_slots - self.moved_out.adapter_slots
            self.moved_out.add(num_evicted, adapter_slots, time.perf_counter() - start_time)

    @property
    def has_queued_loads(self) -> bool:
        """Whether copies wait to be started."""
        return bool(self.cache_controller.load_queue)

    def submit_loads(self) -> None:
        """Start the queued copies although no batch was formed to wait for them."""
        if self.has_queued_loads:
            super().ready_to_load_host_cache()

    def load_back(self, *args: Any, **kwargs: Any) -> bool:
        """As SGLang's, but no: while as many loads are under way as it has events for. It would stop at the next one; so a
        prompt's history KV is computed again."""
        return self.has_free_load_back_slot() and super().load_back(*args, **kwargs)

    def ready_to_load_host_cache(self) -> int:
        """What SGLang calls for a batch that it has formed: start the queued copies, which its forward pass waits for."""
        self.coming = self.queued_adapters if self.waits_by_layer and self.has_queued_loads else []
        self._awaited.update([lora_node.node.id for lora_node in self.coming])
        self.num_came_with_batch += len(self.coming)
        return super().ready_to_load_host_cache()

    @property
    def has_loads_in_flight(self) -> bool:
        """Whether anything is being copied to the GPU."""
        return bool(self.ongoing_load_back)

    def is_loaded(self, lora_node: LoraNode) -> bool:
        """On the GPU with every row in place (a load in flight does not count)."""
        return lora_node.is_resident and lora_node.node.id not in self.ongoing_load_back

    def is_awaited(self, lora_node: LoraNode) -> bool:
        """Coming in with a batch: its forward pass waits for the rows, and what runs after it finds them whole."""
        return lora_node.node.id in self._awaited

    def comes_with_batch(self, lora_node: LoraNode) -> bool:
        """Whether the copy of an adapter started with a batch, or starts with the one that is being formed."""
        if self.is_awaited(lora_node):
            return True
        return self.waits_by_layer and self.has_queued_loads and lora_node in self.queued_adapters

    @property
    def queued_adapters(self) -> list[LoraNode]:
        """Those whose copy would start with the batch that is being formed."""
        nodes = (self.tree_core.find(node_id) for load in self.cache_controller.load_queue for node_id in load.node_ids)
        return [lora_node for lora_node in nodes if lora_node is not None and not lora_node.is_mix]

    def hold(self, lora_node: LoraNode) -> Callable[[], None]:
        """Lock a node on the GPU; returns what undoes it."""
        return self.hold_node(lora_node.node.id)

    def hold_host(self, lora_node: LoraNode) -> Callable[[], None]:
        """Keep a node's host copy; returns what undoes it."""
        node_id, receipt = lora_node.node.id, self.inc_host_lock_ref(lora_node.node.id).to_dec_params()
        return lambda: (self.dec_host_lock_ref(node_id, receipt), None)[1]

    def agree(self, values: torch.Tensor) -> torch.Tensor:
        """The smallest of each value over the tensor-parallel ranks (int64, in place)."""
        if self.tp_world_size > 1:
            self._all_reduce_attn_groups(values, torch.distributed.ReduceOp.MIN)
        return values

    def check_ranks_agree(self) -> None:
        """Assert that all ranks have the same tree (invariant 4); every rank must call it at the same step."""
        if self.tp_world_size > 1:
            own = self.tree_core.fingerprint()
            assert all(find_same([own], self.agree)), f"the ranks' trees differ: {own:014x} here"


def check_kv_pool(pool: Any) -> None:
    """Refuse every KV pool but the one that adapters are known to fit: an allow-list.

    Raises:
        ValueError: naming what the pool is, what is served and what to change.
    """
    refusals = []
    if type(pool) is not MHATokenToKVPool:
        refusals.append(
            f"the KV pool is a {type(pool).__name__} (a plain MHATokenToKVPool is served: no MLA, sliding-window, hybrid, "
            "FP4 or unified-memory pool)"
        )
    else:
        if pool.head_dim != pool.v_head_dim:
            refusals.append(f"K and V have different widths ({pool.head_dim} and {pool.v_head_dim} per head)")
        if pool.dtype not in _SERVED_DTYPES or pool.store_dtype != pool.dtype:
            refusals.append(
                f"KV is kept as {pool.dtype} in {pool.store_dtype}; leave --kv-cache-dtype at auto with a model in float32, "
                "float16 or bfloat16"
            )
        expected = (pool.head_num, pool.head_dim)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            if buffer.dim() != 3 or tuple(buffer.shape[1:]) != expected or not buffer.is_contiguous():
                refusals.append(
                    f"a KV buffer has shape {tuple(buffer.shape)} and strides {buffer.stride()}; slots of {expected} in NHD "
                    "order are served (unset SGLANG_USE_HND_KVCACHE)"
                )
                break
    _raise_refusals(refusals)


def check_allocator(allocator: Any) -> None:
    """Refuse every allocator of slots but SGLang's two plain ones; ValueError names it."""
    if type(allocator) not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
        _raise_refusals([f"the allocator is a {type(allocator).__name__}"])


def _raise_refusals(refusals: list[str]) -> None:
    if refusals:
        raise ValueError("--lora-tree cannot serve this exactly: " + "; ".join(refusals))


def build_cache(ctx: Any) -> LoraTreeCache:
    """The factory that ``--radix-cache-backend lora_tree`` names (seam: ``mem_cache.registry``)."""
    check_allocator(ctx.params.token_to_kv_pool_allocator)
    check_kv_pool(ctx.params.token_to_kv_pool_allocator.get_kvcache())
    ctx.params.tree_core_backend = TREE_CORE_NAME
    ctx.params.component_registry_override = {
        **(ctx.params.component_registry_override or {}),
        ComponentType.FULL: LoraFullComponent,
    }
    cache = create_unified_radix_cache(ctx, cache_class=LoraTreeCache)
    assert isinstance(cache, LoraTreeCache) and isinstance(cache.tree_core, LoraTreeCore)
    if cache.cache_controller is None or cache.host_pool.layout != "layer_first":
        layout = None if cache.cache_controller is None else cache.host_pool.layout
        raise ValueError(
            f"--lora-tree needs HiCache with --hicache-mem-layout layer_first, and found {layout}: drop the option that "
            "chose another"
        )
    install_policy(cache, current_settings() or Settings(), ctx.params.eviction_policy)
    ctx.tp_worker.model_runner.lora_manager.attach_cache(cache)
    return cache


def install_policy(cache: LoraTreeCache, settings: Settings, stock_policy: str) -> None:
    """Have leaves leave in the order of ``settings.retention_policy``; before the first request.

    Args:
        stock_policy: what ``--radix-eviction-policy`` says; it rules unless a policy of ours is chosen.
    """
    name = settings.retention_policy
    if name == "auto":
        name = DEFAULT_POLICY if stock_policy.lower() == "lru" else "stock"
    state = RetentionState(cache.pool_shape.num_planes * cache.pool_shape.width * cache.pool.dtype.itemsize, cache.num_pool_slots)
    if name == "stock":
        cache.tree_core.retention = state
    else:
        cache.tree_core.set_policy(POLICIES[name](state), state)


def register() -> None:
    """Make the cache and its core known to SGLang; safe to call again."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory

    if get_radix_cache_factory(CACHE_NAME) is None:
        register_radix_cache_backend(CACHE_NAME, build_cache)
    if get_tree_core_factory(TREE_CORE_NAME) is None:
        register_tree_core_backend(TREE_CORE_NAME, LoraTreeCore)
