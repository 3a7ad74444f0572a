"""The window over a long queue: everybody gets in, the oldest and what the plan wants by turns, and nobody is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling.orders import Fcfs, Situation, Waiting, make_order
from sglang_lora_tree.scheduling.waiting_queue import SMALL_WINDOW, WINDOW, Ticket, WaitingQueue, arrival_of


@dataclass(eq=False)
class Request:
    lora_tree_ticket: Ticket


def make_queue(count: int) -> tuple[WaitingQueue, list[Request]]:
    queue = WaitingQueue(Fcfs())
    requests = [Request(queue.take_ticket(())) for _ in range(count)]
    for request in requests:
        queue.note_queued(request)
    return queue, requests


def numbers(requests: list[Request]) -> list[int]:
    return [arrival_of(request) for request in requests]


def test_the_oldest_come_first() -> None:
    queue, requests = make_queue(1000)
    window = queue.split(requests)
    assert numbers(window) == list(range(WINDOW)) and numbers(requests) == list(range(WINDOW, 1000))
    assert numbers(queue.join(window, requests)) == list(range(1000))


def test_half_of_the_free_places_are_the_plans() -> None:
    queue, requests = make_queue(1000)
    queue.want([900, 5000, 700, 800, 3])
    rest = requests
    window = queue.split(rest)
    assert {900, 700, 800} < set(numbers(window)) and len(window) == WINDOW
    assert numbers(rest) == sorted(numbers(rest))
    # They stay until they are admitted, and the window fills up again with the oldest.
    left = [request for request in window if arrival_of(request) >= 10]
    window = queue.split(queue.join(left, rest))
    assert {900, 700, 800} < set(numbers(window)) and len(window) == WINDOW


def test_a_retracted_request_finds_its_place_again() -> None:
    queue, requests = make_queue(500)
    window = queue.split(requests)
    first, second = window.pop(0), window.pop(0)
    queue.join(window, requests)
    for request in (second, first):
        queue.note_queued(request)
        requests.append(request)
    late = Request(queue.take_ticket(()))
    queue.note_queued(late)
    requests.append(late)
    window = sorted(queue.split(requests), key=arrival_of)
    assert numbers(window) == list(range(WINDOW))
    assert numbers(queue.join(window, requests)) == list(range(501))


def test_one_that_was_retracted_and_aborted_is_not_missed() -> None:
    queue, requests = make_queue(500)
    window = queue.split(requests)
    first = window.pop(0)
    queue.join(window, requests)
    queue.note_queued(first)  # and SGLang takes it from the queue again
    assert numbers(queue.split(requests)) == list(range(1, WINDOW + 1))


def test_the_window_follows_the_room() -> None:
    queue, requests = make_queue(500)
    queue.want([300, 400])
    window = queue.arrange(queue.split(requests), Situation(0.0, frozenset(), frozenset()), 1)
    requests = queue.join(sorted(window, key=arrival_of), requests)
    queue.note_pass(saw_all=False, found_no_room=True)
    window = queue.split(requests)
    assert numbers(window) == list(range(SMALL_WINDOW))
    assert numbers(requests) == list(range(SMALL_WINDOW, 500)), "what was too much is where it belongs"
    queue.join(window, requests)
    for size in (2 * SMALL_WINDOW, 4 * SMALL_WINDOW):
        queue.note_pass(saw_all=True, found_no_room=False)
        window = queue.split(requests)
        assert len(window) == size
        queue.join(window, requests)
    for _ in range(9):
        queue.note_pass(saw_all=True, found_no_room=False)
    assert queue.window_size == WINDOW
    queue.order = Counting()
    queue.arrange(requests[:WINDOW], Situation(0.0, frozenset(), frozenset()), 1)
    queue.note_pass(saw_all=False, found_no_room=True)
    assert queue.window_size == WINDOW, "not only age decides"


class Counting(Fcfs):
    """Counts how often it is asked; right for a second."""

    asked = 0

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        self.asked += 1
        return super().arrange(waiting, situation)

    def right_until(self, waiting: Sequence[Waiting], situation: Situation) -> float:
        return situation.now + 1.0

    def oldest_first_until(self, now: float) -> float:
        return -1.0


def test_an_order_is_looked_for_when_something_has_changed() -> None:
    queue, requests = make_queue(500)
    queue.order = Counting()
    situation = Situation(0.0, frozenset(), frozenset())
    window = queue.split(requests)
    assert not queue.keep_order(window, 1)
    queue.join(queue.arrange(window, situation, 1), requests)
    window = queue.split(requests)
    assert queue.keep_order(window, 1) and not queue.has_lost, "nothing has changed"
    assert not queue.keep_order(window, 2), "other adapters are on the GPU"
    queue.now = 1.0
    assert not queue.keep_order(window, 1), "somebody may be overdue"
    queue.now = 0.5
    queue.is_fallback = True
    assert not queue.keep_order(window, 1)
    queue.is_fallback = False
    queue.join(window[1:], requests)
    window = queue.split(requests)
    assert not queue.keep_order(window, 1) and not queue.has_lost, "one was admitted, another came"
    queue.join(queue.arrange(window, situation, 1), requests)
    del requests[3]
    window = queue.split(requests)
    assert queue.has_lost and not queue.keep_order(window, 1), "one was aborted"
    queue.arrange(window, situation)
    assert not queue.keep_order(window, None), "an order that depends on more is looked for every time"
    assert queue.order.asked == 3


def test_one_by_one_the_plan_and_the_oldest_take_turns() -> None:
    queue, requests = make_queue(500)
    queue.order = Counting()
    queue.join(queue.split(requests), requests)
    queue.want(range(400, 450))
    for _ in range(40):
        requests = queue.join(sorted(queue.split(requests), key=arrival_of)[1:], requests)
    assert sum(arrival_of(request) >= 400 for request in queue.split(requests)) == 20


@pytest.mark.parametrize("name", ["lag", "fcfs", "lcfs", "least_adapters", "random"])
def test_an_order_that_is_kept_is_the_one_that_would_be_found(name: str) -> None:
    """While requests come, are admitted, retracted and aborted, adapters come and go, and time passes."""
    assert sum(live_one_life(name, random.Random(seed)) for seed in range(60)) > 100, "it is hardly ever kept"


def live_one_life(name: str, chance: random.Random) -> int:
    """How many passes have kept the order of the pass before."""
    queue = WaitingQueue(make_order(Settings(queue_order=name, theta_seconds=5.0)))
    requests: list[Request] = []
    running: list[Request] = []
    resident, version, kept = {"a", "b"}, 0, 0

    def join_queue(request: Request) -> None:
        queue.note_queued(request)
        requests.append(request)

    for _ in range(30):
        queue.now += chance.choice([0.0, 0.5, 4.0])
        for _ in range(chance.choice([0, 0, 1, 3, 40])):
            join_queue(Request(queue.take_ticket(chance.sample("abcde", chance.randint(0, 2)))))
        if running and chance.random() < 0.2:
            join_queue(running.pop())
        if requests and chance.random() < 0.2:
            requests.pop(chance.randrange(len(requests)))
        if chance.random() < 0.2:
            resident ^= {chance.choice("cde")}
            version += 1
        queue.want(chance.choices(range(200), k=3))
        window = queue.split(requests)
        situation = Situation(queue.now, frozenset(), resident)
        by_arrival = sorted(window, key=arrival_of)
        rows = [request.lora_tree_ticket.waiting for request in by_arrival]
        expected = [by_arrival[position] for position in queue.order.arrange(rows, situation)]
        if chance.random() < 0.8:  # else the pass ends before it comes to the order
            if queue.keep_order(window, version):
                kept += 1
            else:
                window = queue.arrange(by_arrival, situation, version)
            assert numbers(window) == numbers(expected)
            able = [request for request in window if resident.issuperset(request.lora_tree_ticket.waiting.members)]
            admitted = able[: chance.randint(0, 2)]
            running += admitted
            window = [request for request in window if request not in admitted]
            queue.note_pass(chance.random() < 0.5, chance.random() < 0.5)
        requests = queue.join(window, requests)
    return kept


def test_members_count_once() -> None:
    queue, _ = make_queue(0)
    assert queue.take_ticket(["a", "b", "a"]).waiting.members == ("a", "b")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_nobody_is_lost_and_everybody_is_served(data: st.DataObject) -> None:
    queue, requests = make_queue(300)
    served: list[int] = []
    for _ in range(60):
        queue.want(data.draw(st.lists(st.integers(0, 400), max_size=8)))
        for _ in range(data.draw(st.integers(0, 3))):
            request = Request(queue.take_ticket(()))
            queue.note_queued(request)
            requests.append(request)
        before = sorted(numbers(requests))
        if data.draw(st.booleans()):
            requests = queue.arrange(requests, Situation(0.0, frozenset(), frozenset()))
            requests.reverse()
            queue.note_unsplit()
        window = queue.split(requests)
        assert numbers(requests) == sorted(numbers(requests)), "the rest is sorted by arrival"
        window = queue.arrange(window, Situation(0.0, frozenset(), frozenset()))
        requests = queue.join(window, requests)
        queue.note_pass(data.draw(st.booleans()), data.draw(st.booleans()))
        assert sorted(numbers(requests)) == before
        for _ in range(min(8, len(requests))):
            admitted = requests.pop(0)
            served.append(arrival_of(admitted))
            if data.draw(st.integers(0, 9)) == 0:
                queue.note_queued(admitted)
                served.remove(arrival_of(admitted))
                requests.append(admitted)
    assert len(served) == len(set(served))
