"""The talk with a real advisor process, killed, stopped and fed with garbage: the loop's side never waits and never fails."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling.client import AdvisorClient
from sglang_lora_tree.scheduling.protocol import Load, Plan, Report

LOAD = Load(0, 1, 1000, 1000, 256, 0.0, 0.0, 0.0, 0.0)
PATIENCE = 60.0  # on a busy machine


class Loop:
    """A scheduler loop with one adapter on the host, which plans should name."""

    def __init__(self, client: AdvisorClient) -> None:
        self.client = client
        client.collect = self.collect
        self.longest = 0.0
        """Step, in seconds."""

    def collect(self) -> Report:
        is_reset, self.client.needs_reset = self.client.needs_reset, False
        rows = ([("adapter:a",)], (), (7, 0, 0, 15, 2, 1.0, 0.0)) if is_reset else ((), (), ())
        return Report(self.client.epoch, self.client.next_sequence, is_reset, 1.0, LOAD, *rows)

    def step(self) -> Plan | None:
        start = time.perf_counter()
        plan = self.client.take_plan()
        self.client.is_alive  # noqa: B018
        self.longest = max(self.longest, time.perf_counter() - start)
        time.sleep(0.01)
        return plan

    def until(self, happened: Callable[[Plan | None], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if happened(self.step()):
                return
        raise AssertionError(f"{what}: {self.client.counters}")

    def until_a_plan(self) -> Plan:
        plans: list[Plan] = []
        self.until(lambda plan: plan is not None and plan.swap_in == (7,) and not plans.append(plan), "no plan came")
        return plans[0]


@pytest.fixture
def loop() -> Iterator[Loop]:
    client = AdvisorClient(Settings(plan_milliseconds=20, advisor_silence_seconds=0.5))
    try:
        yield Loop(client)
    finally:
        client.close()


def test_killed_stopped_and_fed_with_garbage(loop: Loop) -> None:
    client = loop.client
    assert not client.is_alive, "no plan yet"
    first = loop.until_a_plan()
    assert client.is_alive and first.epoch == 1
    assert stat.S_IMODE(client.folder.stat().st_mode) == 0o700
    for name in ("reports", "plans"):
        assert stat.S_IMODE((client.folder / name).stat().st_mode) == 0o600

    # Garbage to both ends: counted, dropped, and plans go on.
    context = zmq.Context()
    strangers = [context.socket(zmq.PUSH) for _ in range(2)]
    try:
        strangers[0].connect(client.address("plans"))

        def is_counted(_: Plan | None) -> bool:
            for data in (b"", b"\xff\x00", b'{"version":1,"kind":"plan"}', b"x" * 1000):
                strangers[0].send(data)  # however much of it ends up behind a newer plan, and is never read
            return client.counters.garbage >= 20

        loop.until(is_counted, "garbage is counted")
        loop.until_a_plan()
    finally:
        context.destroy(0)

    # Killed: another one starts, and makes plans from a picture of its own.
    os.kill(client.pid, signal.SIGKILL)
    loop.until(lambda _: not client.is_alive, "a dead one is noticed")
    assert loop.until_a_plan().epoch > 1
    assert client.counters.deaths == 1

    # Stopped: silence is noticed, it is killed, and another one starts.
    stopped = client.pid
    os.kill(stopped, signal.SIGSTOP)
    loop.until(lambda _: not client.is_alive, "a stopped one is noticed")
    assert loop.until_a_plan().epoch > 2 and client.pid != stopped
    assert client.counters.wedged == 1
    assert loop.longest < 0.25, f"a step took {loop.longest:.3f} s"


def test_reports_to_nobody_are_dropped() -> None:
    client = AdvisorClient(Settings(), start=False)
    try:
        for _ in range(100):
            client.send(Report(1, client.next_sequence, False, 0.0, LOAD))
        assert client.receive() is None
        assert client.counters.dropped_reports == 100 and client.next_sequence == 101
    finally:
        client.close()
    assert not client.folder.exists()


def test_sockets_of_killed_schedulers_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = (
        "import os; from sglang_lora_tree.config import Settings;"
        "from sglang_lora_tree.scheduling.client import AdvisorClient;"
        "client = AdvisorClient(Settings(), start=False); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)})
    (stale,) = tmp_path.iterdir()
    one = AdvisorClient(Settings(), start=False)
    other = AdvisorClient(Settings(), start=False)
    try:
        assert sorted(tmp_path.iterdir()) == sorted([one.folder, other.folder]) and stale not in (one.folder, other.folder)
    finally:
        one.close(), other.close()
    assert not list(tmp_path.iterdir())


def test_plans_of_a_dead_advisor_are_not_taken() -> None:
    from sglang_lora_tree.radix.eval import EvalParameters

    client = AdvisorClient(Settings(), start=False)
    context = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.connect(client.address("plans"))
        for epoch in (2, 1, 1, 7):
            socket.send(Plan(epoch, epoch, EvalParameters()).to_bytes())
        plan, deadline = None, time.monotonic() + PATIENCE
        while plan is None and time.monotonic() < deadline:
            plan = client.receive()
        assert plan is not None and plan.epoch == 1 and client.is_alive
    finally:
        context.destroy(0)
        client.close()


def test_an_advisor_ends_with_its_scheduler() -> None:
    script = (
        "import time; from sglang_lora_tree.config import Settings;"
        "from sglang_lora_tree.scheduling.client import AdvisorClient;"
        "client = AdvisorClient(Settings());\n"
        "while client.pid is None: time.sleep(0.01)\n"
        "print(client.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as scheduler:
        assert scheduler.stdout is not None
        advisor = psutil.Process(int(scheduler.stdout.readline()))
        scheduler.kill()
    assert advisor.wait(PATIENCE) is None or not advisor.is_running()
