"""Which tiles and how many warps for which batch: a table per GPU, written by benchmarks/tune_kernels.py.

The choice depends on the number of tokens and on nothing else of a batch, so a token's bits never depend on which
adapters the other tokens use.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

CONFIGS = Path(__file__).parent / "configs"
"""One JSON file per GPU, named after it: a list of configs, by `max_tokens`."""


@dataclass(frozen=True)
class Config:
    """How a batch of up to `max_tokens` tokens is computed."""

    max_tokens: int
    block_t: int
    """Tokens per tile."""
    shrink_split: bool
    """A program per segment of d_in, of which the last adds up; otherwise one program adds up all segments, in the same order."""
    shrink_block_n: int
    """Rows of A at once: a multiple of RANK_TILE."""
    shrink_block_k: int
    shrink_workers: int
    """Programs that share a tile's rows of A."""
    shrink_warps: int
    shrink_stages: int
    expand_block_d: int
    """Columns of the output at once."""
    expand_items: int
    """Items at once: 1, 2 or 4 tiles of ranks."""
    expand_warps: int
    expand_stages: int
    overlap: bool
    """Shrink on a stream of its own, beside the base model's product."""


DEFAULT = (
    Config(512, 16, True, 16, 128, 32, 4, 8, 128, 2, 4, 5, True),
    Config(1 << 62, 64, False, 32, 64, 4, 4, 6, 64, 1, 4, 2, False),
)
"""For a GPU without a table of its own."""


def choose(num_tokens: int, device: torch.device) -> Config:
    """The config for a batch of `num_tokens` tokens on `device`."""
    configs = _configs(_name(device) if device.type == "cuda" else "")
    return next(config for config in configs if num_tokens <= config.max_tokens)


@functools.lru_cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@functools.lru_cache
def _configs(device_name: str) -> tuple[Config, ...]:
    path = CONFIGS / f"{config_name(device_name)}.json"
    if not device_name or not path.exists():
        return DEFAULT
    return tuple(Config(**entry) for entry in json.loads(path.read_text()))


def config_name(device_name: str) -> str:
    """The file's name for a GPU: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
