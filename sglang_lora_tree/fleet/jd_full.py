"""JD-Full: all adapters of a module share the bases U and V, each keeps a small core (to compare with, not to serve).

    s_i B_i A_i = U S_i V^T,   U (d_out, R), V (d_in, R) orthonormal, S_i = U^T (s_i B_i A_i) V  (R, R)

minimising the summed squared error of the products, each scaled to norm 1 first so that no adapter is drowned: U spans the
leading left singular vectors of all s_i B_i A_i V side by side, V likewise, in turns. (Gabrielsson et al., "Compress then
Serve", arXiv 2407.00066, section 3.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from sglang_lora_tree.adapters.adapter import Adapter, AdapterModule
from sglang_lora_tree.fleet.factorisation import Place

ITERATIONS = 10
"""As in the paper; the error hardly falls after the first few."""


def shared_rank(num_adapters: int, d_in: int, d_out: int, budget: int) -> int:
    """The largest R with R (d_in + d_out) + num_adapters R^2 <= budget parameters; at least 1."""
    width = d_in + d_out
    rank = (math.isqrt(width * width + 4 * num_adapters * budget) - width) // (2 * num_adapters)
    return max(1, min(rank, d_in, d_out))


def jd_full(
    adapters: Sequence[Adapter], fraction: Fraction, iterations: int = ITERATIONS, device: torch.device | str = "cpu"
) -> list[Adapter]:
    """Every adapter as U S_i V^T, in the parameters that LoRAForge-U would use at this fraction; computed on `device`.

    The results have A = S_i V^T (R, d_in), B = U (d_out, R) and scaling 1, so they can be scored as PEFT adapters; only
    the count of shared parameters differs. All adapters must adapt the same modules. Holds all of them in memory.
    """
    assert adapters, "no adapter"
    places = list(adapters[0].modules)
    assert all(list(adapter.modules) == places for adapter in adapters), "JD-Full wants the same modules in all adapters"
    results: list[dict[Place, AdapterModule]] = [{} for _ in adapters]
    for place in places:
        modules = [_moved(adapter.modules[place], device) for adapter in adapters]
        d_in, d_out = modules[0].a.shape[1], modules[0].b.shape[0]
        budget = sum(max(1, math.floor(module.rank * fraction)) for module in modules) * (d_in + d_out)
        u, cores, v = share_bases(modules, shared_rank(len(modules), d_in, d_out, budget), iterations)
        for result, core in zip(results, cores, strict=True):
            result[place] = AdapterModule((core @ v.T).float().contiguous().cpu(), u.float().contiguous().cpu(), 1.0)
    return [Adapter(adapter.name, "", result) for adapter, result in zip(adapters, results, strict=True)]


def share_bases(
    modules: Sequence[AdapterModule], rank: int, iterations: int = ITERATIONS
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """U (d_out, R), S_i (R, R) and V (d_in, R), float64, for the same module of several adapters."""
    a = [module.a.double() for module in modules]
    b = [module.b.double() * module.scaling for module in modules]
    norms = [float(((x.T @ x) * (y @ y.T)).sum().clamp_min(0).sqrt()) for x, y in zip(b, a, strict=True)]
    scaled = [x / norm if norm > 0 else x for x, norm in zip(b, norms, strict=True)]
    v = _leading(torch.cat([y.T @ _root(x) for x, y in zip(scaled, a, strict=True)], dim=1), rank)
    for _ in range(iterations):
        u = _leading(torch.cat([x @ (y @ v) for x, y in zip(scaled, a, strict=True)], dim=1), rank)
        v = _leading(torch.cat([y.T @ (x.T @ u) for x, y in zip(scaled, a, strict=True)], dim=1), rank)
    return u, [(u.T @ x) @ (y @ v) for x, y in zip(b, a, strict=True)], v


def _root(b: torch.Tensor) -> torch.Tensor:
    """W with W W^T = B^T B, so that A^T W has the right singular vectors of B A."""
    return torch.linalg.qr(b)[1].T


def _moved(module: AdapterModule, device: torch.device | str) -> AdapterModule:
    return AdapterModule(module.a.to(device), module.b.to(device), module.scaling)


def _leading(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal columns that span the leading left singular vectors, `rank` of them."""
    rows, columns = matrix.shape
    if columns >= rows:  # most fleets side by side are; far quicker than an SVD
        return torch.linalg.eigh(matrix @ matrix.T)[1].flip(1)[:, :rank]
    u = torch.linalg.svd(matrix, full_matrices=False)[0][:, :rank]
    if u.shape[1] == rank:
        return u
    # Fewer directions than asked for (few adapters of small rank): any orthonormal complement.
    return torch.linalg.qr(torch.cat([u, torch.eye(rows, rank, dtype=u.dtype, device=u.device)], dim=1))[0][:, :rank]
