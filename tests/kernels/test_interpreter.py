"""Without a GPU: the Triton tests in a process of their own, whose kernels run in Triton's interpreter on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreter import run_interpreted

TESTS = Path(__file__).with_name("test_triton.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton.py runs compiled here")
@pytest.mark.timeout(600)  # about 75 s on an idle core
def test_triton_under_the_interpreter():
    assert "skipped" not in run_interpreted(TESTS)
