"""The scheduler's end of the talk with the advisor: sockets, the process, and its life and death.

Only the entry rank has one. Nothing here waits: messages that cannot be sent are dropped, messages that are not there are not
waited for, and processes are started, watched and killed by a thread that sleeps.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import zmq

from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling.protocol import MAX_BYTES, Plan, Report, Resync, parse_reply

logger = logging.getLogger(__name__)

_RECEIVE = 256  # messages taken from the socket in one step; a loop that has slept finds old plans there
_WATCH_SECONDS = 0.1
_START_SECONDS = 15.0  # until a new process must have said something
_RESTART_SECONDS = 0.2  # before the first restart; doubled up to the next
_LONGEST_RESTART_SECONDS = 5.0
_PREFIX = "sglang-lora-tree-advisor-"


def remove_stale_folders() -> None:
    """Remove the sockets of schedulers that were killed and could not."""
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        pid = folder.name[len(_PREFIX) :].split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class AdvisorCounters:
    """What happened since start; read by ``observability``."""

    plans: int = 0
    reports: int = 0
    dropped_reports: int = 0
    """Not sent because the advisor was slow or gone."""
    garbage: int = 0
    """Messages that were no plan."""
    starts: int = 0
    deaths: int = 0
    wedged: int = 0
    """Processes that were killed because they said nothing."""


class AdvisorClient:
    """Starts the advisor and talks to it.

    Args:
        settings: of ``--lora-tree``.
        start: whether to start a process; False for tests that play the advisor.
    """

    def __init__(self, settings: Settings, start: bool = True) -> None:
        self.counters = AdvisorCounters()
        self.epoch = 1
        self.needs_reset = True
        """The next report must be a reset, and everything must be reported again."""
        self._settings = settings
        self._silence = settings.advisor_silence_seconds
        self._heard_at = self._listened_at = time.monotonic()
        self._has_plan = False
        self._sequence = 0
        remove_stale_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))  # mode 0700
        self._context = zmq.Context()
        self._reports = self._bind(zmq.PUSH, "reports")
        self._plans = self._bind(zmq.PULL, "plans")
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.folder, True)
        if start:
            threading.Thread(target=self._watch, name="lora-tree-advisor", daemon=True).start()

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 32)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        socket.bind(self.address(name))
        os.chmod(self.folder / name, 0o600)
        return socket

    def address(self, name: str) -> str:
        """Of the socket "reports" or "plans"."""
        return f"ipc://{self.folder}/{name}"

    # ---- In the loop ----

    def receive(self) -> Plan | None:
        """The newest plan that has come; never waits."""
        messages: list[bytes] = []
        # Asking costs a tenth of the exception that an empty socket raises.
        while len(messages) < _RECEIVE and int(self._plans.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            messages.append(self._plans.recv(zmq.NOBLOCK))
        plan = None
        while messages and plan is None:
            plan = self._take(messages.pop())
        self._listened_at = time.monotonic()
        return plan

    def _take(self, data: bytes) -> Plan | None:
        try:
            reply = parse_reply(data)
        except ValueError as error:
            if self.counters.garbage % 100 == 0:  # whoever can write to the socket must not fill the log
                logger.warning("a message that is no plan was dropped: %.200s", error)
            self.counters.garbage += 1
            return None
        if reply.epoch != self.epoch:
            return None  # of a process that is gone
        self._heard_at = time.monotonic()
        if isinstance(reply, Resync):
            self.needs_reset = True
            return None
        self.counters.plans += 1
        self._has_plan = True
        return reply

    def send(self, report: Report) -> bool:
        """Send a report, or drop it; the advisor notices by the missing number and asks for all of it again."""
        self._sequence += 1
        try:
            self._reports.send(report.to_bytes(), zmq.NOBLOCK)
        except zmq.Again:
            self.counters.dropped_reports += 1
            return False
        self.counters.reports += 1
        return True

    @property
    def next_sequence(self) -> int:
        return self._sequence + 1

    @property
    def is_alive(self) -> bool:
        """Whether plans come."""
        return self._has_plan and time.monotonic() - self._heard_at < self._silence

    @property
    def pid(self) -> int | None:
        """Of the process, if one runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process and remove the sockets."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill()
        for socket in (self._reports, self._plans):
            socket.close(0)
        self._context.term()
        self._finalizer()

    # ---- In a thread ----

    def _watch(self) -> None:
        pause = _RESTART_SECONDS
        while not self._stopping.is_set():
            try:
                began = time.monotonic()
                self._process = self._start()
                self._watch_one(self._process)
                self._process.wait()
            except OSError as error:
                logger.error("the advisor cannot be started: %s", error)
            if self._stopping.is_set():
                return
            self.counters.deaths += 1
            lived = time.monotonic() - began
            pause = _RESTART_SECONDS if lived > _START_SECONDS else min(2 * pause, _LONGEST_RESTART_SECONDS)
            logger.warning("the advisor is gone after %.1f s; another starts in %.1f s", lived, pause)
            self._stopping.wait(pause)
            self._has_plan = False
            self.epoch += 1
            self.needs_reset = True

    def _start(self) -> subprocess.Popen[bytes]:
        self.counters.starts += 1
        arguments = {
            "--reports": self.address("reports"),
            "--plans": self.address("plans"),
            "--settings": self._settings.to_json(),
            "--epoch": str(self.epoch),
            "--parent": str(os.getpid()),
        }
        command = [sys.executable, "-m", "sglang_lora_tree.scheduling.advisor"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, *(part for pair in arguments.items() for part in pair)], stdin=subprocess.DEVNULL, env=environment
        )
        logger.info("the advisor is process %d", process.pid)
        return process

    def _watch_one(self, process: subprocess.Popen[bytes]) -> None:
        """Until it is dead; one that says nothing is killed."""
        began = time.monotonic()
        while process.poll() is None and not self._stopping.wait(_WATCH_SECONDS):
            # Silence counts only while the loop listens: one that stands still has heard nothing.
            patience = 4 * self._silence if self._heard_at > began else _START_SECONDS
            if self._listened_at - max(self._heard_at, began) > patience:
                self.counters.wedged += 1
                logger.warning("the advisor says nothing and is killed")
                process.kill()
                return
