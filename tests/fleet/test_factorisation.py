"""The first k directions reconstruct the rank-k truncated SVD, whatever the factors are like."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_lora_tree.adapters.adapter import Adapter, AdapterModule
from sglang_lora_tree.fleet import factorisation
from sglang_lora_tree.fleet.factorisation import factorise, factorise_pairs, relative_error, truncate

from .conftest import deltas

PLACE = (0, "q_proj")
D_IN, D_OUT = 60, 44


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(matrix: torch.Tensor, orders: float) -> torch.Tensor:
    """Columns mixed and scaled over so many orders of magnitude: an ill-conditioned factor."""
    rank = matrix.shape[1]
    mixing = torch.linalg.qr(random(rank, rank, seed=9))[0]
    return (matrix * torch.logspace(0, -orders, rank)) @ mixing


def one(a: torch.Tensor, b: torch.Tensor, scaling: float = 1.0) -> Adapter:
    return Adapter("one", "", {PLACE: AdapterModule(a.contiguous(), b.contiguous(), scaling)})


def assert_truncated(a: torch.Tensor, b: torch.Tensor, scaling: float = 1.0, *, unique: bool = True) -> None:
    """At every k beside numpy's SVD in float64. unique: False where equal singular values leave the directions open."""
    adapter = one(a, b, scaling)
    factors = factorise(adapter)
    dense = deltas(adapter)[PLACE].numpy()
    u, exact, vt = np.linalg.svd(dense, full_matrices=False)
    rank, largest = len(a), exact[0] or 1.0
    sigma = factors[PLACE].sigma.numpy()
    assert np.abs(sigma[: len(exact)] - exact[:rank]).max() <= 1e-6 * largest
    for k in range(1, rank + 1):
        module = truncate(adapter, factors, {PLACE: k}, dtype=torch.float32).modules[PLACE]
        assert module.rank == k and module.scaling == 1
        found = module.b.double().numpy() @ module.a.double().numpy()
        best = (u[:, :k] * exact[:k]) @ vt[:k]
        if unique:
            assert np.linalg.norm(found - best) <= 1e-5 * largest, k
        lost = np.linalg.norm(exact[k:])
        assert np.linalg.norm(found - dense) <= lost + 1e-6 * largest, k
        lengths = torch.linalg.vector_norm(module.a, dim=1), torch.linalg.vector_norm(module.b, dim=0)
        alive = torch.tensor(sigma[:k] > 1e-4 * largest)
        torch.testing.assert_close(lengths[0][alive], lengths[1][alive], rtol=1e-3, atol=0)  # balanced


@settings(deadline=None, max_examples=40)
@given(
    d_in=st.integers(1, 40),
    d_out=st.integers(1, 40),
    rank=st.integers(1, 20),
    orders=st.sampled_from([0, 2, 5]),
    scaling=st.sampled_from([1.0, -0.5, 30.0]),
    seed=st.integers(0, 99),
)
@example(d_in=1, d_out=1, rank=9, orders=0, scaling=-0.5, seed=47)  # |B A| is a thousandth of |B| |A|
def test_any_shape(d_in, d_out, rank, orders, scaling, seed):
    """Also ranks above d_in or d_out, where the factors are not even tall, and B A may be far smaller than they are: no float32
    factors give it more exactly than to float32's rounding of |B| |A|."""
    a, b = random(rank, d_in, seed=seed), spread(random(d_out, rank, seed=seed + 100), orders)
    adapter = one(a, b, scaling)
    rounding = torch.finfo(torch.float32).eps * abs(scaling) * float(a.norm() * b.norm())
    factors = factorise(adapter)
    exact = np.linalg.svd(deltas(adapter)[PLACE].numpy(), compute_uv=False)
    for k in {1, (rank + 1) // 2, rank}:
        found = deltas(truncate(adapter, factors, {PLACE: k}))[PLACE]
        error = torch.linalg.matrix_norm(found - deltas(adapter)[PLACE])
        assert error <= np.linalg.norm(exact[k:]) + 1e-5 * exact[0] + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    """Half-precision input loses nothing: the exact product of the stored numbers is what is truncated."""
    assert_truncated(random(12, D_IN).to(dtype), random(D_OUT, 12, seed=1).to(dtype))


@pytest.mark.parametrize("orders", [2, 4, 6, 8])
def test_ill_conditioned(orders):
    """A Gram matrix in float32 would be lost here: its condition is the square of the factor's."""
    a, b = spread(random(D_IN, 12), orders).T, spread(random(D_OUT, 12, seed=1), orders)
    assert_truncated(a, random(D_OUT, 12, seed=1))
    assert_truncated(random(12, D_IN), b)
    assert_truncated(a, b, unique=orders < 6)


def test_rank_deficient_and_repeated_directions():
    b = random(D_OUT, 12, seed=1)
    b[:, 3] = b[:, 5]
    b[:, 7] = 0
    assert_truncated(random(12, D_IN), b)
    orthonormal = torch.linalg.qr(random(D_IN, 12))[0].T, torch.linalg.qr(random(D_OUT, 12, seed=1))[0]
    assert_truncated(*orthonormal, unique=False)  # one singular value, twelve times


def test_zero():
    assert_truncated(random(4, D_IN), torch.zeros(D_OUT, 4))


@pytest.mark.parametrize("of_a, of_b", [(1e-18, 1e-12), (1e18, 1e-12), (1e-20, 1e20), (1e15, 1e15)])
def test_scales(of_a, of_b):
    assert_truncated(random(6, D_IN) * of_a, random(D_OUT, 6, seed=1) * of_b)


def test_rank_above_the_kernels(monkeypatch):
    """Ranks above 128 take the plain path even where Triton would be used."""
    monkeypatch.setattr(factorisation, "uses_triton", lambda device: True)
    a, b = random(130, 140), random(150, 130, seed=1)
    adapter = one(a, b)
    found = deltas(truncate(adapter, factorise(adapter), {PLACE: 130}))[PLACE]
    torch.testing.assert_close(found, b.double() @ a.double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_is_refused_by_name(bad):
    b = random(D_OUT, 4)
    b[3, 2] = bad
    modules = {(0, "k_proj"): AdapterModule(random(4, D_IN), random(D_OUT, 4), 1.0)}
    modules[2, "down_proj"] = AdapterModule(random(4, D_IN), b, 1.0)
    with pytest.raises(ValueError, match="broken: layer 2 down_proj: A or B holds NaN"):
        factorise(Adapter("broken", "", modules))


def test_mixed_shapes_and_ranks_in_one_batch_are_as_alone():
    pairs = [(random(r, d, seed=r), random(d + 7, r, seed=r + 1)) for r, d in ((1, 30), (8, 16), (16, 41), (17, 33))]
    for pair, together in zip(pairs, factorise_pairs(pairs), strict=True):
        alone = factorise_pairs([pair])[0]
        torch.testing.assert_close(together.sigma, alone.sigma)
        product = together.of_a @ together.of_b.T, alone.of_a @ alone.of_b.T  # signs of directions are open
        torch.testing.assert_close(*product, rtol=1e-4, atol=1e-4)


def test_relative_error_is_that_of_the_products():
    a, b = random(12, D_IN), spread(random(D_OUT, 12, seed=1), 2)
    adapter = one(a, b, -0.7)
    factors = factorise(adapter)
    for k in (1, 5, 12):
        smaller = truncate(adapter, factors, {PLACE: k}, dtype=torch.float32)
        exact = deltas(adapter)[PLACE]
        wanted = float(torch.linalg.matrix_norm(exact - deltas(smaller)[PLACE]) / torch.linalg.matrix_norm(exact))
        assert relative_error(adapter, smaller) == pytest.approx(wanted, abs=1e-7)
