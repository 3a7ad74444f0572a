"""What compression costs, before anyone trusts it: tables, a picture and report.json."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from sglang_lora_tree.adapters.base_shape import BaseShape
from sglang_lora_tree.fleet.budget import count_parameters, kept_energy, total_energy
from sglang_lora_tree.fleet.compress import POLICIES, Outcome, Settings, plan_ranks
from sglang_lora_tree.fleet.survey import Survey

CURVE = tuple(Fraction(1, divisor) for divisor in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
WORST = 5
REPORT = "report.json"


class EvaluationError(Exception):
    """The command that scores adapters failed; says how."""


# Before: the budget curve


def budget_curve(surveys: Sequence[Survey], settings: Settings, base: BaseShape | None) -> list[dict[str, Any]]:
    """One row per budget and policy: share of parameters, mean and smallest energy kept, bytes, slots (None without base)."""
    rows = []
    for budget in sorted({*CURVE, settings.budget}, reverse=True):
        for policy in POLICIES:
            chosen = Settings(budget, policy, settings.scope, settings.floor, settings.max_energy_loss, settings.keep)
            plan = plan_ranks(surveys, chosen)
            kept = [energy_share(survey, ranks) for survey, ranks in zip(surveys, plan, strict=True)]
            pairs = list(zip(surveys, plan, strict=True))
            before = sum(count_parameters(survey.spectra, survey.ranks) for survey in surveys)
            after = sum(count_parameters(survey.spectra, ranks) for survey, ranks in pairs)
            rows.append(
                {
                    "budget": str(budget),
                    "policy": policy,
                    "parameters": after / before,
                    "energy": sum(kept) / len(kept),
                    "smallest_energy": min(kept),
                    "bytes": round(sum(survey.num_bytes for survey in surveys) * after / before),
                    "slots": sum(survey.slots(ranks, base) for survey, ranks in pairs) if base else None,
                }
            )
    return rows


def energy_share(survey: Survey, ranks: Sequence[int]) -> float:
    """Share of an adapter's energy that these ranks keep; 1 for an adapter of zeros."""
    total = total_energy(survey.spectra)
    return kept_energy(survey.spectra, ranks) / total if total > 0 else 1.0


def curve_text(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("budget", "policy", "parameters", "energy kept", "worst adapter", "MB", "slots")
    body = [
        (
            row["budget"],
            row["policy"],
            f"{row['parameters']:.4f}",
            f"{row['energy']:.4f}",
            f"{row['smallest_energy']:.4f}",
            f"{row['bytes'] / 1e6:.1f}",
            "-" if row["slots"] is None else str(row["slots"]),
        )
        for row in rows
    ]
    return _table(head, body)


def draw_curve(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """The curve as a PNG: energy over parameters, and slots or bytes over the budget. Raises OSError, ImportError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for policy, colour in zip(POLICIES, ("#3b6fb6", "#ee8a2e"), strict=True):
        points = [row for row in rows if row["policy"] == policy]
        shares = [row["parameters"] for row in points]
        left.plot(shares, [row["energy"] for row in points], "o-", color=colour, label=f"{policy}, mean")
        left.plot(shares, [row["smallest_energy"] for row in points], ":", color=colour, label=f"{policy}, worst adapter")
        amounts = [row["bytes"] / 1e6 if row["slots"] is None else row["slots"] for row in points]
        right.plot(shares, amounts, "o-" if policy == POLICIES[0] else "x--", color=colour, label=policy)
    left.set(xscale="log", xlabel="share of parameters", ylabel="share of energy kept", ylim=(0, 1.02))
    unit = "MB" if rows[0]["slots"] is None else "token slots in the pool"
    right.set(xscale="log", yscale="log", xlabel="share of parameters", ylabel=unit)
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


# After: what each adapter lost


def describe(outcomes: Sequence[Outcome], settings: Settings, base: BaseShape | None) -> dict[str, Any]:
    """report.json: the settings, and per adapter sizes, energy kept, error and its worst modules."""
    adapters = {outcome.survey.name: _describe_one(outcome, settings, base) for outcome in outcomes}
    return {
        "budget": str(settings.budget),
        "policy": settings.policy,
        "scope": settings.scope,
        "rank_floor": settings.floor,
        "max_energy_loss": settings.max_energy_loss,
        "adapters": adapters,
    }


def _describe_one(outcome: Outcome, settings: Settings, base: BaseShape | None) -> dict[str, Any]:
    survey, ranks = outcome.survey, outcome.ranks
    modules: list[dict[str, Any]] = []
    for (layer, module), spectrum, rank in zip(survey.shapes, survey.spectra, ranks, strict=True):
        total = float(spectrum.energy.sum())
        kept = float(spectrum.energy[:rank].sum()) / total if total > 0 else 1.0
        modules.append({"layer": layer, "module": module, "rank": rank, "of": spectrum.rank, "energy": kept})
    return {
        "kept_as_is": survey.name in settings.keep,
        "source_digest": survey.digest,
        "parameters": [count_parameters(survey.spectra, survey.ranks), count_parameters(survey.spectra, ranks)],
        "bytes": [survey.num_bytes, outcome.num_bytes],
        "slots": [survey.slots(survey.ranks, base), survey.slots(ranks, base)] if base else None,
        "energy": energy_share(survey, ranks),
        "relative_error": outcome.error,
        "ranks": [min(ranks), sum(ranks) / len(ranks), max(ranks)],
        "worst_modules": sorted(modules, key=lambda entry: entry["energy"])[:WORST],
        "modules": modules,
    }


def add_scores(report: dict[str, Any], before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Puts task scores beside the energies."""
    for name, entry in report["adapters"].items():
        entry["score"] = [before.get(name), after.get(name)]


def report_text(report: Mapping[str, Any]) -> str:
    """A line per adapter, then the modules that lost most."""
    adapters = report["adapters"]
    scored = any("score" in entry for entry in adapters.values())
    head = ["adapter", "parameters", "of", "energy kept", "|dW - dW'|/|dW|", "ranks", "slots", "of"]
    head += ["score", "of"] if scored else []
    body = []
    for name, entry in adapters.items():
        low, mean, high = entry["ranks"]
        slots = entry["slots"] or ("-", "-")
        line = [name + " (kept)" * entry["kept_as_is"], str(entry["parameters"][1]), str(entry["parameters"][0])]
        line += [f"{entry['energy']:.4f}", f"{entry['relative_error']:.4f}", f"{low}-{high}, mean {mean:.1f}"]
        line += [str(slots[1]), str(slots[0])]
        if scored:
            line += ["-" if score is None else f"{score:.3f}" for score in reversed(entry["score"])]
        body.append(tuple(line))
    worst = sorted(
        ((module["energy"], name, module) for name, entry in adapters.items() for module in entry["worst_modules"]),
        key=lambda found: found[0],
    )[:WORST]
    lines = [
        f"  {name}: layer {module['layer']} {module['module']} keeps {energy:.3f} at rank {module['rank']} of {module['of']}"
        for energy, name, module in worst
    ]
    return _table(head, body) + "\nmodules that lost most:\n" + "\n".join(lines)


def write_report(report: Mapping[str, Any], out: Path) -> Path:
    file = out / REPORT
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return file


def run_evaluation(command: Sequence[str], folders: Mapping[str, Path]) -> dict[str, float]:
    """Scores by name: runs COMMAND FOLDER..., which prints JSON, {folder: score} or {"scores": {folder: score}}.

    Raises EvaluationError.
    """
    arguments = [*command, *(folder.as_posix() for folder in folders.values())]
    try:
        run = subprocess.run(arguments, capture_output=True, text=True)
    except OSError as error:
        raise EvaluationError(f"{command[0]} cannot be run ({error}): give --eval a command that scores folders") from error
    if run.returncode:
        raise EvaluationError(f"{' '.join(command)} ended with {run.returncode}: {run.stderr.strip()[-2000:]}")
    try:
        found = json.loads(run.stdout)
        found = found.get("scores", found)
        return {name: float(found[folder.as_posix()]) for name, folder in folders.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(
            f"{' '.join(command)} printed no JSON with a score for every folder ({error!r}): {run.stdout[:300]}"
        ) from error


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *body)]
    return "\n".join(lines)
