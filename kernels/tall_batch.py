"""Many tall-skinny matrices of mixed shapes, as kernels see them: tables of addresses, heights and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SMALLEST_TILE = 16
"""A tensor core's."""
LARGEST_RANK = 128
"""Of Triton's kernels (tsqr.py, jacobi.py): above it a tile's float64 accumulator no longer fits into registers."""


@dataclass(frozen=True, eq=False)
class TallBatch:
    """Tall-skinny matrices X_m (rows_m, rank_m) of one dtype on one device.

    wide: stored transposed, (rank, rows), as lora_A is; otherwise (rows, rank), as lora_B is.
    addresses int64 (M,), rows int32 (M,), ranks int32 (M,): of each matrix. max_rows: the largest of rows;
    padded_rank: the next power of two of the largest rank. aligned: every vector of 16 bytes starts at a multiple of them.
    """

    matrices: tuple[torch.Tensor, ...]
    wide: bool
    addresses: torch.Tensor
    rows: torch.Tensor
    ranks: torch.Tensor
    max_rows: int
    padded_rank: int
    aligned: bool

    @classmethod
    def of(cls, matrices: Sequence[torch.Tensor], *, wide: bool) -> TallBatch:
        """From contiguous matrices; keeps them alive."""
        assert matrices, "an empty batch has no shape"
        device, dtype = matrices[0].device, matrices[0].dtype
        for matrix in matrices:
            assert matrix.dim() == 2 and matrix.is_contiguous(), "factors must be contiguous matrices"
            assert matrix.dtype == dtype and matrix.device == device, "one batch has one dtype and one device"
        ranks, rows = zip(*(matrix.shape if wide else matrix.shape[::-1] for matrix in matrices), strict=True)
        addresses = [matrix.data_ptr() for matrix in matrices]
        return cls(
            matrices=tuple(matrices),
            wide=wide,
            addresses=torch.tensor(addresses, dtype=torch.int64).to(device),
            rows=torch.tensor(rows, dtype=torch.int32).to(device),
            ranks=torch.tensor(ranks, dtype=torch.int32).to(device),
            max_rows=max(rows),
            padded_rank=pad_rank(max(ranks)),
            aligned=all(number % 16 == 0 for number in (*addresses, *(rows if wide else ranks))),
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.matrices[0].dtype

    @property
    def device(self) -> torch.device:
        return self.matrices[0].device

    def __len__(self) -> int:
        return len(self.matrices)


def pad_rank(rank: int) -> int:
    """The size of the tile that holds this rank."""
    assert rank > 0, "a matrix without columns has no factors"
    return max(SMALLEST_TILE, 1 << (rank - 1).bit_length())


def check_apply(
    batch: TallBatch, coefficients: torch.Tensor, kept: Sequence[int], out: Sequence[torch.Tensor]
) -> None:
    """Asserts what `apply` asks of its operands."""
    size = batch.padded_rank
    assert tuple(coefficients.shape) == (len(batch), size, size), f"coefficients must be {(len(batch), size, size)}"
    assert coefficients.dtype == torch.float32 and coefficients.is_contiguous(), "coefficients: contiguous float32"
    assert len(kept) == len(out) == len(batch), "one rank and one result per matrix"
    assert all(0 < k <= size for k in kept), f"kept ranks must be in 1..{size}"
    for matrix, target, k in zip(batch.matrices, out, kept, strict=True):
        shape = (k, matrix.shape[1]) if batch.wide else (matrix.shape[0], k)
        assert tuple(target.shape) == shape and target.is_contiguous(), f"out must be contiguous {shape}"
        assert target.dtype == out[0].dtype, "all results have one dtype"
