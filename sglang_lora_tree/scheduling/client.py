"""The scheduler's end of the talk with the advisor: sockets, the process, and its life and death.

Only the entry rank has one. The loop only reads and writes attributes here. One thread talks: it makes reports, sends them,
waits for plans and checks them, because a system call of a socket that wakes another process costs the loop more than a pass
over its queue. Another starts, watches and kills processes. Messages that cannot be sent are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.leftovers import FOLDER_PREFIX, LOCK, mark_in_use, remove_leftovers
from sglang_lora_tree.scheduling.protocol import MAX_BYTES, Plan, Report, Resync, parse_reply

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_REPORTS = 0.1
_LISTEN_MILLISECONDS = 50  # then the thread looks whether a report is due
_RECEIVE = 256  # messages taken from the socket at a time
ADVISOR_NICE = 10
"""How far the advisor stands back for the server's own processes where there are not cores enough: importing its libraries
takes half a second of one."""
_WATCH_SECONDS = 0.1
_START_SECONDS = 15.0  # until a new process must have said something
_WELL_SECONDS = 1.0  # one that has made plans and lived so long was well: it was killed, and need not be waited for
_RESTART_SECONDS = 0.2  # before the first restart; doubled up to the next if a process was not well
_LONGEST_RESTART_SECONDS = 5.0
_PREFIX = FOLDER_PREFIX + "advisor-"


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
        self._newest: deque[Plan] = deque(maxlen=1)
        self._sequence = 0
        self.collect: Callable[[], Report | None] = lambda: None
        """Makes the next report; called by the thread that talks."""
        remove_leftovers(Path(tempfile.gettempdir()), f"{_PREFIX}*/{LOCK}")  # schedulers that were killed could not
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
        self._lock = mark_in_use(self.folder / LOCK)
        self._context = zmq.Context()
        self._reports = self._bind(zmq.PUSH, "reports")
        self._plans = self._bind(zmq.PULL, "plans")
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.folder, True)
        self._threads: list[threading.Thread] = []
        if start:
            self._run("lora-tree-talk", self._talk)
            self._run("lora-tree-advisor", self._watch)

    def _run(self, name: str, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, name=name, daemon=True))
        self._threads[-1].start()

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

    def take_plan(self) -> Plan | None:
        """The newest plan that has come since the last call."""
        return self._newest.pop() if self._newest else None

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
        for thread in self._threads:
            thread.join()
        for socket in (self._reports, self._plans):
            socket.close(0)
        self._context.term()
        self._finalizer()
        self._lock.close()

    # ---- In the thread that talks ----

    def _talk(self) -> None:
        next_report = 0.0
        while not self._stopping.is_set():
            if self._plans.poll(_LISTEN_MILLISECONDS):
                plan = self.receive()
                if plan is not None:
                    self._newest.append(plan)
            self._listened_at = time.monotonic()
            if self._listened_at >= next_report:
                next_report = self._listened_at + SECONDS_BETWEEN_REPORTS
                self._make_report()

    def _make_report(self) -> None:
        try:
            report = self.collect()
        except Exception:  # what it reads is changed by the loop meanwhile: without this thread no plan would ever come again
            logger.exception("a report could not be made; everything is reported again")
            self.needs_reset = True
            return
        if report is not None:
            self.send(report)

    def receive(self) -> Plan | None:
        """The newest plan that has come; does not wait."""
        messages: list[bytes] = []
        while len(messages) < _RECEIVE and self._plans.poll(0):
            messages.append(self._plans.recv(zmq.NOBLOCK))
        plan = None
        while messages and plan is None:
            plan = self._take(messages.pop())
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

    # ---- In the thread that watches ----

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
            was_well = self._heard_at > began and lived > _WELL_SECONDS
            pause = _RESTART_SECONDS if was_well else min(2 * pause, _LONGEST_RESTART_SECONDS)
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
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, ADVISOR_NICE)
        logger.info("the advisor is process %d", process.pid)
        return process

    def _watch_one(self, process: subprocess.Popen[bytes]) -> None:
        """Until it is dead; one that says nothing is killed."""
        began = time.monotonic()
        while process.poll() is None and not self._stopping.wait(_WATCH_SECONDS):
            # Silence counts only while the other thread listens: in a process that stands still it hears nothing.
            patience = 4 * self._silence if self._heard_at > began else _START_SECONDS
            if self._listened_at - max(self._heard_at, began) > patience:
                self.counters.wedged += 1
                logger.warning("the advisor says nothing and is killed")
                process.kill()
                return
