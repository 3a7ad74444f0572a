"""Orders of the waiting queue: each against the plain sentence that says what it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lora_tree.config import QUEUE_ORDERS, Settings
from sglang_lora_tree.scheduling.lag import Lag
from sglang_lora_tree.scheduling.orders import Clusters, OverdueFirst, Situation, Waiting, make_order

ADAPTERS = "abcdef"


def queue(*members: str, came: Iterable[float] = ()) -> list[Waiting]:
    """Requests in order of arrival; "ab" needs the adapters a and b."""
    times = list(came) or [0.0] * len(members)
    return [Waiting(number, times[number], tuple(names)) for number, names in enumerate(members)]


def situation(running: str = "", resident: str = "", now: float = 0.0) -> Situation:
    return Situation(now, frozenset(running), frozenset(resident))


def arrange_by_definition(waiting: Sequence[Waiting], seen: Situation) -> list[int]:
    """Algorithm 1, word for word: again and again the request that adds the fewest adapters, the first of equals."""
    chosen = {name for name in ADAPTERS if name in seen.running or name in seen.resident}
    left, arranged = list(range(len(waiting))), []
    while left:
        best = min(left, key=lambda position: (len(set(waiting[position].members) - chosen), position))
        chosen |= set(waiting[best].members)
        left.remove(best)
        arranged.append(best)
    return arranged


needs = st.lists(st.sets(st.sampled_from(ADAPTERS), max_size=4).map(lambda names: "".join(sorted(names))), max_size=12)
subsets = st.sets(st.sampled_from(ADAPTERS)).map("".join)


@given(needs, subsets, subsets)
def test_lag_is_the_greedy_order(members: list[str], running: str, resident: str) -> None:
    waiting, seen = queue(*members), situation(running, resident)
    assert Lag().arrange(waiting, seen) == arrange_by_definition(waiting, seen)


def test_lag_by_hand() -> None:
    waiting = queue("ab", "c", "a", "abd", "b", "")
    # the base model needs nothing; c adds one, and so does a; then a, b is only one short
    assert Lag().arrange(waiting, situation()) == [5, 1, 2, 0, 4, 3]
    assert Lag().arrange(waiting, situation(resident="ab")) == [0, 2, 4, 5, 1, 3]
    assert Lag().arrange(waiting, situation(running="c", resident="ad")) == [1, 2, 5, 0, 3, 4]


@given(needs, subsets, subsets, st.lists(st.floats(0, 10), min_size=12, max_size=12), st.sampled_from(QUEUE_ORDERS))
def test_every_order_keeps_everybody(members: list[str], running: str, resident: str, came: list[float], name: str) -> None:
    waiting = queue(*members, came=sorted(came))
    order = make_order(Settings(queue_order=name, theta_seconds=3, cluster_adapters=2))
    arranged = order.arrange(waiting, situation(running, resident, now=10))
    assert sorted(arranged) == list(range(len(waiting)))
    assert arranged == order.arrange(waiting, situation(running, resident, now=10)), "the same on every rank"
    if name not in ("fcfs", "lcfs"):
        overdue = [position for position, request in enumerate(waiting) if request.arrived_at <= 7]
        assert arranged[: len(overdue)] == overdue, "older than theta: first, as they came"


def test_adapters_of_overdue_requests_count_as_chosen() -> None:
    waiting = queue("a", "b", "ca", came=[0.0, 9.0, 9.0])
    assert OverdueFirst(Lag(), theta=5).arrange(waiting, situation(now=10, resident="c")) == [0, 2, 1]


def test_simple_orders_by_hand() -> None:
    waiting = queue("abc", "a", "bc", "d")
    orders = {"fcfs": [0, 1, 2, 3], "lcfs": [3, 2, 1, 0], "least_adapters": [1, 3, 2, 0]}
    for name, expected in orders.items():
        order = make_order(Settings(queue_order=name, theta_seconds=5))
        assert order.arrange(waiting, situation()) == expected, name


def test_random_differs_by_seed_and_not_by_pass() -> None:
    waiting = queue(*"abcdefabcdef")
    orders = [make_order(Settings(queue_order="random", order_seed=seed)) for seed in range(5)]
    assert len({tuple(order.arrange(waiting, situation())) for order in orders}) == 5
    order = make_order(Settings(queue_order="random"))
    first = order.arrange(waiting, situation())
    left = order.arrange(waiting[1:], situation())
    assert [position + 1 for position in left] == [position for position in first if position], "one draw per request"


@pytest.mark.parametrize(("limit", "expected"), [(1, [0, 2, 5, 1, 3, 4]), (2, [0, 1, 2, 5, 3, 4]), (3, [0, 1, 2, 3, 4, 5])])
def test_clusters_hold_few_adapters(limit: int, expected: list[int]) -> None:
    assert Clusters(limit).arrange(queue("a", "b", "a", "bc", "c", "a"), situation(running="a")) == expected


# ---- Nobody starves ----


@pytest.mark.parametrize("theta", [0.0, 2.0, 7.0])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["lag", "least_adapters", "random", "clusters"])
def test_wait_is_bounded_by_theta_and_the_overdue_before(theta: float, batch: int, name: str) -> None:
    """A stream that every order prefers (adapter a is on the GPU) against one request for b. One batch per second takes
    ``batch`` requests of ``batch`` that come: without theta, b would wait for ever."""
    order = make_order(Settings(queue_order=name, theta_seconds=theta, cluster_adapters=1))
    waiting = [Waiting(0, 0.0, ("b", "c"))]
    number, admitted_at = 1, None
    for second in range(30):
        waiting += [Waiting(number + index, float(second), ("a",)) for index in range(batch)]
        number += batch
        seen = situation(running="a", resident="a", now=float(second))
        taken = order.arrange(waiting, seen)[:batch]
        if any(waiting[position].arrival == 0 for position in taken):
            admitted_at = second
            break
        waiting = [request for position, request in enumerate(waiting) if position not in taken]
    assert admitted_at is not None and admitted_at <= theta + 1, "theta and one batch"
