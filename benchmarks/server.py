"""A real server as a child process, for benchmarks: start, ask, stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import requests


class Server:
    """``python -m sglang.launch_server`` with the given arguments; a context manager.

    Args:
        arguments: after the module's name; the port is added.
        log: where its output goes.
        environment: added to this process's.
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.arguments = list(arguments)
        self.log = log
        self.environment = {**os.environ, **(environment or {})}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_seconds = 0.0

    def __enter__(self) -> Server:
        start = time.monotonic()
        command = [sys.executable, "-m", "sglang.launch_server", *self.arguments, "--port", str(self.port)]
        self._process = subprocess.Popen(
            command,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )
        while "fired up" not in self.log.read_text():
            if self._process.poll() is not None or time.monotonic() - start > 400:
                self.__exit__(None, None, None)
                raise RuntimeError(f"the server did not start; the end of its log:\n{self.tail(6000)}")
            time.sleep(0.5)
        self.start_seconds = time.monotonic() - start
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def generate(self, **body: Any) -> Any:
        """POST /generate; raises with the server's message."""
        response = requests.post(f"{self.url}/generate", json=body, timeout=400)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text[:2000]}")
        return response.json()

    def tree(self) -> dict[str, Any]:
        """The tree's summary from /server_info."""
        return requests.get(f"{self.url}/server_info", timeout=60).json()["internal_states"][0]["lora_tree"]

    def tail(self, size: int) -> str:
        return self.log.read_text()[-size:]
