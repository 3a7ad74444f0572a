"""One-sided Jacobi: singular value decompositions of very many small matrices at once, one program each.

Hestenes' method: rotate pairs of columns until all are orthogonal; then the columns are U sigma and the accumulated
rotations are V. A round of the tournament rotates size / 2 disjoint pairs in parallel. It is accurate for small matrices
of any condition (an error of float32's rounding times the largest singular value), and unlike a tridiagonal solver has no
sequential part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST_SIZE = 128
MAX_SWEEPS = 16
"""Convergence is quadratic after some 5 sweeps; 6 to 10 are usual."""
TOLERANCE = 1e-6
"""Cosine between two columns that count as orthogonal: float32's rounding in a sum of 128 products."""
NEGLIGIBLE = 1e-24
"""Squared length of a column, next to a matrix of norm 1, that is rounding alone."""


@triton.jit
def _jacobi_kernel(  # type: ignore[no-untyped-def]
    work, sweeps, tolerance, NEGLIGIBLE: tl.constexpr, MAX_SWEEPS: tl.constexpr, SIZE: tl.constexpr
):
    """One program: one matrix. Row i of work (M, SIZE, 2, SIZE) holds column i of the matrix and column i of V."""
    PAIRS: tl.constexpr = SIZE // 2
    matrix = tl.program_id(0)
    base = work + matrix.to(tl.int64) * (SIZE * 2 * SIZE)
    pair = tl.arange(0, PAIRS)
    column = tl.arange(0, SIZE)
    sweep = 0
    worst = 1.0
    while (sweep < MAX_SWEEPS) & (worst > tolerance):
        largest = tl.zeros((PAIRS,), dtype=tl.float32)
        for turn in range(SIZE - 1):
            # Round-robin: the last column stays, the others turn; every two meet once per sweep.
            first = tl.where(pair == 0, SIZE - 1, (turn + pair) % (SIZE - 1))
            second = tl.where(pair == 0, turn, (turn - pair + SIZE - 1) % (SIZE - 1))
            low = tl.minimum(first, second)
            high = tl.maximum(first, second)
            p = base + low[:, None] * (2 * SIZE) + column[None, :]
            q = base + high[:, None] * (2 * SIZE) + column[None, :]
            xp = tl.load(p)
            xq = tl.load(q)
            vp = tl.load(p + SIZE)
            vq = tl.load(q + SIZE)
            alpha = tl.sum(xp * xp, axis=1)
            beta = tl.sum(xq * xq, axis=1)
            gamma = tl.sum(xp * xq, axis=1)
            # Scaled so that no product of small columns underflows.
            scale = tl.sqrt(alpha) * tl.sqrt(beta)
            live = (alpha > NEGLIGIBLE) & (beta > NEGLIGIBLE)
            cosine = tl.where(live, tl.abs(gamma) / tl.where(live, scale, 1.0), 0.0)
            largest = tl.maximum(largest, cosine)
            turns = cosine > tolerance * 0.5
            zeta = (beta - alpha) / (2.0 * tl.where(turns, gamma, 1.0))
            # Beyond 1e9 the tangent is 1 / (2 zeta), and zeta's square would overflow.
            wide = tl.abs(zeta) > 1e9
            root = tl.sqrt(1.0 + tl.where(wide, 0.0, zeta * zeta))
            tangent = tl.where(wide, 0.5 / tl.where(wide, zeta, 1.0), tl.where(zeta < 0, -1.0, 1.0) / (tl.abs(zeta) + root))
            tangent = tl.where(turns, tangent, 0.0)
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
            tl.store(p + SIZE, pc * vp + ps * vq)
            tl.store(q + SIZE, qc * vp + qs * vq)
            tl.debug_barrier()  # the next round pairs other columns
        worst = tl.max(largest, axis=0)
        sweep += 1
    tl.store(sweeps + matrix, tl.where(worst > tolerance, MAX_SWEEPS + 1, sweep))


def svd(matrices: torch.Tensor, *, num_warps: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Singular value decomposition C = U diag(sigma) V^T, accurate to float32's rounding of the largest singular value.

    Parameters
    ----------
    matrices : Tensor
        C, (M, n, n), n a power of two from 2 to 128, any float dtype; every entry finite.

    Returns
    -------
    tuple of Tensor
        U float32 (M, n, n), sigma float32 (M, n) descending, V float32 (M, n, n). Columns of U whose singular value is
        below rounding are zero.

    Matrices that do not converge in MAX_SWEEPS (on an H200 rounding has kept nearly all of one fleet just above TOLERANCE) are
    left to torch.linalg, which is right, and slower.
    """
    size = matrices.shape[-1]
    assert 2 <= size <= LARGEST_SIZE and size & (size - 1) == 0, f"size {size} is no power of two up to {LARGEST_SIZE}"
    norms = torch.linalg.matrix_norm(matrices)
    scaled = matrices / norms.clamp_min(torch.finfo(matrices.dtype).tiny)[:, None, None]
    work = torch.empty(len(matrices), size, 2, size, dtype=torch.float32, device=matrices.device)
    work[:, :, 0] = scaled.mT
    work[:, :, 1] = torch.eye(size, device=matrices.device)
    sweeps = torch.empty(len(matrices), dtype=torch.int32, device=matrices.device)
    _jacobi_kernel[(len(matrices),)](
        work, sweeps, TOLERANCE, NEGLIGIBLE=NEGLIGIBLE, MAX_SWEEPS=MAX_SWEEPS, SIZE=size,
        num_warps=num_warps or (8 if size > 64 else 4),
    )  # fmt: skip
    columns, v = work[:, :, 0], work[:, :, 1]
    lengths = torch.linalg.vector_norm(columns, dim=-1)
    lengths = torch.where(lengths * lengths > NEGLIGIBLE, lengths, 0)
    order = lengths.argsort(dim=-1, descending=True, stable=True)
    lengths = lengths.gather(1, order)
    pick = order[:, :, None].expand_as(columns)
    u = columns.gather(1, pick) * torch.where(lengths > 0, 1 / lengths, 0)[:, :, None]
    v = v.gather(1, pick)
    failed = sweeps > MAX_SWEEPS
    if failed.any():
        left, exact, right = torch.linalg.svd(scaled[failed].double())
        exact = torch.where(exact * exact > NEGLIGIBLE, exact, 0)
        u[failed] = torch.where(exact > 0, 1.0, 0.0)[:, :, None].float() * left.mT.float()
        lengths[failed], v[failed] = exact.float(), right.float()
    return u.mT, lengths * norms[:, None].float(), v.mT
