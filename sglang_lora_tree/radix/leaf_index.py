"""Eviction order, kept up to date: the least valuable leaf in O(log n), instead of a heap over every leaf at each call.

SGLang's tree core keeps its evictable leaves in plain sets and sorts them all whenever memory is short (143 ms per call at
100,000 leaves). :class:`LeafIndex` takes a set's place and adds an order. The order is corrected lazily: an entry whose
leaf has become more valuable since it was filed (a hit, a later access) is filed again when it comes up. Nothing is ever done
to all leaves at once: a heap that is full of entries that count no longer, or whose order is another's, is retired and
emptied into a new one, lowest first, a few entries at a time.
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

    _SLACK = 64  # stale entries tolerated before the heap is retired, besides one per live leaf
    _STEP = 4  # entries of a retired heap that a victim or a filing takes over

    def __init__(self, priority: Callable[[Any], Any]) -> None:
        self._priority = priority
        self._members: dict[int, Any] = {}
        self._tickets: dict[int, int] = {}  # node id -> the one entry of the heap that counts
        self._heap: list[tuple[Any, int, Any]] = []
        self._retired: list[list[tuple[Any, int, Any]]] = []
        self._is_comparable = True
        """Whether the keys of retired heaps are of the order that rules."""
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
        """Priorities have changed by more than growth: file every leaf anew, little by little.

        Until that is done, victims are the lowest of those filed anew, who were the lowest before.
        """
        self._is_comparable = not self._heap and not self._retired
        self._retire()

    def _retire(self) -> None:
        if self._heap:
            self._retired.append(self._heap)
            self._heap = []

    def _take_over(self, count: int) -> None:
        """File leaves of retired heaps anew, lowest first; in the order in which they were filed first, if equal."""
        while self._retired and count > 0:
            if not self._retired[0]:
                del self._retired[0]
                continue
            _, ticket, leaf = heapq.heappop(self._retired[0])
            if self._tickets.get(leaf.id) == ticket:
                heapq.heappush(self._heap, (self._priority(leaf), ticket, leaf))
                count -= 1
        self._is_comparable = self._is_comparable or not self._retired

    def _catch_up(self) -> None:
        """Before a victim is chosen: whoever may be lower than the heap's lowest is in it."""
        if self._is_comparable:
            while self._retired and (not self._retired[0] or not self._heap or self._retired[0][0][:2] < self._heap[0][:2]):
                self._take_over(1)
        else:
            self._take_over(self._STEP if self._heap else self._SLACK)

    def pop_lowest(self) -> Any | None:
        """The leaf of lowest priority, or None. It stays a member but is not offered again until it is filed anew."""
        leaf = self.peek()
        if leaf is not None:
            heapq.heappop(self._heap)
            del self._tickets[leaf.id]
        return leaf

    def peek(self) -> Any | None:
        """The leaf that :meth:`pop_lowest` would give."""
        while True:
            if self._retired:
                self._catch_up()
            if not self._heap:
                return None
            priority, ticket, leaf = self._heap[0]
            if self._tickets.get(leaf.id) != ticket:
                heapq.heappop(self._heap)
                continue
            current = self._priority(leaf)
            if priority < current:
                heapq.heapreplace(self._heap, (current, self._ticket(leaf), leaf))
                continue
            return leaf

    def end_round(self) -> None:
        """One eviction is over: its victims are gone, and leaves that were offered and declined have been filed anew."""

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
        if self._retired:
            self._take_over(self._STEP)
        elif len(self._heap) > 2 * len(self._members) + self._SLACK:
            self._retire()

    def _ticket(self, leaf: Leaf) -> int:
        # Tickets grow, so equal priorities leave in the order of filing, which is the same on every rank.
        self._next_ticket += 1
        self._tickets[leaf.id] = self._next_ticket
        return self._next_ticket


class CandidateIndex(LeafIndex):
    """An index whose order is nearly right: of the leaves of lowest priority, an exact value decides.

    Args:
        exact: value of a leaf at this moment; lower leaves first. It may change between rounds (:meth:`end_round`) only, but
            for calls of :meth:`revalue`.
        count: how many leaves are compared.
    """

    def __init__(self, priority: Callable[[Any], Any], exact: Callable[[Any], float], count: int) -> None:
        super().__init__(priority)
        self._exact = exact
        self._count = count
        self._front: list[tuple[float, int, Any]] = []
        """The candidates, as a heap; the leaf's ticket says whether it still counts."""

    def pop_lowest(self) -> Any | None:
        while True:
            while len(self._front) < self._count and (leaf := super().pop_lowest()) is not None:
                heapq.heappush(self._front, (self._exact(leaf), self._ticket(leaf), leaf))
            if not self._front:
                return None
            _, ticket, leaf = heapq.heappop(self._front)
            if self._tickets.get(leaf.id) == ticket:
                del self._tickets[leaf.id]
                return leaf

    def revalue(self) -> None:
        """Exact values have changed within a round."""
        self._front = [(self._exact(leaf), ticket, leaf) for _, ticket, leaf in self._front if self._counts(leaf, ticket)]
        heapq.heapify(self._front)

    def end_round(self) -> None:
        front, self._front = self._front, []
        for _, ticket, leaf in front:
            if self._counts(leaf, ticket):
                self._file(leaf)

    def _counts(self, leaf: Leaf, ticket: int) -> bool:
        return self._tickets.get(leaf.id) == ticket

    def file_all(self) -> None:
        self.end_round()
        super().file_all()


class ClassIndex(Set[Any]):
    """Leaves in classes, each in an order of its own; which class gives the next victim is decided at that moment.

    Exact for any policy whose value of a leaf depends on its class and falls along the class's order.

    Args:
        priority: order within a class, as for :class:`LeafIndex`.
        classify: class of a leaf now.
        value: of the lowest leaf of a class; the class of the lowest value gives the victim.
    """

    def __init__(
        self, priority: Callable[[Any], Any], classify: Callable[[Any], Any], value: Callable[[Any, Any], float]
    ) -> None:
        self._priority = priority
        self._classify = classify
        self._value = value
        self._queues: dict[Any, LeafIndex] = {}
        self._classes: dict[int, Any] = {}

    def add(self, leaf: Leaf) -> None:
        if leaf.id not in self._classes:
            self._put(leaf)

    def discard(self, leaf: Leaf) -> None:
        if leaf.id in self._classes:
            self._queues[self._classes.pop(leaf.id)].discard(leaf)

    def refresh(self, leaf: Leaf) -> None:
        """As :meth:`LeafIndex.refresh`; also for a leaf that may be of another class now."""
        known = self._classes.get(leaf.id)
        if known is None:
            return
        if self._classify(leaf) == known:
            self._queues[known].refresh(leaf)
        else:
            self._move(leaf)

    def pop_lowest(self) -> Any | None:
        while True:
            lowest: tuple[float, Any, Any] | None = None
            for known, queue in self._queues.items():
                leaf = queue.peek()
                if leaf is None:
                    continue
                value = self._value(known, leaf)
                if lowest is None or value < lowest[0]:
                    lowest = value, known, leaf
            if lowest is None:
                return None
            _, known, leaf = lowest
            if self._classify(leaf) == known:
                return self._queues[known].pop_lowest()
            self._move(leaf)

    def end_round(self) -> None:
        """As :meth:`LeafIndex.end_round`."""

    def file_all(self) -> None:
        leaves = [leaf for queue in self._queues.values() for leaf in queue]
        self._queues.clear()
        self._classes.clear()
        for leaf in leaves:
            self._put(leaf)

    def _put(self, leaf: Leaf) -> None:
        known = self._classes[leaf.id] = self._classify(leaf)
        self._queues.setdefault(known, LeafIndex(self._priority)).add(leaf)

    def _move(self, leaf: Leaf) -> None:
        self.discard(leaf)
        self._put(leaf)

    def __contains__(self, leaf: object) -> bool:
        return getattr(leaf, "id", None) in self._classes

    _from_iterable = LeafIndex._from_iterable

    def __iter__(self) -> Iterator[Any]:
        return (leaf for queue in self._queues.values() for leaf in queue)

    def __len__(self) -> int:
        return len(self._classes)
