"""What the CPU platform replaces works, and the rest of the process does not notice."""

from __future__ import annotations

import torch
from sglang.srt.lora import layers
from torch.utils._device import _device_constructors

from sglang_lora_tree.platforms import cpu_hooks


def test_torch_is_torch_for_everybody_else() -> None:
    """transformers builds models inside ``torch.device("meta")``; torch knows ``torch.tensor`` there by identity."""
    stock = torch.tensor
    _device_constructors.cache_clear()
    cpu_hooks.install()
    assert torch.tensor is stock
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == "meta"


def test_pinned_tensors_are_plain_ones() -> None:
    """SGLang's LoRA layers ask for pinned memory always, which torch refuses without an accelerator."""
    cpu_hooks.install()
    assert layers.torch.tensor([1, 2], dtype=torch.int32, pin_memory=True).tolist() == [1, 2]
    assert layers.torch.nn is torch.nn
    ones = torch.ones(2)
    assert ones.pin_memory() is ones


def test_the_profiler_knows_the_platform() -> None:
    """SGLang's scheduler asks it by name, and dies without an answer."""
    from sglang_lora_tree.platforms.cpu_platform import CpuReferencePlatform

    platform = CpuReferencePlatform()
    assert platform.get_torch_profiler_activity_str() == "CPU"
    assert platform.get_torch_profiler_activity() is torch.profiler.ProfilerActivity.CPU
