"""Without a GPU: the Triton tests in a process of their own, whose kernels run in Triton's interpreter on the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from background import Background, in_background
from interpreter import assert_passed, run_interpreted


def run_triton_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_interpreted(Path(__file__).with_name("test_triton.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton.py runs compiled here")
@pytest.mark.timeout(600)  # about 75 s on an idle core
@in_background(run_triton_tests)
def test_triton_under_the_interpreter(background: Background):
    run = background.result(run_triton_tests)
    assert_passed(run)
    assert "skipped" not in run.stdout
