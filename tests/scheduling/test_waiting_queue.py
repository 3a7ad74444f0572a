"""The window over a long queue: everybody gets in, the oldest and what the plan wants by turns, and nobody is lost."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lora_tree.scheduling.orders import Fcfs, Situation
from sglang_lora_tree.scheduling.waiting_queue import WINDOW, Ticket, WaitingQueue, arrival_of


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
    window, rest = queue.split(requests)
    assert numbers(window) == list(range(WINDOW))
    assert numbers(queue.join(window, rest)) == list(range(1000))


def test_half_of_the_free_places_are_the_plans() -> None:
    queue, requests = make_queue(1000)
    queue.want([900, 5000, 700, 800, 3])
    window, rest = queue.split(requests)
    assert {900, 700, 800} < set(numbers(window)) and len(window) == WINDOW
    assert numbers(window) == sorted(numbers(window))
    assert numbers(rest) == sorted(numbers(rest))
    # They stay until they are admitted, and the window fills up again with the oldest.
    left = [request for request in window if arrival_of(request) >= 10]
    window, _ = queue.split(queue.join(left, rest))
    assert {900, 700, 800} < set(numbers(window)) and len(window) == WINDOW


def test_a_retracted_request_finds_its_place_again() -> None:
    queue, requests = make_queue(500)
    window, rest = queue.split(requests)
    first = window.pop(0)
    requests = queue.join(window, rest)
    queue.note_queued(first)
    requests.append(first)
    window, _ = queue.split(requests)
    assert numbers(window) == list(range(WINDOW))


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
        window, rest = queue.split(requests)
        assert numbers(rest) == sorted(numbers(rest)), "the rest is sorted by arrival"
        requests = queue.join(window, rest)
        assert sorted(numbers(requests)) == before
        for _ in range(min(8, len(requests))):
            admitted = requests.pop(0)
            served.append(arrival_of(admitted))
            if data.draw(st.integers(0, 9)) == 0:
                queue.note_queued(admitted)
                served.remove(arrival_of(admitted))
                requests.append(admitted)
    assert len(served) == len(set(served))
