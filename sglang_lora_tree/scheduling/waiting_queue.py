"""The waiting queue as this package sees it: numbered requests, a shared clock, a window to look at, and an order.

In: requests as they come, the time that the entry rank has sent to all ranks, and what a plan names. Out: the part of the
queue that a pass looks at, in order. A pass costs what the window costs, however long the queue is.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeVar

from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling.admission import AdmissionControl, LatestFirst
from sglang_lora_tree.scheduling.fairness import FairOrder
from sglang_lora_tree.scheduling.orders import QueueOrder, Situation, Waiting, make_order

WINDOW = 64
"""Requests of a long queue that one pass looks at; of 128 tokens each, they fill a prefill chunk of 8,192."""


@dataclass(slots=True)
class Ticket:
    """What a request carries through the queue."""

    waiting: Waiting
    in_window: bool = False
    charged: int = 0
    """Output tokens that fairness has counted."""


class Ticketed(Protocol):
    """A request."""

    lora_tree_ticket: Ticket


Request = TypeVar("Request", bound=Ticketed)


arrival_of: Callable[[Ticketed], int] = attrgetter("lora_tree_ticket.waiting.arrival")
"""A request's number."""


class WaitingQueue:
    """Numbers, clock, window and order of one scheduler process.

    The list of requests itself stays SGLang's. While the window is in use it is: requests in the window, then the rest by
    arrival.

    Args:
        order: of the requests in the window.
    """

    def __init__(self, order: QueueOrder) -> None:
        self.now = 0.0
        """Seconds of the entry rank's clock, as of its last message to all ranks."""
        self.candidates_found = 0
        """Requests that a pass looked at because a plan named them."""
        self.is_fallback = False
        """No plan rules: requests go as they came."""
        self.order = order
        self.fair: FairOrder | None = None
        self.control: AdmissionControl | None = None
        self._next_arrival = 0
        self._last_queued = -1
        self._is_sorted = True
        self._wanted: deque[int] = deque()

    def take_ticket(self, members: Iterable[str], length: int = 0) -> Ticket:
        """Number a request that has just come; every rank sees requests in one order."""
        ticket = Ticket(Waiting(self._next_arrival, self.now, tuple(dict.fromkeys(members)), length))
        self._next_arrival += 1
        return ticket

    def note_queued(self, request: Ticketed) -> None:
        """A request was put at the end of the queue, perhaps again (retracted, preempted)."""
        arrival = arrival_of(request)
        self._is_sorted = self._is_sorted and arrival > self._last_queued
        self._last_queued = max(arrival, self._last_queued)
        request.lora_tree_ticket.in_window = False
        if self.control is not None:
            self.control.note_arrived(self.now)

    def want(self, arrivals: Iterable[int]) -> None:
        """A plan names requests, by number, that the window should hold, the best first."""
        self._wanted = deque(arrivals)

    # ---- One pass ----

    def split(self, queue: list[Request]) -> tuple[list[Request], list[Request]]:
        """The window and the rest of a queue; both keep their requests until :meth:`join`."""
        if not self._is_sorted:
            queue = sorted(queue, key=arrival_of)
            for request in queue:
                request.lora_tree_ticket.in_window = False
            self._is_sorted = True
        size = 0
        while size < len(queue) and queue[size].lora_tree_ticket.in_window:
            size += 1
        window, rest = queue[:size], queue[size:]
        self._refill(window, rest)
        window.sort(key=arrival_of)
        return window, rest

    def _refill(self, window: list[Request], rest: list[Request]) -> None:
        """By turns what the plan wants and the oldest, so that neither keeps the other out."""
        oldest = 0
        for turn in range(WINDOW - len(window)):
            place = self._find_wanted(rest, oldest) if turn % 2 else None
            if place is None:
                if oldest == len(rest):
                    break
                request, oldest = rest[oldest], oldest + 1
            else:
                request = rest.pop(place)
                self.candidates_found += 1
            request.lora_tree_ticket.in_window = True
            window.append(request)
        del rest[:oldest]

    def _find_wanted(self, rest: list[Request], start: int) -> int | None:
        while self._wanted:
            arrival = self._wanted.popleft()
            place = bisect.bisect_left(rest, arrival, lo=start, key=arrival_of)
            if place < len(rest) and arrival_of(rest[place]) == arrival:
                return place
        return None

    def join(self, window: list[Request], rest: list[Request]) -> list[Request]:
        """The queue again, after a pass that may have taken requests from the window and put others at its end."""
        joined = [request for request in window if request.lora_tree_ticket.in_window]
        if len(joined) == len(window):
            return joined + rest
        return joined + rest + [request for request in window if not request.lora_tree_ticket.in_window]

    def note_unsplit(self) -> None:
        """A pass has looked at the whole queue and left it in the pass's order."""
        self._is_sorted = False

    def arrange(self, requests: Sequence[Request], situation: Situation) -> list[Request]:
        """Requests in the order's order; ties stay as they are given."""
        if self.is_fallback:
            return list(requests)
        waiting = [request.lora_tree_ticket.waiting for request in requests]
        return [requests[position] for position in self.order.arrange(waiting, situation)]


def make_queue(settings: Settings) -> WaitingQueue:
    """The queue as the settings want it."""
    queue = WaitingQueue(make_order(settings))
    queue.fair = queue.order if isinstance(queue.order, FairOrder) else None
    if settings.ttft_slo_seconds is not None:
        queue.control = AdmissionControl(settings.ttft_slo_seconds)
        queue.order = LatestFirst(queue.order, queue.control)
    return queue
