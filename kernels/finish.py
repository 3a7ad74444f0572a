"""What the model does next to a linear layer's output, with the adapters' part added on the way, in Triton.

`expand` can leave that part in a tensor of its own (`delta`), beside the base model's product. Whatever reads the output
afterwards adds it: no launch stands between the product and the next operation for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels.rotation import Rotation
from sglang_lora_tree.kernels.rows import activate, add_and_round, ceil_divide, rotate, round_to_power


@triton.jit
def _normalize_kernel(y, delta, residual, weight, epsilon, y_stride, residual_stride, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: a token."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < D
    outputs, residuals = y + row * y_stride + d, residual + row * residual_stride + d
    output = tl.load(outputs, mask=mask, other=0.0)
    if delta is not None:
        output = add_and_round(output, tl.load(delta + row * D + d, mask=mask, other=0.0))
    total = output.to(tl.float32) + tl.load(residuals, mask=mask, other=0.0).to(tl.float32)
    tl.store(residuals, total.to(output.dtype), mask=mask)
    scale = tl.rsqrt(tl.sum(total * total) / D + epsilon)
    tl.store(outputs, (total * scale * tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)).to(output.dtype), mask=mask)


def normalize(y: torch.Tensor, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """residual += y + delta, and y = the RMS norm of that sum. See lora.add_and_normalize."""
    width = y.shape[1]
    block = round_to_power(width)
    _normalize_kernel[(y.shape[0],)](
        y, delta, residual, weight, epsilon, y.stride(0), residual.stride(0), D=width, BLOCK=block,
        num_warps=max(4, min(16, block // 512)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_kernel(  # type: ignore[no-untyped-def]
    y, delta, positions, cos_sin, num_tokens, y_stride, delta_stride, cos_sin_stride, D: tl.constexpr, ROTATED: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: some tokens x some heads of q, k or v."""
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = tokens < num_tokens
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < D)[None, :]
    rows = tokens.to(tl.int64)[:, None]
    cells = y + rows * y_stride + d[None, :]
    output = tl.load(cells, mask=mask, other=0.0)
    if delta is not None:
        output = add_and_round(output, tl.load(delta + rows * delta_stride + d[None, :], mask=mask, other=0.0))
    if tl.program_id(0) * BLOCK_D < ROTATED:
        position = tl.load(positions + tokens, mask=exists, other=0)
        angles = cos_sin + position.to(tl.int64)[:, None] * cos_sin_stride
        rotated = rotate(output, angles, angles + HEAD // 2, HEAD)
        output = tl.where((d < ROTATED)[None, :], rotated, output)
    tl.store(cells, output, mask=mask)


def rotate_heads(y: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, rotated: int) -> None:
    """y += delta, then rotate the first `rotated` columns. See lora.add_and_rotate."""
    width, head = y.shape[1], rotation.head
    block_t, block_d = 4 if y.shape[0] <= 64 else 16, max(head, 128)
    _rotate_kernel[(ceil_divide(width, block_d), ceil_divide(y.shape[0], block_t))](
        y, delta, rotation.positions, rotation.cos_sin, y.shape[0], y.stride(0), 0 if delta is None else delta.stride(0),
        rotation.cos_sin.stride(0), D=width, ROTATED=rotated, HEAD=head, BLOCK_T=block_t, BLOCK_D=block_d,
    )  # fmt: skip


@triton.jit
def _activate_kernel(y, delta, activated, y_stride, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: a token x a block of columns of gate and the same of up."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    gate = tl.load(y + row * y_stride + d, mask=mask, other=0.0)
    up = tl.load(y + row * y_stride + D + d, mask=mask, other=0.0)
    if delta is not None:
        gate = add_and_round(gate, tl.load(delta + row * 2 * D + d, mask=mask, other=0.0))
        up = add_and_round(up, tl.load(delta + row * 2 * D + D + d, mask=mask, other=0.0))
    tl.store(activated + row * D + d, activate(gate, up), mask=mask)


def activate_halves(y: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up of y + delta. See lora.add_and_activate."""
    width = y.shape[1] // 2
    activated = torch.empty(y.shape[0], width, dtype=y.dtype, device=y.device)
    _activate_kernel[(ceil_divide(width, 1024), y.shape[0])](y, delta, activated, y.stride(0), D=width, BLOCK=1024)
    return activated
