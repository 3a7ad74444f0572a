"""What the acceptance on a GPU judges with: the same as PEFT's own generation, merged weights that are PEFT's, a full pool."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from background import Background, in_background, run_command
from transformers import LlamaForCausalLM

from benchmarks import acceptance_small
from benchmarks.acceptance_bf16 import MERGED_MIXES, save_merged
from benchmarks.acceptance_loads import LOADS_POOL, MANY_ADAPTERS, MANY_MIXES
from benchmarks.acceptance_small import SMALL_ADAPTERS, SMALL_POOL, TIE, make_small, push_out
from tests.models import Oracle

MIX = {"b": 0.5, "d": -0.25}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.setattr(acceptance_small, "SMALL_MODEL", {"layers": 2, "hidden": 128, "vocab": 256})
    patch.setattr(acceptance_small, "VOCAB", 256)
    chosen = {name: SMALL_ADAPTERS[name] for name in ("a", "b", "d")}
    model, adapters = make_small(tmp_path_factory.mktemp("small"), chosen)
    yield model, Oracle(model, adapters, dtype=torch.float64)
    patch.undo()


@pytest.mark.parametrize("mix", [None, {"a": 1.0}, {"a": 0.5}, MIX])
def test_one_pass_judges_as_peft_generates(small: tuple[Path, Oracle], mix: Any) -> None:
    _, oracle = small
    prompt = list(range(3, 20))
    tokens, logprobs = oracle._run(prompt, 6, mix)
    best, own, _ = oracle.judge(prompt, tokens, mix)
    assert own == best and own == pytest.approx(logprobs, abs=1e-9)
    best, own, _ = oracle.judge(prompt, [*tokens[:5], (tokens[5] + 1) % 256], mix)
    assert best[5] - own[5] > TIE


def test_merged_weights_are_the_base_models_with_the_mix_added(small: tuple[Path, Oracle], tmp_path: Path) -> None:
    model, oracle = small
    merged = LlamaForCausalLM.from_pretrained(save_merged(oracle, model, MIX, tmp_path / "merged"), torch_dtype=torch.bfloat16)
    path, delta = "model.layers.1.self_attn.q_proj", 0.0
    for name, weight in MIX.items():
        delta = delta + weight * oracle.model.base_model.model.get_submodule(path).get_delta_weight(name)
    base = LlamaForCausalLM.from_pretrained(model, torch_dtype=torch.float64)
    wanted = (base.get_submodule(path).weight + delta).bfloat16()
    torch.testing.assert_close(merged.get_submodule(path).weight, wanted)
    assert not torch.equal(wanted, base.get_submodule(path).weight.bfloat16())
    assert torch.equal(merged.lm_head.weight, base.lm_head.weight.bfloat16())


class StandIn:
    """A server of so many slots, all of whose adapters leave when prompts fill the pool."""

    def __init__(self, size: int) -> None:
        self.size, self.swap_outs, self.asked = size, 0, []  # type: ignore[var-annotated]

    def tree(self) -> dict[str, Any]:
        return {"counters": {"swap_outs": self.swap_outs}, "pool": {"gpu_size": self.size}}

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> None:
        longest = max(map(len, input_ids)) + sampling_params["max_new_tokens"]
        self.asked.append((len(input_ids), longest))
        self.swap_outs += 2 if sum(map(len, input_ids)) > 0.95 * self.size else 0


@pytest.mark.parametrize("size", [LOADS_POOL, SMALL_POOL])
def test_the_pool_is_filled_until_all_adapters_have_left(size: int) -> None:
    server = StandIn(size)
    assert push_out(server, random.Random(1), 4) == 4  # type: ignore[arg-type]
    assert len(server.asked) == 2
    for count, longest in server.asked:
        assert longest < 4096 and count * longest < size, "they fit side by side"


def test_each_mix_knows_its_adapters() -> None:
    assert {name for mix in MANY_MIXES if mix for name in mix} == set(MANY_ADAPTERS)
    assert all(set(mix) <= set(SMALL_ADAPTERS) for mix in MERGED_MIXES)


def test_a_copy_without_a_clock_is_a_record_too() -> None:
    counters = {"load_bytes": 2e9, "load_seconds": 0.0, "swap_ins": 3}
    assert acceptance_small.swap_in_record("x", counters)["value"] == 0
    record = acceptance_small.swap_in_record("x", {**counters, "load_seconds": 0.1})
    assert record["metric"] == "swap_in_seconds/x" and "2000.0 MB" in record["note"] and "20.0 GB/s" in record["note"]


def run_failing_phase(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.acceptance_gpu", "--phases", "bf16", "--out", str(folder / "new")]
    return run_command(command, 200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@in_background(run_failing_phase)
def test_a_phase_that_fails_is_an_exit_code(background: Background) -> None:
    result = background.result(run_failing_phase)
    assert result.returncode == 1 and "bf16 failed" in result.stdout
