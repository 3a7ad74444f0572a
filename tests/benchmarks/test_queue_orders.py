"""The simulated server of the queue benchmark serves everybody, the same every time, within its GPU."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import queue_orders
from benchmarks.queue_orders import ADVICE, NUM_ON_GPU, OFF, SLO, Tier, make_trace, run_all, satisfaction, simulate
from sglang_lora_tree.config import QUEUE_ORDERS, Settings

TRACE = make_trace(40.0, 2.0, 0, count=200)  # above what the server can do, so that a queue forms


def as_numbers(settings: Settings, parts: tuple[str, ...] = ()) -> tuple[object, ...]:
    return dataclasses.astuple(simulate(TRACE, settings, parts=parts))


@pytest.mark.parametrize("order", QUEUE_ORDERS)
def test_every_request_is_served_once_and_the_same_every_time(order: str) -> None:
    settings = Settings(queue_order=order)
    outcome = simulate(TRACE, settings)
    assert len(outcome.ttft) == len(outcome.found) == len(TRACE) and outcome.refused == 0
    assert all(seconds > 0 for seconds in outcome.ttft)
    assert dataclasses.astuple(outcome) == as_numbers(settings)


def test_what_is_refused_and_what_is_served_are_all_requests() -> None:
    outcome = simulate(TRACE, Settings(queue_order="fcfs", ttft_slo_seconds=0.2))
    assert outcome.refused > 0 and outcome.refused + len(outcome.ttft) == len(TRACE)


def test_satisfaction_falls_with_the_wait_and_counts_who_was_refused() -> None:
    assert satisfaction([0.0, SLO / 2, SLO, 3 * SLO], 8) == pytest.approx((1 + 0.75) / 8)
    row = run_all([TRACE], queue_order="fcfs", ttft_slo_seconds=SLO)
    assert 0 < row["satisfaction"] < row["slo"] <= 1 - row["refused"]


def test_lag_with_a_theta_of_0_is_first_come_first_served_and_without_theta_it_is_not() -> None:
    """As the table in docs/lag.md says."""
    fcfs = as_numbers(Settings(queue_order="fcfs"))
    assert as_numbers(Settings(theta_seconds=0.0)) == fcfs
    assert as_numbers(Settings(theta_seconds=OFF)) != fcfs


def test_advice_changes_what_comes_ahead_and_loses_nobody() -> None:
    outcome = simulate(TRACE, Settings(), parts=ADVICE["all"])
    assert len(outcome.ttft) == len(TRACE)
    assert dataclasses.astuple(outcome) != as_numbers(Settings()), "plans were not carried out"


def test_the_gpu_never_holds_more_adapters_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    bring = Tier.bring

    def bring_and_count(tier: Tier, name: str, now: float, locked: set[str]) -> None:
        bring(tier, name, now, locked)
        sizes.append(len(tier.gpu))

    monkeypatch.setattr(queue_orders.Tier, "bring", bring_and_count)
    simulate(TRACE, Settings())
    assert max(sizes) == NUM_ON_GPU
