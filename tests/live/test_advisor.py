"""The advisor killed, stopped and fed with garbage under load: answers stay PEFT's, nobody fails, and plans come back."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests
import torch
import zmq
from models import ALL_LINEAR, make_adapters, make_llama
from safetensors.torch import load_file, save_file

from benchmarks import results
from benchmarks.server import sampling
from sglang_lora_tree.config import Settings

from .conftest import TINY, Live, on
from .judge import Judge, Mix, random_prompts
from .server import Answer, Server, generate_body, wait_until

PATIENCE = 120.0
GARBAGE = (b"", b"\xff\x00\xfe", b"{}", b'{"version":1,"kind":"plan"}', b"[" * 10_000)


def plans(server: Server) -> dict[str, Any]:
    return server.tree()["plans"]


def is_alive(pid: int) -> bool:
    """Not so if it has been killed, and nobody has noticed yet."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until_plans_come(server: Server, after: int = 0, instead_of: int | None = None) -> dict[str, Any]:
    """Wait for an advisor whose plans take effect, later than ``after`` plans. The loop sleeps while it is idle: wake it.

    instead_of: process id of one that was killed or stopped, whose last plan may still be on its way.
    """

    def come() -> bool:
        state = plans(server)
        is_other = state["pid"] != instead_of and is_alive(state["pid"])
        return is_other and not state["is_fallback"] and state["applied"] > after

    wait_until(come, PATIENCE, "no plans come")
    return plans(server)


def kill(server: Server, kind: int = signal.SIGKILL) -> int:
    """The advisor whose plans rule; its process id."""
    pid = int(until_plans_come(server)["pid"])
    os.kill(pid, kind)
    return pid


def send_garbage(server: Server) -> None:
    """Onto the socket that plans come from."""
    command = psutil.Process(plans(server)["pid"]).cmdline()
    context = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.connect(command[command.index("--plans") + 1])
        for _ in range(20):
            for data in GARBAGE:
                socket.send(data)
        time.sleep(0.2)
    finally:
        context.destroy(linger=1000)


@on("small")
def test_killed_stopped_and_fed_with_garbage_under_load(live: Live, others: dict[str, Path]) -> None:
    server, draw = live.server, random.Random(41)
    for name in list(TINY)[:8]:
        assert server.load(name, others[name]).status_code == 200
    names = [*live.adapters, *list(TINY)[:8]]
    mixes: list[Mix | None] = [{name: 1.0} for name in names]
    mixes += [None, {names[0]: 0.5, names[-1]: 0.5}, {names[1]: 2.0, names[2]: -0.25}]
    prompts = random_prompts(72, 12, live.vocab, seed=42)
    cases = [(prompt, draw.choice(mixes)) for prompt in prompts]

    def ask(case: tuple[list[int], Mix | None]) -> Answer:
        return server.generate([case[0]], 6, [case[1]])[0]

    before = until_plans_come(server)
    with ThreadPoolExecutor(24) as pool:
        futures = [pool.submit(ask, case) for case in cases]
        for kind in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            time.sleep(draw.uniform(0.2, 1.5))
            send_garbage(server)
            killed = kill(server, kind)
            until_plans_come(server, plans(server)["applied"], instead_of=killed)
        answers = [future.result() for future in futures]
    live.judge.check_all(cases, answers, 6)
    after = until_plans_come(server)
    assert after["deaths"] >= before["deaths"] + 3 and after["wedged"] > before["wedged"]
    assert after["garbage"] > before["garbage"] and after["fallbacks"] > before["fallbacks"]
    for name in list(TINY)[:8]:
        assert server.unload(name).status_code == 200
    server.check_at_rest()


@on("small", "tp2")
def test_plans_take_effect_and_say_how(live: Live) -> None:
    """On two ranks, too, which compare their trees at every pass."""
    state = until_plans_come(live.server)
    prompts = random_prompts(8, 10, live.vocab, seed=43)
    mixes: list[Mix] = [{name: 1.0} for name in live.adapters]
    cases = [(prompt, mixes[index % len(mixes)]) for index, prompt in enumerate(prompts)]
    answers = live.server.generate(prompts, 4, [mix for _, mix in cases])
    live.judge.check_all(cases, answers, 4)
    state = until_plans_come(live.server, state["applied"])
    # Low_lora is that of the last five seconds' batches, and is 0 again on a machine that takes longer to answer this.
    assert state["low_lora"] >= 0 and 0 < state["hit_probability"] <= 1 and state["reports"] > 0


# ---- A long run, by hand: LORA_TREE_LONG=1 pytest tests/live/test_advisor.py -k long -s; LORA_TREE_LONG=record notes it ----

NUM_ADAPTERS, NUM_TURNS, NUM_NEW = 100, 5, 8
NUM_CONVERSATIONS = int(os.environ.get("LORA_TREE_CONVERSATIONS", "408"))
"""Fewer on a machine that others use too."""
NUM_KILLS, NUM_ROUNDS, NUM_CLIENTS = int(os.environ.get("LORA_TREE_KILLS", "20")), 4, 48
"""Kills in all, and as many stops."""
TROUBLE: dict[str, int | None] = {"nothing": None, "kills": signal.SIGKILL, "stops": signal.SIGSTOP}
"""What happens to the advisor in rounds by turns; a stopped one is wedged, and garbage goes onto its socket before."""
NUM_TALKS = NUM_CONVERSATIONS // (len(TROUBLE) * NUM_ROUNDS)
"""Conversations of one round."""


class Measured:
    """What clients saw of one kind of rounds."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.spans: list[tuple[float, float, float]] = []
        """When each request was sent, and when its first and its last token came."""
        self.gaps: list[float] = []
        self.cases: list[tuple[list[int], Mix | None]] = []
        self.answers: list[Answer] = []
        self.lock = threading.Lock()

    def summary(self) -> dict[str, float]:
        first, gaps = np.array(self.first), np.array(self.gaps)
        shares = {"ttft_s": first, "gap_s": gaps}
        return {
            f"{name}_p{share}": round(float(np.percentile(values, share)), 3)
            for name, values in shares.items()
            for share in (50, 99, 100)
        }


def stream(server: Server, prompt: list[int], mix: Mix | None, measured: Measured) -> list[int]:
    """One streamed answer; its tokens."""
    start, arrivals, last = time.monotonic(), [], {}
    body = generate_body(prompt, NUM_NEW, mix, stream=True)
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=900) as response:
        assert response.status_code == 200, response.text
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                arrivals.append(time.monotonic())
                last = json.loads(line[6:])
    assert "output_ids" in last, last
    answer = Answer.of(last)
    with measured.lock:
        measured.first.append(arrivals[0] - start)
        measured.spans.append((start, arrivals[0], arrivals[-1]))
        measured.gaps += np.diff(arrivals).tolist()
        measured.cases.append((prompt, mix))
        measured.answers.append(answer)
    return list(answer.tokens)


@contextmanager
def killer(server: Server, count: int, kind: int | None) -> Iterator[Callable[[], int]]:
    """Send the advisor a signal at random moments while the block runs, each time one whose plans rule; gives how often so far.

    With None nothing is sent, and everything else is the same.
    """
    stopping, hit, draw = threading.Event(), [], random.Random(7)

    def work() -> None:
        while len(hit) < count and not stopping.wait(draw.uniform(0.5, 1.5)):
            state = plans(server)
            if state["is_fallback"] or (hit and state["pid"] == hit[-1]) or not is_alive(state["pid"]):
                continue
            if kind == signal.SIGSTOP:
                send_garbage(server)
            if kind is not None:
                os.kill(state["pid"], kind)
            hit.append(state["pid"] if kind is not None else None)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: len(hit)
    finally:
        stopping.set()
        thread.join()


def longest_overtaking(spans: Sequence[tuple[float, float, float]]) -> float:
    """By how many seconds a request came later at most than one that had its first token after it."""
    longest, latest = 0.0, -float("inf")
    for start, *_ in sorted(spans, key=lambda span: span[1]):
        longest, latest = max(longest, latest - start), max(latest, start)
    return longest


def test_overtaking_is_how_much_later_who_was_served_before_came() -> None:
    assert longest_overtaking([(0.0, 1.0, 2.0), (0.5, 1.5, 2.0), (3.0, 3.1, 3.2)]) == 0.0
    assert longest_overtaking([(0.0, 5.0, 6.0), (1.0, 2.0, 3.0), (4.0, 4.5, 5.0), (4.5, 6.0, 7.0)]) == 4.0


@pytest.mark.skipif(not os.environ.get("LORA_TREE_LONG"), reason="takes a quarter of an hour; set LORA_TREE_LONG=1")
@pytest.mark.timeout(3600)
def test_long_run_with_twenty_kills(tmp_path: Path) -> None:
    """100 adapters over a pool that holds a quarter of them, 2,000 requests of multi-turn traffic in rounds without trouble, with
    kills and with stops and garbage by turns, 20 of each in all.

    Every answer is PEFT's, there is no invalid KV, and nobody starves: once a request is older than theta, one that comes more
    than a batch later is not served before it.
    """
    torch.set_num_threads(1)
    llama = make_llama(tmp_path / "llama")
    adapters = make_many(llama, tmp_path / "adapters", NUM_ADAPTERS)
    paths = [f"{name}={path}" for name, path in adapters.items()]
    settings = {"verify_invariants": True, "patience_passes": 64}
    arguments = ["--model-path", str(llama), "--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", "1900"]
    # The host pool's size is given, because what SGLang would take depends on who else is on the machine.
    arguments += ["--hicache-ratio", "2", "--lora-tree", json.dumps(settings), "--lora-paths", *paths]
    log = Path(os.environ.get("LORA_TREE_LOGS", str(tmp_path))) / "long.log"
    server = Server(log, arguments, {"OMP_NUM_THREADS": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"})
    rounds = {name: Measured() for name in TROUBLE}
    done = dict.fromkeys(TROUBLE, 0)
    try:
        server.wait()
        until_plans_come(server)
        with sampling(lambda: int(server.tree()["invalid_kv"]), 0.2) as invalid_kv:
            for number in range(NUM_ROUNDS * len(TROUBLE)):
                name = list(TROUBLE)[number % len(TROUBLE)]
                with killer(server, NUM_KILLS // NUM_ROUNDS, TROUBLE[name]) as so_far:
                    converse(server, list(adapters), number, rounds[name])
                    while TROUBLE[name] and so_far() < NUM_KILLS // NUM_ROUNDS:
                        time.sleep(0.2)
                done[name] += so_far() if TROUBLE[name] else 0
            wait_until(lambda: plans(server)["deaths"] >= sum(done.values()), PATIENCE, "not all kills were noticed")
            state = until_plans_come(server)
        server.check_at_rest()
    finally:
        server.stop()
    judge, wrong = Judge(llama, adapters), []
    for measured in rounds.values():
        assert len(measured.answers) == NUM_ROUNDS * NUM_TALKS * NUM_TURNS
        for (prompt, mix), answer in zip(measured.cases, measured.answers, strict=True):
            try:
                judge.check(prompt, answer, mix, NUM_NEW)
            except AssertionError as fault:
                wrong.append(str(fault))
    records = records_of(rounds, done, len(wrong), invalid_kv)
    print(results.table(records))
    print(json.dumps({name: measured.summary() for name, measured in rounds.items()} | {"done": done, "plans": state}))
    if os.environ["LORA_TREE_LONG"] == "record":
        results.merge("scheduler", "cpu", records)
    assert not wrong, wrong[:10]
    assert max(invalid_kv) == 0 and len(invalid_kv) > 10
    assert done["kills"] == done["stops"] == NUM_KILLS // NUM_ROUNDS * NUM_ROUNDS
    assert state["deaths"] == done["kills"] + done["stops"] and state["wedged"] == done["stops"] and state["garbage"] > 0
    missed = [record for record in records if record["met"] is False and record["metric"].startswith("long_run")]
    assert not missed, results.table(missed)


def records_of(rounds: dict[str, Measured], done: dict[str, int], wrong: int, invalid_kv: Sequence[int]) -> list[dict[str, Any]]:
    """What the long run shows, in the terms of ``benchmarks``: what trouble costs those who wait for the next token, and what
    must hold all the time."""
    spans = [span for measured in rounds.values() for span in measured.spans]
    batch = max(last - first for _, first, last in spans)
    past_theta = max(0.0, longest_overtaking(spans) - Settings().theta_seconds)
    quiet = rounds["nothing"]
    beside = ("without trouble", float(np.percentile(quiet.gaps, 99)))
    records = []
    for name in ("kills", "stops"):
        gaps = rounds[name].gaps
        note = f"live on the CPU: {done[name]} {name} in {NUM_ROUNDS} rounds, by turns with rounds without; {len(gaps)} gaps"
        value = float(np.percentile(gaps, 99))
        records.append(results.record(f"gap_p99_with_{name}_s", value, "s", baseline=beside, limit="ratio <= 1.1", note=note))
    note = (
        f"live on the CPU, {NUM_ADAPTERS} adapters, a pool for a quarter; advisor: {done['kills']} kills, {done['stops']} stops"
    )
    counted = f"{len(invalid_kv)} samples, and every invariant checked at every step"
    return [
        *records,
        results.record("long_run_answers", len(spans), "answers", note=note),
        results.record(
            "long_run_wrong_answers", wrong, "answers", limit="value <= 0", note="tokens and log probabilities, by PEFT"
        ),
        results.record("long_run_invalid_kv", max(invalid_kv), "tokens", limit="value <= 0", note=counted),
        results.record(
            "long_run_overtaken_past_theta_s",
            past_theta,
            "s",
            baseline=("one batch: the longest answer from its first token to its last", batch),
            limit="ratio <= 1.0",
            note=f"by how much more than theta ({Settings().theta_seconds:g} s) a request came after one that was served later",
        ),
    ]


def converse(server: Server, names: Sequence[str], seed: int, measured: Measured) -> None:
    """One round of conversations, ``NUM_CLIENTS`` at a time; adapters by Zipf's law, one in ten a mix, one the base model."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(names))]

    def choose(index: int) -> Mix | None:
        first, second = draw.choices(names, weights, k=2)
        if index % 10 == 0:
            return None
        return {first: 0.5, second: 0.5} if index % 10 == 1 and first != second else {first: 1.0}

    plans_of_talk = [
        (choose(index), random_prompts(NUM_TURNS, draw.randint(4, 16), 320, seed=1000 * seed + index))
        for index in range(NUM_TALKS)
    ]

    def talk(case: tuple[Mix | None, list[list[int]]]) -> None:
        mix, turns = case
        history: list[int] = []
        for turn in turns:
            history = [*history, *turn]
            history = [*history, *stream(server, history, mix, measured)]  # a new list: the old one is what was asked

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for future in [pool.submit(talk, case) for case in plans_of_talk]:
            future.result()


def make_many(llama: Path, folder: Path, count: int) -> dict[str, Path]:
    """Adapters that differ in their tensors only, written without building a model for each."""
    pattern = make_adapters(llama, folder, {"pattern": {"r": 2, "lora_alpha": 4, "target_modules": ALL_LINEAR}})["pattern"]
    tensors = load_file(pattern / "adapter_model.safetensors")
    adapters = {}
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        path = adapters[f"many{index}"] = folder / f"many{index}"
        path.mkdir()
        drawn = {name: 0.15 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
        save_file(drawn, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text((pattern / "adapter_config.json").read_text())
    return adapters
