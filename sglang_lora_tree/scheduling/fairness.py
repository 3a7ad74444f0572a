"""Fairness between adapters: a virtual token counter (Sheng et al., OSDI 2024) over the queue's order.

Every adapter, or mix, has a counter of the tokens that it was served, output tokens at twice the price of prompt tokens. The
next request is always one of the adapter whose counter is lowest; among its requests the order rules. An adapter that comes
back after a pause starts at the lowest counter in the queue, so that pauses are not saved up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from sglang_lora_tree.scheduling.orders import QueueOrder, Situation, Waiting

PROMPT_PRICE = 1.0
OUTPUT_PRICE = 2.0


class FairOrder(QueueOrder):
    """The order of the queue under fairness; :meth:`charge` is told what was served.

    Args:
        order: among requests of one adapter, and between adapters of equal counters.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._counters: dict[tuple[str, ...], float] = {}
        self._waited: set[tuple[str, ...]] = set()
        """Adapters that had requests in the queue at the last look."""
        self.needs_running = order.needs_running

    def right_until(self, waiting: Sequence[Waiting], situation: Situation) -> float:
        return -math.inf  # counters move with every token

    def charge(self, members: tuple[str, ...], prompt_tokens: int, output_tokens: int = 0) -> None:
        """Tokens were served to an adapter (the empty tuple: the base model)."""
        price = PROMPT_PRICE * prompt_tokens + OUTPUT_PRICE * output_tokens
        self._counters[members] = self._counters.get(members, 0.0) + price

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        position_at = self._order.arrange(waiting, situation)
        places: dict[tuple[str, ...], list[int]] = {}
        for place, position in enumerate(position_at):
            places.setdefault(waiting[position].members, []).append(place)
        self._lift(places)
        heap = [(self._counters[members], own[0], members, 0) for members, own in places.items()]
        heapq.heapify(heap)
        arranged: list[int] = []
        while heap:
            counter, place, members, index = heap[0]
            arranged.append(position_at[place])
            counter += PROMPT_PRICE * waiting[position_at[place]].length
            own = places[members]
            if index + 1 < len(own):
                heapq.heapreplace(heap, (counter, own[index + 1], members, index + 1))
            else:
                heapq.heappop(heap)
        return arranged

    def _lift(self, present: dict[tuple[str, ...], list[int]]) -> None:
        """Start adapters that have just come (back) at the lowest counter of those that were here."""
        stayed = [self._counters[members] for members in present if members in self._waited]
        floor = min(stayed, default=0.0)
        for members in present:
            if members not in self._waited:
                self._counters[members] = max(self._counters.get(members, 0.0), floor)
        self._waited = set(present)
