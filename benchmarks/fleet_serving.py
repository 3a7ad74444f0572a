"""Serving a fleet at 1/12 of its parameters beside the originals, with scarce and with ample memory, on one GPU.

    python -m benchmarks.fleet_serving --out DIR [--adapters 12] [--cases scarce ample]

Llama-3.1-8B's shape, random weights, bfloat16; rank-64 adapters whose spectra decay. 32 parallel requests of 256 + 128 tokens
over all adapters. Where the pool has room for few of the originals they are swapped, and requests wait for them; where it
has room for all, what remains of the difference is the kernels'. About 60 GB of GPU memory, 5 GB of disk, two server
starts; results: ``fleet_serving_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import results
from benchmarks.acceptance_gpu import make_llama8b_config, run_32
from benchmarks.server import Server
from sglang_lora_tree.adapters.base_shape import MODULE_PATHS, BaseShape
from sglang_lora_tree.fleet.compress import Settings, compress

RANK = 64
BUDGET = Fraction(1, 12)
REQUEST_SLOTS = 32 * (256 + 128)
ROOM_FOR_ORIGINALS = {"scarce": 4.5, "ample": 1e9}
"""How many of the originals fit into the pool beside the requests; at most all."""
WANTED = 1.9


def write_adapter(folder: Path, base: BaseShape, seed: int, device: str) -> Path:
    """A random adapter; B's columns decay at another pace in every module, so that spectral ranks differ."""
    generator = torch.Generator(device).manual_seed(seed)
    pace = random.Random(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(base.num_layers):
        for module, (d_in, d_out) in base.widths.items():
            key = f"base_model.model.model.layers.{layer}.{MODULE_PATHS[module]}"
            decay = pace.uniform(0.75, 0.95) ** torch.arange(RANK, device=device)
            a = torch.randn(RANK, d_in, generator=generator, device=device) / d_in**0.5
            b = torch.randn(d_out, RANK, generator=generator, device=device) * decay * 0.02
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a.bfloat16().cpu(), b.bfloat16().cpu()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(base.widths)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def measure(work: Path, num_adapters: int, cases: list[str]) -> list[dict[str, Any]]:
    model = make_llama8b_config(work / "model")
    base = BaseShape.from_folder(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    originals = [write_adapter(work / f"x{index}", base, index, device) for index in range(num_adapters)]
    outcomes = compress(originals, work / "small", Settings(BUDGET), base, device)
    torch.cuda.empty_cache()
    before = sum(outcome.survey.slots(outcome.survey.ranks, base) for outcome in outcomes)
    after = sum(outcome.survey.slots(outcome.ranks, base) for outcome in outcomes)
    records = [
        results.record("slots/twelfth", after, "slots", baseline=("originals", before), limit=f"ratio <= {1.1 / 12:.4f}")
    ]
    speeds: dict[tuple[str, str], float] = {}
    for case in cases:
        fleets = {"original": originals, "twelfth": [work / "small" / folder.name for folder in originals]}
        room = min(ROOM_FOR_ORIGINALS[case], num_adapters + 1)
        pool = REQUEST_SLOTS + int(room * before / num_adapters) + 2048
        for fleet, folders in fleets.items():
            speeds[case, fleet] = serve(model, folders, pool, work / f"{case}_{fleet}.log")
            print(f"{case} {fleet}: {speeds[case, fleet]:.0f} tokens/s, pool of {pool} slots", flush=True)
        records.append(
            results.record(
                f"serve_8b_twelfth/{case}",
                speeds[case, "twelfth"],
                "tokens/s",
                baseline=("originals", speeds[case, "original"]),
                limit=f"ratio >= {WANTED}" if case == "scarce" else None,
                note=f"{num_adapters} adapters of rank {RANK}, pool of {pool} slots, 32 requests of 256 + 128 tokens",
            )
        )
    return records


def serve(model: Path, folders: list[Path], pool: int, log: Path) -> float:
    """Median tokens per second of three rounds; every request has the next adapter."""
    options = ["--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--lora-tree"]
    options += ["--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch"]
    options += ["--cuda-graph-max-bs-decode", "32", "--cuda-graph-backend-prefill", "disabled"]
    options += ["--max-total-tokens", str(pool), "--hicache-ratio", "4", "--mem-fraction-static", "0.6"]
    options += ["--lora-paths", *(f"{folder.name}={folder}" for folder in folders)]
    rng = random.Random(5)

    def choose(index: int) -> dict[str, float]:
        return {folders[index % len(folders)].name: 1.0}

    with Server(options, log) as server:
        run_32(server, rng, choose, 16)  # compiles kernels, reads adapters
        return statistics.median(run_32(server, rng, choose, 128) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    parser.add_argument("--adapters", type=int, default=12)
    parser.add_argument("--cases", nargs="+", choices=tuple(ROOM_FOR_ORIGINALS), default=list(ROOM_FOR_ORIGINALS))
    arguments = parser.parse_args()
    machine = results.hardware().lower().rpartition(" ")[2]
    with tempfile.TemporaryDirectory() as folder:
        records = measure(Path(folder), arguments.adapters, arguments.cases)
        results.write("fleet_serving", machine, records, arguments.out)
    print(results.table(records))


if __name__ == "__main__":
    main()
