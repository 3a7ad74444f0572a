"""What the model does next to gate and up, and to q and k, adds the adapters' part: outputs are read once and written once.

Hooks:
``sglang.srt.layers.activation.SiluAndMul.forward_cuda`` (AROUND): gate and up are read once and never written again.
``sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda`` (AROUND): q, k and v, in one launch.

Only in MLPs and attentions that :func:`can_activate` and :func:`can_rotate` know; in any other, ``forward_with_base`` finishes
the output itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.models.qwen2 import Qwen2Attention
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.composite import backend_hooks
from sglang_lora_tree.kernels.lora import fits_rotation
from sglang_lora_tree.kernels.rotation import Rotation


def finishes_later(linear: str, parent: torch.nn.Module) -> bool:
    """Whether the output of a linear layer of ``parent``, e.g. of "qkv_proj", is finished here.

    Not in float32, where SGLang is run for exactness with its torch operators.
    """
    if next(parent.parameters()).dtype not in (torch.bfloat16, torch.float16) or not torch.cuda.is_available():
        return False
    return can_activate(parent) if linear == "gate_up_proj" else linear == "qkv_proj" and can_rotate(parent)


def can_activate(mlp: torch.nn.Module) -> bool:
    """Whether the output of an MLP's gate_up_proj goes to SiluAndMul's CUDA form, and only there.

    Not if a fused path of SGLang's takes the output.
    """
    act_fn = getattr(mlp, "act_fn", None)
    quant, dual = getattr(mlp, "activation_quant", None), getattr(mlp, "dual_gemm", None)
    return (
        isinstance(act_fn, SiluAndMul)
        and act_fn._forward_method == act_fn.forward_cuda
        and not getattr(quant, "enabled", False)
        and getattr(dual, "mode", None) is None
    )


def can_rotate(attention: torch.nn.Module) -> bool:
    """Whether q and k of an attention go from qkv_proj to the rotary embedding's CUDA form, and only there.

    Known of Llama's and Qwen2's (Qwen3 has norms in between). All of a head must be rotated, half by half.
    """
    kind = type(attention)
    known = kind.forward is Qwen2Attention.forward or (
        kind.forward is LlamaAttention.forward
        and getattr(kind, "forward_prepare_native", None) is LlamaAttention.forward_prepare_native
    )
    rotary = getattr(attention, "rotary_emb", None)
    row_width: int = getattr(attention, "kv_size", 0)
    return (
        known
        and isinstance(rotary, RotaryEmbedding)
        and rotary._forward_method == rotary.forward_cuda
        and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
        and not rotary.use_fallback_kernel
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
        and rotary.cos_sin_cache.dtype == torch.float32
        and fits_rotation(rotary.head_size, row_width)
    )


def activate(
    original: Callable[..., torch.Tensor], act_fn: SiluAndMul, x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """AROUND ``SiluAndMul.forward_cuda``."""
    backend = backend_hooks.current()
    activated = None if backend is None else backend.activate(x)
    return original(act_fn, x, *args, **kwargs) if activated is None else activated


def rotate(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    rotary: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """AROUND ``RotaryEmbedding.forward_cuda``: it rotates in place too. With offsets, or if it is to store K and V, it does
    so itself, once the output is finished."""
    backend = backend_hooks.current()
    plain = not any(arg is not None for arg in (*args, *kwargs.values())) and positions.dim() == 1
    rotation = Rotation(positions, rotary.cos_sin_cache, rotary.head_size) if plain else None
    if backend is not None and backend.rotate(query, rotation):
        return query, key
    return original(rotary, positions, query, key, *args, **kwargs)


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.layers.activation.SiluAndMul.forward_cuda", activate, HookType.AROUND),
    ("sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda", rotate, HookType.AROUND),
]
