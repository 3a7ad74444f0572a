"""Admission control: who cannot be served in time is refused on arrival, and the rest is served in time."""

from __future__ import annotations

import pytest

from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling.admission import AdmissionControl
from sglang_lora_tree.scheduling.orders import Waiting
from sglang_lora_tree.scheduling.waiting_queue import make_queue


def run(requests_per_second: float, slo: float | None, seconds: float = 60.0, rate: float = 1000.0) -> tuple[list[float], int]:
    """A server that takes one prompt of 100 tokens at a time, at ``rate`` tokens a second: times to the first token of those
    that were served, and how many were refused. Ten requests a second are all that it can do."""
    control = AdmissionControl(slo if slo is not None else 1e9)
    waiting: list[Waiting] = []
    times: list[float] = []
    now, number, refused = 0.0, 0, 0
    while now < seconds:
        while number / requests_per_second <= now:
            waiting.append(Waiting(number, number / requests_per_second, (), 100))
            control.note_arrived(now)
            number += 1
        before, kept = 0, []
        for request in waiting:
            if control.retry_after(0 if control.is_overloaded else before, request, now) is None:
                before += request.length
                kept.append(request)
            else:
                refused += 1
        waiting = kept
        if waiting:
            request = waiting.pop(-1 if slo is not None and control.is_overloaded else 0)
            control.note_started(1, request.length, now, not waiting)
            now += request.length / rate
            times.append(now - request.arrived_at)
        else:
            now += 0.01
    return times, refused


def test_below_capacity_nobody_is_refused() -> None:
    times, refused = run(requests_per_second=8, slo=1.0)
    assert refused == 0 and max(times) < 0.5


@pytest.mark.parametrize("load", [15, 30])
def test_above_capacity_most_of_the_capacity_is_served_in_time(load: float) -> None:
    times, refused = run(load, slo=1.0)
    in_time = sum(time <= 1.0 for time in times)
    assert in_time > 0.9 * len(times), "who is let in makes it"
    assert len(times) > 0.9 * 60 * 10, "refusing costs no capacity"
    assert refused == pytest.approx(60 * (load - 10), rel=0.15)
    without, _ = run(load, slo=None)
    assert sum(time <= 1.0 for time in without) < 0.5 * in_time


def test_when_to_come_back() -> None:
    control = AdmissionControl(2.0)
    control.note_started(1, 1000, 0.0, False)
    control.note_started(1, 1000, 1.0, False)  # 1,000 tokens took a second
    request = Waiting(0, 1.0, (), 1000)
    assert control.retry_after(500, request, 1.0) is None
    assert control.retry_after(5000, request, 1.0) == 4, "6 seconds of work are waiting, 2 are allowed"
    assert control.refused == 1


def test_off_by_default() -> None:
    assert make_queue(Settings()).control is None and make_queue(Settings()).fair is None
    assert make_queue(Settings(ttft_slo_seconds=2.0)).control is not None
