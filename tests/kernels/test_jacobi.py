"""The batched SVD in Triton beside float64 LAPACK, on a GPU or under Triton's interpreter (as test_tsqr.py)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from background import Background, in_background
from interpreter import assert_passed, run_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 16 if INTERPRETED else 64
compiled_or_interpreted = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="runs in the process that test_under_the_interpreter starts"
)


def run_jacobi_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_interpreted(Path(__file__))


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the tests themselves run here")
@pytest.mark.timeout(600)  # about 40 s on an idle core
@in_background(run_jacobi_tests)
def test_under_the_interpreter(background: Background):
    assert_passed(background.result(run_jacobi_tests))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_spectrum(*sigma: float) -> torch.Tensor:
    left, right = (torch.linalg.qr(random(len(sigma), len(sigma), seed=seed))[0] for seed in (1, 2))
    return left * torch.tensor(sigma, dtype=torch.float64) @ right


def decades(number: int) -> torch.Tensor:
    return torch.logspace(0, -number, SIZE, dtype=torch.float64)


def spectra() -> dict[str, torch.Tensor]:
    """Matrices on which Jacobi's method is slow, or wrong if its thresholds are."""
    third = SIZE // 3
    equal_columns = random(SIZE, SIZE)
    equal_columns[:, 3] = equal_columns[:, 5]
    return {
        "zero": torch.zeros(SIZE, SIZE, dtype=torch.float64),
        "identity": torch.eye(SIZE, dtype=torch.float64),
        "orthogonal": with_spectrum(*[1.0] * SIZE),
        "condition 1e7": with_spectrum(*decades(7).tolist()),
        "condition 1e14": with_spectrum(*decades(14).tolist()),
        "graded columns": random(SIZE, SIZE) * decades(7),
        "graded rows": decades(7)[:, None] * random(SIZE, SIZE),
        "repeated": with_spectrum(*[1.0] * third, *[0.1] * third, *[1e-5] * (SIZE - 2 * third)),
        "rank 2": random(SIZE, 2) @ random(2, SIZE, seed=3),
        "rank 2 and noise": random(SIZE, 2) @ random(2, SIZE, seed=3) + 1e-6 * random(SIZE, SIZE),
        "product of triangles": random(SIZE, SIZE).triu() * decades(2) @ random(SIZE, SIZE, seed=4).tril(),
        "equal columns": equal_columns,
        "tiny": random(SIZE, SIZE) * 1e-30,
        "huge": random(SIZE, SIZE) * 1e30,
    }


@compiled_or_interpreted
def test_every_spectrum_settles_and_equals_lapack():
    """All at once: sigma within 1e-8 of the largest, U sigma V^T = H, U and V orthonormal where sigma counts."""
    from sglang_lora_tree.kernels import jacobi

    names, matrices = zip(*spectra().items(), strict=True)
    stack = torch.stack(matrices).to(DEVICE)
    norms = torch.linalg.matrix_norm(stack).clamp_min(1e-300)[:, None, None]
    sweeps = jacobi.orthogonal_columns(stack / norms)[1]
    assert (sweeps > 0).all(), f"not settled: {[name for name, count in zip(names, sweeps, strict=True) if count < 0]}"
    # Without the triangle of the sorted rows it is 17 for 16 x 16, and more than MAX_SWEEPS for 64 x 64.
    assert sweeps.max() <= (10 if SIZE == 16 else 20), dict(zip(names, sweeps.tolist(), strict=True))
    u, sigma, v = jacobi.svd(stack)
    largest = torch.linalg.svdvals(stack)[:, :1].clamp_min(1e-300)
    for index, name in enumerate(names):
        exact, found = torch.linalg.svdvals(stack[index]), sigma[index]
        assert ((found - exact).abs() <= 1e-8 * largest[index]).all(), name
        assert (found.diff() <= 0).all(), name
        error = (u[index] * found @ v[index].mT - stack[index]).abs().max()
        assert error <= 1e-8 * largest[index], name
        alive = (found > 1e-7 * largest[index]).double()
        wanted = torch.eye(SIZE, device=DEVICE, dtype=torch.float64) * alive
        assert (u[index].mT @ u[index] * alive * alive[:, None] - wanted).abs().max() < 1e-6, name
        assert not u[index][:, found == 0].any() and not v[index][:, found == 0].any(), name


@compiled_or_interpreted
@pytest.mark.parametrize("size", [2, 4, 32])
def test_other_sizes(size):
    from sglang_lora_tree.kernels import jacobi

    stack = random(3, size, size).float().to(DEVICE)
    u, sigma, v = jacobi.svd(stack)
    torch.testing.assert_close(sigma, torch.linalg.svdvals(stack.double()), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(u * sigma[:, None] @ v.mT, stack.double(), rtol=1e-12, atol=1e-12)


@compiled_or_interpreted
def test_what_does_not_settle_is_right_all_the_same(monkeypatch):
    from sglang_lora_tree.kernels import jacobi

    monkeypatch.setattr(jacobi, "MAX_SWEEPS", 1)
    stack = torch.stack([torch.eye(4), random(4, 4).float(), torch.diag(torch.tensor([2.0, 1.0, 0.0, 0.0]))]).to(DEVICE)
    assert (jacobi.orthogonal_columns(stack.double())[1] < 0).tolist() == [False, True, False]
    u, sigma, v = jacobi.svd(stack)
    torch.testing.assert_close(sigma, torch.linalg.svdvals(stack.double()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(u * sigma[:, None] @ v.mT, stack.double(), rtol=1e-5, atol=1e-5)
    assert (u[2][:, 2:] == 0).all(), "directions below rounding are zero"
