"""Invariant 6: a request is admitted only if it can finish beside its adapters, and every admitted request finishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import PATIENCE, WIDE, Live, on
from .judge import Mix, random_prompts


@pytest.fixture
def wide(live: Live, others: dict[str, Path]) -> Iterator[list[str]]:
    """Five adapters of which the pool holds two."""
    for name in WIDE:
        answer = live.server.load(name, others[name])
        assert answer.status_code == 200, answer.text
    yield list(WIDE)
    for name in WIDE:
        assert live.server.unload(name).status_code == 200


@on("small")
def test_what_can_never_fit_is_refused(live: Live, wide: list[str]) -> None:
    """400, with the numbers: members that fit one by one but not together, and a prompt that fits alone but not beside
    its adapters."""
    slots, pool = live.server.tree()["registered"][wide[0]]["slots"], live.pool_size
    assert 2 * slots < pool < 3 * slots, "the test needs adapters of another size"
    short, long = (random_prompts(1, length, live.vocab, seed=31)[0] for length in (5, pool - 2 * slots + 1))
    message = live.server.refuse([short], 4, [dict.fromkeys(wide[:3], 0.5)])
    mix_node = live.server.tree()["pool"]["page_size"]
    assert "does not fit the pool" in message and f"take {3 * slots + mix_node} slots" in message
    message = live.server.refuse([long], 4, [dict.fromkeys(wide[:2], 0.5)])
    assert "does not fit the pool" in message and str(len(long)) in message
    mix: Mix = dict.fromkeys(wide[:2], 0.5)
    for prompt, one in ((short, mix), (long, {wide[0]: 1.0}), (long, None)):
        live.judge.check(prompt, live.server.generate([prompt], 4, [one])[0], one, 4)
    live.server.check_at_rest()


@on("small", "tp2")
def test_output_is_limited_to_what_fits(live: Live, wide: list[str]) -> None:
    """An answer that asks for more tokens than fit beside its adapters ends there, exact, and nothing that it needs is
    evicted."""
    slots, pool = live.server.tree()["registered"][wide[0]]["slots"], live.pool_size
    prompt = random_prompts(1, 10, live.vocab, seed=32)[0]
    for mix in ({wide[0]: 1.0}, dict.fromkeys(wide[:2], -0.5)):
        answer = live.server.generate([prompt], 3000, [mix])[0]
        room = pool - slots * len(mix) - len(prompt)
        assert room - 16 <= len(answer.tokens) <= room, f"{len(answer.tokens)} tokens in {room} slots"
        assert answer.finish["type"] == "length"
        live.judge.check(prompt, answer, mix)
    live.server.check_at_rest()


@on("small", "tp2")
def test_two_adapters_fit_and_five_wait(live: Live, wide: list[str]) -> None:
    """Long outputs under five adapters, of which two fit at a time: all finish, exact, in bounded time."""
    mixes: list[Mix | None] = [*({name: 1.0} for name in wide), dict.fromkeys(wide[:2], 0.5), None]
    cases = [(prompt, mixes[index % 7]) for index, prompt in enumerate(random_prompts(14, 8, live.vocab, seed=33))]
    start = time.monotonic()
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(
            pool.map(
                lambda case: live.server.generate(
                    [case[0]],
                    40,
                    [case[1]],
                )[0],
                cases,
            )
        )
    assert time.monotonic() - start < 200
    live.judge.check_all(cases, answers, 40)
    live.server.check_at_rest()


@on("small")
def test_a_big_mix_is_not_starved(live: Live, wide: list[str]) -> None:
    """A request that needs nearly the whole pool, among small ones that always find room, finishes before too many of
    those that came after it."""
    names = sorted(live.adapters)
    finished = threading.Event()
    counts: list[int] = []

    def stream(seed: int) -> None:
        done = 0
        for prompt in random_prompts(1000, 6, live.vocab, seed):
            if finished.is_set():
                break
            mix = {names[(seed + done) % len(names)]: 1.0}
            answer = live.server.generate([prompt], 6, [mix])[0]
            if done % 8 == 0:
                live.judge.check(prompt, answer, mix, 6)
            done += 1
        counts.append(done)

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, seed) for seed in range(4)]
        time.sleep(2)
        big: Mix = dict.fromkeys(wide[:2], 0.5)
        prompt = random_prompts(1, 20, live.vocab, seed=34)[0]
        before = live.server.tree()["counters"]
        answer = live.server.generate([prompt], 20, [big])[0]
        after = live.server.tree()["counters"]
        finished.set()
        for future in streams:
            future.result()
    live.judge.check(prompt, answer, big, 20)
    assert after["swap_ins"] >= before["swap_ins"] + 2
    # The blocker's patience and what overtakes it, then one pass per token of what runs.
    assert sum(counts) < 8 * PATIENCE + 100, f"{counts} small requests were served meanwhile"
    live.server.check_at_rest()


@on("small")
def test_pinned_adapters_stay(live: Live, others: dict[str, Path]) -> None:
    """A pinned adapter comes to the GPU by itself and stays there; only so much of the pool can be pinned, and requests
    that no longer fit beside what is pinned are refused, base-model ones too."""
    server, pool = live.server, live.pool_size
    assert server.load("pinned", others["tiny0"], pinned=True).status_code == 200
    assert server.load("large", others["wide0"], pinned=True).status_code == 200
    refused = server.load("too large", others["wide1"], pinned=True)
    assert refused.status_code == 400 and "cannot be pinned" in refused.text, refused.text
    prompts = random_prompts(2, pool - 150, live.vocab, seed=35)
    assert "pinned adapters" in server.refuse([prompts[0]], 4)
    assert server.unload("large").status_code == 200
    for prompt in prompts:
        live.judge.check(prompt, server.generate([prompt], 4)[0], None, 4)
    assert server.tree()["registered"]["pinned"]["tier"] == "gpu"
    assert server.unload("pinned").status_code == 200
    server.check_at_rest()
