"""What ``sglang-lora-tree compress`` writes, served: answers are PEFT's on the same folders, here and by stock SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from sglang_lora_tree.cli import main

from .conftest import Live, on
from .judge import Judge, Mix, random_prompts
from .server import Server

NUM_NEW = 8


def compress(folders: list[Path], model: Path, out: Path, *options: str) -> dict[str, Any]:
    """What report.json says of each adapter; written in float32, so that only what was cut off is missing."""
    arguments = [*map(str, folders), "--out", str(out), "--base", str(model), "--dtype", "float32", *options]
    assert main(["compress", *arguments]) == 0
    adapters: dict[str, Any] = json.loads((out / "report.json").read_text())["adapters"]
    return adapters


@on("small", "float32")
def test_compressed_adapters(live: Live, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Half of the parameters where they keep most energy, and all of them: alone, mixed with each other and with the original,
    in slots as the report says."""
    if live.name == "small":
        model, original = request.getfixturevalue("llama"), request.getfixturevalue("others")["wide0"]
    else:
        model, original = request.getfixturevalue("embedded")[0], live.adapters["math"]
    name, server = original.name, live.server
    reports, folders = {}, {"original": original}
    for written, budget in (("whole", "1"), ("smaller", "1/2")):
        reports[written] = compress([original], model, tmp_path / written, "--budget", budget)[name]
        folders[written] = tmp_path / written / name
    low, _, high = reports["smaller"]["ranks"]
    assert low < high, "one rank for all modules shows little"

    judge = Judge(model, {written: folders[written] for written in reports})
    mixes: list[Mix] = [{"smaller": 1.0}, {"whole": 1.0}, {"whole": 0.7, "smaller": -0.4}, {"smaller": 0.5}]
    cases = list(zip(random_prompts(len(mixes), 12, live.vocab, seed=71), mixes, strict=True))
    try:
        for written, folder in folders.items():
            loaded = server.load(written, folder)
            assert loaded.status_code == 200, loaded.text
        for batch in (cases, cases[:1], cases[1:2]):
            answers = server.generate([prompt for prompt, _ in batch], NUM_NEW, [mix for _, mix in batch])
            judge.check_all(batch, answers, NUM_NEW)
        # At full rank nothing is lost: it answers as the original does, which cancels it down to the base model.
        prompt = random_prompts(1, 12, live.vocab, seed=72)[0]
        for mix, same in (({"whole": 1.0}, {name: 1.0}), ({"whole": 1.0, "original": -1.0}, None)):
            answer = server.generate([prompt], NUM_NEW, [mix])[0]
            live.judge.check(prompt, answer, same, NUM_NEW)
        tree = server.tree()
        slots = {written: tree["registered"][written]["slots"] for written in folders}
    finally:
        for written in folders:
            server.unload(written)
    server.check_at_rest()
    page = tree["pool"]["page_size"]
    for written, report in reports.items():
        before, after = (-(-count // page) * page for count in report["slots"])
        assert (slots["original"], slots[written]) == (before, after)
    assert slots["whole"] == slots["original"]
    assert slots["smaller"] <= 0.55 * slots["original"] + page


@pytest.mark.skipif(torch.cuda.is_available(), reason="a server of the CPU platform")
def test_padded_adapters_in_stock_sglang(embedded: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    """Without --lora-tree: SGLang's own loader, memory pool and `torch_native` LoRA backend."""
    model, originals = embedded
    names = ["json", "math", "upper"]
    compress([originals[name] for name in names], model, tmp_path / "fleet", "--budget", "1/4", "--padded")
    folders = {name: tmp_path / "fleet" / name for name in names}
    arguments = ["--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "4000"]
    arguments += ["--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "4"]
    arguments += ["--lora-paths", *(f"{name}={folder}" for name, folder in folders.items())]
    server = Server(tmp_path / "server.log", arguments, {"OMP_NUM_THREADS": "1"})
    try:
        judge = Judge(model, folders)
        server.wait()
        state = requests.get(server.url + "/server_info", timeout=60).json()
        assert state["lora_backend"] == "torch_native" and "lora_tree" not in state["internal_states"][0]
        chosen = [*names, None] * 5
        prompts = random_prompts(len(chosen), 12, 256, seed=73)
        answers = []
        for start in range(0, len(chosen), 4):
            part = slice(start, start + 4)
            answers += server.generate(prompts[part], NUM_NEW, lora_path=chosen[part])
        for prompt, name, answer in zip(prompts, chosen, answers, strict=True):
            judge.check(prompt, answer, {name: 1.0} if name else None, NUM_NEW)
    finally:
        server.stop()
