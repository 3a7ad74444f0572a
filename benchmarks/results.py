"""Records of measurements, in the one form that all benchmarks use.

A record says what was measured, next to what, and on what: ``metric``, ``value``, ``unit``, ``baseline`` (name and value,
measured in the same run), ``ratio`` (value / baseline), ``limit`` and whether it was ``met``, ``command``, ``hardware``,
``versions``, ``date``, ``note``. A file ``results/<topic>_<hardware>.json`` is a list of them.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("sglang", "torch", "triton", "sglang-lora-tree")
_COMPARISONS = {"<=": lambda value, bound: value <= bound, ">=": lambda value, bound: value >= bound}


def record(
    metric: str,
    value: float,
    unit: str,
    *,
    baseline: tuple[str, float] | None = None,
    limit: str | None = None,
    note: str = "",
) -> dict[str, Any]:
    """Make one record.

    Args:
        metric: a path-like name, what varies last: "evict_vs_default/100000".
        baseline: name and value of what it is compared with, measured in the same run and in the same unit.
        limit: what is wanted, "ratio <= 1.0" or "value >= 0.8"; None if the number only informs.

    Raises:
        ValueError: if ``limit`` cannot be read, or speaks of a ratio without a baseline.
    """
    ratio = None if baseline is None or baseline[1] == 0 else value / baseline[1]
    return {
        "metric": metric,
        "value": _rounded(value),
        "unit": unit,
        "baseline": None if baseline is None else {"name": baseline[0], "value": _rounded(baseline[1])},
        "ratio": None if ratio is None else _rounded(ratio),
        "limit": limit,
        "met": None if limit is None else _holds(limit, value, ratio),
        "command": command(),
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "note": note,
    }


def write(topic: str, machine: str, records: Sequence[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write a topic's records for one kind of machine ("cpu", "h200"), replacing those of an earlier run.

    Metrics must be unique: a reader finds a number by its name.
    """
    names = [entry["metric"] for entry in records]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"metrics recorded twice: {twice}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{topic}_{machine}.json"
    path.write_text(json.dumps(list(records), indent=1) + "\n", encoding="utf-8")
    return path


def merge(topic: str, machine: str, records: Sequence[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """`write`, but what the file has of other metrics stays: for a part that is measured by itself."""
    path = folder / f"{topic}_{machine}.json"
    known = {entry["metric"]: entry for entry in json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}
    known |= {entry["metric"]: entry for entry in records}
    return write(topic, machine, list(known.values()), folder)


@dataclass
class Report:
    """A topic's records, on disk after each: a run that is cut short leaves what it has."""

    topic: str
    machine: str
    folder: Path = RESULTS
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *records: dict[str, Any]) -> None:
        """Keep, write and print."""
        self.records += records
        write(self.topic, self.machine, self.records, self.folder)
        print(table(records), flush=True)


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as text, one line each."""
    lines = []
    for entry in records:
        beside = "" if entry["baseline"] is None else f"{entry['baseline']['name']} {entry['baseline']['value']:g}"
        ratio = "" if entry["ratio"] is None else f"x{entry['ratio']:.3g}"
        verdict = {None: "", True: "met", False: "MISSED"}[entry["met"]]
        lines.append(f"{entry['metric']:<44}{entry['value']:>12g} {entry['unit']:<8}{beside:<28}{ratio:<10}{verdict}")
    return "\n".join(lines)


def command() -> str:
    """How this process was started, with paths relative to the working folder."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [_relative(sys.argv[0])]
    return shlex.join(["python", *program, *map(_relative, sys.argv[1:])])


def hardware() -> str:
    """The GPUs if there are any, else the processor and how many cores this process may use."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return " + ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


def gpu() -> str:
    """The kind of GPU as file names have it: "h200"."""
    return hardware().lower().rpartition(" ")[2]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def _relative(argument: str) -> str:
    """A path as seen from here; one outside of here by its name alone, since it says nothing on another machine."""
    if not os.path.isabs(argument):
        return argument
    near = os.path.relpath(argument)
    return os.path.basename(argument) if near.startswith("..") else near


def _holds(limit: str, value: float, ratio: float | None) -> bool:
    words = limit.split()
    if len(words) != 3 or words[0] not in ("value", "ratio") or words[1] not in _COMPARISONS:
        raise ValueError(f"limit {limit!r} is not of the form 'value <= 0.5' or 'ratio >= 0.8'")
    subject = value if words[0] == "value" else ratio
    if subject is None:
        raise ValueError(f"limit {limit!r} compares with a baseline, and none was given")
    return bool(_COMPARISONS[words[1]](subject, float(words[2])))
