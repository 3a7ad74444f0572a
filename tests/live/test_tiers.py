"""Three tiers: more adapters than host memory holds, read on first use, and files that change under the server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from .conftest import TINY, Live, on
from .judge import Mix, random_prompts
from .server import generate_body

NUM_NEW = 4


@pytest.fixture
def tiny(live: Live, others: dict[str, Path]) -> Iterator[list[str]]:
    """Forty more adapters, registered while the test runs."""
    loaded = []
    for name in TINY:
        answer = live.server.load(name, others[name])
        assert answer.status_code == 200, answer.text
        loaded.append(name)
    yield loaded
    for name in loaded:
        assert live.server.unload(name).status_code == 200


@on("small", "tp2")
def test_more_adapters_than_host_memory_holds(live: Live, tiny: list[str]) -> None:
    """All registered adapters answer exactly, in two rounds: each is read again when its host copy had to go."""
    tree = live.server.tree()
    registered = sum(adapter["slots"] for adapter in tree["registered"].values())
    assert registered > tree["pool"]["host_size"], "the test needs more or larger adapters"
    prompts = random_prompts(len(tiny), 6, live.vocab, seed=21)
    for order in (tiny, tiny[::-1]):
        mixes: list[Mix] = [{name: 1.0} for name in order]
        answers = live.server.generate(prompts, NUM_NEW, mixes)
        live.judge.check_all(zip(prompts, mixes, strict=True), answers, NUM_NEW)
    assert live.server.tree()["counters"]["reads"] > tree["counters"]["reads"] + len(tiny)
    live.server.check_at_rest()


@on("small")
def test_mixes_of_cold_adapters(live: Live, tiny: list[str]) -> None:
    """Members are read side by side; a mix waits for all of them."""
    live.server.flush()
    mixes: list[Mix] = [dict(zip(tiny[start : start + 8], [0.5] * 8, strict=True)) for start in range(0, 40, 8)]
    prompts = random_prompts(len(mixes), 6, live.vocab, seed=22)
    answers = live.server.generate(prompts, NUM_NEW, mixes)
    live.judge.check_all(zip(prompts, mixes, strict=True), answers, NUM_NEW)


@on("small")
def test_cold_adapters_hold_nobody_up(live: Live, tiny: list[str]) -> None:
    """While adapters are read from disk and come to the GPU, a running request goes on (invariant 5)."""
    live.server.flush()
    prompt = random_prompts(1, 8, live.vocab, seed=23)[0]
    cold_prompts = random_prompts(12, 6, live.vocab, seed=24)

    def ask_cold(index: int) -> float:
        mix = {tiny[index]: 1.0}
        answer = live.server.generate([cold_prompts[index]], NUM_NEW, [mix])[0]
        live.judge.check(cold_prompts[index], answer, mix, NUM_NEW)
        return time.monotonic()

    arrivals = []
    with ThreadPoolExecutor(12) as pool:
        body = generate_body(prompt, 250, None, stream=True)
        with requests.post(live.server.url + "/generate", json=body, stream=True, timeout=300) as response:
            waiting = None
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    arrivals.append(time.monotonic())
                    if waiting is None:
                        asked = time.monotonic()
                        waiting = [pool.submit(ask_cold, index) for index in range(12)]
        assert waiting is not None
        answered = max(future.result() for future in waiting)
    assert sum(asked < arrival < answered for arrival in arrivals) >= 20, "the running request stood still"


@on("small", "tp2")
def test_files_that_vanish_or_change(live: Live, others: dict[str, Path], tmp_path: Path) -> None:
    """An adapter whose files are gone, or others, since its registration fails its own requests, with a message that
    names it; everybody else goes on, and with the files back it is served."""
    server, names = live.server, sorted(live.adapters)
    prompt = random_prompts(1, 10, live.vocab, seed=25)[0]
    for name, source in (("vanishing", "tiny0"), ("changing", "tiny1")):
        shutil.copytree(others[source], tmp_path / name)
        assert server.load(name, tmp_path / name).status_code == 200
    server.flush()
    (tmp_path / "vanishing").rename(tmp_path / "away")
    weights = "adapter_model.safetensors"
    shutil.copy(others["tiny2"] / weights, tmp_path / "changing" / weights)
    with ThreadPoolExecutor(6) as pool:
        good = [pool.submit(server.generate, [prompt], NUM_NEW, [{name: 1.0}]) for name in names[:3]]
        gone = pool.submit(server.refuse, [prompt], NUM_NEW, [{"vanishing": 1.0}])
        changed = pool.submit(server.refuse, [prompt], NUM_NEW, [{"changing": 0.5, names[0]: 1.0}])
        assert "vanishing" in gone.result() and str(tmp_path / "vanishing") in gone.result()
        assert "changing" in changed.result() and "other weights" in changed.result()
        for name, future in zip(names, good, strict=False):
            live.judge.check(prompt, future.result()[0], {name: 1.0}, NUM_NEW)
    (tmp_path / "away").rename(tmp_path / "vanishing")
    shutil.copy(others["tiny1"] / weights, tmp_path / "changing" / weights)
    for name, source in (("vanishing", "tiny0"), ("changing", "tiny1")):
        answer = server.generate([prompt], NUM_NEW, [{name: 1.0}])[0]
        live.judge.check(prompt, answer, {source: 1.0}, NUM_NEW)
        assert server.unload(name).status_code == 200
    server.check_at_rest()


@on("small", "float32")
def test_refused_folders(live: Live, tmp_path: Path) -> None:
    """A folder that cannot be served is refused at load with what is wrong and where; the name stays free."""
    server = live.server
    name, folder = next(iter(live.adapters.items()))
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path, says in ((tmp_path / "nowhere", "nowhere"), (broken, "adapter_model.safetensors")):
        answer = server.load("refused", path)
        assert answer.status_code == 400 and says in answer.text, answer.text
    assert server.load(name, folder).status_code == 400
    assert "refused" not in server.tree()["registered"]
    assert server.load("refused", folder).status_code == 200
    assert server.unload("refused").status_code == 200
    assert server.unload("refused").status_code == 400
