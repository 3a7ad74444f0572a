"""SGLang's SiluAndMul adds the adapters' part of gate and up, so that their output is read once and never written again.

Hook: ``sglang.srt.layers.activation.SiluAndMul.forward_cuda`` (AROUND). Only for MLPs that :func:`can_activate` knows; in any
other, ``forward_with_base`` finishes the output itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.composite import backend_hooks


def can_activate(mlp: torch.nn.Module) -> bool:
    """Whether the output of an MLP's gate_up_proj goes to SiluAndMul's CUDA form, and only there.

    Not in float32, where SGLang is run for exactness with its torch operators, nor if a fused path of SGLang's takes the output.
    """
    act_fn = getattr(mlp, "act_fn", None)
    quant, dual = getattr(mlp, "activation_quant", None), getattr(mlp, "dual_gemm", None)
    return (
        isinstance(act_fn, SiluAndMul)
        and act_fn._forward_method == act_fn.forward_cuda
        and not getattr(quant, "enabled", False)
        and getattr(dual, "mode", None) is None
        and next(mlp.parameters()).dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.is_available()
    )


def finish(original: Callable[..., torch.Tensor], act_fn: SiluAndMul, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """AROUND ``SiluAndMul.forward_cuda``."""
    backend = backend_hooks.current()
    activated = None if backend is None else backend.activate(x)
    return original(act_fn, x, *args, **kwargs) if activated is None else activated


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.layers.activation.SiluAndMul.forward_cuda", finish, HookType.AROUND),
]
