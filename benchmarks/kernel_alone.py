"""LoRA's kernels alone, out of slots, against three other ways to serve mixes, on one GPU; no server, no base products.

    python -m benchmarks.kernel_alone [--out FOLDER] [--seconds 50]

Linear layers of the Llama-3-8B shape, bf16, as CUDA graphs. `LAYERS` of the model's 32 layers are measured, with adapters of
their own: what the smallest batch reads does not fit into the cache, as in a server, where the base model's weights pass through
it between two layers. Every other way is first checked against ours. Its metrics:

kernel_alone/WAY/BS, kernel_alone_of_64/WAY/BS
    Milliseconds of ours (value) and of another way (baseline), rank 8, a mix of 3 out of 8 (64) adapters per request.
    copy_sgmv merges each request's mix into one contiguous adapter of rank 24 (mix_operators.py), then runs SGLang's csgmv
    kernels; copy and sgmv are its two parts. loop goes over the adapters in plain torch, padded_bmm gathers every request's
    adapters (S-LoRA's padding; all ranks are equal here) for torch.bmm: both have contiguous adapters to start from.
kernel_alone/ms_per_token/BS
    Ours for the whole model, per token of a step: the measured time times 32 / LAYERS, over the batch's tokens.
random_vs_contiguous/RANK, bytes_over_copy_rate/RANK, rank_8_vs_64
    32 requests of 32 adapters (the last: of 8 adapters).

Results: ``kernel_alone_<gpu>.json``, written after every record.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.kernel_world import KernelWorld, Mixes, decode_mixes, time_graph
from benchmarks.mix_operators import Dense, Merged, Operator, Place, Rows, both, loop, ours, padded_bmm

MODEL_LAYERS = 32
LAYERS = 16
RANK = 8
MEMBERS = 3
BATCHES = (1, 2, 4, 8, 16, 32, 64)
RANKS = (8, 16, 32, 64)
WANTED = {"copy_sgmv": 2, "loop": 5, "padded_bmm": 3}
"""How many times faster ours shall be."""
LARGEST_ERROR = 1e-2
def milliseconds(world: KernelWorld, operator: Operator, bs: int, repeats: int = 10, rounds: int = 3) -> float:
    """Of all linear layers of the world, a token per request."""
    xs = [torch.randn(bs, layer.d_in, dtype=world.dtype, device=world.device) for layer in world.shape]
    ys = [torch.zeros(bs, sum(layer.widths), dtype=world.dtype, device=world.device) for layer in world.shape]

    def step() -> None:
        for number in range(world.num_layers):
            for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
                operator(number, index, x, y)

    return time_graph(step, repeats, rounds)


def check(world: KernelWorld, operator: Operator, reference: Operator, bs: int) -> float:
    """The largest relative error of a linear layer, over the first and the last layer of the world.

    Raises:
        ValueError: if it is above LARGEST_ERROR.
    """
    largest = 0.0
    for number in {0, world.num_layers - 1}:
        for index, layer in enumerate(world.shape):
            x = torch.randn(bs, layer.d_in, dtype=world.dtype, device=world.device)
            y, wanted = (torch.zeros(bs, sum(layer.widths), dtype=world.dtype, device=world.device) for _ in range(2))
            operator(number, index, x, y)
            reference(number, index, x, wanted)
            error = float((y.float() - wanted.float()).norm() / wanted.float().norm())
            if not error <= LARGEST_ERROR:  # NaN is one too
                raise ValueError(f"layer {number}, {layer.name}: relative error {error:.2g} against ours: another computation")
            largest = max(largest, error)
    return largest


@dataclass
class Report(results.Report):
    """... and how much time is left."""

    seconds: float = math.inf
    start: float = field(default_factory=time.monotonic)

    def attempt(self, name: str, section: Callable[[], None]) -> None:
        """Run a section unless the time is up; print its error and go on."""
        passed = time.monotonic() - self.start
        if passed > self.seconds:
            print(f"{name}: left out, {passed:.0f} s have passed", flush=True)
            return
        try:
            section()
        except Exception:
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)


def distinct_mixes(bs: int, adapters: int, members: int = MEMBERS) -> Mixes:
    """`decode_mixes`, no two alike: a merged adapter serves one request, since users choose their own weights."""
    mixes = decode_mixes(bs, adapters, members)
    return [[(adapter, weight + 0.01 * i) for adapter, weight in mix] for i, mix in enumerate(mixes)]


def compare(report: Report, adapters: int, prefix: str, num_layers: int = LAYERS, batches: Sequence[int] = BATCHES,
            **world_options: Any) -> None:  # fmt: skip
    """Ours against the other ways, all adapters of rank RANK."""
    world = KernelWorld([RANK] * adapters, num_layers, **world_options)
    keys = [(number, index) for number in range(num_layers) for index in range(len(world.shape))]
    rows = {key: Rows.find(world, key[0], world.shape[key[1]], RANK) for key in keys}
    dense = {key: Dense.copy(world, found) for key, found in rows.items()}
    note = f"rank {RANK}, mixes of {MEMBERS} out of {adapters}, {num_layers} layers"
    for bs in batches:
        mixes = distinct_mixes(bs, adapters)
        report.attempt(f"{prefix}/{bs}", functools.partial(compare_batch, report, world, rows, dense, mixes, prefix, note))


def compare_batch(report: Report, world: KernelWorld, rows: Mapping[Place, Rows], dense: Mapping[Place, Dense],
                  mixes: Mixes, prefix: str, note: str) -> None:  # fmt: skip
    """One batch size, a mix per request."""
    bs = len(mixes)
    reference = ours(world, mixes)
    took = milliseconds(world, reference, bs)
    layers = MODEL_LAYERS / world.num_layers
    report.add(
        results.record(
            f"{prefix}/ms_per_token/{bs}", took * layers / bs, "ms", limit="value <= 0.04",
            note=f"{note} x {layers:g}, over {bs} tokens",
        )
    )  # fmt: skip

    def against(way: str, operator: Operator, repeats: int, what: str | None = None) -> None:
        if what is None:
            what = f"wanted: {WANTED[way]}x; relative error {check(world, operator, reference, bs):.2g}"
        theirs = milliseconds(world, operator, bs, repeats)
        limit = f"ratio <= {1 / WANTED[way]:.4f}" if way in WANTED else None
        report.add(
            results.record(f"{prefix}/{way}/{bs}", took, "ms", baseline=(way, theirs), limit=limit, note=f"{note}; {what}")
        )

    def against_copy_sgmv() -> None:
        merged = Merged(world, rows, mixes, RANK)
        sgmv = merged.sgmv()
        against("copy_sgmv", both(merged.copy, sgmv), 10)
        against("copy", merged.copy, 10, "only the copy out of slots")
        against("sgmv", sgmv, 10, "only the csgmv kernels, merged adapters of rank 24 given")

    report.attempt(f"{prefix}/copy_sgmv/{bs}", against_copy_sgmv)
    report.attempt(f"{prefix}/loop/{bs}", lambda: against("loop", loop(world, dense, mixes), 3))
    report.attempt(f"{prefix}/padded_bmm/{bs}", lambda: against("padded_bmm", padded_bmm(world, dense, mixes), 5))


def copy_rate(device: str) -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    size = 1 << 31 if device == "cuda" else 1 << 20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * size / (time_graph(copy, 5, 3) / 1000)


def adapter_bytes(world: KernelWorld, rank: int, adapters: int) -> int:
    """Of A and B of all linear layers of the world."""
    per_rank = sum(len(layer.modules) * layer.d_in + sum(layer.widths) for layer in world.shape)
    return per_rank * rank * adapters * world.num_layers * world.pool.planes[0].element_size()


def compare_slots(report: Report, bs: int = 32, num_layers: int = 4, ranks: Sequence[int] = RANKS,
                  **world_options: Any) -> None:  # fmt: skip
    """Random slots against consecutive ones, and bytes per second, with an adapter per request."""
    rate = copy_rate(world_options.get("device", "cuda")) / 1e9
    mixes = decode_mixes(bs, bs)

    def one(rank: int) -> None:
        worlds = [KernelWorld([rank] * bs, num_layers, contiguous=contiguous, **world_options) for contiguous in (False, True)]
        operators = [ours(world, mixes) for world in worlds]
        # Twice, in turns: a GPU's clock moves by more than what is looked for.
        turns = [[milliseconds(world, operators[i], bs) for i, world in enumerate(worlds)] for _ in range(2)]
        random, contiguous = (min(times) for times in zip(*turns, strict=True))
        note = f"{bs} requests of {bs} adapters, {num_layers} layers"
        achieved = adapter_bytes(worlds[0], rank, bs) / 1e9 / (random / 1000)
        beside, copied = ("consecutive slots", contiguous), ("device copy, read + written", rate)
        report.add(
            results.record(f"random_vs_contiguous/{rank}", random, "ms", baseline=beside, limit="ratio <= 1.05", note=note),
            results.record(f"bytes_over_copy_rate/{rank}", achieved, "GB/s", baseline=copied, note=note),
        )

    for rank in ranks:
        report.attempt(f"slots/{rank}", functools.partial(one, rank))


def compare_ranks(report: Report, bs: int = 32, adapters: int = 8, num_layers: int = LAYERS, **world_options: Any) -> None:
    """Small ranks must be faster."""
    mixes = decode_mixes(bs, adapters)
    times = []
    for rank in (8, 64):
        world = KernelWorld([rank] * adapters, num_layers, **world_options)
        times.append(milliseconds(world, ours(world, mixes), bs))
    note = f"{bs} requests of {adapters} adapters, {num_layers} layers; wanted: 2x"
    report.add(results.record("rank_8_vs_64", times[0], "ms", baseline=("rank 64", times[1]), limit="ratio <= 0.5", note=note))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    parser.add_argument("--seconds", type=float, default=50, help="after which nothing more is begun")
    arguments = parser.parse_args()
    report = Report("kernel_alone", results.gpu(), arguments.out, seconds=arguments.seconds)
    report.attempt("compare 8", lambda: compare(report, 8, "kernel_alone"))
    report.attempt("slots", lambda: compare_slots(report))
    report.attempt("ranks", lambda: compare_ranks(report))
    report.attempt("compare 64", lambda: compare(report, 64, "kernel_alone_of_64"))
    print(f"{time.monotonic() - report.start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
