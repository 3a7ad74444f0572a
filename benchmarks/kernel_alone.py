"""LoRA's kernels alone, out of slots, against three other ways to serve mixes, on one GPU; no server, no base products.

    python -m benchmarks.kernel_alone [--out FOLDER] [--seconds 50]

Linear layers of the Llama-3-8B shape, bf16, as CUDA graphs. `LAYERS` of the model's 32 layers are measured, with adapters of
their own: what the smallest batch reads does not fit into the cache, as in a server, where the base model's weights pass through
it between two layers. Every other way is first checked against ours. Its metrics:

kernel_alone/WAY/BS, kernel_alone_of_64/WAY/BS
    Milliseconds of ours (value) and of another way (baseline), rank 8, a mix of 3 out of 8 (64) adapters per request.
    copy_sgmv merges each request's mix into one contiguous adapter of rank 24 (a kernel below), then runs SGLang's csgmv
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
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks import results
from benchmarks.kernel_world import KernelWorld, Layer, Mixes, decode_mixes, time_graph
from sglang_lora_tree.kernels import add_lora

MODEL_LAYERS = 32
LAYERS = 16
RANK = 8
MEMBERS = 3
BATCHES = (1, 2, 4, 8, 16, 32, 64)
RANKS = (8, 16, 32, 64)
WANTED = {"copy_sgmv": 2, "loop": 5, "padded_bmm": 3}
"""How many times faster ours shall be."""
LARGEST_ERROR = 1e-2
CHUNK = 16
"""Tokens per segment of csgmv: SGLang's max_lora_chunk_size, below 64 tokens its only choice."""

Operator = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""Add every token's mix: (layer of the model, which of its linear layers, x (T, d_in), y (T, D)), y in place."""


def ours(world: KernelWorld, mixes: Mixes) -> Operator:
    pairs = world.pairs([1] * len(mixes), mixes)

    def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        layer = world.shape[index]
        add_lora(y, x, world.table, world.pool, pairs, number, layer.modules, layer.offsets, layer.widths)

    return apply


@dataclass(frozen=True)
class Rows:
    """Where the rows of all adapters (of one rank R) lie for one linear layer of M modules.

    Attributes:
        a: int64 (2, adapters, M * R, chunks of d_in): planes, then slots, of the chunks of A's rows.
        b: int64 (2, adapters, R, chunks of all outputs): the same of B's, transposed; the modules side by side.
    """

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def find(cls, world: KernelWorld, number: int, layer: Layer, rank: int) -> Rows:
        table, width = world.table, world.width
        assert not any(d % width for d in (layer.d_in, *layer.widths)), f"widths must be multiples of {width}: {layer}"
        adapters = table.capacity - 1  # KernelWorld leaves the last one empty
        start = table.row_start[:adapters, number, list(layer.modules)].long()
        assert bool((table.rank[:adapters, number, list(layer.modules)] == rank).all()), f"all ranks must be {rank}"
        first = table.first_slot[:adapters].long()[:, None, None]
        count = table.slot_count[:adapters].long()[:, None, None]

        def places(first_row: torch.Tensor, chunks: int) -> torch.Tensor:
            rows = first_row[:, None] + torch.arange(rank * chunks, device=first_row.device)
            rows = rows.view(adapters, rank, chunks)
            return torch.stack([rows // count, table.slots[first + rows % count].long()])

        chunks_in = layer.d_in // width
        a = [places(start[:, m], chunks_in) for m in range(len(layer.modules))]
        b = [places(start[:, m] + rank * chunks_in, out // width) for m, out in enumerate(layer.widths)]
        return cls(torch.cat(a, dim=2), torch.cat(b, dim=3))


@dataclass(frozen=True)
class Dense:
    """All adapters of one linear layer, contiguous: a (adapters, M * R, d_in), b (adapters, R, all outputs)."""

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def copy(cls, world: KernelWorld, rows: Rows) -> Dense:
        return cls(*(_take(world, places).flatten(2) for places in (rows.a, rows.b)))


def _take(world: KernelWorld, places: torch.Tensor) -> torch.Tensor:
    """Pool rows, (..., W), at `places` (2, ...): planes, then slots."""
    taken = torch.empty(*places.shape[1:], world.width, dtype=world.dtype, device=world.device)
    for plane in places[0].unique().tolist():
        here = places[0] == plane
        taken[here] = world.pool.planes[plane][places[1][here]]
    return taken


def loop(world: KernelWorld, dense: dict[tuple[int, int], Dense], mixes: Mixes) -> Operator:
    """An adapter at a time, for all tokens that use it."""
    uses: dict[int, list[tuple[int, float]]] = {}
    for token, mix in enumerate(mixes):
        for adapter, weight in mix:
            uses.setdefault(adapter, []).append((token, weight))
    batch = [
        (
            adapter,
            torch.tensor([token for token, _ in pairs], device=world.device),
            torch.tensor([[weight] for _, weight in pairs], dtype=world.dtype, device=world.device),
        )
        for adapter, pairs in uses.items()
    ]

    def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        layer, weights = world.shape[index], dense[number, index]
        for adapter, tokens, weight in batch:
            z = (x.index_select(0, tokens) @ weights.a[adapter].T).mul_(weight).chunk(len(layer.modules), 1)
            for part, offset, width in zip(z, layer.offsets, layer.widths, strict=True):
                columns = slice(offset, offset + width)
                y[:, columns].index_add_(0, tokens, part @ weights.b[adapter][:, columns])

    return apply


def padded_bmm(world: KernelWorld, dense: dict[tuple[int, int], Dense], mixes: Mixes) -> Operator:
    """Every request's adapters gathered side by side, then one batched product per matrix."""
    bs, members = len(mixes), len(mixes[0])
    adapters, weights = _flatten(world, mixes)
    weights = weights.to(world.dtype).view(bs, members, 1, 1)

    def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        layer, stored = world.shape[index], dense[number, index]
        a = stored.a.index_select(0, adapters).view(bs, -1, layer.d_in)
        b = stored.b.index_select(0, adapters).view(bs, -1, stored.b.shape[2])
        z = torch.bmm(a, x.unsqueeze(2)).view(bs, members, len(layer.modules), -1).mul_(weights)
        for m, (offset, width) in enumerate(zip(layer.offsets, layer.widths, strict=True)):
            columns = slice(offset, offset + width)
            y[:, columns].unsqueeze(1).baddbmm_(z[:, :, m].reshape(bs, 1, -1), b[:, :, columns])

    return apply


def _flatten(world: KernelWorld, mixes: Mixes) -> tuple[torch.Tensor, torch.Tensor]:
    """Adapters (int64) and weights (float32) of all requests, (bs * members,)."""
    assert len({len(mix) for mix in mixes}) == 1, "all mixes must have the same number of members"
    pairs = [pair for mix in mixes for pair in mix]
    adapters = torch.tensor([adapter for adapter, _ in pairs], device=world.device)
    return adapters, torch.tensor([weight for _, weight in pairs], dtype=torch.float32, device=world.device)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    a, b, a_rows, b_rows, adapters, weights,
    MEMBERS: tl.constexpr, MODULES: tl.constexpr, RANK: tl.constexpr, A_CHUNKS: tl.constexpr, B_CHUNKS: tl.constexpr,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one member of one request, and BLOCK columns of all ranks of one module of A, or of B."""
    BLOCKS: tl.constexpr = W // BLOCK
    TOTAL: tl.constexpr = MEMBERS * RANK
    request = tl.program_id(0) // MEMBERS
    member = tl.program_id(0) % MEMBERS
    adapter = tl.load(adapters + tl.program_id(0))
    chunk = tl.program_id(1) // BLOCKS
    inside = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    DTYPE: tl.constexpr = a.dtype.element_ty
    if chunk < MODULES * A_CHUNKS:
        m = chunk // A_CHUNKS
        chunk = chunk % A_CHUNKS
        rows = tl.load(a_rows + ((adapter * MODULES + m) * RANK + r) * A_CHUNKS + chunk)
        tile = tl.load(tl.multiple_of(rows.to(tl.pointer_type(DTYPE)), 16)[:, None] + inside[None, :])
        row = (request * MODULES + m) * TOTAL + member * RANK + r
        tl.store(a + row[:, None] * (A_CHUNKS * W) + chunk * W + inside[None, :], tile)
    else:
        chunk -= MODULES * A_CHUNKS
        rows = tl.load(b_rows + (adapter * RANK + r) * B_CHUNKS + chunk)
        tile = tl.load(tl.multiple_of(rows.to(tl.pointer_type(DTYPE)), 16)[:, None] + inside[None, :])
        tile = (tile.to(tl.float32) * tl.load(weights + tl.program_id(0))).to(DTYPE)
        output = request * (B_CHUNKS * W) + chunk * W + inside
        tl.store(b + output[None, :] * TOTAL + member * RANK + r[:, None], tile)


class Merged:
    """One adapter per request, of rank R * members, in the layout of SGLang's csgmv backend; a layer at a time.

    The buffers are those of one layer of the model, since the next layer's copy may overwrite them.
    """

    def __init__(self, world: KernelWorld, rows: dict[tuple[int, int], Rows], mixes: Mixes, rank: int) -> None:
        self.world, self.rank = world, rank
        self.bs, self.members = len(mixes), len(mixes[0])
        self.adapters, self.weights = _flatten(world, mixes)
        size = world.pool.planes[0].element_size() * world.width
        self.addresses = {
            key: tuple(world.pool.pointers[planes] + slots * size for planes, slots in (found.a, found.b))
            for key, found in rows.items()
        }
        total = rank * self.members
        options: dict[str, Any] = {"dtype": world.dtype, "device": world.device}
        self.a = [torch.empty(self.bs, len(layer.modules) * total, layer.d_in, **options) for layer in world.shape]
        self.b = [torch.empty(self.bs, sum(layer.widths), total, **options) for layer in world.shape]

    def copy(self, number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Gather, weigh and concatenate: one launch."""
        layer, width = self.world.shape[index], self.world.width
        a_rows, b_rows = self.addresses[number, index]
        a_chunks, b_chunks = layer.d_in // width, sum(layer.widths) // width
        block = min(width, 512)
        grid = (self.bs * self.members, (len(layer.modules) * a_chunks + b_chunks) * (width // block))
        _merge_kernel[grid](
            self.a[index], self.b[index], a_rows, b_rows, self.adapters, self.weights, MEMBERS=self.members,
            MODULES=len(layer.modules), RANK=self.rank, A_CHUNKS=a_chunks, B_CHUNKS=b_chunks, W=width, BLOCK=block,
        )  # fmt: skip

    def sgmv(self) -> Operator:
        """SGLang's kernels as ChunkedSgmvLoRABackend and its layers call them (0.5.23: srt/lora/backend/chunked_backend.py)."""
        from sglang.kernels.ops.lora.dense.chunked_sgmv_expand import chunked_sgmv_lora_expand_forward
        from sglang.kernels.ops.lora.dense.chunked_sgmv_shrink import chunked_sgmv_lora_shrink_forward
        from sglang.srt.lora.utils import LoRABatchInfo

        numbers = torch.arange(self.bs + 1, dtype=torch.int32, device=self.world.device)
        batch = LoRABatchInfo(
            use_cuda_graph=False,  # only says that there are more segments than used: here there are not
            bs=self.bs,
            num_segments=self.bs,
            seg_indptr=numbers,
            weight_indices=numbers[:-1],
            lora_ranks=torch.full_like(numbers[:-1], self.rank * self.members),
            scalings=torch.ones(self.bs, dtype=torch.float32, device=self.world.device),
            max_len=CHUNK,
            seg_lens=None,
            permutation=numbers[:-1],
        )
        offsets_cpu = [torch.tensor([*layer.offsets, sum(layer.widths)], dtype=torch.int32) for layer in self.world.shape]
        offsets = [offset.to(self.world.device) for offset in offsets_cpu]

        def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
            layer = self.world.shape[index]
            z = chunked_sgmv_lora_shrink_forward(
                x=x, weights=self.a[index], batch_info=batch, num_slices=len(layer.modules)
            )
            chunked_sgmv_lora_expand_forward(
                x=z,
                weights=self.b[index],
                batch_info=batch,
                slice_offsets=offsets[index],
                slice_offsets_cpu=offsets_cpu[index],
                max_slice_size=max(layer.widths),
                base_output=y,
            )

        return apply


def both(first: Operator, second: Operator) -> Operator:
    def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        first(number, index, x, y)
        second(number, index, x, y)

    return apply


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
class Report:
    """The records so far, on disk after each; how much time is left."""

    out: Path
    machine: str
    seconds: float = math.inf
    records: list[dict[str, Any]] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def add(self, metric: str, value: float, unit: str = "ms", **rest: Any) -> None:
        self.records.append(results.record(metric, value, unit, **rest))
        results.write("kernel_alone", self.machine, self.records, self.out)
        print(results.table(self.records[-1:]), flush=True)

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
    for bs in batches:
        mixes = distinct_mixes(bs, adapters)
        reference = ours(world, mixes)
        what = f"rank {RANK}, mixes of {MEMBERS} out of {adapters}, {num_layers} layers"

        def compare_one(bs: int = bs, mixes: Mixes = mixes, reference: Operator = reference, what: str = what) -> None:
            took = milliseconds(world, reference, bs)
            report.add(
                f"{prefix}/ms_per_token/{bs}",
                took * MODEL_LAYERS / num_layers / bs,
                limit="value <= 0.04",
                note=f"{what} x {MODEL_LAYERS / num_layers:g}, over {bs} tokens",
            )

            def against(way: str, operator: Operator, note: str, repeats: int = 10) -> None:
                theirs = milliseconds(world, operator, bs, repeats)
                limit = f"ratio <= {1 / WANTED[way]:.4f}" if way in WANTED else None
                report.add(f"{prefix}/{way}/{bs}", took, baseline=(way, theirs), limit=limit, note=f"{what}; {note}")

            def against_copy_sgmv() -> None:
                merged = Merged(world, rows, mixes, RANK)
                sgmv = merged.sgmv()
                together = both(merged.copy, sgmv)
                note = f"wanted: 2x; relative error {check(world, together, reference, bs):.2g}"
                against("copy_sgmv", together, note)
                against("copy", merged.copy, "only the copy out of slots")
                against("sgmv", sgmv, "only the csgmv kernels, merged adapters of rank 24 given")

            def against_loop() -> None:
                operator = loop(world, dense, mixes)
                note = f"wanted: 5x; relative error {check(world, operator, reference, bs):.2g}"
                against("loop", operator, note, repeats=3)

            def against_padded_bmm() -> None:
                operator = padded_bmm(world, dense, mixes)
                note = f"wanted: 3x; relative error {check(world, operator, reference, bs):.2g}"
                against("padded_bmm", operator, note, repeats=5)

            for section in (against_copy_sgmv, against_loop, against_padded_bmm):
                report.attempt(f"{prefix}/{section.__name__}/{bs}", section)

        report.attempt(f"{prefix}/{bs}", compare_one)


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
        what = f"{bs} requests of {bs} adapters, {num_layers} layers"
        report.add(
            f"random_vs_contiguous/{rank}", random, baseline=("consecutive slots", contiguous), limit="ratio <= 1.05", note=what
        )
        achieved = adapter_bytes(worlds[0], rank, bs) / 1e9 / (random / 1000)
        report.add(
            f"bytes_over_copy_rate/{rank}", achieved, "GB/s", baseline=("device copy, read + written", rate), note=what
        )

    for rank in ranks:
        report.attempt(f"slots/{rank}", lambda rank=rank: one(rank))  # type: ignore[misc]


def compare_ranks(report: Report, bs: int = 32, adapters: int = 8, num_layers: int = LAYERS, **world_options: Any) -> None:
    """Small ranks must be faster."""
    mixes = decode_mixes(bs, adapters)
    times = []
    for rank in (8, 64):
        world = KernelWorld([rank] * adapters, num_layers, **world_options)
        times.append(milliseconds(world, ours(world, mixes), bs))
    note = f"{bs} requests of {adapters} adapters, {num_layers} layers; wanted: 2x"
    report.add("rank_8_vs_64", times[0], baseline=("rank 64", times[1]), limit="ratio <= 0.5", note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    parser.add_argument("--seconds", type=float, default=50, help="after which nothing more is begun")
    arguments = parser.parse_args()
    report = Report(arguments.out, results.hardware().lower().rpartition(" ")[2], arguments.seconds)
    report.attempt("compare 8", lambda: compare(report, 8, "kernel_alone"))
    report.attempt("slots", lambda: compare_slots(report))
    report.attempt("ranks", lambda: compare_ranks(report))
    report.attempt("compare 64", lambda: compare(report, 64, "kernel_alone_of_64"))
    print(f"{time.monotonic() - report.start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
