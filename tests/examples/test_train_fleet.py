"""The fleet's adapters are trained side by side and yet each by itself: what is stored answers as PEFT says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "embedded_model"
sys.path.insert(0, str(EXAMPLE))

import evaluate  # noqa: E402
import stacked_lora  # noqa: E402
import tasks  # noqa: E402
import train_fleet  # noqa: E402
from peft import PeftModel  # noqa: E402


@pytest.fixture(scope="module")
def base():
    torch.set_num_threads(1)
    return evaluate.load_base().requires_grad_(False)


def factors(base, adapters: int) -> dict[str, stacked_lora.Factors]:
    random = torch.Generator().manual_seed(1)
    fresh = stacked_lora.new_factors(stacked_lora.linear_paths(base), adapters, train_fleet.RANK, random)
    return {path: (a, torch.randn(b.shape, generator=random) * 0.02) for path, (a, b) in fresh.items()}


def test_a_stored_adapter_answers_in_peft_as_in_the_stack(base, tmp_path):
    ids = torch.arange(24).view(2, 12) + 65
    stacked_lora.stack(base, factors(base, 2))
    try:
        with torch.no_grad():
            together = base(input_ids=ids).logits
        train_fleet.save(base, 1, tmp_path / "xml")
    finally:
        stacked_lora.unstack(base)
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        alone = PeftModel.from_pretrained(evaluate.load_base(), tmp_path / "xml").eval()(input_ids=ids).logits
    torch.testing.assert_close(together[1], alone[1], rtol=1e-4, atol=1e-4)
    assert (together[0] - alone[0]).abs().max() > 0.1, "both rows have the same adapter"
    assert (together - plain).abs().max() > 0.1


def test_rates_are_those_of_one_adapter_at_a_time(base):
    questions = tasks.held_out("xml", 8, 3)
    answers = [[tasks.expected("base", question) for question in questions], ["no" for _ in questions]]
    stacked_lora.stack(base, {path: (a, b * 0) for path, (a, b) in factors(base, 2).items()})
    try:
        rates = stacked_lora.exact_rates(base, [questions, questions], answers, batch=3)
    finally:
        stacked_lora.unstack(base)
    assert rates == [evaluate.exact_rate(base, questions, answers[0]), 0.0]
    assert rates[0] > 0.5


def test_every_decay_trains_every_task_from_the_same_start(base):
    """Adapters of one task differ by their decay alone; tasks learn nothing from each other."""
    data = train_fleet.read_tasks(["xml", "lower"], 4)
    start = factors(base, 2)

    def trained(names: list[int], decays: list[float]) -> list[stacked_lora.StackedLinear]:
        chosen = {
            path: (a[names].repeat(len(decays), 1, 1), b[names].repeat(len(decays), 1, 1)) for path, (a, b) in start.items()
        }
        layers = stacked_lora.stack(base, chosen)
        train_fleet.fit(base, layers, tuple(part[names] for part in data), decays, steps=3, batch=1, seconds=1e9)
        stacked_lora.unstack(base)
        return layers

    together, alone = trained([0, 1], [0.0, 50.0]), trained([1], [0.0])
    for both, one in zip(together, alone, strict=True):
        torch.testing.assert_close(both.a[1], one.a[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(both.b[1], one.b[0], rtol=1e-4, atol=1e-4)
    norms = torch.stack([layer.a.detach().square().sum((1, 2)) for layer in together]).sum(0)
    assert norms[2] < 0.9 * norms[0] and norms[3] < 0.9 * norms[1], "decay decays nothing"


def test_runs_into_one_folder_add_up(tmp_path):
    file = tmp_path / "scores.json"
    train_fleet.add_scores(file, {"decay_4": {"xml": {"adapter": 0.5}, "lower": {"adapter": 0.6}}})
    train_fleet.add_scores(file, {"decay_4": {"xml": {"adapter": 0.9}}, "decay_0": {"xml": {"adapter": 0.7}}})
    assert json.loads(file.read_text()) == {
        "rank": train_fleet.RANK,
        "count": train_fleet.COUNT,
        "decay_4": {"xml": {"adapter": 0.9}, "lower": {"adapter": 0.6}},
        "decay_0": {"xml": {"adapter": 0.7}},
    }
