"""A real server as a child process, for benchmarks and tests: start, wait, ask, stop."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil
import requests

T = TypeVar("T")
LAUNCH = ("-m", "sglang.launch_server")
SERVE = ("-c", "from sglang.cli.main import main; main()", "serve")
"""What the console command ``sglang serve`` runs."""
START_SECONDS = 400


class ServerProcess:
    """A server of its own process group; :meth:`stop`, or the end of a ``with``, ends every process of it.

    From then on SIGTERM, which a time limit sends, interrupts this process as Ctrl-C does; else it would end at once and leave
    the server, whose group is another.

    Args:
        arguments: of the server; the port is added.
        log: file for everything it prints.
        environment: added to this process's.
        command: arguments of python that start it.
    """

    process: subprocess.Popen[bytes]

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = LAUNCH,
    ) -> None:
        self.arguments = list(arguments)
        self.log = log
        self.environment = {**os.environ, **(environment or {})}
        self.command = command
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_seconds = 0.0
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def start(self) -> None:
        """Begin to start; :meth:`wait` until it is done."""
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *self.command, "--port", str(self.port), *self.arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Until it answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; the message has the end of its log.
        """
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.tail(6000)}")
            try:
                if requests.get(self.url + "/health", timeout=5).ok:
                    self.start_seconds = time.monotonic() - start
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"the server did not answer within {seconds} s:\n{self.tail(6000)}")

    def stop(self) -> None:
        for kind, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            try:
                os.killpg(self.process.pid, kind)
                self.process.wait(patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait()
        except RuntimeError:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def tree(self) -> dict[str, Any]:
        """What the scheduler process says about its tree (a summary, from /server_info)."""
        return requests.get(f"{self.url}/server_info", timeout=60).json()["internal_states"][0]["lora_tree"]

    def flush(self, seconds: float = 60) -> None:
        """Empty the cache. SGLang refuses while something runs, so wait for that.

        Raises:
            RuntimeError: something runs all the time.
        """
        deadline = time.monotonic() + seconds
        while not requests.post(f"{self.url}/flush_cache", timeout=60).ok:
            if time.monotonic() >= deadline:
                raise RuntimeError(f"the server is never idle: {self.tree()}")
            time.sleep(0.1)

    def memory(self) -> int:
        """Resident bytes of all its processes."""
        root = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, size: int) -> str:
        """The last characters of its log."""
        return self.read_log()[-size:]


class Server(ServerProcess):
    """For benchmarks."""

    def generate(self, **body: Any) -> Any:
        """POST /generate; raises with the server's message."""
        response = requests.post(f"{self.url}/generate", json=body, timeout=400)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text[:2000]}")
        return response.json()


def start_side_by_side(servers: Iterable[ServerProcess], stack: ExitStack) -> None:
    """Begin to start all of them, for the caller to wait for; `stack` stops them."""
    for server in servers:
        server.start()
        stack.callback(server.stop)
        time.sleep(4)  # each looks at the free memory while it starts


@contextmanager
def sampling(take: Callable[[], T | None], seconds: float) -> Iterator[list[T]]:
    """What ``take`` returns, but None, every so many seconds while the block runs; an error of its is raised at the end."""
    samples: list[T] = []
    over = threading.Event()

    def work() -> None:
        while not over.wait(seconds):
            if (sample := take()) is not None:
                samples.append(sample)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(work)
        try:
            yield samples
        finally:
            over.set()
        watching.result()


def free_port() -> int:
    """A port that nothing listens on; SGLang takes a few above it too.

    Below those that Linux gives to connections: one of them would come and take it before the server does.
    """
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
