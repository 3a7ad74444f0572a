"""What compression costs in task scores: fleets of the embedded model's adapters, before and after, in float32.

    python examples/embedded_model/train_fleet.py --out FLEET --device cuda      # trains them
    python -m benchmarks.fleet_quality FLEET/decay_2 [FLEET/decay_0 ...] [--device cuda] [--tables FILE.md]

Policies: uniform (LoRAForge-U), spectral (LoRAForge-S, a budget per adapter), fleet (S, one budget for all), bounded (S, but
an adapter that would lose more than 0.002 of its energy gets more than the budget), and JD-Full at the same budget. A
folder's name is its task, its parent's the fleet's name. All adapters of a fleet are scored at once.
Results: ``fleet_quality_<machine>.json``, written after every number; the tables of docs/compression.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from examples.embedded_model import evaluate  # makes the modules beside it importable
from sglang_lora_tree.adapters.adapter import Adapter, load_adapter
from sglang_lora_tree.adapters.base_shape import MODULE_PATHS
from sglang_lora_tree.fleet.budget import count_parameters
from sglang_lora_tree.fleet.compress import Settings, plan_ranks
from sglang_lora_tree.fleet.factorisation import Factors, Place, factorise, truncate
from sglang_lora_tree.fleet.jd_full import jd_full
from sglang_lora_tree.fleet.report import energy_share
from sglang_lora_tree.fleet.survey import Survey

import stacked_lora  # isort: skip
import tasks  # isort: skip

BUDGETS = tuple(Fraction(1, divisor) for divisor in (12, 8, 4, 2))
POLICIES: dict[str, dict[str, Any]] = {
    "spectral": {"policy": "spectral"},
    "uniform": {"policy": "uniform"},
    "fleet": {"policy": "spectral", "scope": "fleet"},
    "bounded": {"policy": "spectral", "max_energy_loss": 0.002},
}
JD_FULL = "jd_full"
WANTED_LOSS = 1.2
"""Points that S may lose at 1/12; the paper reports 0.80 and 1.20."""

Scores = list[float]
"""Per adapter, 0 to 100."""


class Scorer:
    """Scores adapters of this base by their tasks' held-out questions."""

    def __init__(self, names: Sequence[str], count: int, device: str) -> None:
        self.model = evaluate.load_base().requires_grad_(False).to(device)
        self.questions = [tasks.held_out(name, count, evaluate.SEED) for name in names]
        pairs = zip(names, self.questions, strict=True)
        self.answers = [[tasks.expected(name, question) for question in asked] for name, asked in pairs]

    def score(self, adapters: Sequence[Adapter]) -> Scores:
        stacked_lora.stack(self.model, side_by_side(adapters))
        try:
            return [100 * rate for rate in stacked_lora.exact_rates(self.model, self.questions, self.answers)]
        finally:
            stacked_lora.unstack(self.model)


def side_by_side(adapters: Sequence[Adapter]) -> dict[str, stacked_lora.Factors]:
    """Per module path, A and B of all adapters at the largest rank, scalings inside."""
    found = {}
    for layer, module in adapters[0].modules:
        own = [adapter.modules[layer, module] for adapter in adapters]
        rank = max(one.rank for one in own)
        a = torch.zeros(len(own), rank, own[0].a.shape[1])
        b = torch.zeros(len(own), own[0].b.shape[0], rank)
        for index, one in enumerate(own):
            a[index, : one.rank] = one.a
            b[index, :, : one.rank] = one.b.float() * one.scaling
        found[f"model.layers.{layer}.{MODULE_PATHS[module]}"] = (a, b)
    return found


@dataclass
class Fleet:
    """Adapters of one folder, one per task, and what was found about them by "<policy> <budget>"."""

    name: str
    adapters: list[Adapter]
    factors: list[dict[Place, Factors]]
    surveys: list[Survey]
    scorer: Scorer
    device: str
    scores: dict[str, Scores] = field(default_factory=dict)
    energies: dict[str, list[float]] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    """Of the parameters that are kept."""

    @classmethod
    def of(cls, folder: Path, count: int, device: str) -> Fleet:
        folders = sorted(file.parent for file in folder.glob("*/adapter_config.json"))
        assert folders, f"no adapters in {folder}"
        adapters = [load_adapter(one) for one in folders]
        factors = [factorise(adapter) for adapter in adapters]
        surveys = [Survey.of(*parts) for parts in zip(adapters, folders, factors, strict=True)]
        scorer = Scorer([adapter.name for adapter in adapters], count, device)
        fleet = cls(folder.name, adapters, factors, surveys, scorer, device)
        fleet.scores["original"] = scorer.score(adapters)
        return fleet

    def compress(self, name: str, budget: Fraction) -> None:
        key = f"{name} {budget}"
        if name == JD_FULL:
            self.scores[key] = self.scorer.score(jd_full(self.adapters, budget, device=self.device))
            return
        plan = plan_ranks(self.surveys, Settings(budget, **POLICIES[name]))
        # float32, so that only the lost directions show, not the rounding of the rest
        smaller = [
            truncate(adapter, factors, dict(zip(survey.shapes, ranks, strict=True)), dtype=torch.float32)
            for adapter, factors, survey, ranks in zip(self.adapters, self.factors, self.surveys, plan, strict=True)
        ]
        self.energies[key] = [energy_share(survey, ranks) for survey, ranks in zip(self.surveys, plan, strict=True)]
        kept, whole = (
            sum(count_parameters(survey.spectra, ranks) for survey, ranks in zip(self.surveys, plans, strict=True))
            for plans in (plan, [survey.ranks for survey in self.surveys])
        )
        self.shares[key] = kept / whole
        self.scores[key] = self.scorer.score(smaller)

    def records(self, count: int) -> list[dict[str, Any]]:
        original = statistics.fmean(self.scores["original"])
        note = f"{len(self.adapters)} adapters, {count} held-out questions each"
        records = [results.record(f"score/{self.name}/original", original, "points", note=note + self._each("original"))]
        for key in self.scores:
            if key == "original":
                continue
            policy, budget = key.split(" ")
            name = f"{self.name}/{policy}/{budget.replace('/', '_')}"
            found = statistics.fmean(self.scores[key])
            beside = ("original", original)
            records.append(results.record(f"score/{name}", found, "points", baseline=beside, note=note + self._each(key)))
            wanted = f"value <= {WANTED_LOSS}" if policy in ("spectral", "fleet") and budget == "1/12" else None
            records.append(results.record(f"lost/{name}", original - found, "points", limit=wanted, note=note))
            if key in self.energies:
                energies = self.energies[key]
                smallest = f"mean share of energy kept; smallest {min(energies):.4f}; {self.shares[key]:.4f} of the parameters"
                records.append(results.record(f"energy/{name}", statistics.fmean(energies), "", note=smallest))
        return records

    def _each(self, key: str) -> str:
        pairs = zip(self.adapters, self.scores[key], strict=True)
        return ": " + ", ".join(f"{adapter.name} {score:g}" for adapter, score in pairs)


def markdown(fleet: Fleet) -> str:
    """Means by policy and budget, then every adapter at 1/12; what was not reached is left out."""

    def mean(key: str) -> str:
        if key not in fleet.scores:
            return "-"
        energy = f" ({statistics.fmean(fleet.energies[key]):.3f})" if key in fleet.energies else ""
        return f"{statistics.fmean(fleet.scores[key]):.2f}{energy}"

    names = ("uniform", *(name for name in POLICIES if name != "uniform"), JD_FULL)
    lines = [f"{fleet.name}\n", "| budget | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines.append(f"| 1 (original) | {mean('original')} |" + " |" * (len(names) - 1))
    lines += [f"| {budget} | {' | '.join(mean(f'{name} {budget}') for name in names)} |" for budget in reversed(BUDGETS)]
    keys = [f"{name} {BUDGETS[0]}" for name in names]
    lines += ["", f"| adapter | original | {' | '.join(keys)} |", "|---" * (len(names) + 2) + "|"]
    for index, adapter in enumerate(fleet.adapters):
        cells = [f"{fleet.scores[key][index]:g}" if key in fleet.scores else "-" for key in ("original", *keys)]
        lines.append(f"| {adapter.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fleets", type=Path, nargs="+", help="folders with an adapter per task")
    parser.add_argument("--count", type=int, default=200, help="held-out questions per adapter (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=results.RESULTS, help="folder for fleet_quality_<machine>.json")
    parser.add_argument("--tables", type=Path, help="write the tables here, in Markdown")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--only", nargs="+", metavar="'POLICY BUDGET'", help="these, as 'spectral 1/12' (default: all)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + arguments.seconds
    machine = "cpu" if arguments.device == "cpu" else results.gpu()
    fleets = [Fleet.of(folder, arguments.count, arguments.device) for folder in arguments.fleets]
    # What matters most first: the smallest budget, then the two policies of the paper, then what they are compared with.
    todo = [(name, BUDGETS[0]) for name in (*POLICIES, JD_FULL)]
    todo += [
        (name, budget)
        for names in (("spectral", "uniform"), ("fleet", "bounded"), (JD_FULL,))
        for budget in BUDGETS[1:]
        for name in names
    ]
    if arguments.only:
        todo = [(name, budget) for name, budget in todo if f"{name} {budget}" in arguments.only]
        assert len(todo) == len(arguments.only), (
            f"--only {arguments.only}: policies {', '.join((*POLICIES, JD_FULL))}, budgets 1/12 to 1/2"
        )
    for (name, budget), fleet in itertools.product(todo, fleets):
        key = f"{name} {budget}"
        if time.monotonic() > end:
            print(f"{fleet.name} {key}: no time left", flush=True)
            continue
        fleet.compress(name, budget)
        energy = f" energy {statistics.fmean(fleet.energies[key]):.4f}" if key in fleet.energies else ""
        scores = [statistics.fmean(fleet.scores[one]) for one in (key, "original")]
        print(f"{fleet.name} {key}: {scores[0]:.2f} of {scores[1]:.2f}{energy}", flush=True)
        records = [record for one in fleets for record in one.records(arguments.count)]
        results.write("fleet_quality", machine, records, arguments.out)
        if arguments.tables:
            arguments.tables.write_text("\n".join(map(markdown, fleets)), encoding="utf-8")
    print("\n".join(map(markdown, fleets)))


if __name__ == "__main__":
    main()
