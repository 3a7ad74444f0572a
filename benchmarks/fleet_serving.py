"""Serving a fleet at 1/12 of its parameters beside the originals, with scarce and with ample memory, on one GPU.

    python -m benchmarks.fleet_serving --out DIR [--cases scarce ample]
    python -m benchmarks.fleet_serving --out DIR --small        a tiny shape, to see that it runs, on a CPU too (10 minutes)

Llama-3.1-8B's shape, random weights, bfloat16; 12 adapters of rank 64 whose spectra decay. 32 parallel requests of 256 + 128
tokens over all adapters. One server per case serves first the originals, then, after these are unloaded, their twelfths: same
pool, same graphs. Scarce: the pool has room for few of the originals beside the requests, so they are swapped, and requests
wait for them. Ample: it has room for all, and what remains of the difference is the kernels'. About 40 GB of GPU memory, 25
GB of pinned RAM, 5 GB of disk, 2 to 3 minutes until both servers are up, 1 per case; results:
``fleet_serving_<gpu>.json`` (of a small run ``fleet_serving_small.json``), written after each case, and the servers' logs. A
case that fails is said, and the exit is 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import requests
import torch

from benchmarks import results
from benchmarks.llama8b import write_config, write_factors
from benchmarks.server import Server, start_side_by_side
from sglang_lora_tree.adapters.base_shape import BaseShape
from sglang_lora_tree.fleet.compress import Outcome, Settings, compress

BUDGET = Fraction(1, 12)
ROOM_FOR_ORIGINALS = {"scarce": 4.5, "ample": 1e9}
"""How many of the originals fit into the pool beside the requests; at most all."""
ROUNDS = 5
EMBEDDED = Path(__file__).parents[1] / "examples" / "embedded_model" / "model"


@dataclass(frozen=True)
class Scale:
    """How large everything is. name: in the metrics. model: None for the 8B shape. wanted: of the speed-up, scarce."""

    name: str
    wanted: float | None
    model: Path | None
    num_adapters: int
    rank: int
    num_requests: int
    num_prompt: int
    num_new: int
    vocab: int
    options: tuple[str, ...]

    @property
    def request_slots(self) -> int:
        return self.num_requests * (self.num_prompt + self.num_new)


LARGE = Scale(
    "8b", 1.9, None, 12, 64, 32, 256, 128, 120_000,
    ("--load-format", "dummy", "--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch",
     "--cuda-graph-max-bs-decode", "32", "--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.6"),
)  # fmt: skip
SMALL = Scale("small", None, EMBEDDED, 6, 24, 6, 24, 8, 250, ("--dtype", "float32"))


def write_adapter(folder: Path, base: BaseShape, rank: int, seed: int, device: str) -> Path:
    """A random adapter; B's columns decay at another pace in every module, so that spectral ranks differ."""
    generator = torch.Generator(device).manual_seed(seed)
    pace = random.Random(seed)

    def make(d_in: int, d_out: int) -> tuple[torch.Tensor, torch.Tensor]:
        decay = pace.uniform(0.75, 0.95) ** torch.arange(rank, device=device)
        a = torch.randn(rank, d_in, generator=generator, device=device) / d_in**0.5
        return a, torch.randn(d_out, rank, generator=generator, device=device) * decay * 0.02

    return write_factors(folder, base, rank, make)


def measure(work: Path, report: results.Report, scale: Scale, cases: Sequence[str]) -> None:
    """Add the records of all cases to `report`; the servers' logs are left beside it."""
    start = time.monotonic()
    model = scale.model or write_config(work / "model")
    base = BaseShape.from_folder(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    originals = [write_adapter(work / f"x{index}", base, scale.rank, index, device) for index in range(scale.num_adapters)]
    print(f"{len(originals)} adapters written after {time.monotonic() - start:.0f} s", flush=True)
    slots = count_slots(base, scale.rank)
    pools = {}
    for case in cases:
        room = min(ROOM_FOR_ORIGINALS[case], scale.num_adapters + 1)
        pools[case] = scale.request_slots + int(room * slots) + scale.request_slots // 8
    with ExitStack() as stack:
        servers = start_servers(model, scale, pools, report.folder, stack)
        outcomes = compress(originals, work / "twelfth", Settings(BUDGET), base, device)  # beside their start
        print(f"compressed after {time.monotonic() - start:.0f} s", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
        fleets = {
            "original": {f"original{index}": folder for index, folder in enumerate(originals)},
            "twelfth": {f"twelfth{index}": work / "twelfth" / folder.name for index, folder in enumerate(originals)},
        }
        slots_record = make_slots_record(scale, base, outcomes)
        report.add(slots_record)
        measure_cases(scale, servers, fleets, pools, slots_record["baseline"]["value"], report)


def count_slots(base: BaseShape, rank: int) -> int:
    """Of an adapter of this rank on all linear layers."""
    rows = rank * sum(-(-d_in // base.kv_width) + -(-d_out // base.kv_width) for d_in, d_out in base.widths.values())
    return -(-rows // 2)


def make_slots_record(scale: Scale, base: BaseShape, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the twelfths take of the pool, over the originals."""
    before = sum(outcome.survey.slots(outcome.survey.ranks, base) for outcome in outcomes)
    after = sum(outcome.survey.slots(outcome.ranks, base) for outcome in outcomes)
    share = scale.rank // BUDGET.denominator / scale.rank  # what rounding down the ranks leaves of 1/12
    limit = f"ratio <= {1.1 * share:.4f}"
    return results.record("slots/twelfth", after, "slots", baseline=("originals", before), limit=limit)


def measure_cases(
    scale: Scale,
    servers: dict[str, Server],
    fleets: dict[str, dict[str, Path]],
    pools: dict[str, int],
    original_slots: float,
    report: results.Report,
) -> None:
    """All cases, one after the other; a record for each fleet's turn on a server."""
    ratios: dict[str, float] = {}
    for case, server in servers.items():
        note = f"{scale.num_adapters} adapters of rank {scale.rank}, pool of {pools[case]} slots for "
        note += f"{original_slots:.0f} of originals, {scale.num_requests} requests of {scale.num_prompt} + "
        note += f"{scale.num_new} tokens, median of {ROUNDS} rounds; swap-ins per round: "
        original: float | None = None
        try:
            for fleet, speed, swaps in serve(server, scale, fleets):
                limit = f"ratio >= {scale.wanted}" if original and case == "scarce" and scale.wanted else None
                metric, baseline = f"serve_{scale.name}_{fleet}/{case}", ("originals", original) if original else None
                report.add(results.record(metric, speed, "tokens/s", baseline=baseline, limit=limit, note=f"{note}{swaps}"))
                if original:
                    ratios[case] = speed / original
                original = speed
        except Exception as error:  # one case that fails must not take the other along
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
        finally:
            server.stop()
    if len(ratios) == len(ROOM_FOR_ORIGINALS):
        note = "speed-up with scarce memory over that with ample memory, which is the kernels'"
        gain = ratios["scarce"] / ratios["ample"]
        report.add(results.record(f"serve_{scale.name}_twelfth/gain_by_pool", gain, "x", note=note))


def start_servers(model: Path, scale: Scale, pools: dict[str, int], out: Path, stack: ExitStack) -> dict[str, Server]:
    """A server per case, which start side by side; `stack` stops them. They have no adapters yet."""
    options = ["--model-path", str(model), "--skip-tokenizer-init", "--lora-tree", *scale.options, "--hicache-ratio", "3"]
    servers = {
        case: Server(["--max-total-tokens", str(pool), *options], out / f"fleet_serving_{case}.log")
        for case, pool in pools.items()
    }
    start_side_by_side(servers.values(), stack)
    return servers


def serve(server: Server, scale: Scale, fleets: dict[str, dict[str, Path]]) -> Iterator[tuple[str, float, float]]:
    """Per fleet the median tokens per second, and the adapters swapped in per round; every request has the next adapter."""
    rng = random.Random(5)
    server.wait()
    print(f"server up after {server.start_seconds:.0f} s more", flush=True)
    for fleet, folders in fleets.items():
        names = list(folders)
        for name, folder in folders.items():
            ask(server, "load", lora_name=name, lora_path=str(folder))
        for num_new in (scale.num_new // 4, scale.num_new):  # compiles kernels, reads adapters, copies them to the host
            took = run_round(server, scale, names, rng, num_new)
            print(f"{fleet}: warm-up at {took:.0f} tokens/s", flush=True)
        before = server.tree()["counters"]["swap_ins"]
        rounds = [run_round(server, scale, names, rng, scale.num_new) for _ in range(ROUNDS)]
        print(f"{fleet}: {', '.join(f'{speed:.0f}' for speed in rounds)} tokens/s", flush=True)
        yield fleet, statistics.median(rounds), round((server.tree()["counters"]["swap_ins"] - before) / ROUNDS, 1)
        for name in names:  # or they would come back to free slots of the next fleet, unasked
            ask(server, "unload", lora_name=name)


def ask(server: Server, verb: str, **body: str) -> None:
    """Load or unload an adapter."""
    response = requests.post(f"{server.url}/{verb}_lora_adapter", json=body, timeout=120)
    assert response.status_code == 200, f"{verb} {body['lora_name']}: {response.status_code} {response.text[:500]}"


def run_round(server: Server, scale: Scale, names: Sequence[str], rng: random.Random, num_new: int) -> float:
    """Tokens per second of all requests at once."""
    prompts = [[rng.randrange(2, scale.vocab) for _ in range(scale.num_prompt)] for _ in range(scale.num_requests)]

    def ask(index: int) -> Any:
        return server.generate(
            input_ids=prompts[index],
            lora_path=names[index % len(names)],
            sampling_params={"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True},
        )

    start = time.monotonic()
    with ThreadPoolExecutor(scale.num_requests) as pool:
        answers = list(pool.map(ask, range(scale.num_requests)))
    took = time.monotonic() - start
    assert all(len(answer["output_ids"]) == num_new for answer in answers), "an answer was cut short"
    return scale.num_requests * num_new / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.RESULTS, help="for fleet_serving_<gpu>.json and the servers' logs")
    parser.add_argument("--cases", nargs="+", choices=tuple(ROOM_FOR_ORIGINALS), default=list(ROOM_FOR_ORIGINALS))
    parser.add_argument("--small", action="store_true", help="the embedded model")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.small and not torch.cuda.is_available():
        parser.error("no GPU: the 8B shape needs one; --small runs on a CPU")
    machine = "small" if arguments.small else results.gpu()
    report = results.Report("fleet_serving", machine, arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), report, SMALL if arguments.small else LARGE, arguments.cases)
    measured = {record["metric"].rpartition("/")[2] for record in report.records if "_twelfth/" in record["metric"]}
    if failed := [case for case in arguments.cases if case not in measured]:
        raise SystemExit(f"{', '.join(failed)}: failed, see above and the servers' logs")


if __name__ == "__main__":
    main()
