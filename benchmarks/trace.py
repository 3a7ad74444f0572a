"""Requests with shared prefixes, as token arrays: Mooncake's conversation trace, or a stand-in of the same shape.

The trace (kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0) gives a hash per block of 512 prompt tokens; a block's
tokens here are numbers made from its hash. All its requests share the first block, so a conversation is known by its
second one, and conversations are spread over the adapters.
"""

from __future__ import annotations

import gzip
import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK = 512
_NAME = "mooncake_conversation_trace.jsonl.gz"


@dataclass(frozen=True)
class Request:
    conversation: int
    blocks: tuple[int, ...]
    length: int
    """Prompt tokens; the last block may be partly filled."""

    def tokens(self, block: int = BLOCK, copy: int = 0) -> array[int]:
        """The prompt with ``block`` tokens for every 512; another ``copy`` is the same trace in other users' words."""
        ids = np.asarray(self.blocks, np.int64) + (copy << 24)
        flat = (ids[:, None] * BLOCK + np.arange(block, dtype=np.int64)).reshape(-1)
        return array("q", flat[: -(-self.length * block // BLOCK)].tobytes())


def find_trace(near: Path) -> Path | None:
    """The trace in a folder ``shared/data`` of ``near`` or of a folder above it."""
    for folder in (near, *near.parents):
        path = folder / "shared" / "data" / _NAME
        if path.exists():
            return path
    return None


def read_trace(path: Path) -> list[Request]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [_request(tuple(row["hash_ids"]), row["input_length"]) for row in rows]


def make_trace(num_requests: int = 12_031, seed: int = 0) -> list[Request]:
    """A stand-in with the trace's statistics: 1.6 turns a conversation, prompts of 12,000 tokens on average (long tail),
    a turn repeats the one before and adds to it."""
    rng = random.Random(seed)
    requests: list[Request] = []
    open_turns: list[Request] = []
    next_block = 1
    while len(requests) < num_requests:
        if open_turns and rng.random() < 0.39:
            before = open_turns.pop(rng.randrange(len(open_turns)))
            kept = before.blocks[:-1] if len(before.blocks) > 2 else before.blocks
        else:
            kept = (0,)
        length = min(len(kept) * BLOCK + int(rng.lognormvariate(8.6, 1.1)) + 64, 126_000)
        fresh = -(-length // BLOCK) - len(kept)
        request = _request(kept + tuple(range(next_block, next_block + fresh)), length)
        next_block += fresh
        requests.append(request)
        if len(request.blocks) < 200:  # longer conversations have come to their end
            open_turns.append(request)
        del open_turns[:-2000]
    return requests


def copies(trace: list[Request]) -> Iterator[tuple[int, Request]]:
    """The trace over and over, as (copy, request)."""
    copy = 0
    while True:
        for request in trace:
            yield copy, request
        copy += 1


def _request(blocks: tuple[int, ...], length: int) -> Request:
    return Request(blocks[1] if len(blocks) > 1 else blocks[0], blocks, min(length, len(blocks) * BLOCK))
