"""Runs a file of Triton tests in a process of its own, whose kernels run in Triton's interpreter on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from background import run_command


def run_interpreted(file: Path) -> subprocess.CompletedProcess[str]:
    """pytest on the file."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", str(file)]
    return run_command(command, 900, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


def assert_passed(run: subprocess.CompletedProcess[str]) -> None:
    """Its tests ran and passed."""
    pytest.importorskip("triton")
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout, run.stdout[-4000:]
