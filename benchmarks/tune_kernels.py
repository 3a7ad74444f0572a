"""Find the fastest tiles for this GPU, and write them where kernels/dispatch.py looks.

    python -m benchmarks.tune_kernels [--out kernels/configs] [--rank 16]

Needs a GPU with 8 GB; takes a few minutes, most of it compilation (on all cores, before anything is timed). Layers of the
Llama-3-8B shape run as CUDA graphs, with the base model's products, for 1, 8 and 32 adapters and for mixes of 3. For every
number of tokens, shrink and expand are varied one after the other, and what is fastest over all these batches is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_world import KernelWorld, decode_mixes, time_graph
from sglang_lora_tree.kernels import dispatch
from sglang_lora_tree.kernels.dispatch import Config

LAYERS = 4
"""Of the real model's: their weights are larger than the cache."""
TOKENS = (32, 64, 256, 1024, 8192)
"""What is tuned; the config for a number of tokens serves all below it that no smaller one serves."""

Variation = dict[str, Any]
"""Fields of a config and what they become."""

DECODE_SHRINKS: list[Variation] = [
    {"shrink_block_n": n, "shrink_block_k": k, "shrink_workers": workers, "shrink_warps": 4, "shrink_stages": stages}
    for n, k, workers, stages in (
        (16, 128, 32, 8), (16, 128, 16, 8), (16, 128, 64, 8), (16, 128, 32, 5), (16, 64, 64, 6),
        (32, 128, 32, 4), (32, 128, 32, 8), (64, 128, 16, 5), (64, 128, 16, 8),
    )
]
DECODE_EXPANDS: list[Variation] = [
    {"expand_block_d": d, "expand_items": items, "expand_warps": 4, "expand_stages": stages}
    for d, items, stages in ((128, 2, 3), (128, 2, 5), (128, 2, 7), (64, 2, 5), (128, 4, 5), (128, 1, 5))
]
PREFILL_SHRINKS: list[Variation] = [
    {"shrink_split": split, "shrink_block_n": n, "shrink_block_k": k, "shrink_warps": 4, "shrink_stages": stages}
    for split, n, k, stages in ((False, 32, 64, 6), (False, 32, 128, 4), (False, 64, 64, 4), (True, 32, 64, 4))
]
PREFILL_EXPANDS: list[Variation] = [
    {"expand_block_d": d, "expand_items": items, "expand_warps": 4, "expand_stages": stages}
    for d, items, stages in ((64, 1, 2), (64, 1, 1), (64, 1, 3), (128, 1, 2), (32, 1, 2))
]

Cost = Callable[[Config], float]


def candidates(tokens: int) -> tuple[Config, list[Variation], list[Variation]]:
    """Where to start for a number of tokens, and the variations of shrink and of expand."""
    start = next(config for config in dispatch.DEFAULT if tokens <= config.max_tokens)
    return (start, DECODE_SHRINKS, DECODE_EXPANDS) if start.block_t == 16 else (start, PREFILL_SHRINKS, PREFILL_EXPANDS)


def tune(tokens: int, cost: Cost) -> Config:
    """The cheapest config for `tokens` tokens: the best shrink, then the best expand, then with and without a side stream."""
    best, shrinks, expands = candidates(tokens)
    for variations in (shrinks, expands, [{"overlap": True}, {"overlap": False}]):
        tried = [replace(best, **variation) for variation in variations]
        best = min(tried, key=cost)
    return replace(best, max_tokens=tokens)


def use(config: Config) -> None:
    """Compute every batch by this config."""
    unlimited = (replace(config, max_tokens=1 << 62),)
    dispatch._configs = lambda device_name: unlimited  # type: ignore[assignment]


def batches(tokens: int) -> Iterable[tuple[list[int], list[list[tuple[int, float]]]]]:
    """Segment lengths and mixes that are timed: a token per request up to 256, requests of 1,024 tokens above."""
    seg_lens = [1] * tokens if tokens <= 256 else [1024] * (tokens // 1024)
    for adapters, members in ((1, 1), (8, 1), (32, 1), (8, 3)):
        yield seg_lens, decode_mixes(len(seg_lens), adapters, members)


def measure(world: KernelWorld, tokens: int, config: Config) -> float:
    """Geometric mean of the milliseconds of all batches; infinite if this GPU cannot run the config."""
    use(config)
    logs = []
    for seg_lens, mixes in batches(tokens):
        try:
            step = world.make_step(tokens, world.pairs(seg_lens, mixes), overlap=config.overlap)
            logs.append(math.log(time_graph(step, repeats=5)))
        except RuntimeError as error:  # out of shared memory, for example
            print(f"{config}: {error}")
            return math.inf
    return math.exp(sum(logs) / len(logs))


def compile_one(job: tuple[int, Config, int]) -> None:
    """Compile a config's kernels into Triton's cache on disk."""
    tokens, config, rank = job
    use(config)
    world = KernelWorld([rank], 1)
    seg_lens = next(iter(batches(tokens)))[0]
    world.make_step(tokens, world.pairs(seg_lens, [[(0, 1.0)]] * len(seg_lens)))()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=dispatch.CONFIGS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    arguments = parser.parse_args()
    jobs = [
        (tokens, replace(start, **variation), arguments.rank)
        for tokens in sorted({min(tokens, 1024) if tokens > 256 else 32 for tokens in arguments.tokens})
        for start, shrinks, expands in [candidates(tokens)]
        for variation in (*shrinks, *expands)
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        for outcome in [pool.apply_async(compile_one, (job,)) for job in jobs]:
            try:
                outcome.get(300)
            except Exception as error:  # measured as infinitely slow later
                print(f"does not compile: {error}")
    world = KernelWorld([arguments.rank] * 32, LAYERS)
    configs = write(arguments.tokens, lambda tokens, config: measure(world, tokens, config), arguments.out)
    for config in configs:
        print(config)


def write(tokens: Sequence[int], cost: Callable[[int, Config], float], folder: Path) -> list[Config]:
    """Tune for each number of tokens and write this GPU's file; the last config serves all larger batches."""
    configs = [tune(count, lambda config, count=count: cost(count, config)) for count in sorted(tokens)]  # type: ignore[misc]
    configs[-1] = replace(configs[-1], max_tokens=1 << 62)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{dispatch.config_name(name)}.json"
    path.write_text(json.dumps([asdict(config) for config in configs], indent=1) + "\n", encoding="utf-8")
    return configs


if __name__ == "__main__":
    main()
