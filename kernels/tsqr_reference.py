"""FlashTSQR and the batched SVD in plain torch: the oracle of the kernels, and the CPU path, at any rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_lora_tree.kernels.tall_batch import TallBatch, check_apply


def gram(batch: TallBatch) -> torch.Tensor:
    """X^T X of every matrix.

    Returns
    -------
    Tensor
        float64 (M, R, R), R = batch.padded_rank; rows and columns past a matrix's rank are zero.
    """
    size = batch.padded_rank
    out = torch.zeros(len(batch), size, size, dtype=torch.float64, device=batch.device)
    for index, matrix in enumerate(batch.matrices):
        exact = matrix.double()
        product = exact @ exact.T if batch.wide else exact.T @ exact
        out[index, : len(product), : len(product)] = product
    return out


def apply(
    batch: TallBatch, coefficients: torch.Tensor, kept: Sequence[int], out: Sequence[torch.Tensor]
) -> None:
    """Write X_m C_m[:, :kept_m] of every matrix, computed in float32 (Q applied to a small matrix without forming Q).

    Parameters
    ----------
    batch : TallBatch
        X.
    coefficients : Tensor
        C, contiguous float32 (M, R, R), R = batch.padded_rank.
    kept : sequence of int
        How many columns of C to use, 1 to R.
    out : sequence of Tensor
        One per matrix, all of one dtype, stored as X is: (kept, rows) if batch.wide, else (rows, kept).
    """
    check_apply(batch, coefficients, kept, out)
    for matrix, small, k, target in zip(batch.matrices, coefficients, kept, out, strict=True):
        x = (matrix if not batch.wide else matrix.T).float()
        product = x @ small[: x.shape[1], :k]
        target.copy_(product.T if batch.wide else product)


def svd(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """C = U diag(sigma) V^T of every matrix (M, n, n); returns U, sigma (descending) and V in C's dtype."""
    u, sigma, vt = torch.linalg.svd(matrices)
    return u, sigma, vt.mT
