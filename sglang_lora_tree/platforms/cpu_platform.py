"""The platform class itself; imported only where SGLang is (see ``cpu.activate``)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """Plain torch on the CPU: no graphs, no pinned memory, native attention."""

    _enum = PlatformEnum.OOT
    DEFAULT_POOL_TOKENS = 32768

    def get_device(self, device_id: int = 0) -> Any:
        return "cpu"  # SGLang splits the name of an out-of-tree device at ":"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"  # without it, POST /start_profile stops the scheduler

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """What a laptop wants where the user left SGLang's default (seam: ``SRTPlatform.apply_server_args_defaults``)."""
        server_args.disable_overlap_schedule = True
        server_args.sleep_on_idle = True  # the cores that would spin are the ones that compute
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        if server_args.max_total_tokens is None:
            # The pool is ordinary RAM here: SGLang's share of "device memory" would be most of the machine.
            server_args.max_total_tokens = self.DEFAULT_POOL_TOKENS
        if server_args.hicache_io_backend == "kernel":
            server_args.hicache_io_backend = "direct"
