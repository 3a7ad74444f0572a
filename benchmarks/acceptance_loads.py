"""Part of the acceptance on a GPU: exact answers while adapters come in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.acceptance_small import (
    DECODE_GRAPHS,
    DEVICE,
    FLOAT32,
    ON_GPU,
    PREFILL_GRAPHS,
    SMALL_ADAPTERS,
    SMALL_MIXES,
    TIE,
    Mix,
    Records,
    ask,
    make_small,
    push_out,
    random_prompt,
    small_options,
    swap_in_record,
    tree_options,
)
from benchmarks.server import Server, sampling
from tests.models import ALL_LINEAR, Oracle

MANY_ADAPTERS = SMALL_ADAPTERS | {f"e{index}": {"r": 16, "lora_alpha": 32, "target_modules": ALL_LINEAR} for index in range(8)}
"""Some 3,200 slots."""
MANY_MIXES: tuple[Mix | None, ...] = (
    *SMALL_MIXES,
    *({f"e{index}": 1.0} for index in range(8)),
    {"e0": 0.7, "e1": 0.3},
    {"b": 0.5, "e2": -0.25},
    {"e3": 0.5, "e4": 0.3, "e5": 0.3},
    {"d": 0.5, "e5": 0.3, "e6": -0.25, "e7": 0.7},
)
LOADS_POOL = 2400
LOADS_ROUNDS = 4


def loads(work: Path) -> Records:
    """`check_loads` with decode graphs, where each copy of an adapter is held back by five steps of the loop, its rows full of
    NaN until then."""
    records, came_with_batch = check_loads(work, "loads", DECODE_GRAPHS, {"delay_loads": 5}, {}, "rows NaN until then")
    assert came_with_batch == 0, "what is held back comes in with no batch"
    return records


def late_loads(work: Path) -> Records:
    """`check_loads` where a prefill is computed while its adapters come in, each pool layer 20 ms after the one before."""
    return check_late_loads(work, "late_loads", DECODE_GRAPHS)


def late_loads_graphs(work: Path) -> Records:
    """The same with prefill graphs."""
    return check_late_loads(work, "late_loads_graphs", PREFILL_GRAPHS)


def check_late_loads(work: Path, label: str, graphs: Sequence[str]) -> Records:
    delay = {"SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES": "40000000"} if ON_GPU else {}
    how = "a pool layer every 20 ms" if ON_GPU else "copied at once, as the CPU does"
    records, came_with_batch = check_loads(work, label, graphs, {}, delay, how)
    return [*records, results.record(f"came_with_batch/{label}", came_with_batch, "adapters", limit="value >= 24")]


def check_loads(
    work: Path,
    label: str,
    graphs: Sequence[str],
    settings: Mapping[str, Any],
    environment: Mapping[str, str],
    how: str,
) -> tuple[Records, int]:
    """Exactness while copies are in flight, every invariant checked at every pass; and how many adapters came in with a batch.

    The pool holds fewer than half of the adapters. In each round 32 requests come at once, for adapters and mixes of up to
    four; before a round the cache is flushed (adapters are read from their files) or filled with base prompts.
    """
    model, adapters = make_small(work, MANY_ADAPTERS)
    options = [*small_options(model, LOADS_POOL), *tree_options(adapters, {**settings, "verify_invariants": True})]
    options += [*graphs, "--decode-log-interval", "1"]
    rng = random.Random(23)
    cases: list[tuple[list[int], Mix | None, int]] = []
    answers: list[tuple[list[int], list[float]]] = []
    with Server(options, work / f"{label}.log", {**FLOAT32, **environment}) as server:
        swap_outs = server.tree()["counters"]["swap_outs"]
        with sampling(lambda: sample_load(server), 0.02) as samples:
            for round_number in range(LOADS_ROUNDS):
                if round_number % 2:
                    push_out(server, rng, 1)
                else:
                    server.flush()
                asked = [
                    (random_prompt(rng, rng.randrange(10, 60)), rng.choice(MANY_MIXES), rng.choice((8, 24, 24, 96)))
                    for _ in range(32)
                ]
                with ThreadPoolExecutor(32) as pool:
                    answers += pool.map(lambda case: ask(server, *case), asked)
                cases += asked
        tree = server.tree()
        log = server.read_log().splitlines()
    oracle = Oracle(model, adapters, device=DEVICE, dtype=torch.float64)
    wrong, worst = 0, 0.0
    for (prompt, mix, _), (tokens, logprobs) in zip(cases, answers, strict=True):
        best, exact, _ = oracle.judge(prompt, tokens, mix)
        if max(high - own for high, own in zip(best, exact, strict=True)) >= TIE:
            wrong += 1
            print(f"{label}: {mix} answers {tokens[:8]}..., which is not PEFT's")
        else:
            worst = max(worst, *(abs(own - served) for own, served in zip(exact, logprobs, strict=True)))
    counters = tree["counters"]
    replays = sum("Decode batch" in line and "graph: True" in line for line in log)
    note = f"float32, decode CUDA graphs, {len(cases)} answers of 8 to 96 tokens while adapters came in, {how}"
    records = [
        results.record(f"exact_wrong_answers/{label}", wrong, "answers", limit="value <= 0", note=note),
        results.record(
            f"exact_logprob_difference/{label}", worst, "nats", limit="value <= 0.0001", note=f"{note}; against float64"
        ),
        results.record(f"exact_swapped_out/{label}", counters["swap_outs"] - swap_outs, "adapters", limit="value >= 12"),
        results.record(
            f"loads_in_flight/{label}",
            counters["swap_ins"],
            "copies",
            limit="value >= 24",
            note=f"of adapters; {sum(samples)} of {len(samples)} samples while requests ran saw one in flight",
        ),
        results.record(f"decode_graphs_used/{label}", replays, "steps", limit="value >= 50" if ON_GPU else None),
        results.record(f"invalid_kv/{label}", tree["invalid_kv"], "tokens", limit="value <= 0"),
        swap_in_record(label, counters),
    ]
    return records, counters["came_with_batch"]


def sample_load(server: Server) -> bool | None:
    """Whether an adapter is being copied; None while no request holds KV."""
    tree = server.tree()
    return tree["adapters"]["loading"] > 0 if tree["pool"]["slots"]["gpu"]["running_kv"] else None
