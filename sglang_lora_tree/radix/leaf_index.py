"""Eviction order, kept up to date: the least valuable leaf in O(log n), instead of a heap over every leaf at each call.

SGLang's tree core keeps its evictable leaves in plain sets and sorts them all whenever memory is short (143 ms per call at
100,000 leaves). :class:`LeafIndex` takes a set's place and adds an order. The order is corrected lazily: an entry whose
leaf has become more valuable since it was filed (a hit, a later access) is filed again when it comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, Protocol


class Leaf(Protocol):
    """A tree node, as far as this file is concerned."""

    id: int


class LeafIndex(Set[Any]):
    """A set of leaves with a priority queue inside; smaller priority leaves first.

    Args:
        priority: value of a leaf now. Between two calls of :meth:`refresh` for a leaf it may only grow.
    """

    _SLACK = 64  # stale entries tolerated before the heap is rebuilt, besides one per live leaf

    def __init__(self, priority: Callable[[Any], Any]) -> None:
        self._priority = priority
        self._members: dict[int, Any] = {}
        self._tickets: dict[int, int] = {}  # node id -> the one entry of the heap that counts
        self._heap: list[tuple[Any, int, Any]] = []
        self._next_ticket = 0

    def add(self, leaf: Leaf) -> None:
        if leaf.id not in self._members:
            self._members[leaf.id] = leaf
            self._file(leaf)

    def discard(self, leaf: Leaf) -> None:
        if self._members.pop(leaf.id, None) is not None:
            self._tickets.pop(leaf.id, None)

    def refresh(self, leaf: Leaf) -> None:
        """File a leaf anew whose priority may have fallen; a no-op for anything that is not a leaf."""
        if leaf.id in self._members:
            self._file(leaf)

    def file_all(self) -> None:
        """File every leaf anew: priorities have changed by more than growth."""
        self._tickets.clear()
        self._heap = [(self._priority(leaf), self._ticket(leaf), leaf) for leaf in self._members.values()]
        heapq.heapify(self._heap)

    def pop_lowest(self) -> Any | None:
        """The leaf of lowest priority, or None. It stays a member but is not offered again until it is filed anew."""
        heap = self._heap
        while heap:
            priority, ticket, leaf = heap[0]
            if self._tickets.get(leaf.id) != ticket:
                heapq.heappop(heap)
                continue
            current = self._priority(leaf)
            if priority < current:
                heapq.heapreplace(heap, (current, self._ticket(leaf), leaf))
                continue
            heapq.heappop(heap)
            del self._tickets[leaf.id]
            return leaf
        return None

    def __contains__(self, leaf: object) -> bool:
        return getattr(leaf, "id", None) in self._members

    @classmethod
    def _from_iterable(cls, leaves: Iterable[Any]) -> set[Any]:  # type: ignore[override]
        return set(leaves)  # what set operations return: SGLang's sanity check compares and subtracts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def _file(self, leaf: Leaf) -> None:
        heapq.heappush(self._heap, (self._priority(leaf), self._ticket(leaf), leaf))
        if len(self._heap) > 2 * len(self._members) + self._SLACK:
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[2].id) == entry[1]]
            heapq.heapify(self._heap)

    def _ticket(self, leaf: Leaf) -> int:
        # Tickets grow, so equal priorities leave in the order of filing, which is the same on every rank.
        self._next_ticket += 1
        self._tickets[leaf.id] = self._next_ticket
        return self._next_ticket
