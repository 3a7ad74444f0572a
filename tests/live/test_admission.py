"""Invariant 6: a request is admitted only if it can finish beside its adapters, and every admitted request finishes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from benchmarks.server import start_side_by_side

from .conftest import PATIENCE, WIDE, Live, on
from .judge import Judge, Mix, random_prompts
from .server import Answer, Server, generate_body, wait_until

SLO = 15.0


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


# ---- Orders and overload, on servers of their own that start side by side ----

FEW: dict[str, tuple[dict[str, Any], list[str]]] = {
    "overload": (
        {"ttft_slo_seconds": SLO, "fairness": True},
        ["--enable-priority-scheduling", "--max-running-requests", "2"],
    ),
    # The drainer is asked only while there is room for another request, and says nothing above that level.
    "lpm": (
        {"theta_seconds": 1e6},
        [
            "--schedule-policy", "lpm", "--max-loras-per-batch", "2", "--lora-drain-wait-threshold", "0.3",
            "--max-running-requests", "4", "--log-level", "debug",
        ],
    ),
}  # fmt: skip
"""Settings and arguments of servers that run few requests at a time."""


class Clients:
    """Requests from many threads: in which order they were answered, and whether what was served is PEFT's."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.finished: list[tuple[float, str]] = []
        self.served: list[tuple[list[int], str, int, Answer]] = []

    def ask(self, what: str, name: str, num_new: int, seed: int, prefix: Sequence[int] = (), **fields: Any) -> requests.Response:
        prompt = [*prefix, *random_prompts(1, 40 - len(prefix), 320, seed)[0]]
        response = self.server.post("/generate", generate_body([prompt], num_new, [{name: 1.0}], **fields))
        self.finished.append((time.monotonic(), what))
        if response.status_code == 200:
            self.served.append((prompt, name, num_new, Answer.of(response.json()[0])))
        return response

    def places(self, what: str) -> list[int]:
        return [place for place, (_, other) in enumerate(sorted(self.finished)) if other == what]

    def warm_up(self, *names: str) -> None:
        """Bring adapters in from disk, which may take longer than an SLO."""
        for name in names:
            wait_until(lambda name=name: self.ask("warm", name, 4, 0).status_code == 200, 120, "nobody is served")  # type: ignore[misc]
        self.finished.clear()

    def check(self, judge: Judge) -> None:
        for prompt, name, num_new, answer in self.served:
            judge.check(prompt, answer, {name: 1.0}, num_new)


@pytest.fixture(scope="module")
def few(llama: Path, five: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The servers of ``FEW``; one that is not asked sleeps."""
    if torch.cuda.is_available():
        pytest.skip("these servers are those of the CPU platform")
    folder = Path(os.environ.get("LORA_TREE_LOGS", tmp_path_factory.mktemp("few")))
    paths = [f"{name}={path}" for name, path in five.items()]
    servers = {}
    for name, (settings, arguments) in FEW.items():
        options = ["--model-path", str(llama), "--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", "3000"]
        options += ["--hicache-ratio", "2", *arguments]
        options += ["--lora-tree", json.dumps({"verify_invariants": True, **settings}), "--lora-paths", *paths]
        servers[name] = Server(folder / f"{name}.log", options, {"OMP_NUM_THREADS": "1"}, starts=False)
    with ExitStack() as stack:
        start_side_by_side(servers.values(), stack)
        for server in servers.values():
            server.wait()
        yield servers


def test_overload_fairness_and_priorities(few: dict[str, Server], five: dict[str, Path], small_judge: Judge) -> None:
    """A server with an SLO, fairness and priorities: who would be late gets a 503 that says when to come back, a priority
    overtakes, and an adapter with few requests is not behind one with many."""
    names, server = sorted(five), few["overload"]
    frequent, rare = names[:2]
    clients = Clients(server)
    with ThreadPoolExecutor(64) as pool:
        clients.warm_up(frequent, rare)
        # Priorities: one that comes last, and is served before most of those that wait.
        low = [pool.submit(clients.ask, "low", frequent, 48, seed) for seed in range(8)]
        time.sleep(0.3)
        high = pool.submit(clients.ask, "high", frequent, 24, 100, priority=5)
        assert [future.result().status_code for future in (*low, high)] == [200] * 9
        assert clients.places("high")[0] <= 5, clients.finished
        # Fairness: three that come after twelve of another adapter.
        clients.finished.clear()
        crowd = [pool.submit(clients.ask, "many", frequent, 24, seed) for seed in range(12)]
        time.sleep(0.3)
        guests = [pool.submit(clients.ask, "few", rare, 16, 200 + seed) for seed in range(3)]
        assert {future.result().status_code for future in (*crowd, *guests)} == {200}
        assert clients.places("few")[-1] < 12, clients.finished
        # Overload: more than can be served in time.
        flood = [pool.submit(clients.ask, "flood", names[seed % 5], 64, seed) for seed in range(64)]
        answers = [future.result() for future in flood]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 0 < len(refused) < len(answers), "some are served, some are not"
        for answer in refused:
            assert answer.status_code == 503 and "overloaded" in answer.text, answer.text
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert clients.ask("after", rare, 4, 1).status_code == 200
        assert server.tree()["plans"]["refused"] >= len(refused)
        server.check_at_rest()
    clients.check(small_judge)


def test_longest_prefix_first_and_the_drainer(few: dict[str, Server], five: dict[str, Path], small_judge: Judge) -> None:
    """SGLang's ``--schedule-policy lpm`` decides among requests that LAG holds equal, and its drainer makes room for an adapter
    that waits behind two others (theta is off)."""
    first, second, third = sorted(five)[:3]
    server = few["lpm"]
    clients = Clients(server)
    with ThreadPoolExecutor(64) as pool:
        clients.warm_up(first, second, third)
        # Five whose prompts are known but for their ends come after five unknown ones.
        (stem,) = random_prompts(1, 36, 320, 300)
        clients.ask("stem", first, 4, 301, stem)
        clients.finished.clear()
        running = [pool.submit(clients.ask, "running", first, 250, 310 + seed) for seed in range(4)]
        time.sleep(0.3)
        cold = [pool.submit(clients.ask, "cold", first, 8, 320 + seed) for seed in range(5)]
        time.sleep(0.3)
        known = [pool.submit(clients.ask, "known", first, 8, 330 + seed, stem) for seed in range(5)]
        assert {future.result().status_code for future in (*running, *cold, *known)} == {200}
        assert sum(clients.places("known")) < sum(clients.places("cold")), clients.finished
        # Two adapters run, and more requests of theirs come; one of a third comes before most of those, and is not the last.
        clients.finished.clear()

        def crowd(count: int, num_new: int) -> list[Future[requests.Response]]:
            return [
                pool.submit(clients.ask, "crowd", name, num_new, 400 + seed) for seed in range(count) for name in (first, second)
            ]

        before = [*crowd(1, 130), *crowd(1, 20)]
        time.sleep(0.2)
        guest = pool.submit(clients.ask, "guest", third, 24, 500)
        time.sleep(0.1)
        assert {future.result().status_code for future in (*before, guest, *crowd(15, 20))} == {200}
        assert clients.places("guest")[0] <= 28, clients.finished
        assert "finished draining" in server.read_log()
        server.check_at_rest()
    clients.check(small_judge)
