"""Other ways to factorise many modules, for benchmarks/fleet.py: torch.linalg in float32, and FraQ's one-sided form.

Each yields (B', A') with B' A' = B A, of a module or of a stack of modules, as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from sglang_lora_tree.kernels import jacobi

Pair = tuple[torch.Tensor, torch.Tensor]
"""A (rank, d_in), B (d_out, rank)."""

Baseline = Callable[[Sequence[Pair]], Iterator[Pair]]


def linalg_each(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """QR of both factors and SVD of the core, module by module."""
    for a, b in pairs:
        q_b, r_b = torch.linalg.qr(b.float())
        q_a, r_a = torch.linalg.qr(a.T.float())
        u, sigma, vt = torch.linalg.svd(r_b @ r_a.T)
        root = sigma.sqrt()
        yield q_b @ (u * root), (root[:, None] * vt) @ q_a.T


def linalg_padded(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """The same on stacks padded to the largest shape; the core by eigh, which is batched."""
    rank = pairs[0][0].shape[0]
    stacks = []
    for matrices in ([a.T for a, _ in pairs], [b for _, b in pairs]):
        stack = torch.zeros(len(pairs), max(map(len, matrices)), rank, device=matrices[0].device)
        for index, matrix in enumerate(matrices):
            stack[index, : len(matrix)] = matrix
        stacks.append(torch.linalg.qr(stack))
    (q_a, r_a), (q_b, r_b) = stacks
    core = r_b @ r_a.mT
    square, u = torch.linalg.eigh(core @ core.mT)
    root = square.clamp_min(1e-30).pow(0.25)
    yield q_b @ (u * root[:, None, :]), ((u.mT @ core) / root[:, :, None]) @ q_a.mT


def fraq(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """One-sided: QR of the smaller factor, eigenvalues of H H^T, H = R Y; batched over modules of equal shape."""
    return _one_sided(pairs, torch.linalg.eigh)


def fraq_jacobi(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """The same with our kernel in place of torch.linalg.eigh: what is left of the difference is FlashTSQR's."""

    def eigh(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u, square, _ = jacobi.svd(matrices)
        return square.float(), u.float()

    return _one_sided(pairs, eigh)


def _one_sided(
    pairs: Sequence[Pair], eigh: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[Pair]:
    for a, b in _equal_shapes(pairs):
        b_is_smaller = b.shape[1] <= a.shape[2]
        x, y = (b, a) if b_is_smaller else (a.mT, b.mT)
        q, r = torch.linalg.qr(x)
        h = r @ y
        square, u = eigh(h @ h.mT)
        root = square.clamp_min(1e-30).pow(0.25)
        left, right = q @ (u * root[:, None, :]), (u.mT / root[:, :, None]) @ h
        yield (left, right) if b_is_smaller else (right.mT, left.mT)


def _equal_shapes(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Float32 stacks of A and of B, one pair of stacks per shape."""
    groups: dict[tuple[int, int], list[Pair]] = {}
    for a, b in pairs:
        groups.setdefault((a.shape[1], b.shape[0]), []).append((a, b))
    for group in groups.values():
        yield torch.stack([a for a, _ in group]).float(), torch.stack([b for _, b in group]).float()


BASELINES: dict[str, Baseline] = {
    "fraq_jacobi": fraq_jacobi, "fraq": fraq, "linalg_each": linalg_each, "linalg_padded": linalg_padded,
}  # fmt: skip
OURS = ("fraq_jacobi",)
"""Not what others have: no part in the best baseline."""
