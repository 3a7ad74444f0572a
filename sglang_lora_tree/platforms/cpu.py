"""SGLang's out-of-tree platform seam (entry-point group ``sglang.srt.platforms``), filled for plain CPUs.

SGLang's own CPU engine needs a CPU build of its kernels; this platform needs nothing but torch. It is a reference: every
operation takes SGLang's native torch path, in any dtype, slowly and exactly.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

PLATFORM_NAME = "lora_tree_cpu"
PLATFORM_CLASS = "sglang_lora_tree.platforms.cpu_platform.CpuReferencePlatform"


def activate() -> str | None:
    """Name the platform class if this machine has nothing better, else None (seam: ``platforms._resolve_platform``)."""
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected is not None and selected != PLATFORM_NAME:
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None  # the user asked for SGLang's own CPU engine
    if selected is None and _other_platforms_installed():
        return None  # two active platforms are an error in SGLang; a hardware vendor's goes first
    return None if has_accelerator() else PLATFORM_CLASS


def has_accelerator() -> bool:
    """Whether torch sees an accelerator of any kind on this machine."""
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        return True
    if torch.backends.mps.is_available():
        return True
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "cpu"


def is_active() -> bool:
    """Whether SGLang runs on this platform in this process."""
    from sglang.srt.platforms import current_platform

    return type(current_platform).__name__ == PLATFORM_CLASS.rpartition(".")[2]


def _other_platforms_installed() -> bool:
    return any(point.name != PLATFORM_NAME for point in entry_points(group="sglang.srt.platforms"))
