"""Every launch is compiled for GPUs that this machine need not have: its shared memory is there on the smallest of them."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import GROUPS, WIDTHS, World, all_modules, make_world

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402

from sglang_lora_tree.kernels import dispatch, finish, lora  # noqa: E402
from sglang_lora_tree.kernels.rotation import Rotation  # noqa: E402

SHARED_BYTES = {86: 99 << 10, 90: 227 << 10}
"""What a block may use, by compute capability: 8.6 and 8.9 (RTX 3090, RTX 4090, L4, L40S) have least."""


class Driver:
    """Stands for a GPU of some capability while nothing is launched."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=sorted(SHARED_BYTES))
def launches(request, monkeypatch):
    """What launches become: compiled kernels, each with the shared memory that it asks for."""
    compiled = []

    def compile_only(kernel, grid):
        def launch(*operands, **options):
            compiled.append((request.param, kernel.fn.__name__, kernel.warmup(*operands, grid=grid, **options).metadata.shared))

        return launch

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(request.param), raising=False)
    monkeypatch.setattr(triton.runtime.JITFunction, "__getitem__", compile_only)
    monkeypatch.setattr(lora, "uses_triton", lambda device: True)
    return compiled


def launch_all(world: World, tokens: int) -> None:
    """A launch of each kind."""
    operands = world.table, world.pool, world.batch([tokens], [[(0, 1.0)]])
    for group in ("qkv", "gate_up"):
        modules, offsets = GROUPS[group]
        widths = tuple(WIDTHS[module][1] for module in modules)
        x, y = world.random(tokens, 40, seed=1), world.random(tokens, offsets[-1] + widths[-1], seed=2)
        shrunk = lora.shrink(x, *operands, 1, modules, widths)
        delta = lora.expand_delta(shrunk, *operands, tokens, offsets)
        if group == "gate_up":
            lora.expand_and_activate(shrunk, y, *operands)
            finish.activate_halves(y, delta)
        else:
            lora.expand(shrunk, y, *operands, offsets)
            rotation = Rotation(torch.zeros(tokens, dtype=torch.int64), torch.zeros(1, 4), 4)
            lora.expand_and_rotate(shrunk, y, *operands, offsets, rotation)
            finish.rotate_heads(y, delta, rotation, offsets[2])
            finish.normalize(y, delta, y.clone(), y[0].clone(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", dispatch.DEFAULT, ids=lambda config: f"tiles of {config.block_t}")
def test_defaults_fit_every_gpu(launches, config, dtype):
    world = make_world(WIDTHS, [all_modules(16)], width=1024, dtype=dtype)
    launch_all(world, min(config.max_tokens, 600))
    assert len(launches) == 10
    too_large = [launch for launch in launches if launch[2] > SHARED_BYTES[launch[0]]]
    assert not too_large, too_large
