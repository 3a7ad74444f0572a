"""The example in the room's docstring runs."""

import doctest

import pytest
import torch

from sglang_lora_tree import kernels
from sglang_lora_tree.kernels.lora import uses_triton


@pytest.mark.skipif(uses_triton(torch.device("cpu")), reason="the example is for plain torch")
def test_docstring_example():
    assert doctest.testmod(kernels).failed == 0
