"""Serving a fleet at 1/12 of its parameters beside the originals, with scarce and with ample memory, on one GPU.

    python -m benchmarks.fleet_serving --out DIR [--cases scarce ample]
    python -m benchmarks.fleet_serving --out DIR --small        a tiny shape, to see that it runs, on a CPU too (10 minutes)

Llama-3.1-8B's shape, random weights, bfloat16; 12 adapters of rank 64 whose spectra decay. 32 parallel requests of 256 + 128
tokens over all adapters. One server per case serves first the originals, then, after these are unloaded, their twelfths: same
pool, same graphs. Scarce: the pool has room for few of the originals beside the requests, so they are swapped, and requests
wait for them. Ample: it has room for all, and what remains of the difference is the kernels'. About 40 GB of GPU memory, 25
GB of pinned RAM, 5 GB of disk, a minute of preparation, 2 until both servers are up, 1 per case; results:
``fleet_serving_<gpu>.json`` (of a small run ``fleet_serving_small.json``), written after each case, and the servers' logs. A
case that fails is said, and the exit is 1.
"""

from __future__ import annotations

import argparse
import json
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
from safetensors.torch import save_file

from benchmarks import results
from benchmarks.llama8b import write_config
from benchmarks.server import Server
from sglang_lora_tree.adapters.base_shape import MODULE_PATHS, BaseShape
from sglang_lora_tree.fleet.compress import Settings, compress

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
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(base.num_layers):
        for module, (d_in, d_out) in base.widths.items():
            key = f"base_model.model.model.layers.{layer}.{MODULE_PATHS[module]}"
            decay = pace.uniform(0.75, 0.95) ** torch.arange(rank, device=device)
            a = torch.randn(rank, d_in, generator=generator, device=device) / d_in**0.5
            b = torch.randn(d_out, rank, generator=generator, device=device) * decay * 0.02
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a.bfloat16().cpu(), b.bfloat16().cpu()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(base.widths)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def measure(work: Path, out: Path, machine: str, scale: Scale, cases: Sequence[str]) -> list[dict[str, Any]]:
    start = time.monotonic()
    model = scale.model or write_config(work / "model")
    base = BaseShape.from_folder(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    originals = [write_adapter(work / f"x{index}", base, scale.rank, index, device) for index in range(scale.num_adapters)]
    print(f"{len(originals)} adapters written after {time.monotonic() - start:.0f} s", flush=True)
    outcomes = compress(originals, work / "twelfth", Settings(BUDGET), base, device)
    print(f"compressed after {time.monotonic() - start:.0f} s", flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()
    before = sum(outcome.survey.slots(outcome.survey.ranks, base) for outcome in outcomes)
    after = sum(outcome.survey.slots(outcome.ranks, base) for outcome in outcomes)
    share = scale.rank // BUDGET.denominator / scale.rank  # what rounding down the ranks leaves of 1/12
    records = [
        results.record("slots/twelfth", after, "slots", baseline=("originals", before), limit=f"ratio <= {1.1 * share:.4f}")
    ]
    fleets = {
        "original": {f"original{index}": folder for index, folder in enumerate(originals)},
        "twelfth": {f"twelfth{index}": work / "twelfth" / folder.name for index, folder in enumerate(originals)},
    }
    ratios: dict[str, float] = {}
    pools = {}
    for case in cases:
        room = min(ROOM_FOR_ORIGINALS[case], scale.num_adapters + 1)
        pools[case] = scale.request_slots + int(room * before / scale.num_adapters) + scale.request_slots // 8
    for case, server in start_servers(model, scale, fleets, pools, out):
        pool = pools[case]
        try:
            speeds, swaps = serve(server, scale, fleets)
        except Exception as error:  # one case that fails must not take the other along
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
            continue
        finally:
            server.stop()
        print(f"{case}: {speeds} tokens/s, pool of {pool} slots; after {time.monotonic() - start:.0f} s", flush=True)
        ratios[case] = speeds["twelfth"] / speeds["original"]
        records.append(
            results.record(
                f"serve_{scale.name}_twelfth/{case}",
                speeds["twelfth"],
                "tokens/s",
                baseline=("originals", speeds["original"]),
                limit=f"ratio >= {scale.wanted}" if case == "scarce" and scale.wanted else None,
                note=f"{scale.num_adapters} adapters of rank {scale.rank}, pool of {pool} slots for {before} of originals, "
                f"{scale.num_requests} requests of {scale.num_prompt} + {scale.num_new} tokens; swap-ins per round: {swaps}",
            )
        )
        results.write("fleet_serving", machine, records, out)
    if len(ratios) == len(ROOM_FOR_ORIGINALS):
        note = "speed-up with scarce memory over that with ample memory, which is the kernels'"
        gain = ratios["scarce"] / ratios["ample"]
        records.append(results.record(f"serve_{scale.name}_twelfth/gain_by_pool", gain, "x", note=note))
        results.write("fleet_serving", machine, records, out)
    return records


def start_servers(
    model: Path, scale: Scale, fleets: dict[str, dict[str, Path]], pools: dict[str, int], out: Path
) -> Iterator[tuple[str, Server]]:
    """A server per case. They start side by side; the caller stops each before it takes the next."""
    options = ["--model-path", str(model), "--skip-tokenizer-init", "--lora-tree", *scale.options, "--hicache-ratio", "3"]
    options += ["--lora-paths", *(f"{name}={folder}" for fleet in fleets.values() for name, folder in fleet.items())]
    servers = {
        case: Server(["--max-total-tokens", str(pool), *options], out / f"fleet_serving_{case}.log")
        for case, pool in pools.items()
    }
    with ExitStack() as stack:
        for server in servers.values():
            server.start()
            stack.callback(server.stop)
            time.sleep(4)  # each looks at the free memory while it starts
        yield from servers.items()


def serve(
    server: Server, scale: Scale, fleets: dict[str, dict[str, Path]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Per fleet the median tokens per second, and the adapters swapped in per round; every request has the next adapter."""
    rng = random.Random(5)
    speeds, swaps = {}, {}
    server.wait()
    print(f"server up after {server.start_seconds:.0f} s more", flush=True)
    for fleet, folders in fleets.items():
        names = list(folders)
        for num_new in (scale.num_new // 4, scale.num_new):  # compiles kernels, reads adapters, copies them to the host
            took = run_round(server, scale, names, rng, num_new)
            print(f"{fleet}: warm-up at {took:.0f} tokens/s", flush=True)
        before = server.tree()["counters"]["swap_ins"]
        rounds = [run_round(server, scale, names, rng, scale.num_new) for _ in range(ROUNDS)]
        print(f"{fleet}: {', '.join(f'{speed:.0f}' for speed in rounds)} tokens/s", flush=True)
        speeds[fleet] = statistics.median(rounds)
        swaps[fleet] = round((server.tree()["counters"]["swap_ins"] - before) / ROUNDS, 1)
        for name in names:  # or they would come back to free slots of the next fleet, unasked
            response = requests.post(f"{server.url}/unload_lora_adapter", json={"lora_name": name}, timeout=60)
            assert response.status_code == 200, f"unload {name}: {response.status_code} {response.text[:500]}"
    return speeds, swaps


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
    machine = "small" if arguments.small else results.hardware().lower().rpartition(" ")[2]
    with tempfile.TemporaryDirectory() as folder:
        scale = SMALL if arguments.small else LARGE
        records = measure(Path(folder), arguments.out, machine, scale, arguments.cases)
    print(results.table(records))
    measured = {record["metric"].rpartition("/")[2] for record in records}
    if failed := [case for case in arguments.cases if case not in measured]:
        raise SystemExit(f"{', '.join(failed)}: failed, see above and the servers' logs")


if __name__ == "__main__":
    main()
