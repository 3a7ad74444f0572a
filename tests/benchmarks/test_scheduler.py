"""What a step of the loop costs, in function calls, which are the same on every machine: it does not grow with queue or tree."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import scheduler as benchmark
from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling.client import AdvisorClient
from sglang_lora_tree.scheduling.plan_hooks import Plans
from sglang_lora_tree.scheduling.scheduler_hooks import STATE, SchedulerState
from sglang_lora_tree.scheduling.waiting_queue import make_queue


class Counter:
    """Takes the meter's place, and counts Python functions instead of time."""

    def __init__(self) -> None:
        self.calls = 0

    def on(self) -> None:
        sys.setprofile(self._count)

    def off(self) -> None:
        sys.setprofile(None)

    def take(self) -> float:
        taken, self.calls = self.calls, 0
        return float(taken)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call" and frame.f_code is not Counter.off.__code__


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    for name, value in vars(SchedulerState()).items():
        monkeypatch.setattr(STATE, name, value)
    monkeypatch.setattr(benchmark, "NUM_ADAPTERS", 12)
    monkeypatch.setattr(benchmark, "NUM_ON_GPU", 9)
    counter = Counter()
    monkeypatch.setattr(benchmark, "METER", counter)
    yield counter
    sys.setprofile(None)


def calls_of_steps(num_nodes: int, num_waiting: int, folder: Path) -> dict[str, float]:
    """Functions called in the median step in which a request is admitted, and in which nothing happens."""
    settings = Settings(max_resident_adapters=12, theta_seconds=0.0)
    tree, demands = benchmark.build(num_nodes, settings, folder)
    client = AdvisorClient(settings, start=False)
    try:
        STATE.manager = benchmark.Manager(tree, settings, demands)  # type: ignore[assignment]
        STATE.queue = make_queue(settings)
        STATE.plans = Plans(tree.residency, STATE.queue, settings, client, tuple)
        STATE.plans.next_step = lambda has_requests: None  # type: ignore[method-assign] # it looks at the clock
        run = benchmark._Run(tree, benchmark.Scheduler(num_waiting), client)
        times = run._timed(80 * benchmark.STEPS_PER_REQUEST, 0.0)
    finally:
        client.close()
        tree.close()
    return {
        kind: median(calls for calls, kinds in zip(times.added, times.kinds, strict=True) if kind in kinds)
        for kind in ("admits", "neither")
    }


def test_a_step_calls_few_functions_however_long_the_queue_and_large_the_tree(counter: Counter, tmp_path: Path) -> None:
    few = calls_of_steps(200, 100, tmp_path / "few")
    many = calls_of_steps(2_000, 1_000, tmp_path / "many")
    assert few == many
    assert few["admits"] <= 80 and few["neither"] <= 20
