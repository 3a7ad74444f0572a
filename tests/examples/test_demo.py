"""The demo's parts: what it says, to whom, how it prints, and that it leaves no process behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402

HEALTHY = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(str(child.pid))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server that is ready at once and has a child process, as SGLang's has."""


class FakeClient:
    """An OpenAI client whose answers are known: two pieces per answer, counts in the last chunk."""

    def __init__(self, details: Any = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.models = SimpleNamespace(list=self._models)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._details = details

    def _models(self) -> Any:
        cards = [SimpleNamespace(id="math", parent="the-base"), SimpleNamespace(id="the-base", parent=None)]
        return SimpleNamespace(data=cards)

    def _create(self, **request: Any) -> Iterator[Any]:
        self.requests.append({**request, "messages": list(request["messages"])})
        yield self._chunk("")
        yield self._chunk(f"answer {len(self.requests)}")
        yield self._chunk(".")
        usage = SimpleNamespace(prompt_tokens=90, prompt_tokens_details=self._details)
        yield SimpleNamespace(choices=[], usage=usage)

    @staticmethod
    def _chunk(text: str) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=text))], usage=None)


def test_conversation_shows_what_it_should() -> None:
    """At least 12 calls, with the base model, single adapters and the mix of the README; each comes back; all exist."""
    choices = [adapters for _, turn in demo.CONVERSATION for adapters in turn]
    assert len(choices) >= 12
    names = {path.name for path in (EXAMPLES / "embedded_model" / "adapters").iterdir()}
    for adapters in choices:
        assert set([adapters] if isinstance(adapters, str) else adapters or ()) <= names, adapters
    for shown in (None, "math", "json", {"math": 0.7, "json": 0.3}):
        assert choices.count(shown) >= 2, f"{shown} is never turned back to"
    assert all(turn[0] is None for _, turn in demo.CONVERSATION), "the base model's answer is the one that is kept"


def test_each_call_sends_the_conversation_so_far() -> None:
    """The history grows by one question and the first answer per turn, and is the same for all adapters of a turn."""
    client = FakeClient()
    both = {"math": 0.7, "json": 0.3}
    calls = list(demo.converse(client, (("one", (None, "math")), ("two", (None, both)))))
    assert [call.answer for call in calls] == ["answer 1.", "answer 2.", "answer 3.", "answer 4."]
    first = [{"role": "user", "content": "one"}]
    second = [*first, {"role": "assistant", "content": "answer 1."}, {"role": "user", "content": "two"}]
    assert [request["messages"] for request in client.requests] == [first, first, second, second]
    assert [request["extra_body"] for request in client.requests] == [None, {"lora": "math"}, None, {"lora": both}]
    assert {request["model"] for request in client.requests} == {"the-base"}


@pytest.mark.parametrize(
    "details, cached", [(None, 0), (SimpleNamespace(cached_tokens=None), 0), (SimpleNamespace(cached_tokens=57), 57)]
)
def test_counts_come_from_the_server(details: Any, cached: int) -> None:
    call = demo.ask(FakeClient(details), "the-base", [{"role": "user", "content": "one"}], "math")
    assert (call.prompt_tokens, call.cached_tokens) == (90, cached)
    assert 0 < call.first_token_seconds < 10


def test_table_is_aligned() -> None:
    """Every figure ends under its heading, and an answer stays on one line, whatever the adapters are called."""
    call = demo.Call({"math": 0.7, "json": 0.3}, "How many?", "1. Mia\n2. Oslo", 266, 185, 0.1239)
    line = demo.format_call(7, call)
    assert line.split() == "7 0.7 math + 0.3 json 266 185 124 ms 1. Mia ⏎ 2. Oslo".split()
    for heading, figure in (("prompt", "266"), ("from history", "185"), ("first token", "124 ms")):
        assert line.index(figure) + len(figure) == demo.HEADER.index(heading) + len(heading), heading
    assert line.index("1. Mia") == demo.HEADER.index("answer")
    widest = max((adapters for _, turn in demo.CONVERSATION for adapters in turn), key=lambda it: len(demo.format_adapters(it)))
    other = demo.format_call(19, demo.Call(widest, "?", "", 1, 0, 12.0))
    assert other.index("(nothing)") == demo.HEADER.index("answer") and "12,000 ms" in other


def test_command_can_be_pasted_into_a_shell() -> None:
    """The printed command is the one that runs, and has no path of this machine."""
    import shlex

    command = demo.server_command(30000, [])
    assert shlex.split(demo.format_command(command).replace("\\\n", " ")) == command
    assert not any(word.startswith("/") or "=/" in word for word in command)
    assert command[:3] == ["python", "-m", "sglang.launch_server"] and "--lora-tree" in command


def test_server_and_its_children_end_with_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port, child_file = demo.free_port(), tmp_path / "child"
    command = ["python", "-c", HEALTHY, str(port), str(child_file)]
    with pytest.raises(KeyboardInterrupt), demo.running_server(command, f"http://127.0.0.1:{port}", tmp_path / "log"):
        child = int(child_file.read_text())
        assert is_running(child)
        raise KeyboardInterrupt  # what Ctrl-C does
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline, "a process is left behind"
        time.sleep(0.05)
    assert capsys.readouterr().out.startswith("ready after"), "without a terminal, only the last state of the progress line"


@pytest.mark.parametrize(
    "says, hint",
    [
        ("OSError: [Errno 98] Address already in use", "--port"),
        ("ValueError: Not enough host memory available", "memory"),
        ("something never seen before", "run the command"),
    ],
)
def test_failed_start_shows_the_log_and_a_hint(tmp_path: Path, says: str, hint: str) -> None:
    """The end of the log only, long lines cut, with the exit code."""
    program = f"import sys; print('early'); print('x' * 9000); print('line\\n' * 40); print({says!r}); sys.exit(3)"
    with pytest.raises(demo.DemoError) as caught:
        with demo.running_server(["python", "-c", program], "http://127.0.0.1:9", tmp_path / "log"):
            raise AssertionError("it is not ready")
    message = str(caught.value)
    assert "exit code 3" in message and says in message
    assert hint in message.splitlines()[-1] and message.splitlines()[-1].startswith("Hint: ")
    assert "early" not in message and max(map(len, message.splitlines())) < 300


def is_running(pid: int) -> bool:
    """Not ended, and not a zombie that nobody has waited for."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
