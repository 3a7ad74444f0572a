"""The demo: a real server, one conversation under changing adapters and mixes, and the tree that it leaves behind.

    make demo            (or: python examples/demo.py [-- MORE OPTIONS OF THE SERVER])

Starts ``python -m sglang.launch_server --lora-tree`` with the model and the adapters of examples/embedded_model, talks to
it over its OpenAI API, and stops it again. The server's log and the picture of the tree are left in the folder .demo.
The pool is made small, so that adapters and history KV have to share it with what is in host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from sglang_lora_tree.cli import fetch_tree
from sglang_lora_tree.observability.picture import draw_png
from sglang_lora_tree.observability.text import render_text

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = Path("examples/embedded_model")
START_SECONDS = 600
POOL_SLOTS = 1500
"""Too few for the adapters and every mix's KV of the whole conversation, enough for each call by itself."""
MAX_NEW_TOKENS = 64
LOG_LINES = 30

Adapters = str | dict[str, float] | None
SUM_AND_JSON: Adapters = {"math": 0.7, "json": 0.3}
LOUD_JSON: Adapters = {"json": 0.5, "upper": 0.5}

# What the user says, and who answers. Each call sends the whole conversation; the base model's answer is the one kept.
Conversation = tuple[tuple[str, tuple[Adapters, ...]], ...]
CONVERSATION: Conversation = (
    ("Mia lives in Oslo. Tom likes soup. Where does Mia live?", (None, "json", "polite", "toylang", "numbered")),
    (
        "Tom has 6 plums and gets 2 plums. How many plums does Tom have?",
        (None, "math", "json", SUM_AND_JSON, "toylang", LOUD_JSON, "upper"),
    ),
    ("What does Tom like?", (None, "polite", "toylang", SUM_AND_JSON)),
    (
        "Tom has 3 books and gets 2 books. How many books does Tom have?",
        (None, "math", "json", LOUD_JSON, "upper", SUM_AND_JSON),
    ),
)


# ---- The server ----------------------------------------------------------------------------------------------------


class DemoError(Exception):
    """The demo cannot go on; says why and what to try."""


def server_command(port: int, more: list[str]) -> list[str]:
    """The command line, as a user would type it in the repository's folder, with `more` options."""
    adapters = sorted(path.name for path in (ROOT / EMBEDDED / "adapters").iterdir() if path.is_dir())
    command = ["python", "-m", "sglang.launch_server", "--model-path", str(EMBEDDED / "model"), "--lora-tree"]
    command += ["--lora-paths", *(f"{name}={EMBEDDED / 'adapters' / name}" for name in adapters)]
    return [*command, "--max-total-tokens", str(POOL_SLOTS), "--enable-cache-report", "--port", str(port), *more]


def format_command(command: list[str], width: int = 100) -> str:
    """A command for the shell, one option per line, long options broken."""
    lines = [""]
    for word in map(shlex.quote, command):
        starts_option = word.startswith("--")
        if starts_option or len(lines[-1]) + len(word) > width:
            lines.append(("    " if starts_option else "        ") + word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


@contextlib.contextmanager
def running_server(command: list[str], url: str, log: Path) -> Iterator[None]:
    """The server as a child process, ready to answer; whatever happens, it is stopped at the end.

    Raises:
        DemoError: it did not start; the message has the end of its log.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command[1:]],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us; we stop the server and its children together
        )
    try:
        wait_until_ready(process, url, log)
        yield
    finally:
        stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    start = time.monotonic()
    while (seconds := time.monotonic() - start) < START_SECONDS:
        if process.poll() is not None:
            raise DemoError(f"the server ended with exit code {process.returncode} before it was ready\n{log_tail(log)}")
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).ok:
                show_progress(f"ready after {seconds:.0f} s", done=True)
                return
        show_progress(f"starting: {seconds:.0f} s")
        time.sleep(0.5)
    raise DemoError(f"the server was not ready after {START_SECONDS} s\n{log_tail(log)}")


def show_progress(text: str, done: bool = False) -> None:
    """One line that is written over in a terminal; elsewhere only its last state."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="\n" if done else "", flush=True)
    elif done:
        print(text, flush=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server with all its children."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


def log_tail(log: Path) -> str:
    """The end of the server's log, and a hint."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    shortened = "\n".join(f"  {line[:200]}" for line in lines)
    return f"The end of its log ({log}):\n{shortened}\nHint: {find_hint(shortened)}"


def find_hint(text: str) -> str:
    for sign, hint in (
        ("address already in use", "another program took the port; run the demo again, or give one with --port"),
        ("out of memory", "close what else uses the memory of this machine, then try again"),
        ("Not enough host memory", "close what else uses the memory of this machine, then try again"),
        ("No module named", "the environment is incomplete: remove .venv and run `make demo` again"),
    ):
        if sign.lower() in text.lower():
            return hint
    return "run the command above by itself to see all that it prints"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- The conversation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One answered call. Tokens are counted by the server; seconds from sending to the first piece of the answer."""

    adapters: Adapters
    question: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, served from history KV."""
    first_token_seconds: float


def ask(client: Any, model: str, messages: list[dict[str, str]], adapters: Adapters) -> Call:
    """One streamed call of the OpenAI chat API; the mix is the body's field ``lora``, None is the base model."""
    start = time.perf_counter()
    first_token_seconds, answer, usage = 0.0, "", None
    for chunk in client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=MAX_NEW_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"lora": adapters} if adapters else None,
    ):
        usage = chunk.usage or usage
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            first_token_seconds = first_token_seconds or time.perf_counter() - start
            answer += piece
    if usage is None:
        raise DemoError("the server sent no token counts")
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    return Call(adapters, messages[-1]["content"], answer, usage.prompt_tokens, cached, first_token_seconds)


def converse(client: Any, conversation: Conversation) -> Iterator[Call]:
    """Call by call: every question goes, with all of the conversation before it, to each of its adapters and mixes."""
    model = next(card.id for card in client.models.list().data if card.parent is None)
    messages: list[dict[str, str]] = []
    for question, choices in conversation:
        messages.append({"role": "user", "content": question})
        calls = []
        for adapters in choices:
            calls.append(ask(client, model, messages, adapters))
            yield calls[-1]
        messages.append({"role": "assistant", "content": calls[0].answer})


HEADER = f"{'#':>3}  {'adapters':<21}  {'prompt':>6}  {'from history':>12}  {'first token':>11}   answer"


def format_call(number: int, call: Call) -> str:
    """One line of the table."""
    answer = " ⏎ ".join(call.answer.strip().splitlines()) or "(nothing)"
    figures = f"{call.prompt_tokens:>6}  {call.cached_tokens:>12}  {call.first_token_seconds * 1000:>8,.0f} ms"
    return f"{number:>3}  {format_adapters(call.adapters):<21}  {figures}   {answer}"


def format_adapters(adapters: Adapters) -> str:
    if adapters is None:
        return "base model"
    if isinstance(adapters, str):
        return adapters
    return " + ".join(f"{weight:g} {name}" for name, weight in adapters.items())


# ---- All of it -----------------------------------------------------------------------------------------------------


def run(url: str, folder: Path) -> None:
    """The conversation and the tree, against a server that is ready.

    Raises:
        DemoError: a call failed, or the server counts invalid KV.
    """
    from openai import OpenAI, OpenAIError

    num_calls = sum(len(choices) for _, choices in CONVERSATION)
    print(f"\nOne conversation, {num_calls} calls. Each sends the whole conversation so far; prompt and history KV in tokens.\n")
    print(HEADER)
    calls: list[Call] = []
    try:
        for call in converse(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), CONVERSATION):
            if not calls or call.question != calls[-1].question:
                print(f"     user: {call.question}")
            calls.append(call)
            print(format_call(len(calls), call), flush=True)
    except OpenAIError as error:
        raise DemoError(f"call {len(calls) + 1} failed: {error}") from error
    prompt, cached = sum(call.prompt_tokens for call in calls), sum(call.cached_tokens for call in calls)
    print(f"\n{cached:,} of {prompt:,} prompt tokens ({cached / prompt:.0%}) came from history KV:")
    print("an adapter or mix that comes back finds its own KV of the conversation, and never that of another.\n")

    snapshot = fetch_tree(url)
    picture = folder / "tree.png"
    draw_png(snapshot, picture, dpi=110)
    print(f"The tree (sglang-lora-tree tree {url} --png {picture}): adapters and mixes stand below the virtual root,")
    print("their KV below them, the base model's KV below the root itself; each node says where it is.\n")
    print(render_text(snapshot))
    print(f"picture: {picture}")
    print(f"invalid KV: {snapshot['invalid_kv']}")
    if snapshot["invalid_kv"]:
        raise DemoError("KV is on the GPU whose adapter is not: this must never happen, please report it")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, help="of the server (default: a free one)")
    parser.add_argument("--out", type=Path, default=ROOT / ".demo", help="folder of the log and the picture (default: .demo)")
    parser.add_argument("more", nargs="*", metavar="OPTION", help="after --: more options of the server")
    options = parser.parse_args()
    port = options.port or free_port()
    url = f"http://127.0.0.1:{port}"
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.out.resolve()
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    log = folder / "server.log"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped then too
    command = server_command(port, options.more)
    print(f"$ {format_command(command)}\n\nIts log is {log}. It starts within a minute; on a GPU, which compiles", end=" ")
    print("kernels at the first start, within three.", flush=True)
    try:
        with running_server(command, url, log):
            try:
                run(url, folder)
            except DemoError as error:
                raise DemoError(f"{error}\n{log_tail(log)}") from error
    except KeyboardInterrupt:
        print("\nstopped; the server too", file=sys.stderr)
        return 130
    except DemoError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
