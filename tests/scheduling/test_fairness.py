"""Virtual token counters: equal service while two adapters have work, nothing saved up over pauses, the order among equals."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling.fairness import OUTPUT_PRICE, FairOrder
from sglang_lora_tree.scheduling.lag import Lag
from sglang_lora_tree.scheduling.orders import Fcfs, Situation, Waiting, make_order

SEEN = Situation(0.0, frozenset(), frozenset())


def queue(names: str, length: int = 10, first: int = 0) -> list[Waiting]:
    return [Waiting(first + number, 0.0, (name,), length) for number, name in enumerate(names)]


def test_a_flood_waits_for_the_others() -> None:
    order = FairOrder(Fcfs())
    assert order.arrange(queue("aaaaab"), SEEN) == [0, 5, 1, 2, 3, 4]
    order.charge(("a",), 100)
    assert order.arrange(queue("aaaaabbb"), SEEN)[:3] == [5, 6, 7]


def test_service_is_equal_while_both_wait() -> None:
    """Adapter a sends ten times as much as b, in requests twice as long: tokens served stay within one request's."""
    draw, order = random.Random(0), FairOrder(Fcfs())
    waiting = [Waiting(number, 0.0, ("a",), 20) for number in range(1000)]
    waiting += [Waiting(1000 + number, 0.0, ("b",), 10) for number in range(400)]
    served = {"a": 0.0, "b": 0.0}
    for _ in range(400):
        chosen = waiting.pop(order.arrange(waiting, SEEN)[0])
        output = draw.randint(1, 5)
        order.charge(chosen.members, chosen.length, output)
        served[chosen.members[0]] += chosen.length + OUTPUT_PRICE * output
        assert abs(served["a"] - served["b"]) <= 2 * (20 + OUTPUT_PRICE * 5)
    assert any(request.members == ("b",) for request in waiting), "both had work all the time"


def test_a_pause_is_not_saved_up() -> None:
    order = FairOrder(Fcfs())
    order.arrange(queue("ab"), SEEN)
    order.arrange(queue("a"), SEEN)  # b has nothing more
    for _ in range(100):
        order.charge(("a",), 10)
        order.arrange(queue("aa"), SEEN)
    arranged = order.arrange(queue("aaaabbbb"), SEEN)
    assert arranged == [0, 4, 1, 5, 2, 6, 3, 7], "by turns, not all of b first"


def test_equal_counters_go_by_the_order() -> None:
    order = FairOrder(Lag())
    there = Situation(0.0, frozenset("b"), frozenset())
    assert order.arrange(queue("ab"), there) == [1, 0]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=20), st.sampled_from(["lag", "fcfs", "clusters"]))
def test_everybody_is_kept(requests: list[tuple[str, int]], name: str) -> None:
    order = make_order(Settings(queue_order=name, fairness=True))
    waiting = [Waiting(number, 0.0, (adapter,), length) for number, (adapter, length) in enumerate(requests)]
    assert sorted(order.arrange(waiting, SEEN)) == list(range(len(waiting)))
