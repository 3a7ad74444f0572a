"""Orders of the waiting queue: who is looked at first when a batch is formed.

In: waiting requests in SGLang's own order (``--schedule-policy``, priorities), and what is on the GPU. Out: the same
requests in another order. An order depends on nothing but its input, so every rank finds the same one. SGLang then walks
down the queue and admits what fits.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from sglang_lora_tree.config import QUEUE_ORDERS, Settings

MAX_WAITS = 8
"""After so many requests that wait for adapters, a pass looks only at those whose adapters are there: what the others need
cannot come sooner, and prefetch fetches it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting request, as far as an order looks at it."""

    arrival: int
    """Number of the request since start: a smaller one came earlier."""
    arrived_at: float
    """When it came, in seconds of the clock that the ranks share."""
    members: tuple[str, ...]
    """Identities of the adapters it needs, each once; empty for the base model."""
    length: int = 0
    """Tokens of its prompt."""


@dataclass(frozen=True)
class Situation:
    """What an order may know besides the requests."""

    now: float
    """Of the clock that the ranks share, in seconds."""
    running: frozenset[str]
    """Adapters of the running batch (for orders that need them), and of requests that have been chosen already."""
    resident: Container[str]
    """Adapters on the GPU, or on their way there."""


class QueueOrder(ABC):
    """An order of the waiting queue, to start from."""

    needs_running = False
    """Whether it looks at ``Situation.running``, which takes time to put together. What runs is resident in any case."""

    @abstractmethod
    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        """Positions in ``waiting``, each once, the first to be looked at first."""

    def right_until(self, waiting: Sequence[Waiting], situation: Situation) -> float:
        """When the answer for the same requests and the same situation may be another only because time has passed.

        -inf: it depends on more than these.
        """
        return math.inf

    def oldest_first_until(self, now: float) -> float:
        """Requests that came no later than this go before all others, the oldest first, and nothing else counts among them.

        -inf: there are none such.
        """
        return -math.inf


class Fcfs(QueueOrder):
    """As they came; with ``--schedule-policy lpm``, as SGLang orders them."""

    def oldest_first_until(self, now: float) -> float:
        return math.inf

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        return list(range(len(waiting)))


class Lcfs(QueueOrder):
    """The latest first (S-LoRA, App. B: right when most of the queue is too late already)."""

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        return sorted(range(len(waiting)), key=lambda position: -waiting[position].arrival)


class LeastAdaptersFirst(QueueOrder):
    """Requests that need the fewest adapters first, wherever these are (DyMerge-LoRA, Fig. 15: Least First)."""

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        return sorted(range(len(waiting)), key=lambda position: len(waiting[position].members))


class Random(QueueOrder):
    """At random, but the same on every rank and in every pass.

    Args:
        seed: of the draw that each request gets by its number.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        draws = [random.Random(self._seed * 1_000_003 + request.arrival).random() for request in waiting]
        return sorted(range(len(waiting)), key=draws.__getitem__)


class Clusters(QueueOrder):
    """Requests of the running adapters first, joined by the next ones in the queue up to a number of adapters.

    S-LoRA, section 4.2 (adapter clustering). The rest of the queue comes after them; admission, too, counts to the limit.

    Args:
        limit: adapters in one batch.
    """

    needs_running = True

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        cluster = set(situation.running)
        inside, outside = [], []
        for position, request in enumerate(waiting):
            joined = cluster.union(request.members)
            if len(joined) == len(cluster) or len(joined) <= self._limit:
                cluster = joined
                inside.append(position)
            else:
                outside.append(position)
        # A request that was outside when its turn came may be inside now.
        late = [position for position in outside if cluster.issuperset(waiting[position].members)]
        joined_late = set(late)
        return sorted(inside + late) + [position for position in outside if position not in joined_late]


class OverdueFirst(QueueOrder):
    """Requests older than theta before all others, as they came (DyMerge-LoRA, section 4.2): nobody starves.

    Args:
        order: of the others; it finds the adapters of the overdue ones in the batch already.
        theta: seconds.
    """

    def __init__(self, order: QueueOrder, theta: float) -> None:
        self._order = order
        self._theta = theta
        self.needs_running = order.needs_running

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        latest = self.oldest_first_until(situation.now)
        arrivals = [(request.arrival, position) for position, request in enumerate(waiting) if request.arrived_at <= latest]
        if not arrivals:
            return self._order.arrange(waiting, situation)
        overdue = [position for _, position in sorted(arrivals)]
        if len(overdue) == len(waiting):
            return overdue  # the rule where queues are long
        chosen = situation.running.union(*(waiting[position].members for position in overdue))
        positions = [position for position, request in enumerate(waiting) if request.arrived_at > latest]
        others = Situation(situation.now, chosen, situation.resident)
        arranged = self._order.arrange([waiting[position] for position in positions], others)
        return overdue + [positions[position] for position in arranged]

    def right_until(self, waiting: Sequence[Waiting], situation: Situation) -> float:
        latest = self.oldest_first_until(situation.now)
        overdue_at = [request.arrived_at + self._theta for request in waiting if request.arrived_at > latest]
        return min(overdue_at, default=math.inf)

    def oldest_first_until(self, now: float) -> float:
        return now - self._theta


def make_order(settings: Settings) -> QueueOrder:
    """The order that ``queue_order`` names."""
    from sglang_lora_tree.scheduling.fairness import FairOrder
    from sglang_lora_tree.scheduling.lag import Lag

    orders: dict[str, Callable[[], QueueOrder]] = {
        "lag": lambda: OverdueFirst(Lag(MAX_WAITS), settings.theta_seconds),
        "fcfs": Fcfs,
        "lcfs": Lcfs,
        "least_adapters": lambda: OverdueFirst(LeastAdaptersFirst(), settings.theta_seconds),
        "random": lambda: OverdueFirst(Random(settings.order_seed), settings.theta_seconds),
        "clusters": lambda: OverdueFirst(Clusters(settings.cluster_adapters), settings.theta_seconds),
    }
    assert orders.keys() == set(QUEUE_ORDERS), "config.py names the same orders"
    order = orders[settings.queue_order]()
    if settings.fairness:
        # Under a flood everything is overdue; the counters see to it that nobody starves.
        return FairOrder(order._order if isinstance(order, OverdueFirst) else order)
    return order
