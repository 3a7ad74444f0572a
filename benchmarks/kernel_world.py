"""One model shape on a GPU, without a server: base weights, a pool of slots with adapters in it, batches over them.

    python -m benchmarks.kernel_world [--parts host added prefill] [--out FOLDER] [--layers 32] [--device cpu]

measures what LoRA adds to the base model's linear layers (Llama-3-8B's shape, bf16, as CUDA graphs):

decode_added_ms/ADAPTERS, decode_added_ms/mix3of8
    32 requests, rank 16; the step with adapters minus the step without (the baseline), both measured in turns, the median of
    the turns.
decode_added_ms/ADAPTERS_rRANK, decode_added_ms/8_r5_one_r64
    Other ranks; rank 5, but 64 in o_proj.
prefill_kernels_ms/8, prefill_kernels_ms/mix3of8
    shrink and expand of 8 requests of 1,024 tokens, without the products; the baseline is what the base model does in the place
    of expand, rotation and activation.
host_preparation_ms/changed, host_preparation_ms/unchanged
    Host time of one `Pairs.update` for 256 requests with 3 adapters each, one request of which has changed (or none).

Results: ``decode_added_<gpu>.json``, written after every record. On a CPU a tiny shape runs through the same code.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import results
from sglang_lora_tree.kernels import AdapterTable, Pairs, PoolView, dispatch
from sglang_lora_tree.kernels.lora import (
    Shrunk,
    add_and_activate,
    add_and_normalize,
    add_and_rotate,
    expand,
    expand_and_activate,
    expand_and_rotate,
    expand_delta,
    shrink,
)
from sglang_lora_tree.kernels.rotation import Rotation
from sglang_lora_tree.kernels.table import NUM_MODULES

Mixes = Sequence[Sequence[tuple[int, float]]]
PARTS = ("host", "added", "prefill")


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
        uneven: module -> its rank in every adapter, where it is not the adapter's.
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
        uneven: Mapping[int, int] | None = None,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape, self.num_layers, self.max_members = shape, num_layers, max_members
        self.device, self.dtype, self.width = device, dtype, width
        module_rows = {
            module: -(-layer.d_in // width) + -(-out // width)
            for layer in shape
            for module, out in zip(layer.modules, layer.widths, strict=True)
        }  # per rank
        module_ranks = [{module: (uneven or {}).get(module, rank) for module in module_rows} for rank in ranks]
        counts = [-(-sum(own[module] * rows for module, rows in module_rows.items()) // 2) for own in module_ranks]
        size = sum(counts) * 2 + 64
        planes = [torch.randn(size, width, dtype=dtype, device=device) * 0.02 for _ in range(2 * num_layers)]
        self.pool = PoolView.from_planes(planes)
        self.table = AdapterTable(len(ranks) + 1, size, num_layers, max_rank, device)
        free = torch.arange(size) if contiguous else torch.randperm(size, generator=torch.Generator().manual_seed(1))
        for index, (own, count) in enumerate(zip(module_ranks, counts, strict=True)):
            slots, free = free[:count], free[count:]
            start, rank = (torch.zeros(num_layers, NUM_MODULES, dtype=torch.int32) for _ in range(2))
            row = 0
            for number in range(num_layers):
                for module, rows in module_rows.items():
                    start[number, module], rank[number, module] = row, own[module]
                    row += own[module] * rows
            self.table.write(index, slots, start, rank, torch.ones(start.shape))
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

    def rotation(self, tokens: int) -> Rotation:
        head = HEADS[self.width]
        return Rotation(torch.arange(tokens, device=self.device), torch.rand(tokens, head, device=self.device), head)

    def make_step(self, tokens: int, pairs: Pairs | None, overlap: bool = False) -> Callable[[], None]:
        """A forward pass over `tokens` tokens but for attention, with the batch's adapters unless `pairs` is None.

        Linear layers, norms, rotation and activation, each in our form; where attention is, a launch over its output.
        overlap: shrink and expand on a stream of their own, beside the base product.
        """
        qkv, o = self.shape[:2]
        ys = [torch.zeros(tokens, sum(layer.widths), dtype=self.dtype, device=self.device) for layer in self.shape]
        attended = torch.randn(tokens, o.d_in, dtype=self.dtype, device=self.device)
        residual = torch.randn(tokens, qkv.d_in, dtype=self.dtype, device=self.device)
        norm = torch.ones(qkv.d_in, dtype=self.dtype, device=self.device)
        rotation = self.rotation(tokens)
        side = self.side if overlap else None
        Output = tuple[torch.Tensor, Shrunk | None, torch.Tensor | None]

        def multiply(number: int, index: int, x: torch.Tensor) -> Output:
            """The layer's product, and its adapters' part as far as it is known beside it."""
            layer, y, weight = self.shape[index], ys[index], self.weights[number][index].T
            if pairs is None:
                torch.mm(x, weight, out=y)
                return y, None, None
            delta: torch.Tensor | None = None
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                shrunk = shrink(x, self.table, self.pool, pairs, number, layer.modules, layer.widths)
                if side is not None:
                    delta = expand_delta(shrunk, self.table, self.pool, pairs, tokens, layer.offsets)
            torch.mm(x, weight, out=y)
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            return y, shrunk, delta

        def normalize(y: torch.Tensor, shrunk: Shrunk | None, delta: torch.Tensor | None) -> None:
            if pairs is not None and shrunk is not None and delta is None:
                expand(shrunk, y, self.table, self.pool, pairs, (0,))
            add_and_normalize(y, delta, residual, norm, 1e-5)

        def step() -> None:
            y, shrunk, delta = ys[3], None, None
            for number in range(self.num_layers):
                normalize(y, shrunk, delta)
                y, shrunk, delta = multiply(number, 0, y)
                if pairs is not None and shrunk is not None and delta is None:
                    expand_and_rotate(shrunk, y, self.table, self.pool, pairs, qkv.offsets, rotation)
                else:  # without adapters nothing reads v
                    rotated = qkv.offsets[2]
                    add_and_rotate(y if delta is not None else y[:, :rotated], delta, rotation, rotated)
                attended.neg_()
                normalize(*multiply(number, 1, attended))
                y, shrunk, delta = multiply(number, 2, ys[1])
                if pairs is not None and shrunk is not None and delta is None:
                    activated = expand_and_activate(shrunk, y, self.table, self.pool, pairs)
                else:
                    activated = add_and_activate(y, delta)
                y, shrunk, delta = multiply(number, 3, activated)
            normalize(y, shrunk, delta)

        return step


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


def prefill_kernels(world: KernelWorld, seg_lens: Sequence[int], mixes: Mixes, turns: int = 3) -> tuple[float, float]:
    """Milliseconds of shrink and expand of a prefill, and of the rotation and activation that expand does on the way."""
    tokens, device, dtype = sum(seg_lens), world.device, world.dtype
    pairs = world.pairs(seg_lens, mixes, for_graphs=False)
    operands = world.table, world.pool, pairs
    xs = [torch.randn(tokens, layer.d_in, dtype=dtype, device=device) for layer in world.shape]
    ys = [torch.randn(tokens, sum(layer.widths), dtype=dtype, device=device) for layer in world.shape]
    rotation = world.rotation(tokens)

    def step() -> None:
        for number in range(world.num_layers):
            for layer, x, y in zip(world.shape, xs, ys, strict=True):
                shrunk = shrink(x, *operands, number, layer.modules, layer.widths)
                if layer.name == "qkv":
                    expand_and_rotate(shrunk, y, *operands, layer.offsets, rotation)
                elif layer.name == "gate_up":
                    expand_and_activate(shrunk, y, *operands)
                else:
                    expand(shrunk, y, *operands, layer.offsets)

    def base_step() -> None:
        rotated = world.shape[0].offsets[2]
        for _ in range(world.num_layers):
            add_and_rotate(ys[0][:, :rotated], None, rotation, rotated)
            add_and_activate(ys[2], None)

    times = [[time_graph(run, repeats=3, rounds=3) for run in (step, base_step)] for _ in range(turns)]
    return statistics.median(time[0] for time in times), statistics.median(time[1] for time in times)


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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    parser.add_argument("--layers", type=int, default=32, help="of the model; fewer for a quick look")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    machine = results.gpu() if on_gpu else "cpu"
    shape: dict[str, Any] = {} if on_gpu else {"shape": TINY, "width": TINY_WIDTH, "device": "cpu", "dtype": torch.float32}
    report = results.Report("decode_added", machine, arguments.out)
    world = KernelWorld([16] * 32, 1 if arguments.parts == ["host"] else arguments.layers, **shape)
    for name, changes in (("changed", True), ("unchanged", False)) if "host" in arguments.parts else ():
        times = host_preparation(world, changes)
        note = f"256 requests, 3 adapters each; {len(times)} updates, the slowest {max(times):.2g} ms"
        typical = statistics.median(times)
        report.add(results.record(f"host_preparation_ms/{name}", typical, "ms", limit="value <= 0.15", note=note))
    seg_lens = [1024 if on_gpu else 40] * 8
    for name, members in (("8", 1), ("mix3of8", 3)) if "prefill" in arguments.parts else ():
        total, base = prefill_kernels(world, seg_lens, decode_mixes(8, 8, members))
        baseline = ("rotation and activation alone", base)
        note = f"8 requests of {seg_lens[0]:,} tokens, rank 16, {arguments.layers} layers, without the products"
        report.add(results.record(f"prefill_kernels_ms/{name}", total, "ms", baseline=baseline, note=note))
    if "added" not in arguments.parts:
        return

    def add(name: str, world: KernelWorld, adapters: int, members: int, rank: str) -> None:
        added, base = decode_added(world, 32, decode_mixes(32, adapters, members))
        baseline = ("the same without LoRA, as one graph", base)
        note = f"32 requests, rank {rank}, {arguments.layers} layers"
        report.add(results.record(f"decode_added_ms/{name}", added, "ms", baseline=baseline, note=note))

    for name, adapters, members in (("1", 1, 1), ("8", 8, 1), ("32", 32, 1), ("mix3of8", 8, 3)):
        add(name, world, adapters, members, "16")
    for rank in (1, 4, 8, 64):
        del world
        world = KernelWorld([rank] * 32, arguments.layers, **shape)
        for adapters in (8, 32):
            add(f"{adapters}_r{rank}", world, adapters, 1, str(rank))
    for name, note, uneven in (("8_r5", "5", {}), ("8_r5_one_r64", "5, 64 in o_proj", {3: 64})):
        del world
        world = KernelWorld([5] * 32, arguments.layers, uneven=uneven, **shape)
        add(name, world, 8, 1, note)


if __name__ == "__main__":
    main()
