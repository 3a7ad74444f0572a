"""Plans take effect at one place, the same on every rank; without plans the loop goes on as SGLang's, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.eval import EvalParameters
from sglang_lora_tree.scheduling.plan_hooks import SECONDS_BETWEEN_STEPS, Plans
from sglang_lora_tree.scheduling.protocol import Plan, Step
from sglang_lora_tree.scheduling.waiting_queue import make_queue
from tests.radix.tree import Tree

PLAN = Plan(1, 1, EvalParameters(version=1, now=99.0, low_lora=3.0), candidates=(5, 6))


@dataclass
class Client:
    """Plays the advisor."""

    is_alive: bool = False
    needs_reset: bool = False
    epoch: int = 1
    next_sequence: int = 1
    pid: int | None = None
    coming: list[Plan] = field(default_factory=list)
    counters: Any = None
    collect: Any = None

    def take_plan(self) -> Plan | None:
        return self.coming.pop() if self.coming else None


@pytest.fixture
def plans(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plans]:
    clock = [0.0]
    monkeypatch.setattr("sglang_lora_tree.scheduling.plan_hooks.time.monotonic", lambda: clock[0])
    made = Plans(tree.residency, make_queue(Settings()), Settings(), Client(), tuple)  # type: ignore[arg-type]
    made.clock = clock  # type: ignore[attr-defined]
    yield made


def test_the_clock_goes_on_with_requests_and_now_and_then(plans: Plans) -> None:
    clock = plans.clock  # type: ignore[attr-defined]
    plans.client.is_alive = True  # type: ignore[union-attr, misc]
    assert plans.next_step(has_requests=False) is not None
    assert plans.next_step(has_requests=False) is None, "nothing to say"
    clock[0] = 0.01
    step = plans.next_step(has_requests=True)
    assert step == Step(0.01)
    clock[0] = 0.01 + SECONDS_BETWEEN_STEPS
    assert plans.next_step(has_requests=False) is not None


def test_a_plan_and_its_end(plans: Plans, tree: Tree) -> None:
    client, queue = plans.client, plans._queue
    step = plans.next_step(False)
    assert step is not None and step.is_fallback, "no plan yet"
    plans.apply(step)
    assert queue.is_fallback and tree.core.retention.parameters is None
    client.coming.append(PLAN)  # type: ignore[union-attr]
    client.is_alive = True  # type: ignore[union-attr, misc]
    step = plans.next_step(False)
    assert step is not None and step.plan is PLAN and not step.is_fallback
    plans.apply(Step(7.0, step.plan))
    assert tree.core.retention.parameters is PLAN.parameters
    assert tree.core.retention.seconds == 7.0, "time is the broadcast's, not the advisor's"
    assert not queue.is_fallback and list(queue._wanted) == [5, 6] and plans.last is PLAN
    client.is_alive = False  # type: ignore[union-attr, misc]
    plans.clock[0] += SECONDS_BETWEEN_STEPS  # type: ignore[attr-defined]
    step = plans.next_step(False)
    assert step is not None and step.is_fallback
    plans.apply(step)
    assert tree.core.retention.parameters is None and not list(queue._wanted) and plans.last is None
    assert plans.counters.fallbacks == 2 and plans.counters.applied == 1


def test_a_plan_waits_for_a_step_without_requests_but_not_for_ever(plans: Plans) -> None:
    client, clock = plans.client, plans.clock  # type: ignore[attr-defined]
    taken = []
    for number in range(100):
        clock[0] = number / 100
        client.coming = [PLAN]  # type: ignore[union-attr]
        step = plans.next_step(has_requests=number != 30)
        assert step is not None
        taken += [number] * (step.plan is not None)
    assert taken == [0, 20, 30, 50, 70, 90]


def test_other_ranks_do_as_they_are_told(tree: Tree) -> None:
    other = Plans(tree.residency, make_queue(Settings()), Settings(), None, tuple)
    step = other.next_step(True)
    assert step is not None and step.plan is None and not step.is_fallback, "without an advisor nothing is missing"
    other.apply(Step(3.0, PLAN))
    assert other._queue.now == 3.0 and other.last is PLAN
    other.apply(Step(4.0, None, is_fallback=True))
    assert other.is_fallback and other.summary()["fallbacks"] == 1
