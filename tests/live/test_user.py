"""The server as a user starts it, with the model of the repository: what the examples, the console command and the
monitoring show."""

from __future__ import annotations

import re
import subprocess
import sys
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
    from sglang_lora_tree.lang import RuntimeEndpoint, function, gen

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


@on("embedded")
def test_metrics(live: Live) -> None:
    """/metrics has our series beside SGLang's, they add up, and the series that routers read is there."""
    import time

    Client(live).native(lora=MIX)
    time.sleep(2.5)  # written once a second
    text = live.server.get("/metrics").text
    slots: dict[str, float] = {}
    for tier, value in re.findall(r'^sglang:lora_tree_slots\{[^}]*tier="(\w+)"[^}]*\} (\S+)$', text, re.MULTILINE):
        slots[tier] = slots.get(tier, 0.0) + float(value)
    pool = live.server.tree()["pool"]
    assert slots == {"gpu": pool["gpu_size"], "host": pool["host_size"]}
    for name in ("adapter_hits", "adapter_misses", "kv_hit_tokens", "kv_miss_tokens", "swap_ins", "disk_reads"):
        assert re.search(rf"^sglang:lora_tree_{name}_total\{{.*\}} \S+$", text, re.MULTILINE), name
    assert re.search(r"^sglang:lora_tree_invalid_kv_tokens\{.*\} 0\.0$", text, re.MULTILINE)
    assert "sglang:lora_tree_cold_start_seconds_bucket" in text
    assert re.search(r'^vllm:lora_requests_info\{.*max_lora="\d+".*\} \S+$', text, re.MULTILINE)
