"""What the Triton kernels share: where a pool row starts, and how much of it is taken at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels.pool import PoolView


@triton.jit
def row_addresses(  # type: ignore[no-untyped-def]
    rows, mask, pointers, slots, slot_count, W: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return pointers to pool rows: row i starts in plane i // n at slot slots[i % n].

    rows int32 (R,), mask bool (R,): masked rows give a null pointer, not to be loaded from. slots (R,) points at the
    adapter's run, slot_count (R,) is its length n. The product slot * W is taken in int64: pools exceed 2^31 elements.
    """
    plane = tl.load(pointers + rows // slot_count, mask=mask, other=0)
    slot = tl.load(slots + rows % slot_count, mask=mask, other=0)
    addresses = plane.to(tl.pointer_type(DTYPE)) + slot.to(tl.int64) * W
    if ALIGNED:
        addresses = tl.multiple_of(addresses, 16)  # lets loads be 16 bytes wide: the compiler cannot know it
    return addresses


@triton.jit
def add_and_round(base, delta):  # type: ignore[no-untyped-def]
    """base + delta (float32), rounded to base's dtype. Where delta is 0 base keeps its bits: -0 + 0 would be 0, but adding -0
    changes nothing. (Not a choice between rounded numbers: these would be rounded one by one, a quarter as fast.)"""
    nothing = tl.full(delta.shape, -(1 << 31), tl.int32).to(tl.float32, bitcast=True)  # Triton reads a literal -0.0 as 0.0
    return (base.to(tl.float32) + tl.where(delta == 0.0, nothing, delta)).to(base.dtype)


@triton.jit
def activate(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) * up in float32, rounded to gate's dtype, as SGLang's SiluAndMul."""
    gate_32 = gate.to(tl.float32)
    return (gate_32 / (1.0 + tl.exp(-gate_32)) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def rotate(y, cos, sin, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate the heads of a tile: y (T, D), D a multiple of WIDTH: of a head, or of a part of both its halves.

    cos and sin (T, 1) point at the tokens' WIDTH / 2 cosines and sines. In float32, rounded once.
    """
    T: tl.constexpr = y.shape[0]
    HEADS: tl.constexpr = y.shape[1] // WIDTH
    HALF: tl.constexpr = WIDTH // 2
    angles = tl.arange(0, HALF)[None, :]
    cosines = tl.reshape(tl.load(cos + angles), (T, 1, HALF))
    sines = tl.reshape(tl.load(sin + angles), (T, 1, HALF))
    first, second = tl.split(tl.permute(tl.reshape(y.to(tl.float32), (T, HEADS, 2, HALF)), (0, 1, 3, 2)))
    rotated = tl.join(first * cosines - second * sines, second * cosines + first * sines)
    return tl.reshape(tl.permute(rotated, (0, 1, 3, 2)), (T, HEADS * WIDTH)).to(y.dtype)


def upcasts(pool: PoolView) -> bool:
    """Whether tl.dot must be given float32: Triton's interpreter multiplies bfloat16's bit patterns as integers."""
    return pool.dtype == torch.bfloat16 and triton.knobs.runtime.interpret


def ceil_divide(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's cdiv and next_power_of_2 take microseconds on the host, and every launch has several.)"""
    return -(-a // b)


def round_to_power(n: int) -> int:
    """The smallest power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def block_width(width: int, largest: int) -> int:
    """How many elements of a run of `width` a kernel takes at once: a power of two, at least the 16 that tl.dot needs."""
    return max(16, min(round_to_power(width), largest))
