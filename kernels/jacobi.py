"""One-sided Jacobi: singular value decompositions of very many small matrices at once, one program each.

Hestenes' method: rotate pairs of columns until all are orthogonal; then they are U sigma. A round of the tournament rotates
size / 2 disjoint pairs in parallel, so unlike a tridiagonal solver nothing is sequential in the size.

How fast it converges depends on how ill-conditioned the columns are once they have length 1. Applied to a matrix as it is, a
spectrum over seven decades leaves it unfinished after 24 sweeps. Applied to the columns of L, with rows sorted by length
and H^T = Q L^T, all kinds of spectra take 5 to 12 sweeps and repeated singular values up to 16 (Drmac and Veselic, "New fast
and accurate Jacobi SVD algorithm I", 2008, pivot the columns; sorting does here). L has H's U and sigma; V = H^T U / sigma.
That divides by sigma, which float64 affords, and so V need not be carried through the rotations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels.tall_batch import LARGEST_RANK

MAX_SWEEPS = 30
SETTLED = 1e-9
"""Cosine of two columns. After a sweep that met none above it all are far below: convergence is quadratic."""
ORTHOGONAL = 1e-14
"""Cosine that is float64's rounding in a sum of 128 products: not worth a rotation."""
NEGLIGIBLE = 1e-18
"""Squared length of a column, next to a matrix of norm 1, that counts as 0: its singular value is below 1e-9 of the norm."""


@triton.jit
def _jacobi_kernel(  # type: ignore[no-untyped-def]
    work, sweeps, max_sweeps, SETTLED: tl.constexpr, ORTHOGONAL: tl.constexpr, NEGLIGIBLE: tl.constexpr, SIZE: tl.constexpr
):
    """One program: one matrix. Row i of work (M, SIZE, SIZE) float64 holds its column i. sweeps: -1 if not settled."""
    PAIRS: tl.constexpr = SIZE // 2
    matrix = tl.program_id(0)
    base = work + matrix.to(tl.int64) * (SIZE * SIZE)
    pair = tl.arange(0, PAIRS)
    row = tl.arange(0, SIZE)
    zero = tl.zeros((PAIRS,), dtype=tl.float64)
    one = zero + 1.0
    sweep = 0
    settled = False
    while (sweep < max_sweeps) & (not settled):
        largest = zero
        for turn in range(SIZE - 1):
            # Round-robin: the last column stays, the others turn; every two meet once per sweep.
            first = tl.where(pair == 0, SIZE - 1, (turn + pair) % (SIZE - 1))
            second = tl.where(pair == 0, turn, (turn - pair + SIZE - 1) % (SIZE - 1))
            p = base + tl.minimum(first, second)[:, None] * SIZE + row[None, :]
            q = base + tl.maximum(first, second)[:, None] * SIZE + row[None, :]
            xp = tl.load(p)
            xq = tl.load(q)
            alpha = tl.sum(xp * xp, axis=1)
            beta = tl.sum(xq * xq, axis=1)
            gamma = tl.sum(xp * xq, axis=1)
            live = (alpha > NEGLIGIBLE) & (beta > NEGLIGIBLE)
            cosine = tl.where(live, tl.abs(gamma) / tl.where(live, tl.sqrt(alpha * beta), one), zero)
            largest = tl.maximum(largest, cosine)
            turns = cosine > ORTHOGONAL
            zeta = (beta - alpha) / (2.0 * tl.where(turns, gamma, one))
            tangent = tl.where(zeta < 0, -one, one) / (tl.abs(zeta) + tl.sqrt(1.0 + zeta * zeta))
            tangent = tl.where(turns, tangent, zero)
            c = 1.0 / tl.sqrt(1.0 + tangent * tangent)
            s = c * tangent
            # The longer column goes to the lower place: sorted columns converge faster.
            swap = beta > alpha
            pc = tl.where(swap, s, c)[:, None]
            ps = tl.where(swap, c, -s)[:, None]
            qc = tl.where(swap, -c, s)[:, None]
            qs = tl.where(swap, s, c)[:, None]
            tl.debug_barrier()  # all have read before any writes: a column's row is shared by several threads
            tl.store(p, pc * xp + ps * xq)
            tl.store(q, qc * xp + qs * xq)
            tl.debug_barrier()  # the next round pairs other columns
        settled = tl.max(largest, axis=0) <= SETTLED
        sweep += 1
    tl.store(sweeps + matrix, tl.where(settled, sweep, -1))


def svd(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Singular value decomposition H = U diag(sigma) V^T in float64.

    Parameters
    ----------
    matrices : Tensor
        H, (M, n, n), n a power of two from 2 to 128, any float dtype; every entry finite.

    Returns
    -------
    tuple of Tensor
        U (M, n, n), sigma (M, n) descending, V (M, n, n), float64. Singular values below 1e-9 of the matrix' norm are 0, and
        their columns of U and V too.

    A matrix that has not settled after MAX_SWEEPS (none known) is left to torch.linalg, which is right, and slower.
    """
    size = matrices.shape[-1]
    assert 2 <= size <= LARGEST_RANK and size & (size - 1) == 0, f"size {size} is no power of two up to {LARGEST_RANK}"
    norms = torch.linalg.matrix_norm(matrices.double())
    scaled = matrices.double() / norms.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
    columns, sweeps = orthogonal_columns(scaled)
    failed = sweeps < 0
    lengths = torch.linalg.vector_norm(columns, dim=-1)
    sigma, order = torch.where(lengths * lengths > NEGLIGIBLE, lengths, 0).sort(dim=-1, descending=True, stable=True)
    inverse = torch.where(sigma > 0, 1 / sigma, 0)[:, None, :]
    u = columns.gather(1, order[:, :, None].expand_as(columns)).mT * inverse
    v = (scaled.mT @ u) * inverse
    if failed.any():
        left, exact, right = torch.linalg.svd(scaled[failed])
        exact = torch.where(exact * exact > NEGLIGIBLE, exact, 0)
        alive = torch.where(exact > 0, 1.0, 0.0)[:, None, :]
        u[failed], sigma[failed], v[failed] = left * alive, exact, right.mT * alive
    return u, sigma * norms[:, None], v


def orthogonal_columns(matrices: torch.Tensor, num_warps: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """U sigma, unsorted, of float64 matrices (M, n, n) of norm 1; and the sweeps that each took, int32 (M,), -1: unsettled.

    Column i is row i of the result (M, n, n). num_warps: benchmarks/fleet.py tries others.
    """
    size = matrices.shape[-1]
    order = torch.linalg.vector_norm(matrices, dim=-1).argsort(dim=-1, descending=True)[:, :, None].expand_as(matrices)
    # Row i of the triangle is column i of L.
    work = torch.linalg.qr(matrices.gather(1, order).mT, mode="r")[1].contiguous()
    sweeps = torch.empty(len(matrices), dtype=torch.int32, device=matrices.device)
    _jacobi_kernel[(len(matrices),)](
        work, sweeps, MAX_SWEEPS, SETTLED=SETTLED, ORTHOGONAL=ORTHOGONAL, NEGLIGIBLE=NEGLIGIBLE, SIZE=size,
        num_warps=num_warps or max(1, size * size // 1024),
    )  # fmt: skip
    # L belongs to the sorted rows: entry order[i] of a column is what was computed as entry i.
    return torch.empty_like(work).scatter_(2, order.mT, work), sweeps
