"""On a GPU: the server's answers equal PEFT's with decode graphs off and on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here; what an H200 measured is in benchmarks/results/acceptance_h200.json",
)


@pytest.mark.parametrize("phase", ["eager", "graphs"])
def test_acceptance(phase: str, tmp_path: Path) -> None:
    """benchmarks/acceptance_gpu.py measures it; every limit that it states is met."""
    command = [sys.executable, "-m", "benchmarks.acceptance_gpu", "--phases", phase, "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    output = result.stdout[-8000:] + result.stderr[-8000:]
    assert result.returncode == 0, output
    records = [record for path in tmp_path.glob("acceptance_*.json") for record in json.loads(path.read_text())]
    assert records, output
    assert all(record["met"] is not False for record in records), records
