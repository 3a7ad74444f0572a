"""How long it takes to factorise a whole fleet of adapters: FlashTSQR against torch.linalg, in one process on one GPU.

    python -m benchmarks.fleet --out DIR            two synthetic fleets of the papers' shapes, rank 64, bfloat16
    TRITON_INTERPRET=1 python -m benchmarks.fleet --fleets tiny --out DIR    the same path without a GPU

From adapters in GPU memory to all balanced factors (every direction, float32) in GPU memory, tables, checks and
synchronisation included. The variants of each kernel are tried on a part of the first fleet; the fastest are then used for
whole fleets. Baselines that take long run on whole adapters, as many as fit into their share of the time, and are scaled
by the number of modules: the records say so.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from sglang_lora_tree.fleet import factorisation
from sglang_lora_tree.kernels import jacobi, tsqr
from sglang_lora_tree.kernels.tall_batch import TallBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHUNK = 10
"""Adapters per batch: bounded memory, enough matrices to fill the GPU."""
REPEATS = 3
KEPT_AT_TWELFTH = 12  # rank / 12 directions
LAPTOP = DEVICE.type == "cpu"


@dataclass(frozen=True)
class Fleet:
    """num_adapters of one rank on a model's linear layers. widths: (d_in, d_out) of the modules of a layer."""

    name: str
    num_adapters: int
    rank: int
    num_layers: int
    widths: tuple[tuple[int, int], ...]
    wanted: float
    """Speed-up over the best baseline that the paper reports."""

    @property
    def num_modules(self) -> int:
        return self.num_layers * len(self.widths)


FLEETS = {
    "qwen50": Fleet(
        "qwen50", 50, 64, 36,
        ((2560, 4096), (2560, 1024), (2560, 1024), (4096, 2560), (2560, 9728), (2560, 9728), (9728, 2560)), 2.3,
    ),
    "llama35": Fleet(
        "llama35", 35, 64, 32,
        ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)), 1.9,
    ),
    "tiny": Fleet("tiny", 3, 5, 1, ((48, 32), (32, 64)), 0.0),
}  # fmt: skip

Pair = tuple[torch.Tensor, torch.Tensor]
"""A (rank, d_in), B (d_out, rank)."""


class Deadline:
    """Seconds left of the run."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def synchronise() -> None:
    if not LAPTOP:
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall-clock seconds, after one run to warm up."""
    run()
    times = []
    for _ in range(repeats):
        synchronise()
        start = time.perf_counter()
        run()
        synchronise()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def make_fleet(fleet: Fleet) -> list[list[Pair]]:
    """Per adapter its modules' factors. A is as at initialisation; B's spectrum decays, as trained ones do."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    rank, layers = fleet.rank, fleet.num_layers
    decay = torch.logspace(0, -2, rank, device=DEVICE)
    adapters = []
    for _ in range(fleet.num_adapters):
        stacks = []
        for d_in, d_out in fleet.widths:
            mixing = torch.linalg.qr(random(rank, rank))[0] * decay
            a = random(layers, rank, d_in) / d_in**0.5
            b = random(layers, d_out, rank) @ mixing / d_out**0.5
            stacks.append((a.bfloat16(), b.bfloat16()))
        adapters.append([(a[layer], b[layer]) for layer in range(layers) for a, b in stacks])
    return adapters


def chunks(adapters: Sequence[list[Pair]], size: int = CHUNK) -> Iterable[list[Pair]]:
    for start in range(0, len(adapters), size):
        yield [pair for adapter in adapters[start : start + size] for pair in adapter]


# FlashTSQR


@dataclass(frozen=True)
class Variant:
    """Launch parameters of the three kernels, and how the core is decomposed."""

    gram: tuple[int, int, int] = (16, 4, 3)
    """rows per step, warps, pipeline stages."""
    svd: str = "jacobi4"
    apply: tuple[int, int] = (64, 4)
    """rows per step, warps."""


@dataclass(frozen=True)
class Room:
    """Where the factors of a chunk go, used again by the next: bounded memory, and no allocation in the timed part."""

    a: list[torch.Tensor]
    b: list[torch.Tensor]

    @classmethod
    def of(cls, pairs: Sequence[Pair], rank: int) -> Room:
        return cls(
            [torch.empty(rank, a.shape[1], device=DEVICE) for a, _ in pairs],
            [torch.empty(b.shape[0], rank, device=DEVICE) for _, b in pairs],
        )


def decompose(kind: str, matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if kind == "eigh":
        square, u = torch.linalg.eigh(matrices @ matrices.mT)
        sigma, u = square.flip(-1).clamp_min(0).sqrt(), u.flip(-1)
        inverse = torch.where(sigma > factorisation.NEGLIGIBLE * sigma[:, :1], 1 / sigma, 0)
        return u, sigma, (matrices.mT @ u) * inverse[:, None, :]
    return jacobi.svd(matrices, num_warps=int(kind.removeprefix("jacobi")))


def flash_tsqr(pairs: Sequence[Pair], room: Room, variant: Variant) -> torch.Tensor:
    """The factors of a chunk into `room`, as many directions as it has; returns the singular values."""
    a_batch = TallBatch.of([a for a, _ in pairs], wide=True)
    b_batch = TallBatch.of([b for _, b in pairs], wide=False)
    block, warps, stages = variant.gram
    grams = [tsqr.gram(batch, block_rows=block, num_warps=warps, num_stages=stages) for batch in (a_batch, b_batch)]
    sigma, of_a, of_b = factorisation.core_factors(grams[0], grams[1], svd=lambda core: decompose(variant.svd, core))
    rank = room.a[0].shape[0]
    for batch, small, out in ((a_batch, of_a, room.a), (b_batch, of_b, room.b)):
        tsqr.apply(batch, small, [rank] * len(batch), out[: len(batch)], block_rows=variant.apply[0], num_warps=variant.apply[1])
    return sigma


def tune(fleet: Fleet, adapters: list[list[Pair]], deadline: Deadline) -> tuple[Variant, list[dict[str, Any]]]:
    """Time the variants of each kernel on one chunk; the fastest of each, and the records."""
    pairs = next(iter(chunks(adapters)))
    a_batch = TallBatch.of([a for a, _ in pairs], wide=True)
    b_batch = TallBatch.of([b for _, b in pairs], wide=False)
    batches = (a_batch, b_batch)
    core = random_cores(len(pairs), a_batch.padded_rank)
    small = torch.randn(len(pairs), a_batch.padded_rank, a_batch.padded_rank, device=DEVICE)
    room = Room.of(pairs, fleet.rank)
    kept = [fleet.rank] * len(pairs)

    def run_gram(block: int, warps: int, stages: int) -> None:
        for batch in batches:
            tsqr.gram(batch, block_rows=block, num_warps=warps, num_stages=stages)

    def run_apply(block: int, warps: int) -> None:
        for batch, out in zip(batches, (room.a, room.b), strict=True):
            tsqr.apply(batch, small, kept, out, block_rows=block, num_warps=warps)

    grams = [(16, 4, 3), (32, 4, 3), (32, 8, 3), (16, 4, 4), (16, 8, 3), (32, 4, 2)]
    applies = [(64, 4), (64, 8), (32, 4)]
    cores = ["jacobi4", "jacobi8", "jacobi2", "eigh"]
    if LAPTOP:
        grams, applies, cores = grams[:2], applies[:1], ["jacobi4", "eigh"]
    records = []

    def best(part: str, candidates: Sequence[Any], run: Callable[[Any], object]) -> Any:
        times: dict[Any, float] = {}
        for candidate in candidates:
            if times and deadline.left < 0:
                print(f"{part}: no time left for {candidate}", flush=True)
                continue
            try:
                times[candidate] = seconds(lambda candidate=candidate: run(candidate))
            except Exception as error:  # one variant too large for this GPU must not end the run
                print(f"{part} {candidate}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            print(f"{part} {candidate}: {times[candidate] * 1e3:.2f} ms", flush=True)
        fastest = min(times, key=times.__getitem__)
        scale = 1e3 * len(adapters) * fleet.num_modules / len(pairs)
        for candidate, took in times.items():
            name = candidate if isinstance(candidate, str) else "x".join(map(str, candidate))
            note = f"measured on {len(pairs)} modules and scaled to the fleet" + "; chosen" * (candidate == fastest)
            records.append(results.record(f"variant/{fleet.name}/{part}/{name}", took * scale, "ms", note=note))
        return fastest

    variant = Variant(
        best("gram", grams, lambda candidate: run_gram(*candidate)),
        best("core", cores, lambda candidate: decompose(candidate, core)),
        best("apply", applies, lambda candidate: run_apply(*candidate)),
    )
    return variant, records


def random_cores(count: int, size: int) -> torch.Tensor:
    """Cores as the fleets have them: products of triangles with decaying columns."""
    decay = torch.logspace(0, -2, size, device=DEVICE, dtype=torch.float64)
    left, right = (torch.randn(count, size, size, device=DEVICE, dtype=torch.float64) for _ in range(2))
    return left.triu() * decay @ right.triu().mT


# Baselines: the same result by torch.linalg, in float32.


def linalg_each(pairs: Sequence[Pair]) -> None:
    """(a) QR of both factors and SVD of the core, module by module."""
    for a, b in pairs:
        q_b, r_b = torch.linalg.qr(b.float())
        q_a, r_a = torch.linalg.qr(a.T.float())
        u, sigma, vt = torch.linalg.svd(r_b @ r_a.T)
        root = sigma.sqrt()
        torch.matmul(q_b, u * root), torch.matmul(root[:, None] * vt, q_a.T)


def linalg_padded(pairs: Sequence[Pair]) -> None:
    """(b) The same on stacks padded to the largest shape; the core by eigh, which is batched."""
    rank = pairs[0][0].shape[0]
    stacks = []
    for matrices in ([a.T for a, _ in pairs], [b for _, b in pairs]):
        stack = torch.zeros(len(pairs), max(map(len, matrices)), rank, device=DEVICE)
        for index, matrix in enumerate(matrices):
            stack[index, : len(matrix)] = matrix
        stacks.append(torch.linalg.qr(stack))
    (q_a, r_a), (q_b, r_b) = stacks
    core = r_b @ r_a.mT
    square, u = torch.linalg.eigh(core @ core.mT)
    root = square.clamp_min(1e-30).pow(0.25)
    torch.matmul(q_b, u * root[:, None, :])
    torch.matmul((u.mT @ core) / root[:, :, None], q_a.mT)


def fraq(pairs: Sequence[Pair]) -> None:
    """(c) One-sided: QR of the smaller factor, eigenvalues of H H^T, H = R Y; batched over modules of equal shape."""
    for a, b in equal_shapes(pairs):
        x, y = (b, a) if b.shape[1] <= a.shape[2] else (a.mT, b.mT)
        q, r = torch.linalg.qr(x)
        h = r @ y
        square, u = torch.linalg.eigh(h @ h.mT)
        root = square.clamp_min(1e-30).pow(0.25)
        torch.matmul(q, u * root[:, None, :]), torch.matmul(u.mT / root[:, :, None], h)


def torch_gram(pairs: Sequence[Pair]) -> None:
    """FlashTSQR's own algorithm by torch: batched float64 products over modules of equal shape, Cholesky, eigh."""
    for a, b in equal_shapes(pairs):
        a64, b64 = a.double(), b.double()
        _, of_a, of_b = factorisation.core_factors(a64 @ a64.mT, b64.mT @ b64, svd=lambda core: decompose("eigh", core))
        torch.matmul(of_a.mT, a), torch.matmul(b, of_b)


def equal_shapes(pairs: Sequence[Pair]) -> Iterable[Pair]:
    """Float32 stacks of A and of B, one pair of stacks per shape."""
    groups: dict[tuple[int, int], list[Pair]] = {}
    for a, b in pairs:
        groups.setdefault((a.shape[1], b.shape[0]), []).append((a, b))
    for group in groups.values():
        yield torch.stack([a for a, _ in group]).float(), torch.stack([b for _, b in group]).float()


BASELINES = {"linalg_each": linalg_each, "linalg_padded": linalg_padded, "fraq": fraq, "torch_gram": torch_gram}
IN_ISSUE = ("linalg_each", "linalg_padded", "fraq")
"""What "the best baseline" is chosen from; torch_gram shares our algorithm."""


def time_baseline(
    run: Callable[[Sequence[Pair]], None], fleet: Fleet, adapters: list[list[Pair]], budget: float
) -> tuple[float, str]:
    """Seconds for the whole fleet, and how they were found: as many adapters as the budget allows, the rest scaled."""
    layer = adapters[0][: len(fleet.widths)]
    run(layer)  # libraries start up
    synchronise()
    start = time.perf_counter()
    run(layer)
    synchronise()
    whole = (time.perf_counter() - start) * fleet.num_layers  # an upper bound for one adapter
    count = int(min(CHUNK, max(1, budget // max(whole, 1e-9))))
    pairs = [pair for adapter in islice(adapters, count) for pair in adapter]
    repeats = 1
    if whole > budget:  # not even one adapter
        pairs, repeats = layer, 2
    start = time.perf_counter()
    for _ in range(repeats):
        run(pairs)
    synchronise()
    took = (time.perf_counter() - start) / repeats
    total = fleet.num_adapters * fleet.num_modules
    return took * total / len(pairs), f"measured on {len(pairs)} of {total} modules, scaled"


# Correctness


def worst_errors(pairs: Sequence[Pair], room: Room, sigma: torch.Tensor, count: int = 7) -> tuple[float, float]:
    """Against float64 on `count` modules, next to the largest singular value.

    Returns the largest error of a singular value, and of the product of the first k directions beside the truncated SVD
    (Frobenius), k = rank / 12 and k = rank.
    """
    sigma_error = product_error = 0.0
    for index in range(0, min(count, len(pairs))):
        a, b = (factor.double() for factor in pairs[index])
        q_b, r_b = torch.linalg.qr(b)
        q_a, r_a = torch.linalg.qr(a.T)
        u, exact, vt = torch.linalg.svd(r_b @ r_a.T)
        rank = len(a)
        sigma_error = max(sigma_error, float(((sigma[index, :rank] - exact).abs() / exact[0]).max()))
        for k in (max(1, rank // KEPT_AT_TWELFTH), rank):
            wanted = (q_b @ (u[:, :k] * exact[:k])) @ (vt[:k] @ q_a.T)
            found = room.b[index][:, :k].double() @ room.a[index][:k].double()
            product_error = max(product_error, float(torch.linalg.matrix_norm(found - wanted) / exact[0]))
    return sigma_error, product_error


def measure(fleet: Fleet, adapters: list[list[Pair]], variant: Variant, budget: float) -> list[dict[str, Any]]:
    first = next(iter(chunks(adapters)))
    room = Room.of(first, fleet.rank)
    sigma = flash_tsqr(first, room, variant)
    sigma_error, product_error = worst_errors(first, room, sigma)
    kept = max(1, fleet.rank // KEPT_AT_TWELFTH)

    def whole(room: Room) -> None:
        for pairs in chunks(adapters):
            flash_tsqr(pairs, room, variant)

    took = seconds(lambda: whole(room))
    room_twelfth = Room.of(first, kept)
    took_twelfth = seconds(lambda: whole(room_twelfth))
    if not LAPTOP:
        torch.cuda.empty_cache()
    size = sum(a.numel() + b.numel() for a, b in adapters[0]) * len(adapters)
    note = f"{fleet.num_adapters} adapters x {fleet.num_modules} modules, rank {fleet.rank}, {size / 1e9:.2f}e9 parameters"
    records = [
        results.record(f"construction/{fleet.name}/tsqr", took, "s", note=f"{note}; all directions; {variant}"),
        results.record(f"construction_twelfth/{fleet.name}/tsqr", took_twelfth, "s", note=f"{note}; {kept} directions kept"),
        results.record(f"sigma_error/{fleet.name}", sigma_error, "", limit="value <= 1e-5", note="beside float64, 7 modules"),
        results.record(f"product_error/{fleet.name}", product_error, "", limit="value <= 1e-5", note="rank k = 1/12 and full"),
    ]
    print(results.table(records), flush=True)
    times = {}
    for name, run in BASELINES.items():
        try:
            times[name], how = time_baseline(run, fleet, adapters, budget)
        except Exception as error:  # a baseline that fails must not take the others along
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        records.append(
            results.record(f"construction/{fleet.name}/{name}", times[name], "s", baseline=("tsqr", took), note=how)
        )
        print(results.table(records[-1:]), flush=True)
        if not LAPTOP:
            torch.cuda.empty_cache()
    candidates = [name for name in IN_ISSUE if name in times]
    if candidates:
        best = min(candidates, key=times.__getitem__)
        records.append(
            results.record(
                f"tsqr_vs_best/{fleet.name}", times[best] / took, "x", limit=f"value >= {fleet.wanted}",
                note=f"best of {', '.join(candidates)}: {best}",
            )
        )  # fmt: skip
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for fleet_<machine>.json")
    parser.add_argument("--fleets", nargs="+", choices=tuple(FLEETS), default=["qwen50", "llama35"])
    parser.add_argument("--machine", default=None, help="name in the file's name (default: h200, gpu or cpu)")
    parser.add_argument("--seconds", type=float, default=200, help="of the whole run; what does not fit is left out")
    arguments = parser.parse_args()
    if LAPTOP and not tsqr.interpreted():
        parser.error("no GPU: set TRITON_INTERPRET=1 (and --fleets tiny)")
    named = "cpu" if LAPTOP else "h200" if "H200" in torch.cuda.get_device_name() else "gpu"
    run_all(arguments.fleets, arguments.out, arguments.machine or named, arguments.seconds)


def run_all(names: Sequence[str], out: Path, machine: str, limit: float) -> None:
    deadline = Deadline(limit)
    tuning = Deadline(limit * 0.5)
    variant: Variant | None = None
    records: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        fleet = FLEETS[name]
        adapters = make_fleet(fleet)
        synchronise()
        print(f"{name}: {len(adapters)} adapters, {deadline.left:.0f} s left", flush=True)
        if variant is None:
            variant, found = tune(fleet, adapters, tuning)
            records += found
        budget = max(1.0, (deadline.left / (len(names) - index) - 10) / len(BASELINES) / 3)
        records += measure(fleet, adapters, variant, budget)
        results.write("fleet", machine, records, out)  # after each fleet: a run that is cut short leaves what it has
        del adapters
    print(results.table(records))


if __name__ == "__main__":
    main()
