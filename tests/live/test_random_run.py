"""A long random run: everything at once, every answer compared with PEFT's, nothing left behind.

LORA_TREE_LONG_RUN=3600 makes it an hour long and records it; LORA_TREE_SEED=2 is another run. A failure shows the prompt, mix
and answer that it is about, and the last operations of all threads.
"""

from __future__ import annotations

import base64
import json
import os
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer

from benchmarks import results

from .conftest import Live, on
from .judge import Mix, random_prompts
from .server import Answer, generate_body, wait_until
from .test_exactness import mixes_of

SECONDS = float(os.environ.get("LORA_TREE_LONG_RUN", 30))
NUM_SHOWN = 80
"""Operations that a failure shows."""


class Run:
    """Threads that do random things until time is up, or one of them fails."""

    def __init__(self, live: Live, others: dict[str, Path], seed: int) -> None:
        self.live = live
        self.server = live.server
        self.others = others
        self.seed = seed
        self.start = time.monotonic()
        self.deadline = self.start + SECONDS
        self.last_operations: deque[str] = deque(maxlen=NUM_SHOWN)
        self.mixes = mixes_of(sorted(live.adapters))
        self.stems = random_prompts(6, 60, live.vocab, seed)
        self.may_ask = threading.Event()
        self.may_ask.set()
        self.failed = threading.Event()
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def note(self, operation: str) -> None:
        """What is asked or has come, for whoever reads a failure."""
        self.last_operations.append(f"{time.monotonic() - self.start:8.3f} {threading.current_thread().name} {operation}")

    def go_on(self, step: Callable[[random.Random], None], seed: int) -> None:
        source = random.Random(seed)
        try:
            while time.monotonic() < self.deadline and not self.failed.is_set():
                self.may_ask.wait()
                step(source)
                with self._lock:
                    self.counts[step.__name__] = self.counts.get(step.__name__, 0) + 1
        except BaseException as error:
            self.failed.set()
            self.note(f"{step.__name__} fails")
            error.add_note(f"in {step.__name__}, seed {self.seed}; the last operations, of all threads:")
            error.add_note("\n".join(self.last_operations))
            raise

    def prompt(self, source: random.Random) -> list[int]:
        ending = [source.randrange(3, self.live.vocab) for _ in range(source.randrange(1, 20))]
        return source.choice(self.stems)[: source.randrange(60)] + ending

    # ---- Steps ----

    def ask(self, source: random.Random) -> None:
        cases = [(self.prompt(source), source.choice(self.mixes)) for _ in range(source.choice((1, 1, 1, 2, 5)))]
        num_new = source.choice((1, 3, 8, 8, 30))
        self.note(f"ask {num_new}: {cases}")
        answers = self.server.generate([prompt for prompt, _ in cases], num_new, [mix for _, mix in cases])
        self.live.judge.check_all(cases, answers, num_new)

    def leave(self, source: random.Random) -> None:
        """A client that goes away after some tokens, or at once."""
        prompt, mix, lines = self.prompt(source), source.choice(self.mixes), source.randrange(1, 12)
        self.note(f"leave after {lines} lines: {prompt}, {mix}")
        body = generate_body(prompt, 60, mix, stream=True)
        try:
            with requests.post(self.server.url + "/generate", json=body, stream=True, timeout=(5, 0.3)) as response:
                for _, _ in zip(range(lines), response.iter_lines(), strict=False):
                    pass
        except requests.RequestException:
            pass

    def abort(self, source: random.Random) -> None:
        """/abort_request: the answer holds what was made until then, and it is right."""
        request_id = uuid.uuid4().hex
        prompt, mix, seconds = self.prompt(source), source.choice(self.mixes), source.random()
        self.note(f"abort {request_id} after {seconds:.3f} s: {prompt}, {mix}")
        with ThreadPoolExecutor(1) as pool:
            body = generate_body(prompt, 80, mix, rid=request_id)
            waiting = pool.submit(self.server.post, "/generate", body)
            time.sleep(seconds)
            assert self.server.post("/abort_request", {"rid": request_id}).status_code == 200
            response = waiting.result()
        if response.status_code == 200 and response.json()["output_ids"]:
            self.live.judge.check(prompt, Answer.of(response.json()), mix)

    def load(self, source: random.Random) -> None:
        """Other bytes under one name, from a folder or as tensors; the name answers with what it holds now."""
        contents = source.choice([name for name in self.others if name.startswith("tiny")])
        name = f"churn {threading.get_ident()}, {source.randrange(3)}"
        load = self.server.load if source.random() < 0.5 else partial(load_from_tensors, self.live)
        self.note(f"load {name} = {contents}")
        response = load(name, self.others[contents])
        assert response.status_code == 200, response.text
        prompt, weight = self.prompt(source), source.choice((1.0, 1.0, -0.5))
        self.note(f"ask 4: {prompt}, {name}: {weight}")
        answer = self.server.generate([prompt], 4, [{name: weight}])[0]
        self.live.judge.check(prompt, answer, {contents: weight}, 4)
        self.note(f"unload {name}")
        response = self.server.unload(name)
        assert response.status_code == 200, response.text

    def flush(self, source: random.Random) -> None:
        """Now and then everybody pauses, the cache is emptied, and they go on."""
        time.sleep(source.uniform(4, 10))
        self.may_ask.clear()
        self.note("flush")
        try:
            self.server.flush()
        finally:
            self.may_ask.set()


def test_a_failure_shows_what_led_to_it() -> None:
    """The seed and the last operations, oldest first: what it takes to look for the cause."""
    live: Any = SimpleNamespace(server=None, adapters=dict.fromkeys("abcde"), vocab=320)
    run = Run(live, {}, seed=7)

    def step(source: random.Random) -> None:
        run.note(f"operation {len(run.last_operations)}")
        assert len(run.last_operations) < 5, "the answer is wrong"

    with pytest.raises(AssertionError, match="the answer is wrong") as failure:
        run.go_on(step, 0)
    head, operations = failure.value.__notes__
    assert "in step, seed 7" in head
    said = [line.split(maxsplit=2)[2] for line in operations.splitlines()]
    assert said == [*(f"operation {number}" for number in range(5)), "step fails"]
    assert run.failed.is_set(), "the others go on"


def load_from_tensors(live: Live, name: str, folder: Path) -> requests.Response:
    """Named tensors, one copy per rank, as SGLang's API takes them."""
    torch.multiprocessing.set_sharing_strategy("file_system")  # another program than ours will open them
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    ranks = 2 if live.name == "tp2" else 1
    copies = [base64.b64encode(MultiprocessingSerializer.serialize(tensors)).decode() for _ in range(ranks)]
    body: dict[str, Any] = {"lora_name": name, "config_dict": config, "serialized_named_tensors": copies}
    return live.server.post("/load_lora_adapter_from_tensors", body)


@on("small", "tp2")
def test_loaded_from_tensors(live: Live, others: dict[str, Path]) -> None:
    """An adapter that came as tensors answers exactly, survives a flush, and is the same adapter as its files."""
    prompt = random_prompts(1, 20, live.vocab, seed=41)[0]
    response = load_from_tensors(live, "from tensors", others["tiny3"])
    assert response.status_code == 200, response.text
    mix: Mix = {"from tensors": 1.0}
    for _ in range(2):
        answer = live.server.generate([prompt], 6, [mix])[0]
        live.judge.check(prompt, answer, {"tiny3": 1.0}, 6)
        assert answer.cached == 0
        live.server.flush()
    live.server.generate([prompt], 6, [mix])
    assert live.server.load("from files", others["tiny3"]).status_code == 200
    assert live.server.generate([prompt], 6, [{"from files": 1.0}])[0].cached > 0
    for name in ("from tensors", "from files"):
        assert live.server.unload(name).status_code == 200


@on("small")
@pytest.mark.parametrize("seed", [int(os.environ.get("LORA_TREE_SEED", 1))])
def test_random_run(live: Live, others: dict[str, Path], seed: int) -> None:
    """See the module's head."""
    run = Run(live, others, seed)
    steps = [run.ask] * 4 + [run.leave, run.abort, run.load, run.load, run.flush]
    with ThreadPoolExecutor(len(steps)) as pool:
        futures = [pool.submit(run.go_on, step, 1000 * seed + index) for index, step in enumerate(steps)]
        for future in futures:
            future.result()
    assert run.counts["ask"] > SECONDS / 10, run.counts
    live.server.check_at_rest()
    # Nothing is held, and whatever was loaded meanwhile is gone.
    assert set(live.server.tree()["registered"]) == set(live.adapters)
    wait_until(lambda: not locked_nodes(live), 30, lambda: f"left locked: {locked_nodes(live)}")
    if "LORA_TREE_LONG_RUN" in os.environ:
        done = ", ".join(f"{name} {count}" for name, count in sorted(run.counts.items()))
        note = f"of all answers of {SECONDS:.0f} s at random, each compared with PEFT's; steps: {done}; seed {seed}"
        record = results.record("random_run_wrong_answers", 0, "answers", limit="value <= 0", note=note)
        results.merge("live", "cpu", [record])


def locked_nodes(live: Live) -> list[dict[str, Any]]:
    nodes = live.server.get("/lora_tree").json()["nodes"]
    return [node for node in nodes if node["locks"] and node["kind"] != "virtual root"]
