"""The prefix cache without a server or a model: ``LoraTreeCache`` over SGLang's pool, allocator and HiCache, as a server has it.

The simulator, the swap-in benchmark and the tests of the tree build theirs here.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import base as pool_host
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_context

from sglang_lora_tree.platforms import cpu_hooks
from sglang_lora_tree.radix import cache_hooks
from sglang_lora_tree.radix.cache_hooks import LoraTreeCache
from sglang_lora_tree.radix.lora_component_hooks import LoraFullComponent
from sglang_lora_tree.radix.tree_core_hooks import TREE_CORE_NAME


def build_cache(
    pool_slots: int,
    host_slots: int,
    *,
    num_layers: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 1,
    dtype: torch.dtype = torch.float32,
    page_size: int = 1,
    device: str = "cpu",
    eviction_policy: str = "lru",
) -> LoraTreeCache:
    """Both pools, empty, and the tree over them.

    Args:
        pool_slots, host_slots: sizes of the two pools; SGLang adds a page to each.
        device: "cpu" (as on the CPU platform: copies are done when the call returns) or "cuda" (pinned host memory, SGLang's
            copy kernels).

    Raises:
        ValueError: the host pool does not fit this machine's memory.
    """
    if device == "cpu":
        cpu_hooks.install()
        pool_host.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # a megabyte or two: no reason to leave gigabytes free
    cache_hooks.register()
    # SGLang reads these while it builds, and not later.
    context = get_context().override_server_args(
        device=device,
        page_size=page_size,
        enable_hierarchical_cache=True,
        hicache_io_backend="direct" if device == "cpu" else "kernel",
        hicache_mem_layout="layer_first",
        hicache_write_policy="write_through",
        hicache_size=0,
        hicache_ratio=host_slots / pool_slots,
    )
    server_args = context.install()
    try:
        pool = MHATokenToKVPool(pool_slots, page_size, dtype, num_kv_heads, head_dim, num_layers, device, False)
        allocator_class = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        paging = () if page_size == 1 else (page_size,)
        allocator = allocator_class(pool_slots, *paging, dtype, device, pool, False)
        cache_hooks.check_kv_pool(pool)
        cache_hooks.check_allocator(allocator)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(1, 1, device, False),
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            eviction_policy=eviction_policy,
            tree_components=(ComponentType.FULL,),
            component_registry_override={ComponentType.FULL: LoraFullComponent},
            tree_core_backend=TREE_CORE_NAME,
        )
        cache = LoraTreeCache(params)
        cache.init_hicache(server_args, params)
    finally:
        context.restore()
    return cache
