"""FlashTSQR in Triton beside float64 and plain torch, on a GPU or under Triton's interpreter.

Without a GPU this file runs itself once more with TRITON_INTERPRET=1, which Triton reads at import (see conftest.py).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from background import Background, in_background
from interpreter import assert_passed, run_interpreted

from sglang_lora_tree.kernels import tsqr_reference
from sglang_lora_tree.kernels.tall_batch import TallBatch, pad_rank

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
compiled_or_interpreted = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="runs in the process that test_under_the_interpreter starts"
)
SHAPES = ((5, 40), (16, 100), (1, 64), (11, 7))
"""(rank, rows): mixed in one launch; the last has fewer rows than columns."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(wide: bool, dtype: torch.dtype = torch.float32, shapes=SHAPES) -> TallBatch:
    matrices = [random(rank, rows, seed=rows).to(dtype).to(DEVICE) for rank, rows in shapes]
    return TallBatch.of(matrices if wide else [matrix.T.contiguous() for matrix in matrices], wide=wide)


def run_tsqr_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_interpreted(Path(__file__))


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the tests themselves run here")
@pytest.mark.timeout(600)  # about 60 s on an idle core
@in_background(run_tsqr_tests)
def test_under_the_interpreter(background: Background):
    assert_passed(background.result(run_tsqr_tests))


@compiled_or_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [True, False])
def test_gram_is_exact_in_float64(wide, dtype):
    """Mixed shapes in one launch; the products of halves and floats lose nothing; padding is zero."""
    from sglang_lora_tree.kernels import tsqr

    batch = batch_of(wide, dtype)
    found = tsqr.gram(batch)
    torch.testing.assert_close(found, tsqr_reference.gram(batch), rtol=1e-14, atol=1e-13)
    for (rank, _), matrix in zip(SHAPES, found, strict=True):
        assert not matrix[rank:].any() and not matrix[:, rank:].any()


@compiled_or_interpreted
@pytest.mark.parametrize("wide", [True, False])
def test_rows_are_split_where_matrices_are_few(wide):
    """Shares that do not divide the rows; a matrix so short that it has no rows for the last shares."""
    from sglang_lora_tree.kernels import tsqr

    batch = batch_of(wide, shapes=((3, 1700), (2, 20)))
    assert tsqr._splits(batch) == 3
    torch.testing.assert_close(tsqr.gram(batch), tsqr_reference.gram(batch), rtol=1e-13, atol=1e-12)
    check_apply(batch, [2, 1], torch.float32)


@compiled_or_interpreted
def test_larger_ranks():
    from sglang_lora_tree.kernels import tsqr

    batch = batch_of(True, shapes=((40, 70), (33, 64)))  # padded to 64
    torch.testing.assert_close(tsqr.gram(batch), tsqr_reference.gram(batch), rtol=1e-14, atol=1e-13)
    largest = batch_of(False, shapes=((128, 16),))
    torch.testing.assert_close(tsqr.gram(largest), tsqr_reference.gram(largest), rtol=1e-14, atol=1e-13)


@compiled_or_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [True, False])
def test_apply(wide, dtype):
    """Other ranks for every matrix, written where they belong and nowhere else, rounded once."""
    check_apply(batch_of(wide, dtype), [2, 16, 1, 11], torch.float32)
    check_apply(batch_of(wide, dtype), [1, 3, 16, 16], dtype)


@compiled_or_interpreted
def test_apply_more_directions_than_a_block_holds():
    check_apply(batch_of(True, shapes=((100, 40),)), [90], torch.float32)
    check_apply(batch_of(False, shapes=((100, 40),)), [90], torch.float32)


def check_apply(batch: TallBatch, kept: list[int], out_dtype: torch.dtype) -> None:
    from sglang_lora_tree.kernels import tsqr

    size = batch.padded_rank
    coefficients = random(len(batch), size, size, seed=5).to(DEVICE)
    heights = batch.rows.tolist()
    shapes = [(k, height) if batch.wide else (height, k) for k, height in zip(kept, heights, strict=True)]
    # One room for all, with a gap behind each: a result that is too long would show.
    room = torch.full((sum(a * b + 32 for a, b in shapes),), float("nan"), dtype=out_dtype, device=DEVICE)
    out, begin = [], 0
    for shape in shapes:
        out.append(room[begin : begin + shape[0] * shape[1]].view(shape))
        begin += shape[0] * shape[1] + 32
    tsqr.apply(batch, coefficients, kept, out)
    assert int(room.isnan().sum()) == 32 * len(shapes)
    expected = [torch.empty(shape, dtype=torch.float32, device=DEVICE) for shape in shapes]
    tsqr_reference.apply(batch, coefficients, kept, expected)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[out_dtype]
    for found, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=rounding, atol=rounding)


@compiled_or_interpreted
def test_the_whole_way_equals_the_truncated_svd():
    """Gram, triangles, core, apply, all in Triton: within 1e-5 of float64 at every rank, with ill-conditioned factors."""
    from sglang_lora_tree.adapters.adapter import Adapter, AdapterModule
    from sglang_lora_tree.fleet.factorisation import factorise, truncate

    a, b = random(6, 50), random(34, 6, seed=1) * torch.logspace(0, -4, 6) @ torch.linalg.qr(random(6, 6, seed=2))[0]
    modules = {(0, "q_proj"): AdapterModule(a, b, -0.5), (0, "k_proj"): AdapterModule(a.bfloat16(), b.bfloat16(), 2.0)}
    modules[1, "q_proj"] = AdapterModule(a[:3].contiguous(), torch.zeros(34, 3), 1.0)
    adapter = Adapter("x", "", modules)
    factors = factorise(adapter, DEVICE)
    for k in (1, 3):
        cut = truncate(adapter, factors, dict.fromkeys(modules, k), DEVICE, torch.float32)
        for place, module in modules.items():
            u, sigma, vt = torch.linalg.svd(module.scaling * module.b.double() @ module.a.double())
            found = cut.modules[place].b.double() @ cut.modules[place].a.double()
            wanted = (u[:, :k] * sigma[:k]) @ vt[:k]
            assert torch.linalg.matrix_norm(found - wanted) <= 1e-5 * sigma[0]


def test_padded_rank():
    assert [pad_rank(rank) for rank in (1, 16, 17, 64, 65, 130)] == [16, 16, 32, 64, 128, 256]


def test_operands_are_checked():
    batch = batch_of(True, shapes=((4, 20),))
    small = torch.zeros(1, 16, 16, device=DEVICE)
    with pytest.raises(AssertionError, match="kept ranks"):
        tsqr_reference.apply(batch, small, [17], [torch.empty(17, 20, device=DEVICE)])
    with pytest.raises(AssertionError, match="out must be contiguous"):
        tsqr_reference.apply(batch, small, [2], [torch.empty(20, 2, device=DEVICE)])
    with pytest.raises(AssertionError, match="one dtype"):
        TallBatch.of([torch.zeros(2, 3), torch.zeros(2, 3).half()], wide=True)
    with pytest.raises(AssertionError, match="contiguous"):
        TallBatch.of([torch.zeros(3, 2).T], wide=True)
