"""One model shape on a GPU, without a server: base weights, a pool of slots with adapters in it, batches over them.

    python -m benchmarks.kernel_world [--out FOLDER] [--layers 32] [--device cpu]

measures what LoRA adds to a decode step of the base model's linear layers (Llama-3-8B's shape, bf16, rank 16, as CUDA graphs):

decode_added_ms/ADAPTERS, decode_added_ms/mix3of8
    32 requests; the step with adapters minus the step without (the baseline), both measured in turns, the median of the turns.
host_preparation_ms/changed, host_preparation_ms/unchanged
    Host time of one `Pairs.update` for 256 requests with 3 adapters each, one request of which has changed (or none).

Results: ``decode_added_<gpu>.json``, written after every record. On a CPU a tiny shape runs through the same code.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks import results
from sglang_lora_tree.kernels import AdapterTable, Pairs, PoolView, dispatch
from sglang_lora_tree.kernels.lora import expand, expand_and_activate, expand_and_rotate, shrink
from sglang_lora_tree.kernels.rotation import Rotation
from sglang_lora_tree.kernels.rows import activate, rotate
from sglang_lora_tree.kernels.table import NUM_MODULES

Mixes = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Layer:
    """A linear layer of the base model: the modules that it holds and their widths."""

    name: str
    modules: tuple[int, ...]
    d_in: int
    widths: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(sum(self.widths[:i]) for i in range(len(self.widths)))


LLAMA_8B = (
    Layer("qkv", (0, 1, 2), 4096, (4096, 1024, 1024)),
    Layer("o", (3,), 4096, (4096,)),
    Layer("gate_up", (4, 5), 4096, (14336, 14336)),
    Layer("down", (6,), 14336, (4096,)),
)
LLAMA_8B_WIDTH = 1024
HEADS = {LLAMA_8B_WIDTH: 128, 16: 8}
"""Width of an attention head, by that of a row of the pool."""
TINY = (
    Layer("qkv", (0, 1, 2), 32, (32, 16, 16)),
    Layer("o", (3,), 32, (32,)),
    Layer("gate_up", (4, 5), 32, (48, 48)),
    Layer("down", (6,), 48, (32,)),
)
TINY_WIDTH = 16


class KernelWorld:
    """Adapters of given ranks on every linear layer, in random slots of a pool (or in consecutive ones).

    Args:
        ranks: one adapter each.
        num_layers: fewer than the real model's are enough, as long as the weights are larger than the cache.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        num_layers: int,
        *,
        shape: Sequence[Layer] = LLAMA_8B,
        width: int = LLAMA_8B_WIDTH,
        max_rank: int = 64,
        max_members: int = 8,
        contiguous: bool = False,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape, self.num_layers, self.max_members = shape, num_layers, max_members
        self.device, self.dtype, self.width = device, dtype, width
        rows_per_rank = sum(
            -(-layer.d_in // width) + -(-out // width) for layer in shape for out in layer.widths
        )  # of one layer of the model
        counts = [-(-rank * rows_per_rank * num_layers // (2 * num_layers)) for rank in ranks]
        size = sum(counts) * 2 + 64
        planes = [torch.randn(size, width, dtype=dtype, device=device) * 0.02 for _ in range(2 * num_layers)]
        self.pool = PoolView.from_planes(planes)
        self.table = AdapterTable(len(ranks) + 1, size, num_layers, max_rank, device)
        free = torch.arange(size) if contiguous else torch.randperm(size, generator=torch.Generator().manual_seed(1))
        for index, (rank, count) in enumerate(zip(ranks, counts, strict=True)):
            slots, free = free[:count], free[count:]
            entry = torch.zeros(num_layers, NUM_MODULES, dtype=torch.int32)
            row = 0
            for number in range(num_layers):
                for layer in shape:
                    for module, out in zip(layer.modules, layer.widths, strict=True):
                        entry[number, module] = row
                        row += rank * (-(-layer.d_in // width) + -(-out // width))
            self.table.write(index, slots, entry, torch.full_like(entry, rank), torch.ones(entry.shape))
        self.table.flush()
        self.weights = [
            [torch.randn(sum(layer.widths), layer.d_in, dtype=dtype, device=device) * 0.02 for layer in shape]
            for _ in range(num_layers)
        ]
        self.side = torch.cuda.Stream() if device == "cuda" else None

    def pairs(self, seg_lens: Sequence[int], mixes: Mixes, for_graphs: bool = True) -> Pairs:
        tokens = sum(seg_lens)
        block_t = dispatch.choose(tokens, torch.device(self.device)).block_t
        pairs = Pairs.allocate(self.table, len(seg_lens), tokens, self.max_members, block_t, for_graphs)
        pairs.update(seg_lens, mixes)
        return pairs

    def make_step(self, tokens: int, pairs: Pairs | None, overlap: bool = False) -> Callable[[], None]:
        """All linear layers of a forward pass over `tokens` tokens, with the batch's adapters unless `pairs` is None.

        overlap: shrink on a stream of its own, beside the base product.
        """
        xs = [torch.randn(tokens, layer.d_in, dtype=self.dtype, device=self.device) for layer in self.shape]
        ys = [torch.zeros(tokens, sum(layer.widths), dtype=self.dtype, device=self.device) for layer in self.shape]
        side = self.side if overlap else None
        angles = torch.rand(tokens, HEADS[self.width], device=self.device)
        rotation = Rotation(torch.arange(tokens, device=self.device), angles, HEADS[self.width])

        def step() -> None:
            for number in range(self.num_layers):
                for layer, x, y, weight in zip(self.shape, xs, ys, self.weights[number], strict=True):
                    if tokens <= 256:
                        x.neg_()  # a model has a norm, a rotation or an activation before every product
                    activates, rotates = len(layer.modules) == 2, len(layer.modules) == 3
                    if pairs is None:
                        torch.mm(x, weight.T, out=y)
                        if activates:
                            silu_and_mul(y)
                        elif rotates:
                            rotate_heads(y[:, : sum(layer.widths[:2])], rotation)
                        continue
                    if side is not None:
                        side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        shrunk = shrink(x, self.table, self.pool, pairs, number, layer.modules, layer.widths)
                    torch.mm(x, weight.T, out=y)
                    if side is not None:
                        torch.cuda.current_stream().wait_stream(side)
                    if activates:
                        expand_and_activate(shrunk, y, self.table, self.pool, pairs)
                    elif rotates:
                        expand_and_rotate(shrunk, y, self.table, self.pool, pairs, layer.offsets, rotation)
                    else:
                        expand(shrunk, y, self.table, self.pool, pairs, layer.offsets)

        return step


@triton.jit
def _silu_and_mul(y, out, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    gate = tl.load(y + row * 2 * D + d, mask=d < D)
    up = tl.load(y + row * 2 * D + D + d, mask=d < D)
    tl.store(out + row * D + d, activate(gate, up), mask=d < D)


def silu_and_mul(y: torch.Tensor) -> torch.Tensor:
    """What the base model does to gate and up: (T, 2 d) -> (T, d)."""
    if not y.is_cuda:
        gate, up = y.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up
    out = torch.empty(y.shape[0], y.shape[1] // 2, dtype=y.dtype, device=y.device)
    _silu_and_mul[(triton.cdiv(out.shape[1], 1024), out.shape[0])](y, out, out.shape[1], 1024)
    return out


@triton.jit
def _rotate_heads(y, positions, cos_sin, num_tokens, y_stride, HEAD: tl.constexpr, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = tokens < num_tokens
    cells = y + tokens.to(tl.int64)[:, None] * y_stride + tl.program_id(0) * HEAD + tl.arange(0, HEAD)[None, :]
    position = tl.load(positions + tokens, mask=exists, other=0)
    tile = tl.load(cells, mask=exists[:, None], other=0.0)
    angles = cos_sin + position[:, None] * HEAD
    tl.store(cells, rotate(tile, angles, angles + HEAD // 2, HEAD), mask=exists[:, None])


def rotate_heads(y: torch.Tensor, rotation: Rotation) -> None:
    """What the base model does to q and k (T, columns), in place."""
    if not y.is_cuda:
        y.copy_(rotation.apply(y))
        return
    grid = (y.shape[1] // rotation.head, triton.cdiv(y.shape[0], 4))
    _rotate_heads[grid](y, rotation.positions, rotation.cos_sin, y.shape[0], y.stride(0), rotation.head, 4)


@functools.lru_cache(1)
def _capture_stream() -> torch.cuda.Stream:
    """One for all: torch hands out 32 in turns, and the one that a world has beside it must be another."""
    return torch.cuda.Stream()


def time_graph(step: Callable[[], None], repeats: int = 20, rounds: int = 5) -> float:
    """Milliseconds of one `step`, replayed as a CUDA graph: the median over rounds of the mean over repeats.

    Without a GPU the step runs once, as it is: to see that it does.
    """
    if not torch.cuda.is_available():
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1000
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(rounds):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(repeats):
            graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / repeats)
    return statistics.median(times)


def decode_mixes(bs: int, adapters: int, members: int = 1) -> list[list[tuple[int, float]]]:
    """Request i has adapters i, i + 1, ... modulo their number, with unequal weights."""
    return [[((i + j) % adapters, 0.3 + 0.2 * j) for j in range(members)] for i in range(bs)]


def decode_added(world: KernelWorld, bs: int, mixes: Mixes, turns: int = 3) -> tuple[float, float]:
    """Milliseconds that the adapters of `mixes` add to a decode step of `bs` requests, and those of the step without."""
    overlap = world.side is not None and dispatch.choose(bs, torch.device(world.device)).overlap
    steps = world.make_step(bs, None), world.make_step(bs, world.pairs([1] * bs, mixes), overlap=overlap)
    times = [[time_graph(step) for step in steps] for _ in range(turns)]  # in turns: a GPU's clock moves
    return statistics.median(after - before for before, after in times), statistics.median(before for before, _ in times)


def host_preparation(world: KernelWorld, changes: bool, bs: int = 256, members: int = 3, calls: int = 300) -> list[float]:
    """Milliseconds on the host of each of `calls` updates; nothing waits for the device."""
    adapters = world.table.capacity - 1
    mixes = [np.array(mix, dtype=np.float64) for mix in decode_mixes(bs, adapters, min(members, adapters))]
    pairs = world.pairs([1] * bs, mixes)  # type: ignore[arg-type]
    times = []
    for call in range(calls):
        if changes:
            mixes[call % bs] = mixes[call % bs].copy()
        start = time.perf_counter()
        pairs.update([1] * bs, mixes)
        times.append((time.perf_counter() - start) * 1000)
    return times[calls // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    parser.add_argument("--layers", type=int, default=32, help="of the model; fewer for a quick look")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    machine = results.gpu() if on_gpu else "cpu"
    shape: dict[str, Any] = {} if on_gpu else {"shape": TINY, "width": TINY_WIDTH, "device": "cpu", "dtype": torch.float32}
    world = KernelWorld([16] * 32, arguments.layers, **shape)
    report = results.Report("decode_added", machine, arguments.out)
    for name, changes in (("changed", True), ("unchanged", False)):
        times = host_preparation(world, changes)
        note = f"256 requests, 3 adapters each; {len(times)} updates, the slowest {max(times):.2g} ms"
        typical = statistics.median(times)
        report.add(results.record(f"host_preparation_ms/{name}", typical, "ms", limit="value <= 0.15", note=note))
    for name, adapters, members in (("1", 1, 1), ("8", 8, 1), ("32", 32, 1), ("mix3of8", 8, 3)):
        added, base = decode_added(world, 32, decode_mixes(32, adapters, members))
        baseline = ("products, rotations and activations without LoRA, as one graph", base)
        note = f"32 requests, rank 16, {arguments.layers} layers"
        report.add(results.record(f"decode_added_ms/{name}", added, "ms", baseline=baseline, note=note))


if __name__ == "__main__":
    main()
