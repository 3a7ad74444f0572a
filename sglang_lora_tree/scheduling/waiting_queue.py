"""The waiting queue as this package sees it: numbered requests, a shared clock, a window to look at, and an order.

In: requests as they come, the time that the entry rank has sent to all ranks, and what a plan names. Out: the part of the
queue that a pass looks at, in order. A pass costs what has changed since the one before: the order that it left is the order,
but for requests that are new in the window, and where only age decides those just find their places.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling.admission import AdmissionControl, LatestFirst
from sglang_lora_tree.scheduling.fairness import FairOrder
from sglang_lora_tree.scheduling.orders import QueueOrder, Situation, Waiting, make_order

if TYPE_CHECKING:
    from sglang_lora_tree.radix.tiers import Demand

WINDOW = 64
"""Requests of a long queue that one pass looks at, at most; of 128 tokens each, they fill a prefill chunk of 8,192."""
SMALL_WINDOW = 16
"""While there is no room for more and age decides, which is when queues are long: looking at more would change nothing."""


@dataclass(slots=True)
class Ticket:
    """What a request carries through the queue."""

    waiting: Waiting
    demand: Demand | None = None
    """What it needs; None for the base model."""
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
    arrival, then those that came back out of turn (retracted, preempted) since the last pass.

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
        self.window_size = WINDOW
        self.has_lost = False
        """Requests have left the window since the last pass, and not because that pass has admitted them."""
        self._next_arrival = 0
        self._last_queued = -1
        self._is_sorted = True
        self._out_of_turn: list[Ticketed] = []
        self._wanted: Iterator[int] = iter(())
        self._is_plans_turn = False
        """The next free place of the window is the plan's."""
        self._window: list[Any] = []
        """As the last pass left it."""
        self._has_joined = False
        """Requests have joined the queue since the window was taken off it."""
        self._num_arranged = 0
        """How many requests, from the window's first on, are in the order that was found last..."""
        self._arranged_for: Any = None
        """... what it was found for, besides requests and time..."""
        self._arranged_until = -math.inf
        """... and until when it is right. Of those who are in it, anyone may be admitted, which changes nothing for the others:
        what he needs is on the GPU."""
        self.goes_by_age = False
        """In that order only age counts, whatever is on the GPU."""

    def take_ticket(self, members: Iterable[str], length: int = 0, demand: Demand | None = None) -> Ticket:
        """Number a request that has just come; every rank sees requests in one order."""
        ticket = Ticket(Waiting(self._next_arrival, self.now, tuple(dict.fromkeys(members)), length), demand)
        self._next_arrival += 1
        return ticket

    def note_queued(self, request: Ticketed) -> None:
        """A request was put at the end of the queue, perhaps again (retracted, preempted)."""
        ticket = request.lora_tree_ticket
        arrival = ticket.waiting.arrival
        if arrival > self._last_queued:
            self._last_queued = arrival
        elif self._is_sorted:
            self._out_of_turn.append(request)
        ticket.in_window = False
        self._has_joined = True
        if self.control is not None:
            self.control.note_arrived(self.now)

    def want(self, arrivals: Iterable[int]) -> None:
        """A plan names requests, by number, that the window should hold, the best first."""
        self._wanted = iter(arrivals)

    # ---- One pass ----

    def split(self, queue: list[Request]) -> list[Request]:
        """Take the window off the front of a queue, which keeps the rest until :meth:`join`.

        In place: a long list copied, or looked through, in every pass is what costs.
        """
        if not self._is_sorted:
            queue.sort(key=arrival_of)
            for request in queue:
                request.lora_tree_ticket.in_window = False
            self._window = []
        elif self._out_of_turn:
            self._put_in_turn(queue)
        self._out_of_turn.clear()
        size = len(self._window)
        window = queue[:size]
        self.has_lost = not self._is_sorted or window != self._window  # the same objects, so nobody is looked at
        self._is_sorted = True
        if self.has_lost:
            size, self._num_arranged = _count_in_window(queue), 0
            window = queue[:size]
        del queue[:size]
        if size > self.window_size:
            self._put_back(window, queue)
        elif size < self.window_size and queue:
            self._refill(window, queue)
        self._has_joined = False
        return window

    def _put_back(self, window: list[Any], rest: list[Any]) -> None:
        """Give what is too much for the window back to the rest."""
        back = sorted(window[self.window_size :], key=arrival_of)
        del window[self.window_size :]
        self.has_lost = True
        self._num_arranged = min(self._num_arranged, self.window_size)
        for request in back:
            request.lora_tree_ticket.in_window = False
        older = bisect.bisect_left(back, arrival_of(rest[0]), key=arrival_of) if rest else len(back)
        rest[:0] = back[:older]
        for request in back[older:]:
            bisect.insort(rest, request, lo=older, key=arrival_of)

    def _put_in_turn(self, queue: list[Any]) -> None:
        """Move requests that came back from the end of the queue to where their arrival puts them."""
        found = []
        for request in self._out_of_turn:
            place = len(queue) - 1
            while place >= 0 and queue[place] is not request:
                place -= 1
            if place >= 0:  # else it was aborted meanwhile
                found.append(queue.pop(place))
        start = _count_in_window(queue)
        for request in found:
            bisect.insort(queue, request, lo=start, key=arrival_of)

    def _refill(self, window: list[Request], rest: list[Request]) -> None:
        """By turns what the plan wants and the oldest, so that neither keeps the other out."""
        oldest = 0
        for _ in range(self.window_size - len(window)):
            # Where only age counts, whoever the plan wants would wait in the window instead of behind it.
            place = self._find_wanted(rest, oldest) if self._is_plans_turn and not self.goes_by_age else None
            self._is_plans_turn = not self._is_plans_turn
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
        for arrival in self._wanted:
            place = bisect.bisect_left(rest, arrival, lo=start, key=arrival_of)
            if place < len(rest) and arrival_of(rest[place]) == arrival:
                return place
        return None

    def join(self, window: list[Request], rest: list[Request]) -> list[Request]:
        """The queue again, after a pass that may have taken requests from the window and put others at its end."""
        if self._has_joined:
            rest += [request for request in window if not request.lora_tree_ticket.in_window]
            window = [request for request in window if request.lora_tree_ticket.in_window]
        rest[:0] = self._window = window
        self._num_arranged = min(self._num_arranged, len(window))
        return rest

    def note_unsplit(self) -> None:
        """A pass has looked at the whole queue and left it in the pass's order."""
        self._is_sorted = False

    def note_pass(self, saw_all: bool, found_no_room: bool) -> None:
        """How a pass over the window ended: one that got through all of it will look at more the next time."""
        if found_no_room:
            self.window_size = SMALL_WINDOW if self.is_fallback or self.goes_by_age else WINDOW
        elif saw_all:
            self.window_size = min(2 * self.window_size, WINDOW)

    # ---- Order ----

    def arrange(self, requests: Sequence[Request], situation: Situation, version: Any = None) -> list[Request]:
        """Requests in the order's order; ties stay as they are given.

        Args:
            version: stands for what ``situation`` says of the GPU; an order found for the same is not looked for again.
                None: always look.
        """
        if self.is_fallback:
            self._num_arranged = 0
            return list(requests)
        waiting = [request.lora_tree_ticket.waiting for request in requests]
        arranged = [requests[position] for position in self.order.arrange(waiting, situation)]
        self._num_arranged = len(arranged)
        self._arranged_for = version
        latest = self.order.oldest_first_until(situation.now)
        self.goes_by_age = all(request.arrived_at <= latest for request in waiting)
        self._arranged_until = -math.inf if version is None else self.order.right_until(waiting, situation)
        return arranged

    def keep_order(self, window: list[Request], version: Any) -> bool:
        """Whether the window is, or is put, in the order that :meth:`arrange` would find; False: nobody has been moved.

        Args:
            version: as for :meth:`arrange`; where only age decides, another one changes nothing.
        """
        known = self._num_arranged
        if known == 0 or self.now >= self._arranged_until or self.is_fallback:
            return False
        if not self.goes_by_age:
            return known == len(window) and version == self._arranged_for
        if known < len(window):
            latest = self.order.oldest_first_until(self.now)
            for place in range(known, len(window)):
                if window[place].lora_tree_ticket.waiting.arrived_at > latest:
                    return False
            _insert_by_arrival(window, known)
            self._num_arranged = len(window)
        return True


def _count_in_window(queue: list[Any]) -> int:
    size, length = 0, len(queue)
    while size < length and queue[size].lora_tree_ticket.in_window:
        size += 1
    return size


def _insert_by_arrival(window: list[Any], known: int) -> None:
    """Put those after the first ``known``, which are in order of arrival, where their arrival puts them."""
    for place in range(known, len(window)):
        request = window[place]
        if arrival_of(request) < arrival_of(window[place - 1]):
            del window[place]
            bisect.insort(window, request, hi=place, key=arrival_of)


def make_queue(settings: Settings) -> WaitingQueue:
    """The queue as the settings want it."""
    queue = WaitingQueue(make_order(settings))
    queue.fair = queue.order if isinstance(queue.order, FairOrder) else None
    if settings.ttft_slo_seconds is not None:
        queue.control = AdmissionControl(settings.ttft_slo_seconds)
        queue.order = LatestFirst(queue.order, queue.control)
    return queue
