"""With the setting ``join_operations``, what the model does next to a linear layer's output adds the adapters' part: no launch
stands between the two for it.

Hooks, all AROUND:
``sglang.srt.layers.activation.SiluAndMul.forward``: gate and up.
``sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward``: q, k and v.
``sglang.srt.layers.layernorm.RMSNorm.forward``: the outputs of o_proj and down_proj, with the residual.

Not ``forward_cuda``: SGLang finds out which form to run when it first runs one, long after the model is built.

Only in MLPs, attentions and decoder layers that :func:`can_activate`, :func:`can_rotate` and :func:`can_normalize` know; in any
other, ``forward_with_base`` finishes the output itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.fused_op import get_fused_op_backend
from sglang.srt.layers import layernorm
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel
from sglang.srt.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2Model
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel

from sglang_lora_tree.composite import backend_hooks
from sglang_lora_tree.config import current_settings
from sglang_lora_tree.kernels.lora import fits_rotation
from sglang_lora_tree.kernels.rotation import Rotation

ROTARY_FORMS = ("forward", "forward_native", "forward_cpu", "forward_cuda")
"""The forms of SGLang's rotary embedding, of which the subclasses of some kinds of scaling have their own."""


def finishes_later(model: torch.nn.Module, name: str) -> bool:
    """Whether the output of a linear layer, e.g. "model.layers.0.mlp.down_proj", is finished here.

    Not in float32 on a GPU, where SGLang is run for exactness with its torch operators, nor if SGLang is told which form of
    its operators to run.
    """
    settings = current_settings()
    if settings is None or not settings.join_operations or get_fused_op_backend() is not None:
        return False
    path, _, linear = name.rpartition(".")
    parent = model.get_submodule(path)
    weight = next(parent.parameters())
    if weight.is_cuda and weight.dtype == torch.float32:
        return False
    if linear == "gate_up_proj":
        return can_activate(parent)
    if linear == "qkv_proj":
        return can_rotate(parent)
    decoder_path, _, _ = path.rpartition(".")
    layers_path = decoder_path.rpartition(".")[0]  # "model.layers"
    return can_normalize(model.get_submodule(decoder_path), model.get_submodule(layers_path.rpartition(".")[0]))


def can_activate(mlp: torch.nn.Module) -> bool:
    """Whether the output of an MLP's gate_up_proj goes to SiluAndMul, and only there.

    Not if a fused path of SGLang's takes the output.
    """
    if type(mlp) not in (LlamaMLP, Qwen2MLP):
        return False
    quant, dual = getattr(mlp, "activation_quant", None), getattr(mlp, "dual_gemm", None)
    return (
        type(mlp.act_fn) is SiluAndMul
        and not getattr(quant, "enabled", False)
        and getattr(dual, "mode", None) is None
    )


def can_rotate(attention: torch.nn.Module) -> bool:
    """Whether q and k of an attention go from qkv_proj to the rotary embedding, and only there.

    Known of Llama's and Qwen2's (Qwen3 has norms in between). All of a head must be rotated, half by half, with float32 angles:
    for heads of some widths SGLang's fallback kernel rounds the table to the model's dtype, at its first call.
    """
    if type(attention) not in (LlamaAttention, Qwen2Attention):
        return False
    rotary: Any = attention.rotary_emb
    row_width: Any = attention.kv_size
    return (
        isinstance(rotary, RotaryEmbedding)
        and all(getattr(type(rotary), form) is getattr(RotaryEmbedding, form) for form in ROTARY_FORMS)
        and not rotary.use_fallback_kernel
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
        and rotary.cos_sin_cache.dtype == torch.float32
        and fits_rotation(rotary.head_size, row_width)
    )


def can_normalize(decoder: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Whether what o_proj and down_proj put out goes to a norm with the residual, and only there.

    Known of Llama's and Qwen2's decoder layers in their models, without tensor parallelism: a rank's output is a part of a
    sum, which is added up before the norm. model: takes a layer's output to the next one's norm, the last one's to its own.
    """
    known = type(decoder) in (LlamaDecoderLayer, Qwen2DecoderLayer) and type(model) in (LlamaModel, Qwen2Model)
    if not known or get_parallel().tp_size > 1:
        return False
    norms: list[Any] = [decoder.input_layernorm, decoder.post_attention_layernorm, model.norm]
    return all(
        type(norm) is RMSNorm
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        for norm in norms
    )


def activate(
    original: Callable[..., torch.Tensor], act_fn: SiluAndMul, x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """AROUND ``SiluAndMul.forward``."""
    backend = backend_hooks.current()
    if backend is None:  # without --lora-tree
        return original(act_fn, x, *args, **kwargs)
    activated = backend.activate(x)
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
    """AROUND ``RotaryEmbedding.forward``: it rotates in place too. With offsets, or if it is to store K and V, it does
    so itself, once the output is finished."""
    backend = backend_hooks.current()
    if backend is None:
        return original(rotary, positions, query, key, *args, **kwargs)
    plain = not any(arg is not None for arg in (*args, *kwargs.values())) and positions.dim() == 1
    rotation = Rotation(positions, rotary.cos_sin_cache, rotary.head_size) if plain else None
    if backend.rotate(query, rotation):
        return query, key
    return original(rotary, positions, query, key, *args, **kwargs)


def normalize(
    original: Callable[..., Any],
    norm: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND ``RMSNorm.forward``: it works in place too. Asked for more, or to be the same in every batch, it does so
    itself, once the output is finished."""
    backend = backend_hooks.current()
    if backend is None:
        return original(norm, x, residual, *args, **kwargs)
    plain = not any(arg is not None for arg in (*args, *kwargs.values())) and not layernorm.is_batch_invariant_mode_enabled()
    if backend.normalize(x, residual if plain else None, norm.weight, norm.variance_epsilon):
        return x, residual
    return original(norm, x, residual, *args, **kwargs)


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.layers.activation.SiluAndMul.forward", activate, HookType.AROUND),
    ("sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward", rotate, HookType.AROUND),
    ("sglang.srt.layers.layernorm.RMSNorm.forward", normalize, HookType.AROUND),
]
