"""The allow-list of KV pools and allocators (``radix.cache_hooks``): real pools of SGLang's, small ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_lora_tree.radix.cache_hooks import build_cache, check_allocator, check_kv_pool

COMMON: dict[str, Any] = {"size": 16, "page_size": 4, "layer_num": 2, "device": "cpu", "enable_memory_saver": False}


def mha_pool(kind: type[MHATokenToKVPool] = MHATokenToKVPool, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return kind(**COMMON, dtype=dtype, head_num=2, head_dim=16, enable_alt_stream=False, **options)


def hnd_pool() -> Any:
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        return mha_pool()


def mla_pool() -> Any:
    return memory_pool.MLATokenToKVPool(**COMMON, dtype=torch.float32, kv_lora_rank=16, qk_rope_head_dim=8)


def hybrid_pool() -> Any:
    return memory_pool.HybridLinearKVPool.__new__(memory_pool.HybridLinearKVPool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_pools_are_served(dtype: torch.dtype) -> None:
    check_kv_pool(mha_pool(dtype=dtype))


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("HND", hnd_pool, "SGLANG_USE_HND_KVCACHE"),
    ("FP8", lambda: mha_pool(dtype=torch.float8_e4m3fn), "--kv-cache-dtype"),
    ("FP4", lambda: mha_pool(memory_pool.MHATokenToKVPoolFP4), "MHATokenToKVPoolFP4"),
    ("MLA", mla_pool, "MLATokenToKVPool"),
    ("hybrid", hybrid_pool, "HybridLinearKVPool"),
    ("unequal width", lambda: mha_pool(v_head_dim=8), "different widths"),
]


@pytest.mark.parametrize(("make", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_other_pools_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"--lora-tree cannot serve this exactly: .*{says}"):
        check_kv_pool(make())


def test_the_two_plain_allocators_are_served() -> None:
    for kind in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
        check_allocator(kind.__new__(kind))


class OwnAllocator(TokenToKVPoolAllocator):
    """A subclass may do anything."""


@pytest.mark.parametrize("kind", [SWATokenToKVPoolAllocator, OwnAllocator])
def test_other_allocators_are_refused_before_the_tree_is_built(kind: type) -> None:
    with pytest.raises(ValueError, match=f"the allocator is a {kind.__name__}"):
        build_cache(SimpleNamespace(params=SimpleNamespace(token_to_kv_pool_allocator=kind.__new__(kind))))
