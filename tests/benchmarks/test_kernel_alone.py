"""What is timed against ours computes the same as ours; what a section's failure or the time limit costs.

SGLang's kernels and the copy into a merged adapter are Triton: they run here only in a process of their own, under Triton's
interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from background import Background, in_background, run_command

from benchmarks import kernel_alone
from benchmarks.kernel_alone import RANK, Report, check, distinct_mixes
from benchmarks.kernel_world import TINY, TINY_WIDTH, KernelWorld
from benchmarks.mix_operators import Dense, Merged, Rows, both, loop, ours, padded_bmm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OPTIONS = {"shape": TINY, "width": TINY_WIDTH, "device": "cpu"}


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch):
    """Ours by plain torch, also where Triton is interpreted; a step instead of its time."""
    monkeypatch.setattr("sglang_lora_tree.kernels.lora.uses_triton", lambda device: False)

    def run_once(step, repeats, rounds):
        step()
        return 1.0

    monkeypatch.setattr(kernel_alone, "time_graph", run_once)


def make(adapters: int = 5, dtype: torch.dtype = torch.float32):
    world = KernelWorld([RANK] * adapters, 3, dtype=dtype, **OPTIONS)
    rows = {
        (number, index): Rows.find(world, number, layer, RANK) for number in range(3) for index, layer in enumerate(TINY)
    }
    return world, rows, {key: Dense.copy(world, found) for key, found in rows.items()}


@pytest.mark.parametrize("make_operator", [loop, padded_bmm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_ways_compute_what_ours_does(make_operator, dtype):
    world, _, dense = make(dtype=dtype)
    mixes = distinct_mixes(7, 5)
    error = check(world, make_operator(world, dense, mixes), ours(world, mixes), 7)
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_another_computation_is_not_timed():
    world, _, dense = make()
    mixes = distinct_mixes(3, 5)
    with pytest.raises(ValueError, match="another computation"):
        check(world, loop(world, dense, mixes[::-1]), ours(world, mixes), 3)
    with pytest.raises(ValueError, match="another computation"):
        check(world, lambda number, index, x, y: y.fill_(float("nan")), ours(world, mixes), 3)


@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter runs in a process of its own: see below")
def test_copy_and_sgmv_compute_what_ours_does(monkeypatch):
    monkeypatch.setattr("sglang.kernels.ops.lora.dense.lora_tuning_config.get_device_name", lambda: "cpu")
    world, rows, _ = make()
    mixes = distinct_mixes(3, 5)
    merged = Merged(world, rows, mixes, RANK)
    assert check(world, both(merged.copy, merged.sgmv()), ours(world, mixes), 3) < 1e-5


def run_triton_part(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "sgmv_compute", __file__]
    return run_command(command, 280, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.skipif(INTERPRETED, reason="it starts the interpreter")
@pytest.mark.timeout(300)
@in_background(run_triton_part)
def test_the_triton_part_under_the_interpreter(background: Background):
    run = background.result(run_triton_part)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout[-4000:]


def test_a_failing_way_costs_only_itself(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(kernel_alone, "Merged", fail)
    report = Report("kernel_alone", "cpu", tmp_path)
    kernel_alone.compare(report, 5, "kernel_alone", 2, (1, 4), **OPTIONS)
    kernel_alone.compare_slots(report, 4, 2, (8,), **OPTIONS)
    kernel_alone.compare_ranks(report, 4, 2, 2, **OPTIONS)
    names = [record["metric"] for record in report.records]
    assert names == [
        *(f"kernel_alone/{way}/{bs}" for bs in (1, 4) for way in ("ms_per_token", "loop", "padded_bmm")),
        *("random_vs_contiguous/8", "bytes_over_copy_rate/8", "rank_8_vs_64"),
    ]
    assert "no such kernel" in capsys.readouterr().out
    assert (tmp_path / "kernel_alone_cpu.json").exists()


def test_nothing_begins_when_the_time_is_up(tmp_path):
    report = Report("kernel_alone", "cpu", tmp_path, seconds=0.0)
    kernel_alone.compare(report, 5, "kernel_alone", 1, (1,), **OPTIONS)
    assert report.records == []


def test_bytes_are_those_of_a_and_b():
    world, _, dense = make()
    size = sum(matrices.a.nbytes + matrices.b.nbytes for matrices in dense.values())
    assert kernel_alone.adapter_bytes(world, RANK, 5) == size
