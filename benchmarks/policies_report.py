"""Records and plots of the policy benchmark, from the runs that ``benchmarks.policies`` left."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_report(parts: dict[str, list[dict[str, Any]]], docs: Path) -> None:
    """Write results/policies_sim.json and docs/policies.png."""
