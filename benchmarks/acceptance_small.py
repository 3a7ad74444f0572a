"""The small model of the acceptance on a GPU: its adapters, mixes and servers' options, and what all phases ask of a server."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.server import Server
from tests.models import ALL_LINEAR, make_adapters, make_llama

Records = list[dict[str, Any]]
Mix = Mapping[str, float]

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SMALL_MODEL = {"layers": 4, "hidden": 1024, "vocab": 4096} if ON_GPU else {"layers": 2, "hidden": 256, "vocab": 512}
VOCAB = SMALL_MODEL["vocab"]
SMALL_POOL = 8000
"""Slots: 32 requests of up to 300 + 128 tokens fit beside SMALL_ADAPTERS, and two prompts fill it."""
LONGEST_PROMPT = 3900
"""Tokens; the small model knows 4,096 positions."""
TIE = 1e-4
"""Two tokens whose log probabilities differ by less are equally greedy in float32: no more is asked of log probabilities."""

FLOAT32 = {
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",  # SGLang's norms on CUDA know half precision only
    "TRITON_F32_DEFAULT": "ieee",  # Triton's attention would multiply in TF32
}
"""Environment of a server whose answers are compared in float32."""

GRAPHS = ["--attention-backend", "triton", "--cuda-graph-max-bs-decode", "32"]
DECODE_GRAPHS = [*GRAPHS, "--cuda-graph-backend-prefill", "disabled"] if ON_GPU else []
PREFILL_GRAPHS = [*GRAPHS, "--cuda-graph-backend-prefill", "breakable", "--cuda-graph-max-bs-prefill", "2048"]
"""Of SGLang's own sizes up to there."""

SMALL_ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 16, "lora_alpha": 32, "target_modules": ALL_LINEAR},
    "b": {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "c": {"r": 32, "lora_alpha": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
    "d": {"r": 3, "lora_alpha": 9, "target_modules": ALL_LINEAR, "rank_pattern": {"o_proj": 40}},
}
SMALL_MIXES: tuple[Mix | None, ...] = (
    None,
    {"a": 1.0},
    {"b": 1.0},
    {"c": 1.0},
    {"d": 1.0},
    {"a": 0.5},
    {"a": 0.7, "b": 0.3},
    {"c": 0.5, "d": -0.25},
    {"a": 0.4, "b": 0.4, "c": 0.4, "d": 0.4},
)


def text(mix: Mix | None) -> str | None:
    """A mix as ``lora_path``."""
    return None if mix is None else json.dumps(mix)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def make_small(work: Path, configs: Mapping[str, dict[str, Any]] = SMALL_ADAPTERS) -> tuple[Path, dict[str, Path]]:
    """A small model in float32 and adapters for it (made anew, always the same)."""
    model = make_llama(work / "small", heads=SMALL_MODEL["hidden"] // 64, kv_heads=SMALL_MODEL["hidden"] // 128, **SMALL_MODEL)
    # As strong as trained adapters: a delta of about half the weights' size; stronger ones amplify every rounding error.
    return model, make_adapters(model, work / "small_adapters", configs, std=0.08)


def small_options(model: Path, pool: int = SMALL_POOL, dtype: str = "float32") -> list[str]:
    options = ["--model-path", str(model), "--skip-tokenizer-init", "--dtype", dtype]
    return [*options, "--max-total-tokens", str(pool), "--sampling-backend", "pytorch"]


def tree_options(adapters: Mapping[str, Path], settings: Mapping[str, Any] | None = None) -> list[str]:
    """What a server with adapters takes beside `small_options`."""
    options = ["--hicache-ratio", "2", "--lora-tree", json.dumps(settings or {})]
    return [*options, "--lora-paths", *(f"{key}={path}" for key, path in adapters.items())]


def greedy(num_new: int) -> dict[str, Any]:
    """Sampling parameters."""
    return {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}


def ask(server: Server, prompt: list[int], mix: Mix | None, num_new: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log probabilities."""
    answer = server.generate(input_ids=prompt, lora_path=text(mix), sampling_params=greedy(num_new), return_logprob=True)
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def push_out(server: Server, rng: random.Random, count: int) -> int:
    """Base prompts that fill the pool all at once, so that everything else leaves it; until `count` adapters have.

    Returns:
        Adapters that were swapped out.
    """
    tree = server.tree()
    before, size = tree["counters"]["swap_outs"], tree["pool"]["gpu_size"]
    num_prompts, num_new, swapped = -(-size // LONGEST_PROMPT), 32, 0
    length = (size - 64) // num_prompts - num_new
    for _ in range(4):
        prompts = [random_prompt(rng, length) for _ in range(num_prompts)]
        server.generate(input_ids=prompts, sampling_params=greedy(num_new))  # one batch: they run side by side
        swapped = server.tree()["counters"]["swap_outs"] - before
        if swapped >= count:
            break
    return swapped


def swap_in_record(name: str, counters: Mapping[str, float]) -> dict[str, Any]:
    """What the served run copied to its GPU, by its own counters."""
    num_bytes, seconds = counters["load_bytes"], counters["load_seconds"]
    rate = f", {num_bytes / seconds / 1e9:.1f} GB/s" if seconds else ""  # the CPU keeps no time of copies
    note = f"{num_bytes / 1e6:.1f} MB in {counters['swap_ins']} adapters and history KV{rate}; from start event to finish event"
    return results.record(f"swap_in_seconds/{name}", seconds, "s", note=note)
