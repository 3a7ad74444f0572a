"""Process memory stays flat over loads and unloads. LORA_TREE_LOADS=1000 makes the test ten times as long, and records it."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks import results

from .conftest import WIDE, Live, on
from .judge import random_prompts

LOADS = int(os.environ.get("LORA_TREE_LOADS", 100))
SETTLED = 20
"""Loads after which buffers, pools and caches have their size."""
ALLOWED_GROWTH = 25e6
"""Bytes. One adapter's tensors are 0.55 MB: a copy of each kept would be 55 MB in 100 loads."""


@on("small")
def test_memory_is_flat_over_loads_and_unloads(live: Live, others: dict[str, Path]) -> None:
    """Load, answer, unload, with adapters too large for the host pool to keep them all."""
    prompts = random_prompts(LOADS + SETTLED, 4, live.vocab, seed=51)
    settled = 0
    for index, prompt in enumerate(prompts):
        name = list(WIDE)[index % len(WIDE)]
        assert live.server.load("cycle", others[name]).status_code == 200
        answer = live.server.generate([prompt], 1, [{"cycle": 1.0}])[0]
        assert live.server.unload("cycle").status_code == 200
        if index % 10 == 0:
            live.judge.check(prompt, answer, {name: 1.0}, 1)
        if index == SETTLED:
            settled = live.server.memory()
    growth = live.server.memory() - settled
    if "LORA_TREE_LOADS" in os.environ:
        note = f"all processes of a server on the CPU, after {SETTLED} loads and after as many more as the name says"
        limit = f"value <= {ALLOWED_GROWTH / 1e6}"
        results.merge("live", "cpu", [results.record(f"memory_growth_mb/{LOADS}", growth / 1e6, "MB", limit=limit, note=note)])
    assert growth < ALLOWED_GROWTH, f"{growth / 1e6:.1f} MB more after {LOADS} loads"
    live.server.check_at_rest()
