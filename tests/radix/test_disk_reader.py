"""Outcomes come in the order of submission, at the same step on every rank, and never before every rank has them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_lora_tree.radix.disk_reader import DiskReader


class Ranks:
    """Readers of two ranks, polled one after the other; each sees the smaller of both ranks' states."""

    def __init__(self) -> None:
        self.readers = [DiskReader(2, self.agree) for _ in range(2)]
        self.log: list[list[Any]] = [[], []]
        self.gates: list[list[threading.Event]] = [[], []]

    def agree(self, _: torch.Tensor) -> torch.Tensor:
        states = [[job.state for job in reader.jobs] for reader in self.before]
        return torch.tensor(states).min(dim=0).values

    def submit(self, rank: int, name: str, error: Exception | None = None) -> Callable[[], None]:
        gate = threading.Event()

        def work() -> str:
            gate.wait(10)
            if error is not None:
                raise error
            return name

        log = self.log[rank]
        self.readers[rank].submit(work, log.append, lambda message: log.append(("failed", message)))
        job = self.readers[rank].jobs[-1]
        return lambda: (gate.set(), job.future.exception(10), None)[-1]

    def poll(self) -> None:
        # The reduction sees what both ranks hold at this step.
        self.before = [type("Held", (), {"jobs": list(reader.jobs)}) for reader in self.readers]
        for reader in self.readers:
            reader.poll()


def test_nothing_is_applied_before_every_rank_has_it() -> None:
    ranks = Ranks()
    finish = [[ranks.submit(rank, name) for name in ("one", "two", "three")] for rank in (0, 1)]
    finish[0][0]()
    ranks.poll()
    assert ranks.log == [[], []]
    finish[1][0]()
    finish[0][1]()
    ranks.poll()
    assert ranks.log == [["one"], ["one"]]
    for one in finish[0][1:] + finish[1][1:]:
        one()
    ranks.poll()
    assert ranks.log == [["one", "two", "three"]] * 2
    assert [reader.num_pending for reader in ranks.readers] == [0, 0]


def test_a_failure_on_one_rank_is_a_failure_on_all() -> None:
    ranks = Ranks()
    ranks.submit(0, "one")()
    ranks.submit(1, "one", ValueError("no such file"))()
    ranks.poll()
    assert ranks.log[1] == [("failed", "no such file")]
    assert ranks.log[0][0][0] == "failed" and "another rank" in ranks.log[0][0][1]


def local() -> DiskReader:
    return DiskReader(1, lambda states: states)


def test_a_slow_job_does_not_hold_back_a_later_one_and_poll_never_waits() -> None:
    reader, gate, log = DiskReader(2, lambda states: states), threading.Event(), []
    reader.submit(lambda: gate.wait(10), lambda _: log.append("slow"), log.append)
    reader.submit(lambda: None, lambda _: log.append("quick"), log.append)
    reader.jobs[1].future.result(10)
    reader.poll()
    assert log == ["quick"] and reader.num_pending == 1
    gate.set()
    reader.jobs[0].future.result(10)
    reader.poll()
    assert log == ["quick", "slow"]


@pytest.mark.parametrize("error", [ValueError("bad file"), OSError("gone"), MemoryError("no room"), KeyError("x")])
def test_an_error_is_handed_on_as_text(error: Exception) -> None:
    reader, log = local(), []
    reader.submit(lambda: (_ for _ in ()).throw(error), log.append, lambda text: log.append(("failed", text)))
    reader.jobs[0].future.exception(10)
    reader.poll()
    assert log == [("failed", str(error))]


def test_a_callback_may_submit_more() -> None:
    reader, log = local(), []
    reader.submit(lambda: 1, lambda _: reader.submit(lambda: 2, log.append, log.append), log.append)
    for _ in range(2):
        reader.jobs[0].future.exception(10)
        reader.poll()
    assert log == [2] and reader.num_pending == 0


def test_polling_without_jobs_reduces_nothing() -> None:
    """Idle ranks do not talk."""
    reader = DiskReader(1, lambda states: pytest.fail("a reduction with nothing to agree on"))
    reader.poll()


def test_drain_waits_for_the_threads_and_forgets_their_outcomes() -> None:
    reader, log, ended = local(), [], []
    reader.submit(lambda: ended.append(1), log.append, log.append)
    reader.submit(lambda: 1 / 0, log.append, log.append)
    reader.drain()
    assert ended == [1] and reader.num_pending == 0
    reader.poll()
    assert log == []


@pytest.mark.parametrize(("own", "other", "same"), [(7, 7, True), (7, 9, False), (9, 7, False)])
def test_ranks_that_found_different_things_fail_together(own: int, other: int, same: bool) -> None:
    """Whichever of them has the larger fingerprint; a job without one is not compared."""

    def agree(values: torch.Tensor) -> torch.Tensor:
        # Two jobs' states first, then the fingerprint of the one that has one.
        return values if values.tolist() == [2, 2] else torch.minimum(values, torch.tensor([other, -other]))

    reader, done, failed = DiskReader(1, agree), [], []
    for fingerprint in (lambda value: value, None):
        reader.submit(lambda: own, done.append, failed.append, fingerprint)
    for job in reader.jobs:
        job.future.result(10)
    reader.poll()
    assert (done, len(failed)) == (([own, own], 0) if same else ([own], 1))
    assert same or "different files" in failed[0]
