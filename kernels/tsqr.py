"""FlashTSQR: the triangular factors of very many tall-skinny matrices of mixed shapes at once, and Q applied implicitly.

A LoRA factor X (B, or A transposed) has thousands of rows and at most 128 columns. Only R of X = Q R is needed to know the
spectrum of B A, and the new factors are small matrices times the old ones, so Q is never formed and nothing tall is stored
in between: X is read once for R and once for the result.

R comes from X^T X (level by level: rows add up in a tile's accumulator, tiles in the factor's sum), then a Cholesky factor
of the small matrix. That squares the condition number, which is why everything up to R is float64: products of halves and
floats are exact in it, an error of 2^-53 in X^T X is one of at most sqrt(2^-53) = 1e-8 ||X|| in R however ill-conditioned
X is, below float32's own rounding, and GPUs made for computing multiply float64 matrices on tensor cores. The Householder
tree of the paper (LoRAForge, arXiv 2611.01256, section 4) needs rank steps one after another in every tile instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels.tall_batch import LARGEST_RANK, SMALLEST_TILE, TallBatch, check_apply

ENOUGH_PROGRAMS = 2048
"""A batch of fewer matrices has their rows split, so that a large GPU is full."""
SMALLEST_SHARE = 512
"""Rows of a split: fewer would not repay its sum."""
BLOCK_ROWS = 16
NUM_STAGES = 3
APPLY_BLOCK_ROWS = 64
LARGEST_BLOCK_KEPT = 64
"""Result columns per program: more would spill."""


@triton.jit
def _tile(base, rows, rank, begin, WIDE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK rows of X from row `begin`, as stored: (R, BLOCK) if WIDE, else (BLOCK, R); zeros outside."""
    row = begin + tl.arange(0, BLOCK)
    column = tl.arange(0, R)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        rows = tl.multiple_of(rows, 16) if WIDE else rows
        rank = rank if WIDE else tl.multiple_of(rank, 16)
    if WIDE:
        places = base + column[:, None].to(tl.int64) * rows + row[None, :]
        mask = (column[:, None] < rank) & (row[None, :] < rows)
    else:
        places = base + row[:, None].to(tl.int64) * rank + column[None, :]
        mask = (row[:, None] < rows) & (column[None, :] < rank)
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def _gram_kernel(  # type: ignore[no-untyped-def]
    addresses, all_rows, ranks, out,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One program: a share of one matrix's rows. out (M, SPLITS, R, R) float64 gets X^T X of the share."""
    matrix = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.load(all_rows + matrix)
    rank = tl.load(ranks + matrix)
    base = tl.load(addresses + matrix).to(tl.pointer_type(DTYPE))
    share = (rows + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    begin = split * share
    total = tl.zeros((R, R), dtype=tl.float64)
    for row in range(begin, tl.minimum(begin + share, rows), BLOCK):
        tile = _tile(base, rows, rank, row, WIDE, R, BLOCK, ALIGNED).to(tl.float32)
        if COMPILED:
            # The compiler (Triton 3.8) would widen halves inside the dot's operand and fail for float64 ("largeK"); it
            # does not look through this conversion.
            tile = tl.inline_asm_elementwise("cvt.f64.f32 $0, $1;", "=d,f", [tile], dtype=tl.float64, is_pure=False, pack=1)
        else:
            tile = tile.to(tl.float64)
        if WIDE:
            total = tl.dot(tile, tl.trans(tile), total, out_dtype=tl.float64)
        else:
            total = tl.dot(tl.trans(tile), tile, total, out_dtype=tl.float64)
    column = tl.arange(0, R)
    target = out + (matrix.to(tl.int64) * SPLITS + split) * (R * R)
    tl.store(target + column[:, None] * R + column[None, :], total)


def gram(batch: TallBatch) -> torch.Tensor:
    """X^T X of every matrix, float64 (M, R, R). See tsqr_reference.gram; its sums are added in another order."""
    _check_rank(batch)
    splits = _splits(batch)
    size = batch.padded_rank
    out = torch.empty(len(batch), splits, size, size, dtype=torch.float64, device=batch.device)
    _gram_kernel[len(batch), splits](
        batch.addresses, batch.rows, batch.ranks, out,
        DTYPE=_triton_dtype(batch.dtype), WIDE=batch.wide, R=size, SPLITS=splits, BLOCK=BLOCK_ROWS,
        ALIGNED=batch.aligned, COMPILED=not interpreted(),
        num_warps=8 if size > 64 else 4, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out.sum(1) if splits > 1 else out.squeeze(1)


@triton.jit
def _apply_kernel(  # type: ignore[no-untyped-def]
    addresses, all_rows, ranks, coefficients, out_addresses, kept_ranks,
    DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program: a share of one matrix's rows times the matrix's (R, K) coefficients, stored as X is."""
    matrix = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.load(all_rows + matrix)
    rank = tl.load(ranks + matrix)
    kept = tl.load(kept_ranks + matrix)
    base = tl.load(addresses + matrix).to(tl.pointer_type(DTYPE))
    target = tl.load(out_addresses + matrix).to(tl.pointer_type(OUT_DTYPE))
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    column = tl.arange(0, R)
    direction = tl.program_id(2) * K + tl.arange(0, K)
    small = coefficients + matrix.to(tl.int64) * (R * R)
    if WIDE:  # directions past R are read as 0 and never stored
        weights = tl.load(small + column[None, :] * R + direction[:, None], mask=direction[:, None] < R, other=0.0)
    else:
        weights = tl.load(small + column[:, None] * R + direction[None, :], mask=direction[None, :] < R, other=0.0)
    share = (rows + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    begin = split * share
    for first in range(begin, tl.minimum(begin + share, rows), BLOCK):
        tile = _tile(base, rows, rank, first, WIDE, R, BLOCK, ALIGNED).to(tl.float32)
        row = first + tl.arange(0, BLOCK)
        if WIDE:
            result = tl.dot(weights, tile, input_precision="tf32x3")
            places = target + direction[:, None].to(tl.int64) * (tl.multiple_of(rows, 16) if ALIGNED else rows) + row[None, :]
            mask = (direction[:, None] < kept) & (row[None, :] < rows)
        else:
            result = tl.dot(tile, weights, input_precision="tf32x3")
            places = target + row[:, None].to(tl.int64) * kept + direction[None, :]
            mask = (row[:, None] < rows) & (direction[None, :] < kept)
        tl.store(places, result.to(OUT_DTYPE), mask=mask)


def apply(
    batch: TallBatch, coefficients: torch.Tensor, kept: Sequence[int], out: Sequence[torch.Tensor]
) -> None:
    """Write X_m C_m[:, :kept_m] of every matrix: Q applied to a small matrix without forming Q. See tsqr_reference.apply."""
    size = batch.padded_rank
    _check_rank(batch)
    check_apply(batch, coefficients, kept, out)
    addresses = [target.data_ptr() for target in out]
    splits = _splits(batch)
    block_kept = min(LARGEST_BLOCK_KEPT, max(SMALLEST_TILE, triton.next_power_of_2(max(kept))))
    _apply_kernel[len(batch), splits, triton.cdiv(max(kept), block_kept)](
        batch.addresses, batch.rows, batch.ranks, coefficients,
        torch.tensor(addresses, dtype=torch.int64).to(batch.device),
        torch.tensor(kept, dtype=torch.int32).to(batch.device),
        DTYPE=_triton_dtype(batch.dtype), OUT_DTYPE=_triton_dtype(out[0].dtype), WIDE=batch.wide, R=size,
        K=block_kept, SPLITS=splits, BLOCK=32 if size > 64 else APPLY_BLOCK_ROWS,
        ALIGNED=batch.aligned and all(address % 16 == 0 for address in addresses),
        num_warps=8 if size > 64 else 4,
    )  # fmt: skip


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _splits(batch: TallBatch) -> int:
    return max(1, min(triton.cdiv(ENOUGH_PROGRAMS, len(batch)), batch.max_rows // SMALLEST_SHARE))


def _check_rank(batch: TallBatch) -> None:
    assert batch.padded_rank <= LARGEST_RANK, f"rank {batch.padded_rank} is above {LARGEST_RANK}: use the reference"


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
