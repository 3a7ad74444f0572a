"""JD-Full: exact where shared bases suffice, within its budget, and never better than its own number of directions allows."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from sglang_lora_tree.adapters.adapter import Adapter, AdapterModule
from sglang_lora_tree.fleet.factorisation import relative_error
from sglang_lora_tree.fleet.jd_full import jd_full, share_bases, shared_rank


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapters(count: int, rank: int, d_in: int = 30, d_out: int = 20) -> list[Adapter]:
    return [
        Adapter(
            f"a{i}",
            "",
            {(0, "q_proj"): AdapterModule(random(rank, d_in, seed=i), random(d_out, rank, seed=100 + i), 0.5 + i)},
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("count, d_in, d_out, budget", [(12, 2560, 4096, 12 * 5 * 6656), (3, 8, 6, 20), (50, 30, 40, 700)])
def test_shared_rank_is_the_largest_within_the_budget(count, d_in, d_out, budget):
    rank = shared_rank(count, d_in, d_out, budget)

    def parameters(size: int) -> int:
        return size * (d_in + d_out) + count * size * size

    assert parameters(rank) <= budget or rank == 1
    assert parameters(rank + 1) > budget or rank == min(d_in, d_out)


def test_exact_when_the_adapters_share_their_spaces():
    u, v = random(20, 4, seed=1), random(30, 4, seed=2)
    modules = [AdapterModule(random(4, 4, seed=i) @ v.T, u, 1.0 + i) for i in range(5)]
    basis, cores, other = share_bases(modules, 4)
    for module, core in zip(modules, cores, strict=True):
        exact = module.scaling * module.b.double() @ module.a.double()
        torch.testing.assert_close(basis @ core @ other.T, exact, rtol=1e-6, atol=1e-5)


def test_error_falls_with_the_budget():
    fleet = adapters(4, rank=6)
    errors = [
        sum(relative_error(*pair) for pair in zip(fleet, jd_full(fleet, Fraction(k, 6)), strict=True)) for k in (1, 3, 6)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] < 4, "shared bases that keep nothing"


def test_more_directions_than_there_are():
    fleet = adapters(2, rank=1)
    basis, _, other = share_bases([adapter.modules[0, "q_proj"] for adapter in fleet], 5)
    for matrix in (basis, other):
        torch.testing.assert_close(matrix.T @ matrix, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-10)
