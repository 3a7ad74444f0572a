"""Compress a fleet of adapters: look at each, plan the ranks, write each. One adapter is in memory at a time.

Until the run is finished, OUT/.work holds what was found about the adapters (a few percent of their size); a run that was
cut short goes on from it, and an adapter folder in OUT is always whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from sglang_lora_tree.adapters.adapter import load_adapter
from sglang_lora_tree.adapters.base_shape import BaseShape
from sglang_lora_tree.adapters.tensors import find_tensor_file
from sglang_lora_tree.fleet.budget import (
    Spectrum,
    count_parameters,
    ranks_within_loss,
    spectral_ranks,
    total_energy,
    uniform_ranks,
)
from sglang_lora_tree.fleet.export import write_adapter
from sglang_lora_tree.fleet.factorisation import Factors, Place, factorise, relative_error, truncate
from sglang_lora_tree.fleet.survey import Survey, read_factors, read_survey, write_survey

WORK = ".work"
POLICIES = ("spectral", "uniform")
SCOPES = ("adapter", "fleet")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

T = TypeVar("T")


class CompressionError(Exception):
    """What was asked for cannot be done; says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """How to compress.

    budget: share of the parameters to keep (the paper's 1/d). policy: "spectral" (S) or "uniform" (U). scope: what S spends
    one budget on, each "adapter" or the whole "fleet". floor: smallest rank of a module. max_energy_loss: an adapter that
    would lose more of its energy gets more than its budget. keep: names of adapters that stay as they are. padded: write
    every module at the adapter's largest rank. dtype: of the result, None for the original's.
    """

    budget: Fraction
    policy: str = "spectral"
    scope: str = "adapter"
    floor: int = 1
    max_energy_loss: float | None = None
    keep: tuple[str, ...] = ()
    padded: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        assert self.policy in POLICIES and self.scope in SCOPES, f"{self.policy}, {self.scope}: no such policy or scope"
        assert self.floor >= 1, "a module without a direction would be missing from the adapter"
        assert self.dtype is None or self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}"


@dataclass(frozen=True)
class Outcome:
    """What became of one adapter.

    ranks: per module, in the survey's order. num_bytes: of the tensor file. error: |dW - dW'| / |dW|, of what was written.
    """

    survey: Survey
    ranks: list[int]
    num_bytes: int
    error: float


def compress(
    folders: Sequence[Path],
    out: Path,
    settings: Settings,
    base: BaseShape | None = None,
    device: torch.device | str = "cpu",
) -> list[Outcome]:
    """Writes OUT/<name> for every adapter folder, and returns what each lost.

    base: to check shapes against. Raises CompressionError for names that are not unique or an OUT that holds something
    else, AdapterError for an adapter that cannot be served, BudgetError for floors above the budget.
    """
    outcomes = write_fleet(folders, out, settings, base, device)
    finish(out)
    return outcomes


def write_fleet(
    folders: Sequence[Path],
    out: Path,
    settings: Settings,
    base: BaseShape | None = None,
    device: torch.device | str = "cpu",
) -> list[Outcome]:
    """`compress`, but not finished: for a caller that has more to write, and is repeated as a whole if it is cut short.

    What is written already is not written again. The last thing to call is `finish`.
    """
    named = _name(folders, settings.keep)
    work = _open_work(out, named, settings)
    surveys = [
        _survey(name, folder, work / f"{name}.safetensors", base, device)
        for name, folder in _progress(list(named.items()), "looking at adapters")
    ]
    plan = plan_ranks(surveys, settings)
    outcomes = [
        _write(survey, ranks, out, work, settings, base, device)
        for survey, ranks in _progress(list(zip(surveys, plan, strict=True)), "writing adapters")
    ]
    return outcomes


def finish(out: Path) -> None:
    """Ends a run of `write_fleet`: from here on OUT is a result, and never written to."""
    shutil.rmtree(out / WORK)


def survey_fleet(
    folders: Sequence[Path], base: BaseShape | None = None, device: torch.device | str = "cpu", keep: Sequence[str] = ()
) -> list[Survey]:
    """Looks at every adapter and writes nothing: what a dry run needs. Raises as `compress` does."""
    named = list(_name(folders, keep).items())
    return [_look(name, folder, base, device)[0] for name, folder in _progress(named, "looking at adapters")]


def plan_ranks(surveys: Sequence[Survey], settings: Settings) -> list[list[int]]:
    """Ranks per adapter and module. Adapters to keep have theirs, and no part in the fleet's budget."""
    plan = [survey.ranks for survey in surveys]
    chosen = [index for index, survey in enumerate(surveys) if survey.name not in settings.keep]
    uniform = {index: uniform_ranks(surveys[index].spectra, settings.budget, settings.floor) for index in chosen}
    if settings.policy == "uniform":
        found = uniform
    elif settings.scope == "adapter":
        found = {
            index: spectral_ranks(
                surveys[index].spectra, count_parameters(surveys[index].spectra, uniform[index]), settings.floor
            )
            for index in chosen
        }
    else:
        found = _plan_fleet(surveys, chosen, uniform, settings.floor)
    for index in chosen:
        plan[index] = found[index]
        if settings.max_energy_loss is not None:
            plan[index] = ranks_within_loss(surveys[index].spectra, found[index], settings.max_energy_loss)
    return plan


def _plan_fleet(
    surveys: Sequence[Survey], chosen: Sequence[int], uniform: Mapping[int, list[int]], floor: int
) -> dict[int, list[int]]:
    """One budget for all. Energies count as shares of their adapter's: large weights must not starve the others."""
    modules: list[Spectrum] = []
    budget = 0
    for index in chosen:
        spectra = surveys[index].spectra
        whole = total_energy(spectra) or 1.0
        modules += [Spectrum(spectrum.energy / whole, spectrum.cost) for spectrum in spectra]
        budget += count_parameters(spectra, uniform[index])
    ranks = iter(spectral_ranks(modules, budget, floor))
    return {index: [next(ranks) for _ in surveys[index].spectra] for index in chosen}


def _name(folders: Sequence[Path], keep: Sequence[str]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for folder in folders:
        name = folder.resolve().name
        if name in named:
            raise CompressionError(f"{named[name]} and {folder} have the same name: rename one, it names the result too")
        named[name] = folder
    if not named:
        raise CompressionError("no adapter to compress: name PEFT folders")
    absent = [name for name in keep if name not in named]
    if absent:
        raise CompressionError(f"to be kept but not among the adapters: {', '.join(absent)}")
    return named


def _open_work(out: Path, named: Mapping[str, Path], settings: Settings) -> Path:
    """OUT/.work of a new run, or of one with the same adapters and settings to go on with."""
    work = out / WORK
    run = asdict(settings) | {"budget": str(settings.budget), "keep": list(settings.keep)}
    run["adapters"] = {name: str(folder.resolve()) for name, folder in named.items()}
    file = work / "run.json"
    if file.is_file():
        if json.loads(file.read_text(encoding="utf-8")) != run:
            raise CompressionError(
                f"{out} holds the start of a run with other adapters or settings: repeat that one, or delete {out}"
            )
        return work
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CompressionError(f"{out} is there already and not empty: choose another --out, nothing is overwritten")
    work.mkdir(parents=True)
    file.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return work


def _survey(name: str, folder: Path, file: Path, base: BaseShape | None, device: torch.device | str) -> Survey:
    if file.is_file():
        return read_survey(file, folder)
    survey, factors = _look(name, folder, base, device)
    write_survey(survey, factors, file)
    return survey


def _look(
    name: str, folder: Path, base: BaseShape | None, device: torch.device | str
) -> tuple[Survey, dict[Place, Factors]]:
    """A function of its own, so that the adapter is gone before the next one is loaded."""
    adapter = load_adapter(folder, base, name)
    factors = factorise(adapter, device)
    return Survey.of(adapter, folder, factors), factors


def _write(
    survey: Survey,
    ranks: list[int],
    out: Path,
    work: Path,
    settings: Settings,
    base: BaseShape | None,
    device: torch.device | str,
) -> Outcome:
    target, done = out / survey.name, work / f"{survey.name}.json"
    if target.exists() and done.is_file():
        return Outcome(survey, ranks, **json.loads(done.read_text(encoding="utf-8")))
    original = load_adapter(survey.folder, base, survey.name)
    if original.digest != survey.digest:
        raise CompressionError(f"{survey.folder} has changed since the run began: delete {out} and start again")
    error = 0.0
    shutil.rmtree(target, ignore_errors=True)  # of a run that ended between the folder and its record
    if survey.name in settings.keep:
        shutil.copytree(survey.folder, target)
    else:
        dtype = DTYPES[settings.dtype] if settings.dtype else None
        factors = read_factors(work / f"{survey.name}.safetensors")
        smaller = truncate(original, factors, dict(zip(survey.shapes, ranks, strict=True)), device, dtype)
        write_adapter(survey.folder, target, smaller, padded=settings.padded)
        error = relative_error(original, smaller, device)
    result = {"num_bytes": find_tensor_file(target).stat().st_size, "error": error}
    done.write_text(json.dumps(result), encoding="utf-8")
    return Outcome(survey, ranks, **result)  # type: ignore[arg-type]


def _progress(items: Sequence[T], what: str) -> Iterable[T]:
    """A bar on a terminal, nothing elsewhere."""
    return tqdm(items, desc=what, unit="adapter", disable=None, leave=False)
