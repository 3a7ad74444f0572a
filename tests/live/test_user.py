"""The server as a user starts it, with the model of the repository: what the examples, the console command and the
monitoring show."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_lora_tree import cli

from .conftest import EMBEDDED, Live, on
from .test_api import MIX, QUESTION, Client, chat_text, prompt_of

EXAMPLES = EMBEDDED.parent


@on("embedded")
def test_adapters_change_the_answers(live: Live) -> None:
    """Over chat, most adapters say something else than the base model and than each other."""
    client = Client(live)
    answers = {name: chat_text(client.chat(name)) for name in (client.base, *live.adapters)}
    assert len(set(answers.values())) >= len(answers) - 2, answers


@on("embedded")
@pytest.mark.parametrize("example", ["agent.py", "async_client.py"])
def test_examples_run(live: Live, example: str) -> None:
    """The examples run against this server as their heads say; the agent's turns reuse what their mix left."""
    command = [sys.executable, str(EXAMPLES / example), "--url", live.server.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    if example == "agent.py":
        lines = re.findall(r"^(.*?) +(\d+) of +(\d+) prompt tokens from history KV", result.stdout, re.MULTILINE)
        assert len(lines) >= 11, result.stdout
        seen: set[str] = set()
        for mix, reused, _ in lines:
            assert mix not in seen or int(reused) > 0, f"{mix} came back and found nothing:\n{result.stdout}"
            seen.add(mix)
    else:
        assert "404" in result.stdout and "400" in result.stdout, result.stdout


@on("embedded")
@pytest.mark.parametrize("number", [0, 1], ids=["openai", "language"])
def test_samples_of_the_readme_run(live: Live, number: int) -> None:
    """As they stand, but for address and model; the mix answers in json's form."""
    sample = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(encoding="utf-8"), re.DOTALL)[number]
    sample = sample.replace("http://localhost:30000", live.server.url).replace('"tiny', f'"{Client(live).base}')
    result = subprocess.run([sys.executable, "-c", sample], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert '{"name": "Tom", "plums":' in result.stdout, result.stdout


@on("embedded")
def test_language(live: Live) -> None:
    """sglang.lang with adapters per call: in forks, in a batch whose items have mixes of their own, and in select."""
    from sglang_lora_tree.lang import RuntimeEndpoint, function, gen, select

    client = Client(live)
    mixes: list[Any] = [None, "math", MIX, [{"name": "upper", "scale": 1.0}]]
    expected = [client.native(lora=mix) for mix in mixes]
    backend = RuntimeEndpoint(live.server.url)
    settings: dict[str, Any] = {"backend": backend, "temperature": 0.0, "max_new_tokens": 24}

    @function
    def forked(s: Any, question: str) -> None:
        s += prompt_of(question)
        branches = s.fork(len(mixes))
        for branch, mix in zip(branches, mixes, strict=True):
            branch += gen("answer", adapters=mix)
        s["answers"] = [branch["answer"] for branch in branches]

    @function
    def single(s: Any, question: str, adapters: Any) -> None:
        s += prompt_of(question) + gen("answer", adapters=adapters)

    @function
    def selected(s: Any, question: str, adapters: Any, choices: list[str]) -> None:
        s += prompt_of(question) + select("answer", choices, adapters=adapters)

    # Each mix prefers its own words to those of the others. Twice: the second time the choices are found in the tree.
    for mix, words in [*zip(mixes, expected, strict=True)] * 2:
        state = selected.run(QUESTION, adapters=mix, choices=expected, backend=backend)
        assert state["answer"] == words, mix
    assert forked.run(QUESTION, **settings)["answers"] == expected
    items = [{"question": QUESTION, "adapters": mix} for mix in mixes]
    states = single.run_batch(items, num_threads=4, **settings)
    assert [state["answer"] for state in states] == expected


@on("embedded")
def test_tree_endpoint_and_command(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GET /lora_tree and ``sglang-lora-tree tree URL``: every layer is there, sizes add up, invalid KV is 0."""
    client = Client(live)
    client.native(lora=MIX)
    client.native(lora="upper")
    tree = live.server.get("/lora_tree").json()
    nodes = {node["id"]: node for node in tree["nodes"]}
    kinds = {node["kind"] for node in tree["nodes"]}
    assert kinds == {"virtual root", "adapter", "mix", "kv"}
    for node in tree["nodes"]:
        assert node["parent"] in nodes or node["kind"] == "virtual root"
        if node["kind"] == "mix":
            assert all(member["name"] in live.adapters for member in node["members"]), node
    assert tree["invalid_kv"] == 0
    picture = tmp_path / "tree.png"
    assert cli.main(["tree", live.server.url, "--png", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "math" in text and "upper" in text and re.search(r"invalid KV\W+0", text, re.IGNORECASE), text
    assert picture.read_bytes().startswith(b"\x89PNG")


def read_metrics(live: Live) -> str:
    """/metrics, once all that has happened is in it."""
    time.sleep(2.5)  # written once a second
    return live.server.get("/metrics").text


def read_series(text: str, name: str) -> dict[tuple[str, ...], float]:
    """A metric of ours: the values of its own labels -> its value."""
    found = re.findall(rf"^sglang:lora_tree_{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    assert found, name
    own = (dict(re.findall(r'(\w+)="([^"]*)"', labels)) for labels, _ in found)
    names = ("tier", "direction", "kind")
    keys = [tuple(labels[label] for label in names if label in labels) for labels in own]
    return dict(zip(keys, (float(value) for _, value in found), strict=True))


@on("embedded")
def test_metrics(live: Live) -> None:
    """/metrics has our series beside SGLang's, they add up, and the series that routers read is there."""
    Client(live).native(lora=MIX)
    text = read_metrics(live)
    slots: dict[str, float] = {}
    for (tier, _), value in read_series(text, "slots").items():
        slots[tier] = slots.get(tier, 0.0) + value
    pool = live.server.tree()["pool"]
    assert slots == {"gpu": pool["gpu_size"], "host": pool["host_size"]}
    for name in ("adapter_hits", "adapter_misses", "kv_hit_tokens", "kv_miss_tokens", "swap_ins", "swap_outs", "disk_reads"):
        assert re.search(rf"^sglang:lora_tree_{name}_total\{{.*\}} \S+$", text, re.MULTILINE), name
    assert re.search(r"^sglang:lora_tree_invalid_kv_tokens\{.*\} 0\.0$", text, re.MULTILINE)
    assert "sglang:lora_tree_cold_start_seconds_bucket" in text
    assert re.search(r'^vllm:lora_requests_info\{.*max_lora="\d+".*\} \S+$', text, re.MULTILINE)


@on("small")
def test_metrics_of_swaps(live: Live) -> None:
    """Five adapters in turn, in a pool too small for them: what came and went is counted, in bytes and seconds too."""
    prompts = [[10 + turn, *range(100, 140)] for turn in range(2)]
    for _ in range(2):
        for name in live.adapters:
            live.server.generate(prompts, 4, [{name: 1.0}] * 2)
    live.server.check_at_rest()
    text = read_metrics(live)
    swapped, seconds, tokens = (
        read_series(text, f"{name}_total") for name in ("swapped_bytes", "swap_seconds", "swapped_kv_tokens")
    )
    tree = live.server.tree()
    counters, slot_bytes = tree["counters"], tree["pool"]["slot_bytes"]
    for direction in ("in", "out"):
        assert read_series(text, f"swap_{direction}s_total") == {(): counters[f"swap_{direction}s"]}
        assert counters[f"swap_{direction}s"] > len(live.adapters)
        assert swapped[direction, "adapter"] == counters[f"swap_{direction}_slots"] * slot_bytes > 0
        assert swapped[direction, "kv"] == tokens[direction,] * slot_bytes
    assert tokens["out",] > 0 and seconds["out", "adapter"] > 0 and seconds["out", "kv"] > 0
    assert set(seconds) == set(swapped)
