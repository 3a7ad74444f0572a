"""Without a GPU: the Triton tests in a process of their own, whose kernels run in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).with_name("test_triton.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton.py runs compiled here")
@pytest.mark.timeout(600)  # about 50 s on an idle core
def test_triton_under_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", str(TESTS)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=TESTS.parents[2],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout
