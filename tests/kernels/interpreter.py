"""Runs a file of Triton tests in a process of its own, whose kernels run in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(file: Path) -> str:
    """What pytest says about the file; fails unless its tests ran and passed."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=file.parents[2],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout, run.stdout[-4000:]
    return run.stdout
