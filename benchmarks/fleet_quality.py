"""What compression costs in task scores: a fleet of the embedded model's adapters, before and after, in float32 on the CPU.

    python examples/embedded_model/fleet.py --out FLEET      # trains it: 12 and more tasks, rank 48
    python -m benchmarks.fleet_quality FLEET [--count 100] [--tables FILE.md] [--cache FILE.json]

Policies: uniform (LoRAForge-U), spectral (LoRAForge-S, a budget per adapter), fleet (S, one budget for all), and JD-Full at
the same budget. A folder's name is its task. Results: ``fleet_cpu.json``; the tables of docs/compression.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from examples.embedded_model import evaluate
from sglang_lora_tree.adapters.adapter import load_adapter
from sglang_lora_tree.fleet.compress import Settings, compress
from sglang_lora_tree.fleet.export import write_adapter
from sglang_lora_tree.fleet.jd_full import jd_full
from sglang_lora_tree.fleet.report import energy_share

BUDGETS = tuple(Fraction(1, divisor) for divisor in (2, 4, 8, 12))
POLICIES: dict[str, dict[str, str]] = {
    "uniform": {"policy": "uniform"},
    "spectral": {"policy": "spectral"},
    "fleet": {"policy": "spectral", "scope": "fleet"},
}
JD_FULL = "jd_full"
WANTED_LOSS = 1.2
"""Points that S may lose at 1/12; the paper reports 0.80 and 1.20."""

Scores = dict[str, float]


class Scorer:
    """Scores folders named after their tasks, in points (0 to 100).

    cache: file of scores found so far, so that a run that was cut short goes on, and that adapters can be scored one by one
    while a fleet is being trained.
    """

    def __init__(self, count: int, cache: Path | None = None) -> None:
        self.model = evaluate.load_base()
        self.count = count
        self.cache = cache
        self.found: Scores = json.loads(cache.read_text()) if cache and cache.exists() else {}

    def scores(self, folders: Sequence[Path]) -> Scores:
        return {folder.name: self.score(folder) for folder in folders}

    def score(self, folder: Path) -> float:
        key = f"{folder.name} {load_adapter(folder).digest} {self.count}"
        if key not in self.found:
            self.found[key] = 100 * evaluate.score(self.model, folder, folder.name, self.count)
            if self.cache:
                self.cache.write_text(json.dumps(self.found, indent=0))
        return self.found[key]


def measure(folders: Sequence[Path], scorer: Scorer) -> tuple[dict[str, Scores], dict[str, float]]:
    """Scores and mean energy kept, by "original" and "<policy> <budget>"."""
    scores = {"original": scorer.scores(folders)}
    energies: dict[str, float] = {}
    print(f"original {mean(scores['original']):.2f}", flush=True)
    for budget in BUDGETS:
        for policy, fields in POLICIES.items():
            key = f"{policy} {budget}"
            with tempfile.TemporaryDirectory() as temporary:
                out = Path(temporary) / "out"
                # float32, so that only the lost directions show, not the rounding of the rest
                outcomes = compress(folders, out, Settings(budget, dtype="float32", **fields))
                energies[key] = statistics.fmean(energy_share(outcome.survey, outcome.ranks) for outcome in outcomes)
                scores[key] = scorer.scores([out / folder.name for folder in folders])
            print(f"{key} energy {energies[key]:.4f} score {mean(scores[key]):.2f}", flush=True)
        scores[f"{JD_FULL} {budget}"] = score_jd_full(folders, budget, scorer)
        print(f"{JD_FULL} {budget} score {mean(scores[f'{JD_FULL} {budget}']):.2f}", flush=True)
    return scores, energies


def score_jd_full(folders: Sequence[Path], budget: Fraction, scorer: Scorer) -> Scores:
    shared = jd_full([load_adapter(folder) for folder in folders], budget)
    with tempfile.TemporaryDirectory() as temporary:
        written = []
        for folder, adapter in zip(folders, shared, strict=True):
            written.append(Path(temporary) / folder.name)
            write_adapter(folder, written[-1], adapter)
        return scorer.scores(written)


def mean(scores: Mapping[str, float]) -> float:
    return statistics.fmean(scores.values())


def make_records(scores: Mapping[str, Scores], energies: Mapping[str, float], count: int) -> list[dict[str, Any]]:
    original = mean(scores["original"])
    note = f"{len(scores['original'])} adapters, {count} held-out questions each"
    records = [results.record("score/original", original, "points", note=note)]
    for key, found in scores.items():
        if key == "original":
            continue
        policy, budget = key.split(" ")
        name = f"{policy}/{budget.replace('/', '_')}"
        records.append(
            results.record(f"score/{name}", mean(found), "points", baseline=("original", original), note=note)
        )
        if key in energies:
            records.append(results.record(f"energy/{name}", energies[key], "", note="mean share of energy kept"))
    lost = original - mean(scores["spectral 1/12"])
    records.append(results.record("lost/spectral/1_12", lost, "points", limit=f"value <= {WANTED_LOSS}", note=note))
    return records


def markdown(scores: Mapping[str, Scores], energies: Mapping[str, float]) -> str:
    """Means by policy and budget, then every adapter at 1/12."""
    names = (*POLICIES, JD_FULL)
    lines = ["| budget | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines.append(f"| 1 (original) | {mean(scores['original']):.2f} |" + " |" * (len(names) - 1))
    for budget in BUDGETS:
        cells = []
        for name in names:
            energy = energies.get(f"{name} {budget}")
            cells.append(f"{mean(scores[f'{name} {budget}']):.2f}" + ("" if energy is None else f" ({energy:.3f})"))
        lines.append(f"| {budget} | " + " | ".join(cells) + " |")
    last = BUDGETS[-1]
    lines += ["", f"| adapter | original | {' | '.join(f'{name} {last}' for name in names)} |", "|---" * (len(names) + 2) + "|"]
    for task, score in scores["original"].items():
        cells = [f"{scores[f'{name} {last}'][task]:.0f}" for name in names]
        lines.append(f"| {task} | {score:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fleet", type=Path, help="folder with an adapter per task")
    parser.add_argument("--count", type=int, default=100, help="held-out questions per adapter (default: 100)")
    parser.add_argument("--out", type=Path, default=results.RESULTS, help="folder for fleet_cpu.json")
    parser.add_argument("--cache", type=Path, help="scores found so far, to go on from")
    parser.add_argument("--tables", type=Path, help="write the tables here, in Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folders = sorted(file.parent for file in arguments.fleet.glob("*/adapter_config.json"))
    scores, energies = measure(folders, Scorer(arguments.count, arguments.cache))
    records = make_records(scores, energies, arguments.count)
    results.write("fleet", "cpu", records, arguments.out)
    print(results.table(records))
    text = markdown(scores, energies)
    print(text)
    if arguments.tables:
        arguments.tables.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
