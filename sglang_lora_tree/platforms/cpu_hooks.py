"""What SGLang and HiCache assume of CUDA, answered for the CPU reference platform.

Replaces, only where that platform is active:

* ``sglang.srt.mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS["cpu"]``: host memory without ``cudaHostRegister``;
* ``sglang.srt.mem_cache.pool_host.mha.transfer_kv_direct``: the copy between the two pools, which is undefined off CUDA;
* ``torch`` in ``sglang.srt.lora.layers`` and ``.backend.torch_backend``, which ask for pinned tensors always: ``torch.tensor``
  without ``pin_memory``. (Not ``torch.tensor`` itself: torch looks for it by identity in device contexts, and transformers
  would build its models wrongly in this process.)
* ``torch.Tensor.pin_memory``: the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch


def install() -> None:
    """Put the replacements in place; safe to call again."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend
    from sglang.srt.mem_cache.pool_host import base, common, mha

    from sglang_lora_tree.config import current_settings

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_host_memory
    mha.transfer_kv_direct = transfer_slots
    settings = current_settings()
    reserve_gb = 2.0 if settings is None or settings.host_reserve_gb is None else settings.host_reserve_gb
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = int(reserve_gb * 1e9)
    layers.torch = torch_backend.torch = _TorchWithoutPinning("torch")
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def transfer_slots(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy slots between pools: ``dst_layers[i][dst_indices] = src_layers[i][src_indices]``.

    Args:
        src_layers, dst_layers: tensors of shape (slots, heads, head_dim), one per layer and K or V.
        src_indices, dst_indices: slot numbers, int64, of equal length.
        page_size: unused; kept for SGLang's signature.
    """
    del page_size
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def _allocate_host_memory(
    dims: Any, dtype: torch.dtype, device: str, pin_memory: bool | None = None, allocator: Any = None, **_: Any
) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


class _TorchWithoutPinning(ModuleType):
    """torch, but for what is asked for pinned memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)
