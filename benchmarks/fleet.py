"""How long it takes to factorise a whole fleet of adapters: FlashTSQR against torch.linalg, in one process on one GPU.

    python -m benchmarks.fleet --out DIR            two synthetic fleets of the papers' shapes, rank 64, bfloat16
    TRITON_INTERPRET=1 python -m benchmarks.fleet --fleets tiny --out DIR    the same path without a GPU

From adapters in GPU memory to all balanced factors (every direction, float32) in GPU memory, tables, checks and
synchronisation included. A baseline that would take longer than its share of the time runs on the first n adapters of the
fleet, and is compared with FlashTSQR on these n: nothing is scaled. Beside it: where FlashTSQR's time goes, how many warps
the Jacobi kernel wants, and its sweeps and errors on difficult spectra.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.fleet_baselines import BASELINES, OURS, Baseline, Pair
from sglang_lora_tree.fleet import factorisation
from sglang_lora_tree.kernels import jacobi, tsqr
from sglang_lora_tree.kernels.tall_batch import TallBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHUNK = 10
"""Adapters per batch: bounded memory, enough matrices to fill the GPU."""
REPEATS = 5
KEPT_AT_TWELFTH = 12  # rank / 12 directions
ON_CPU = DEVICE.type == "cpu"


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
    "tiny": Fleet("tiny", 3, 8, 1, ((48, 32), (32, 64)), 0.0),
}  # fmt: skip

class Deadline:
    """Seconds left of the run."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def synchronise() -> None:
    if not ON_CPU:
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


class Stopwatch:
    """Milliseconds per stage. Off by default: waiting for the GPU after every stage costs time itself."""

    def __init__(self, on: bool = False) -> None:
        self.on = on
        self.stages: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, stage: str) -> None:
        if self.on:
            synchronise()
            now = time.perf_counter()
            self.stages[stage] = self.stages.get(stage, 0.0) + (now - self.last) * 1e3
            self.last = now


def flash_tsqr(pairs: Sequence[Pair], room: Room, watch: Stopwatch | None = None) -> torch.Tensor:
    """The factors of a chunk into `room`, as many directions as it has; returns the singular values."""
    watch = watch or Stopwatch()
    a_batch = TallBatch.of([a for a, _ in pairs], wide=True)
    b_batch = TallBatch.of([b for _, b in pairs], wide=False)
    watch.lap("tables")
    grams = tsqr.gram(a_batch), tsqr.gram(b_batch)
    watch.lap("gram")

    def svd(core: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        watch.lap("triangles")
        found = jacobi.svd(core)
        watch.lap("svd of the core")
        return found

    sigma, of_a, of_b = factorisation.core_factors(*grams, svd=svd)
    watch.lap("coefficients")
    rank = room.a[0].shape[0]
    for batch, small, out in ((a_batch, of_a, room.a), (b_batch, of_b, room.b)):
        tsqr.apply(batch, small, [rank] * len(batch), out[: len(batch)])
    watch.lap("apply")
    return sigma


def stage_records(fleet: Fleet, pairs: Sequence[Pair], room: Room) -> list[dict[str, Any]]:
    """Where the time goes in one chunk, and how the Jacobi kernel does on its cores."""
    watch = Stopwatch(on=True)
    synchronise()
    watch.lap("")
    flash_tsqr(pairs, room, watch)
    watch.stages.pop("")
    note = f"one chunk of {len(pairs)} modules, waiting after every stage"
    records = [results.record(f"stage/{fleet.name}/{stage}", took, "ms", note=note) for stage, took in watch.stages.items()]
    core = core_matrices(pairs)
    core /= torch.linalg.matrix_norm(core)[:, None, None]
    for warps in (4,) if ON_CPU else (2, 4, 8):
        took = seconds(lambda warps=warps: jacobi.orthogonal_columns(core, warps), 3)
        records.append(results.record(f"jacobi/{fleet.name}/{warps}_warps", took * 1e3, "ms", note="QR of the rows included"))
    took = seconds(lambda: torch.linalg.qr(core.mT, mode="r"), 3)
    records.append(results.record(f"jacobi/{fleet.name}/qr", took * 1e3, "ms", note="of them, torch.linalg.qr"))
    sweeps = jacobi.orthogonal_columns(core)[1]
    records.append(
        results.record(
            f"jacobi/{fleet.name}/unsettled", int((sweeps < 0).sum()), "", limit="value <= 0",
            note=f"of {len(core)} cores; most sweeps {int(sweeps.max())}",
        )
    )  # fmt: skip
    return records


def core_matrices(pairs: Sequence[Pair]) -> torch.Tensor:
    """R_B R_A^T of every module, float64."""
    r_a, r_b = (
        factorisation.triangular_factors(tsqr.gram(TallBatch.of([pair[side] for pair in pairs], wide=side == 0)))
        for side in (0, 1)
    )
    return r_b @ r_a.mT


def spectrum_records(size: int, count: int) -> list[dict[str, Any]]:
    """The Jacobi kernel beside LAPACK in float64 on spectra that are hard for it."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, device=DEVICE, dtype=torch.float64)

    def decades(number: int) -> torch.Tensor:
        return torch.logspace(0, -number, size, device=DEVICE, dtype=torch.float64)

    def spread(sigma: torch.Tensor) -> torch.Tensor:
        left, right = (torch.linalg.qr(random(size, size))[0] for _ in range(2))
        return left * sigma @ right

    low_rank = random(size, 5) @ random(5, size)
    repeated = torch.cat([torch.full((size // 2,), 1.0), torch.full((size - size // 2,), 1e-5)]).to(decades(0))
    spectra = {
        "condition_1e7": spread(decades(7)),
        "condition_1e14": spread(decades(14)),
        "repeated": spread(repeated),
        "rank_5": low_rank,
        "rank_5_and_noise": low_rank + 1e-6 * random(size, size),
        "triangles": random(size, size).triu() * decades(2) @ random(size, size).triu().mT,
        "zero": torch.zeros_like(low_rank),
    }
    records = []
    for name, matrices in spectra.items():
        norms = torch.linalg.matrix_norm(matrices).clamp_min(1e-300)
        sweeps = jacobi.orthogonal_columns(matrices / norms[:, None, None])[1]
        u, sigma, v = jacobi.svd(matrices)
        largest = torch.linalg.svdvals(matrices.cpu())[:, 0].to(DEVICE).clamp_min(1e-300)
        error = float((torch.linalg.matrix_norm(u * sigma[:, None] @ v.mT - matrices) / largest).max())
        note = f"{count} matrices of {size} x {size}; unsettled {int((sweeps < 0).sum())}, most sweeps {int(sweeps.max())}"
        records.append(results.record(f"jacobi_error/{name}", error, "", limit="value <= 1e-5", note=note))
    return records


def time_baseline(
    baseline: Baseline, fleet: Fleet, adapters: list[list[Pair]], budget: float
) -> tuple[float, int]:
    """Seconds for the first n adapters, and n: all of them if that fits into `budget` seconds."""

    def run(pairs: Sequence[Pair]) -> None:
        collections.deque(baseline(pairs), maxlen=0)  # factors are not kept: a whole fleet's would not fit

    run(adapters[0][: len(fleet.widths)])  # libraries start up
    synchronise()
    start = time.perf_counter()
    run(adapters[0])
    synchronise()
    one = time.perf_counter() - start
    count = int(min(len(adapters), max(1, budget // max(one, 1e-9))))
    start = time.perf_counter()
    for pairs in chunks(adapters[:count]):
        run(pairs)
    synchronise()
    return time.perf_counter() - start, count


# Correctness


def worst_errors(pairs: Sequence[Pair], room: Room, sigma: torch.Tensor) -> tuple[float, float]:
    """Against float64 on the first 7 modules (a layer's), next to the largest singular value.

    Returns the largest error of a singular value, and of the product of the first k directions beside the truncated SVD
    (Frobenius), k = rank / 12 and k = rank.
    """
    sigma_error = product_error = 0.0
    for index in range(min(7, len(pairs))):
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


def measure(
    fleet: Fleet,
    adapters: list[list[Pair]],
    baselines: Sequence[str],
    deadline: Deadline,
    report: results.Report,
) -> None:
    """Baselines share what is left of the time."""
    first = next(iter(chunks(adapters)))
    room = Room.of(first, fleet.rank)
    sigma = flash_tsqr(first, room)  # compiles
    sigma_error, product_error = worst_errors(first, room, sigma)

    def whole(room: Room, count: int) -> None:
        for pairs in chunks(adapters[:count]):
            flash_tsqr(pairs, room)

    took = {fleet.num_adapters: seconds(lambda: whole(room, fleet.num_adapters))}
    size = sum(a.numel() + b.numel() for a, b in adapters[0]) * len(adapters)
    note = f"{fleet.num_adapters} adapters x {fleet.num_modules} modules, rank {fleet.rank}, {size / 1e9:.2f}e9 parameters"
    report.add(
        results.record(f"construction/{fleet.name}/tsqr", took[fleet.num_adapters], "s", note=f"{note}; all directions"),
        results.record(f"sigma_error/{fleet.name}", sigma_error, "", limit="value <= 1e-5", note="beside float64, 7 modules"),
        results.record(f"product_error/{fleet.name}", product_error, "", limit="value <= 1e-5", note="rank k = 1/12 and full"),
    )
    kept = max(1, fleet.rank // KEPT_AT_TWELFTH)
    small = Room.of(first, kept)
    at_twelfth = seconds(lambda: whole(small, fleet.num_adapters))
    report.add(results.record(f"construction_twelfth/{fleet.name}/tsqr", at_twelfth, "s", note=f"{note}; {kept} directions kept"))
    report.add(*stage_records(fleet, first, room))
    found: dict[str, tuple[float, int]] = {}
    for index, name in enumerate(baselines):
        budget = max(1.0, deadline.left / (len(baselines) - index))
        try:
            baseline, count = time_baseline(BASELINES[name], fleet, adapters, budget)
        except Exception as error:  # a baseline that fails must not take the others along
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        if not ON_CPU:
            torch.cuda.empty_cache()
        if count not in took:
            took[count] = seconds(lambda count=count: whole(room, count))
        if name not in OURS:
            found[name] = baseline, count
        beside = f"tsqr, {count} adapters" if count < fleet.num_adapters else "tsqr"
        how = f"{count} of {fleet.num_adapters} adapters, once; float32"
        report.add(results.record(f"construction/{fleet.name}/{name}", baseline, "s", baseline=(beside, took[count]), note=how))
    if found:
        report.add(best_record(fleet, found, took))


def best_record(fleet: Fleet, found: Mapping[str, tuple[float, int]], took: Mapping[int, float]) -> dict[str, Any]:
    """FlashTSQR's seconds beside the best baseline's, on the same adapters.

    found: per baseline its seconds and the number of adapters. took: FlashTSQR's seconds by number of adapters.
    """
    faster = {name: theirs / took[count] for name, (theirs, count) in found.items()}
    best = min(faster, key=faster.__getitem__)
    theirs, count = found[best]
    note = f"{faster[best]:.4g} times as fast as {best}, the best of {', '.join(found)}; wanted: {fleet.wanted}; {count} adapters"
    limit = f"ratio <= {1 / fleet.wanted:.4f}" if fleet.wanted else None
    return results.record(f"tsqr_vs_best/{fleet.name}", took[count], "s", baseline=(best, theirs), limit=limit, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for fleet_<machine>.json")
    parser.add_argument("--fleets", nargs="+", choices=tuple(FLEETS), default=["qwen50", "llama35"])
    parser.add_argument("--baselines", nargs="+", choices=tuple(BASELINES), default=list(BASELINES))
    parser.add_argument("--machine", default=None, help="name in the file's name (default: h200, gpu or cpu)")
    parser.add_argument("--seconds", type=float, default=140, help="of the whole run; baselines share what is left")
    arguments = parser.parse_args()
    if ON_CPU and not tsqr.interpreted():
        parser.error("no GPU: set TRITON_INTERPRET=1 (and --fleets tiny)")
    named = "cpu" if ON_CPU else "h200" if "H200" in torch.cuda.get_device_name() else "gpu"
    run_all(arguments.fleets, arguments.baselines, arguments.out, arguments.machine or named, arguments.seconds)


def run_all(names: Sequence[str], baselines: Sequence[str], out: Path, machine: str, limit: float) -> None:
    deadline = Deadline(limit)
    report = results.Report("fleet", machine, out)
    for index, name in enumerate(names):
        fleet = FLEETS[name]
        adapters = make_fleet(fleet)
        synchronise()
        print(f"{name}: {len(adapters)} adapters, {deadline.left:.0f} s left", flush=True)
        measure(fleet, adapters, baselines, Deadline(deadline.left / (len(names) - index)), report)
        del adapters
    report.add(*spectrum_records(*((16, 1) if ON_CPU else (64, 64))))


if __name__ == "__main__":
    main()
