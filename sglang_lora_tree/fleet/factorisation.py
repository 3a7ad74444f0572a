"""Balanced factors of B A, module by module but all at once: the first k directions are its truncated SVD.

With thin QRs B = Q_B R_B and A^T = Q_A R_A, the core R_B R_A^T = U diag(sigma) V^T is small and has B A's singular values,
and  B A = (Q_B U sigma^1/2) (sigma^1/2 V^T Q_A^T).  Because Q_B R_B = B and Q_A R_A = A^T, these two are

    B' = B C_B,  C_B = R_A^T V sigma^-1/2        A'^T = A^T C_A,  C_A = R_B^T U sigma^-1/2

so no Q is formed, no R is inverted, and nothing suffers from ill-conditioned factors: an error is one of rounding, next to
|A| |B|. (LoRAForge, arXiv 2611.01256, section 4, has Y = A and H = R_B Y, the eigenvalues of H H^T and the balanced factors
F = B', T = A'; both sides are reduced to triangles here, so that H is as small as R.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_lora_tree.adapters.adapter import Adapter, AdapterModule
from sglang_lora_tree.kernels import tsqr_reference
from sglang_lora_tree.kernels.lora import uses_triton
from sglang_lora_tree.kernels.tall_batch import LARGEST_RANK, TallBatch, pad_rank

NEGLIGIBLE = 1e-7
"""A singular value below this share of the largest is rounding; it counts as 0. (Its energy would be 1e-14.)"""

Place = tuple[int, str]
"""(layer, module)."""
Decomposition = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(M, n, n) -> U, sigma (descending), V."""


@dataclass(frozen=True, eq=False)
class Factors:
    """What is needed to truncate one module at any rank; small: independent of d_in and d_out.

    sigma: float64 (r,), singular values of s B A, descending (the paper's sigma_m,j).
    of_a, of_b: float32 (r, r), C_A and C_B above with s inside: A'^T = A^T of_a[:, :k], B' = B of_b[:, :k].
    """

    sigma: torch.Tensor
    of_a: torch.Tensor
    of_b: torch.Tensor


def factorise(adapter: Adapter, device: torch.device | str = "cpu") -> dict[Place, Factors]:
    """Factors of every module of an adapter, on the CPU.

    device: where to compute; a GPU takes the Triton kernels. Raises ValueError for a module with NaN or infinity.
    """
    places = list(adapter.modules)
    modules = [adapter.modules[place] for place in places]
    pairs = [(module.a, module.b) for module in modules]
    try:
        found = factorise_pairs(pairs, [module.scaling for module in modules], device)
    except NotFiniteError as error:
        layer, module = places[error.index]
        raise ValueError(f"{adapter.name}: layer {layer} {module}: {error}") from None
    return dict(zip(places, found, strict=True))


class NotFiniteError(ValueError):
    """A factor holds NaN or infinity. index: of the pair."""

    def __init__(self, index: int) -> None:
        super().__init__("A or B holds NaN or infinity; there is nothing to approximate")
        self.index = index


def factorise_pairs(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scalings: Sequence[float] | None = None,
    device: torch.device | str = "cpu",
) -> list[Factors]:
    """Factors of s_m B_m A_m, for A_m (r_m, d_in) and B_m (d_out, r_m) of any shapes in float32, float16 or bfloat16.

    Batches are of equal dtype and padded rank; shapes mix. Raises NotFiniteError.
    """
    device = torch.device(device)
    scalings = [1.0] * len(pairs) if scalings is None else scalings
    found: dict[int, Factors] = {}
    for indices in _batches(pairs):
        a_batch = TallBatch.of([pairs[index][0].contiguous().to(device) for index in indices], wide=True)
        b_batch = TallBatch.of([pairs[index][1].contiguous().to(device) for index in indices], wide=False)
        sigma, of_a, of_b = (part.cpu() for part in core_factors(gram(a_batch), gram(b_batch), indices))
        for row, index in enumerate(indices):
            rank, scaling = pairs[index][0].shape[0], scalings[index]
            root = abs(scaling) ** 0.5
            found[index] = Factors(
                sigma=sigma[row, :rank] * abs(scaling),
                of_a=of_a[row, :rank, :rank] * root,
                of_b=of_b[row, :rank, :rank] * (root if scaling >= 0 else -root),
            )
    return [found[index] for index in range(len(pairs))]


def truncate(
    adapter: Adapter,
    factors: Mapping[Place, Factors],
    ranks: Mapping[Place, int],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Adapter:
    """The adapter with ranks[place] directions per module and scaling 1; its digest is empty.

    dtype: of the result, None for that of each module's B.
    """
    device = torch.device(device)
    places = list(adapter.modules)
    pairs = [(adapter.modules[place].a, adapter.modules[place].b) for place in places]
    modules: dict[Place, AdapterModule] = {}
    for indices in _batches(pairs):
        kept = [ranks[places[index]] for index in indices]
        target = dtype or pairs[indices[0]][1].dtype
        halves = []
        for side, wide in ((0, True), (1, False)):
            batch = TallBatch.of([pairs[index][side].contiguous().to(device) for index in indices], wide=wide)
            small = torch.zeros(len(indices), batch.padded_rank, batch.padded_rank)
            for row, index in enumerate(indices):
                found = factors[places[index]]
                matrix = found.of_b if side else found.of_a
                small[row, : len(matrix), : len(matrix)] = matrix
            heights = [pairs[index][side].shape[1 if wide else 0] for index in indices]
            shapes = [(k, height) if wide else (height, k) for k, height in zip(kept, heights, strict=True)]
            out = [torch.empty(shape, dtype=target, device=device) for shape in shapes]
            apply(batch, small.to(device), kept, out)
            halves.append([result.cpu() for result in out])
        for row, index in enumerate(indices):
            modules[places[index]] = AdapterModule(halves[0][row], halves[1][row], 1.0)
    return Adapter(adapter.name, "", {place: modules[place] for place in places})


def relative_error(original: Adapter, other: Adapter, device: torch.device | str = "cpu") -> float:
    """|dW - dW'| / |dW| (Frobenius) over all modules of two adapters with the same modules; 0 if dW is 0.

    dW - dW' is a product of factors set side by side, and its norm is the trace of two small matrices: nothing of the size
    of a weight matrix is formed. In float64, so errors below 1e-8 are rounding.
    """
    device = torch.device(device)
    places = list(original.modules)
    differences = []
    for place in places:
        first, second = original.modules[place], other.modules[place]
        pair = torch.cat([first.a.float(), second.a.float()]), torch.cat([first.b.float(), second.b.float()], dim=1)
        differences.append((pair, (first.scaling, -second.scaling), first.rank))
    total = lost = 0.0
    for indices in _batches([pair for pair, _, _ in differences]):
        a_gram = gram(TallBatch.of([differences[index][0][0].to(device) for index in indices], wide=True)).cpu()
        b_gram = gram(TallBatch.of([differences[index][0][1].to(device) for index in indices], wide=False)).cpu()
        for row, index in enumerate(indices):
            (a, _), scales, rank = differences[index]
            signs = torch.cat([torch.full((rank,), scales[0]), torch.full((len(a) - rank,), scales[1])]).double()
            size = len(a)
            product = a_gram[row, :size, :size] * (signs[:, None] * b_gram[row, :size, :size] * signs)
            lost += float(product.sum())
            total += float(product[:rank, :rank].sum())
    return (max(lost, 0.0) / total) ** 0.5 if total > 0 else 0.0


def gram(batch: TallBatch) -> torch.Tensor:
    """X^T X of every matrix, float64; by Triton on a GPU up to rank 128. See tsqr_reference.gram."""
    if _by_triton(batch.device, batch.padded_rank):
        from sglang_lora_tree.kernels import tsqr

        return tsqr.gram(batch)
    return tsqr_reference.gram(batch)


def apply(batch: TallBatch, coefficients: torch.Tensor, kept: Sequence[int], out: Sequence[torch.Tensor]) -> None:
    """Writes X C[:, :kept] of every matrix; by Triton on a GPU up to rank 128. See tsqr_reference.apply."""
    if _by_triton(batch.device, batch.padded_rank):
        from sglang_lora_tree.kernels import tsqr

        tsqr.apply(batch, coefficients, kept, out)
    else:
        tsqr_reference.apply(batch, coefficients, kept, out)


def core_factors(
    gram_a: torch.Tensor, gram_b: torch.Tensor, indices: Sequence[int] | None = None, svd: Decomposition | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From A A^T and B^T B, float64 (M, R, R), to sigma float64 (M, R), C_A and C_B float32 (M, R, R).

    indices: of the matrices among all, for NotFiniteError. svd: of the cores, None for core_svd.
    """
    finite = gram_a.isfinite().flatten(1).all(1) & gram_b.isfinite().flatten(1).all(1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise NotFiniteError(row if indices is None else indices[row])
    r_a, r_b = triangular_factors(gram_a), triangular_factors(gram_b)
    u, sigma, v = (svd or core_svd)(r_b @ r_a.mT)
    sigma = sigma.double()
    sigma = torch.where(sigma > NEGLIGIBLE * sigma[:, :1], sigma, 0)
    weights = torch.where(sigma > 0, sigma.rsqrt(), 0)[:, None, :]
    of_a = (r_b.mT @ u.double()) * weights
    of_b = (r_a.mT @ v.double()) * weights
    return sigma, of_a.float().contiguous(), of_b.float().contiguous()


def triangular_factors(gram_matrices: torch.Tensor) -> torch.Tensor:
    """R, upper triangular, with R^T R = X^T X up to rounding: float64 (M, R, R) to the same.

    Columns are brought to length 1 first, so scales do not matter, and a shift of rounding's size keeps singular X in:
    it changes R by at most its square root, 1e-7, and by far less unless X is singular itself.
    """
    size = gram_matrices.shape[-1]
    lengths = gram_matrices.diagonal(dim1=1, dim2=2).sqrt()
    safe = torch.where(lengths > 0, lengths, 1)
    unit = gram_matrices / safe[:, :, None] / safe[:, None, :]
    shift = torch.full((len(unit), 1, 1), size * torch.finfo(torch.float64).eps, dtype=unit.dtype, device=unit.device)
    identity = torch.eye(size, dtype=unit.dtype, device=unit.device)
    while True:
        lower, failed = torch.linalg.cholesky_ex(unit + shift * identity)
        if not bool(failed.any()):
            return lower.mT * lengths[:, None, :]
        shift = torch.where(failed[:, None, None] > 0, shift * 16, shift)


def core_svd(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U, sigma, V of small matrices (M, n, n): LAPACK on a CPU, Jacobi in Triton on a GPU."""
    if _by_triton(matrices.device, matrices.shape[-1]):
        from sglang_lora_tree.kernels import jacobi

        return jacobi.svd(matrices)
    return tsqr_reference.svd(matrices)


def _by_triton(device: torch.device, rank: int) -> bool:
    """Larger ranks take the plain-torch path, on whatever device."""
    return uses_triton(device) and rank <= LARGEST_RANK


def _batches(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterable[list[int]]:
    """Indices of pairs that can go together: equal dtypes, equal padded rank."""
    groups: dict[tuple[torch.dtype, torch.dtype, int], list[int]] = {}
    for index, (a, b) in enumerate(pairs):
        assert a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1], f"A {tuple(a.shape)} and B {tuple(b.shape)} do not fit"
        groups.setdefault((a.dtype, b.dtype, pad_rank(a.shape[0])), []).append(index)
    return groups.values()
