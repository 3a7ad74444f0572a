"""The command of benchmarks.kernel_world, on the CPU: every record is there, of the same code that a GPU runs."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks import kernel_world
from benchmarks.kernel_world import TINY, TINY_WIDTH, KernelWorld, decode_mixes


def test_the_command_writes_every_record(tmp_path, monkeypatch):
    monkeypatch.setattr("sglang_lora_tree.kernels.lora.uses_triton", lambda device: False)
    arguments = ["--device", "cpu", "--layers", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["kernel_world", *arguments])
    kernel_world.main()
    records = json.loads((tmp_path / "decode_added_cpu.json").read_text())
    names = ["1", "8", "32", "mix3of8", *(f"{adapters}_r{rank}" for rank in (1, 4, 8, 64) for adapters in (8, 32))]
    names += ["8_r5", "8_r5_one_r64"]
    wanted = ["host_preparation_ms/changed", "host_preparation_ms/unchanged"]
    wanted += ["prefill_kernels_ms/8", "prefill_kernels_ms/mix3of8", *(f"decode_added_ms/{name}" for name in names)]
    assert [record["metric"] for record in records] == wanted
    assert records[0]["value"] > 2 * records[1]["value"], "a changed batch was taken for an unchanged one"


def test_a_step_with_adapters_is_the_base_step_and_more(monkeypatch):
    """The difference that is timed is LoRA's: the same products, then every layer's adapters once."""
    monkeypatch.setattr("sglang_lora_tree.kernels.lora.uses_triton", lambda device: False)
    world = KernelWorld([16] * 4, 2, shape=TINY, width=TINY_WIDTH, device="cpu", dtype=torch.float32)
    calls = []
    for name in ("mm", "shrink", "expand", "expand_and_activate", "expand_and_rotate"):
        owner = torch if name == "mm" else kernel_world
        original = getattr(owner, name)

        def count(*operands, original=original, name=name, **options):
            calls.append(name)
            return original(*operands, **options)

        monkeypatch.setattr(owner, name, count)
    world.make_step(4, None)()
    assert calls == ["mm"] * 8
    calls.clear()
    world.make_step(4, world.pairs([1] * 4, decode_mixes(4, 4, 3)))()
    assert calls.count("mm") == calls.count("shrink") == 8
    assert calls.count("expand") == 4 and calls.count("expand_and_activate") == calls.count("expand_and_rotate") == 2
