"""`sglang-lora-tree check`: exit code, text and JSON for good and refused adapters, and the slots by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_lora_tree.adapters.adapter import Adapter, AdapterModule, load_adapter
from sglang_lora_tree.adapters.base_shape import BaseShape
from sglang_lora_tree.adapters.check import count_slots, run_check

Capture = pytest.CaptureFixture[str]


def test_good_adapter_as_json(plain_folder: Path, base_folder: Path, capsys: Capture) -> None:
    assert run_check([str(plain_folder), "--base", str(base_folder), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    # W = 2 * 12 = 24; per layer: q (32, 48), k and v (32, 24), o (48, 32), gate and up (32, 56), down (56, 32), rank 4.
    chunks = (2 + 2) + 2 * (2 + 1) + (2 + 2) + 2 * (2 + 3) + (3 + 2)
    assert verdict["slots"] == math.ceil(3 * 4 * chunks / (2 * 3)) == 58
    widths = (32 + 48) + 2 * (32 + 24) + (48 + 32) + 2 * (32 + 56) + (56 + 32)
    assert verdict["bytes"] == 3 * 4 * widths * 4
    assert verdict["ok"] is True and verdict["name"] == "plain"
    assert verdict["ranks"] == [4] and verdict["scalings"] == [1.5] and verdict["dtypes"] == ["float32"]
    assert set(verdict["modules"].values()) == {3} and len(verdict["modules"]) == 7
    assert verdict["digest"] == load_adapter(plain_folder).digest


def test_good_adapter_as_text(plain_folder: Path, base_folder: Path, capsys: Capture) -> None:
    digest = load_adapter(plain_folder).digest
    assert run_check([str(plain_folder), "--base", str(base_folder)]) == 0
    text = capsys.readouterr().out
    for part in "ok: plain", "LlamaForCausalLM", "q_proj", "21 in 3 layers", "float32", "58", digest:
        assert part in text
    assert run_check([str(plain_folder)]) == 0
    assert "unknown without --base" in capsys.readouterr().out


def test_refused_adapter(tmp_path: Path, capsys: Capture) -> None:
    assert run_check([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"refused: {tmp_path}/adapter_config.json: the file: is missing")
    assert run_check([str(tmp_path), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["ok"] is False and verdict["field"] == "the file" and verdict["cause"] == "is missing"
    assert verdict["file"] == str(tmp_path / "adapter_config.json") and verdict["cure"] in verdict["message"]


def test_adapter_that_does_not_fit_the_base(
    plain_folder: Path, base_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = json.loads((base_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    assert run_check([str(plain_folder), "--base", str(tmp_path)]) == 1
    assert "shape" in capsys.readouterr().err
    assert run_check([str(plain_folder), "--base", str(tmp_path / "nowhere")]) == 1
    assert "nowhere/config.json" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["a", "b"], ["--no-such-flag", "a"], ["a", "--base"]])
def test_wrong_usage(argv: list[str], capsys: Capture) -> None:
    assert run_check(argv) == 2
    assert "usage: sglang-lora-tree check" in capsys.readouterr().err


def test_help(capsys: Capture) -> None:
    assert run_check(["--help"]) == 0
    assert "--base MODEL" in capsys.readouterr().out


def test_slots_follow_the_effective_ranks(tmp_path: Path, base: BaseShape, save_adapter: Callable[..., Path]) -> None:
    fields = {"target_modules": ["k_proj"], "layers_to_transform": 1, "rank_pattern": {"k_proj": 1}}
    folder = save_adapter(tmp_path / "adapter", **fields)
    assert count_slots(load_adapter(folder, base), base) == 1  # 3 rows, of 6 in a slot


def test_slots_of_the_8b_shape() -> None:
    """Llama-3-8B, rank 16 on all linear layers: 1,280 rows per layer, 640 slots."""
    base = BaseShape.from_hf_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 32,
            "vocab_size": 128256,
        }
    )
    modules = {
        (layer, module): AdapterModule(torch.empty(16, d_in, device="meta"), torch.empty(d_out, 16, device="meta"), 1.0)
        for layer in range(32)
        for module, (d_in, d_out) in base.widths.items()
    }
    assert count_slots(Adapter("x", "", modules), base) == 640
