"""SGLang's queue under our order: priorities stay, SGLang's ties stay, ranks agree; a pass sees the window and loses nobody."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_drainer import LoRADrainer
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, CacheAwarePolicy

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.residency import Demand
from sglang_lora_tree.scheduling import queue_hooks, scheduler_hooks
from sglang_lora_tree.scheduling.scheduler_hooks import STATE, SchedulerState
from sglang_lora_tree.scheduling.waiting_queue import WINDOW, make_queue


class Residency:
    """Adapters a and b are on the GPU."""

    def __init__(self) -> None:
        self.resident = frozenset("ab")
        self.version = 0
        self.cache = SimpleNamespace(has_queued_loads=False)
        self.passes: list[list[str]] = []
        self.has_lost: list[bool] = []

    @property
    def num_resident(self) -> int:
        return len(self.resident)

    def begin_pass(self, waiting: Iterator[str], has_lost: bool = True) -> None:
        self.passes.append(list(waiting))
        self.has_lost.append(has_lost)


@pytest.fixture
def residency(monkeypatch: pytest.MonkeyPatch) -> Residency:
    residency = Residency()
    fresh = SchedulerState()
    for name, value in vars(fresh).items():
        monkeypatch.setattr(STATE, name, value)
    settings = Settings(theta_seconds=5)
    resolver = SimpleNamespace(resolve=lambda lora_id: lora_id and SimpleNamespace(demand=Demand(lora_id, tuple(lora_id))))
    monkeypatch.setattr(STATE, "manager", SimpleNamespace(residency=residency, settings=settings, resolver=resolver))
    monkeypatch.setattr(STATE, "queue", make_queue(settings))
    return residency


def ask(lora_id: str | None, priority: int = 0, now: float = 0.0) -> Any:
    """A request as SGLang queues it; "ab" needs the adapters a and b."""
    assert STATE.queue is not None
    STATE.queue.now = now
    ticket = STATE.queue.take_ticket(lora_id or (), 10)
    req = SimpleNamespace(rid=f"r{ticket.waiting.arrival}", lora_id=lora_id, priority=priority, lora_tree_ticket=ticket)
    req.sampling_params, req.output_ids = SimpleNamespace(max_new_tokens=10), []
    req.time_stats = SimpleNamespace(wait_queue_entry_time=random.random())  # each rank's own clock
    queue_hooks.note_queued(None, None, req)
    return req


def names(reqs: Sequence[Any]) -> list[str]:
    return [req.lora_id for req in reqs]


def policy_of(kind: Any = CacheAgnosticPolicy.FCFS, has_priorities: bool = False) -> Any:
    return SimpleNamespace(policy=kind, enable_priority_scheduling=has_priorities)


def test_fewest_new_adapters_first_and_arrival_among_equals(residency: Residency) -> None:
    queue = [ask(lora_id) for lora_id in ("c", "a", "cd", "b", "ab")]
    running = SimpleNamespace(reqs=[ask("d")])
    queue_hooks.order_queue(lambda *_: None, policy_of(), queue, running)
    assert names(queue) == ["a", "b", "ab", "c", "cd"]
    assert residency.passes == [[req.rid for req in queue]]
    random.Random(0).shuffle(queue)  # as a pass before may have left it
    queue_hooks.order_queue(lambda *_: None, policy_of(), queue, running)
    assert names(queue) == ["a", "b", "ab", "c", "cd"]


def test_sglangs_order_breaks_ties(residency: Residency) -> None:
    queue = [ask(lora_id) for lora_id in ("c", "a", "d", "b")]
    queue_hooks.order_queue(lambda policy, waiting, *_: waiting.reverse(), policy_of(CacheAwarePolicy.LPM), queue)
    assert names(queue) == ["b", "a", "d", "c"], "the longest prefix first, among those that need as many"


def test_priorities_go_before(residency: Residency) -> None:
    queue = [ask("a", 1), ask("c", 2), ask("b", 2), ask("d", 1)]

    def by_priority(policy: Any, waiting: list[Any], *_: Any) -> None:
        waiting.sort(key=lambda req: -req.priority)

    queue_hooks.order_queue(by_priority, policy_of(has_priorities=True), queue)
    assert names(queue) == ["b", "c", "a", "d"]


def test_fallback_is_arrival(residency: Residency) -> None:
    assert STATE.queue is not None
    queue = [ask(lora_id) for lora_id in ("c", "a", "d")]
    STATE.queue.is_fallback = True
    queue_hooks.order_queue(lambda *_: None, policy_of(), queue)
    assert names(queue) == ["c", "a", "d"]


def make_scheduler(queue: list[Any], kind: Any = CacheAgnosticPolicy.FCFS) -> Any:
    return SimpleNamespace(waiting_queue=queue, policy=policy_of(kind), chunked_req=None)


def test_a_pass_sees_the_window_and_loses_nobody(residency: Residency) -> None:
    scheduler = make_scheduler([ask("c") for _ in range(500)], CacheAwarePolicy.LPM)
    seen: list[int] = []

    def original(scheduler: Any) -> tuple[Any, Any]:
        stock_called: list[None] = []
        queue_hooks.order_queue(lambda *_: stock_called.append(None), scheduler.policy, scheduler.waiting_queue)
        assert not stock_called, "SGLang matches no prefixes in a long queue, nor do we"
        seen.append(len(scheduler.waiting_queue))
        scheduler.waiting_queue = scheduler.waiting_queue[3:]  # admitted
        retracted = ask("a")
        scheduler.waiting_queue.append(retracted)
        return None, None

    for _ in range(5):
        scheduler_hooks._walk_queue(original, STATE.queue, scheduler)
    assert seen == [WINDOW] * 5 and len(scheduler.waiting_queue) == 500 - 5 * 3 + 5
    assert len({req.rid for req in scheduler.waiting_queue}) == len(scheduler.waiting_queue)
    assert not scheduler_hooks.may_split(policy_of(has_priorities=True), scheduler.waiting_queue)
    assert not scheduler_hooks.may_split(policy_of(CacheAgnosticPolicy.LOF), scheduler.waiting_queue)


def test_an_order_is_kept_until_something_changes(residency: Residency, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = STATE.queue
    assert queue is not None
    asked: list[int] = []
    arrange = queue.order.arrange
    monkeypatch.setattr(queue.order, "arrange", lambda *args: asked.append(len(args[0])) or arrange(*args))
    scheduler = make_scheduler([ask(name) for name in "cacbdb"])

    def original(scheduler: Any) -> tuple[Any, Any]:
        queue_hooks.order_queue(lambda *_: None, scheduler.policy, scheduler.waiting_queue)
        return None, None

    def one_pass() -> tuple[int, list[str]]:
        before = len(asked)
        scheduler_hooks._walk_queue(original, queue, scheduler)
        return len(asked) - before, names(scheduler.waiting_queue)

    assert one_pass() == (1, ["a", "b", "b", "c", "c", "d"])
    assert one_pass() == (0, ["a", "b", "b", "c", "c", "d"])
    residency.resident, residency.version = frozenset("abd"), 1
    assert one_pass() == (1, ["a", "b", "d", "b", "c", "c"])
    residency.resident, residency.version = frozenset("abc"), 3
    assert one_pass() == (1, ["c", "a", "c", "b", "b", "d"])
    scheduler.waiting_queue.append(ask("c"))
    assert one_pass() == (1, ["c", "a", "c", "b", "b", "c", "d"])
    scheduler.waiting_queue.pop(0)
    assert one_pass()[0] == 1
    queue.now = 5.0  # theta
    assert one_pass() == (1, ["a", "c", "b", "d", "b", "c"])


def test_a_full_batch_costs_nothing_and_aborted_requests_lose_their_holds(residency: Residency) -> None:
    scheduler = make_scheduler([ask("c") for _ in range(500)])
    full = SimpleNamespace(batch_is_full=True, is_empty=lambda: False, reqs=[])
    untouched = scheduler.waiting_queue

    def one_pass() -> None:
        scheduler_hooks.run_pass(lambda scheduler, running_batch: (None, running_batch), scheduler, running_batch=full)

    for _ in range(3):
        one_pass()
    assert scheduler.waiting_queue is untouched and residency.passes == []
    aborted = scheduler.waiting_queue.pop(3)
    one_pass()
    assert len(residency.passes) == 1 and aborted.rid not in residency.passes[0]
    full.batch_is_full = False
    one_pass()
    assert len(residency.passes) == 2, "there was room, and nobody was looked at"

    def looks_all_the_same(scheduler: Any, running_batch: Any) -> tuple[Any, Any]:
        queue_hooks.order_queue(lambda *_: None, scheduler.policy, scheduler.waiting_queue)
        return None, running_batch

    full.batch_is_full = True
    scheduler.waiting_queue.append(ask("a"))
    scheduler_hooks.run_pass(looks_all_the_same, scheduler, running_batch=full)
    assert names(scheduler.waiting_queue)[0] == "a"
    assert STATE.queue is not None
    window = STATE.queue.split(scheduler.waiting_queue)
    assert [req.rid for req in window] == sorted((req.rid for req in window), key=lambda rid: int(rid[1:])), "sorted anew"


def drain(waiting: list[Any], running: list[Any], max_loras: int = 2) -> dict[str, str]:
    """Which adapter drains for which, through SGLang's drainer with our hooks."""
    drainer = LoRADrainer(max_loras, max_wait_time_secs=1.0)
    drainer._update_adapter_stats(waiting, running)
    queue_hooks.share_waiting_times(None, drainer, waiting, running)
    queue_hooks.choose_draining(drainer._update_draining_loras, drainer, running)
    return {name: stats.is_draining_for for name, stats in drainer.adapter_to_stats.items() if stats.is_draining_for}


def test_the_drainer_goes_by_the_shared_clock_and_breaks_ties_by_name(residency: Residency) -> None:
    assert STATE.queue is not None
    waiting = [ask("d", now=0.0), ask("c", now=0.0), ask("e", now=4.5)]
    running = [ask("b", now=1.0), ask("a", now=1.0)]
    STATE.queue.now = 5.0
    expected = {"a": "c", "b": "d"}
    assert drain(waiting, running) == drain(waiting[::-1], running[::-1]) == expected, "whatever the order of sets"
    STATE.queue.now = 0.5
    assert drain(waiting[:2], running) == {}, "nobody has waited for a second of the shared clock"


def test_the_drainer_counts_members_of_mixes(residency: Residency) -> None:
    assert STATE.queue is not None
    waiting, running = [ask("d")], [ask("ab")]
    STATE.queue.now = 5.0
    assert drain(waiting, running) == {"ab": "d"}, "one mix of two fills a batch of two adapters"
