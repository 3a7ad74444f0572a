"""Eviction order, kept up to date: the least valuable leaf in O(log n), instead of a heap over every leaf at each call.

SGLang's tree core keeps its evictable leaves in plain sets and sorts them all whenever memory is short (143 ms per call at
100,000 leaves). :class:`LeafIndex` takes a set's place and adds an order. The tree files a leaf anew whenever a use or a touch
changes its key, so entries are right, and one victim costs the same however many leaves have changed since the last. Where keys
grow without a word (a few policies that are there for comparison), a victim corrects a few entries at most. Nothing is ever
done to all leaves at once: under another order they move into it a few at a time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, Protocol


class Leaf(Protocol):
    """A tree node, as far as this file is concerned."""

    id: int


Entry = tuple[Any, int, Any, "SortedEntries"]
"""Key, ticket, leaf, and where it is filed. No two tickets are equal, so comparing entries never gets to the leaves."""


class SortedEntries:
    """Entries in ascending order, in short lists: a heap has no cheap way to take an entry out of its middle.

    A heap that only marks entries as dead instead has, after many touches, thousands of them below its lowest live one, and the
    next victim pays for all.
    """

    _LENGTH = 512
    """Of a list that has just been divided."""

    def __init__(self) -> None:
        self._lists: list[list[Entry]] = []
        self._highest: list[Entry] = []
        """The last entry of each list."""

    def __bool__(self) -> bool:
        return bool(self._lists)

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    def add(self, entry: Entry) -> None:
        place = bisect_left(self._highest, entry)
        if place < len(self._lists):
            entries = self._lists[place]
            insort(entries, entry)
        elif place:
            place -= 1
            entries = self._lists[place]
            entries.append(entry)
            self._highest[place] = entry
        else:
            entries = [entry]
            self._lists.append(entries)
            self._highest.append(entry)
        if len(entries) >= 2 * self._LENGTH:
            upper = entries[self._LENGTH :]
            del entries[self._LENGTH :]
            self._lists.insert(place + 1, upper)
            self._highest[place : place + 1] = [entries[-1], upper[-1]]

    def remove(self, entry: Entry) -> None:
        place = bisect_left(self._highest, entry)
        entries = self._lists[place]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._lists[place], self._highest[place]
        elif self._highest[place] is entry:
            self._highest[place] = entries[-1]

    def lowest(self) -> Entry:
        return self._lists[0][0]

    def first(self, count: int) -> list[Entry]:
        """The lowest entries, up to ``count``."""
        found: list[Entry] = []
        for entries in self._lists:
            found += entries[: count - len(found)]
            if len(found) >= count:
                break
        return found


class LeafIndex(Set[Any]):
    """A set of leaves in order; smaller priority leaves first.

    Args:
        priority: value of a leaf now. :meth:`refresh` is called when it has changed; if it has grown without that, the leaf is
            filed anew when it comes up.
    """

    _STEP = 4  # leaves that a victim or a filing takes over into a new order
    _FIRST = 64  # the same, where the new order is empty
    _MOST = 64  # leaves that one victim files anew because their priorities have grown

    def __init__(self, priority: Callable[[Any], Any]) -> None:
        self._priority = priority
        self._members: dict[int, Any] = {}
        self._entries: dict[int, Entry] = {}
        """Node id -> its entry; a leaf that has been given out has none."""
        self._order = SortedEntries()
        self._former: deque[SortedEntries] = deque()
        """Former orders, of leaves that have not been filed anew yet; the oldest first."""
        self._next_ticket = 0

    def add(self, leaf: Leaf) -> None:
        if leaf.id not in self._members:
            self._members[leaf.id] = leaf
            self._file(leaf, self._priority(leaf))

    def discard(self, leaf: Leaf) -> None:
        if self._members.pop(leaf.id, None) is not None:
            self.take(leaf)

    def refresh(self, leaf: Leaf) -> None:
        """File a leaf anew whose priority may have changed; a no-op for anything that is not a leaf."""
        if leaf.id in self._members:
            self._file(leaf, self._priority(leaf))

    def file_all(self) -> None:
        """Priorities are others now: file every leaf anew, little by little.

        Until that is done, victims are the lowest of those filed anew, who were the lowest before.
        """
        if self._order:
            self._former.append(self._order)
            self._order = SortedEntries()

    def peek(self) -> Any | None:
        """The leaf that :meth:`pop_lowest` would give."""
        if self._former:
            self._take_over(self._STEP if self._order else self._FIRST)
        corrected: list[Entry] = []
        while self._order and len(corrected) < self._MOST:
            leaf = self._order.lowest()[2]
            entry = self._corrected(leaf)
            if entry is None:
                return leaf
            corrected.append(entry)
        return min(corrected)[2] if corrected else None

    def pop_lowest(self) -> Any | None:
        """The leaf of lowest priority, or None; as :meth:`take` it."""
        leaf = self.peek()
        if leaf is not None:
            self.take(leaf)
        return leaf

    def take(self, leaf: Leaf) -> None:
        """Give a leaf out: it stays a member but is not offered again until it is filed anew."""
        entry = self._entries.pop(leaf.id, None)
        if entry is not None:
            entry[3].remove(entry)
            if self._former and not self._former[0]:
                self._former.popleft()

    def __contains__(self, leaf: object) -> bool:
        return getattr(leaf, "id", None) in self._members

    @classmethod
    def _from_iterable(cls, leaves: Iterable[Any]) -> set[Any]:  # type: ignore[override]
        return set(leaves)  # what set operations return: SGLang's sanity check compares and subtracts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def _file(self, leaf: Leaf, priority: Any) -> None:
        # Tickets grow, so equal priorities leave in the order of filing, which is the same on every rank.
        self._next_ticket += 1
        self._put(leaf, priority, self._next_ticket)
        if self._former:
            self._take_over(self._STEP)

    def _put(self, leaf: Leaf, priority: Any, ticket: int) -> None:
        self.take(leaf)
        entry = self._entries[leaf.id] = (priority, ticket, leaf, self._order)
        self._order.add(entry)

    def _corrected(self, leaf: Leaf) -> Entry | None:
        """The leaf's new entry if its priority has grown since it was filed."""
        priority = self._priority(leaf)
        if not self._entries[leaf.id][0] < priority:
            return None
        self._file(leaf, priority)
        return self._entries[leaf.id]

    def _take_over(self, count: int) -> None:
        """File leaves of former orders anew, lowest first; they keep their tickets."""
        while self._former and count > 0:
            if not self._former[0]:
                self._former.popleft()
                continue
            _, ticket, leaf, _ = self._former[0].lowest()
            self._put(leaf, self._priority(leaf), ticket)
            count -= 1


class CandidateIndex(LeafIndex):
    """An index whose order is nearly right: of the leaves of lowest priority, an exact value decides.

    Args:
        priority: as for :class:`LeafIndex`, but it must not grow without :meth:`refresh`.
        exact: value of a leaf at this moment, given its priority; lower leaves first.
        count: how many leaves are compared.
        moment: while what it returns stays the same, so do exact values of leaves that are not filed anew.
    """

    def __init__(
        self, priority: Callable[[Any], Any], exact: Callable[[Any, Any], float], count: int, moment: Callable[[], Any]
    ) -> None:
        super().__init__(priority)
        self._exact = exact
        self._count = count
        self._moment = moment
        self._valued_at: Any = None
        self._values: dict[int, float] = {}
        """Ticket -> the leaf's exact value."""

    def peek(self) -> Any | None:
        if self._former:
            self._take_over(self._STEP if self._order else self._FIRST)
        moment = self._moment()
        if self._valued_at != moment:
            self._values.clear()
            self._valued_at = moment
        values = self._values
        best, lowest = None, math.inf
        for key, ticket, leaf, _ in self._order.first(self._count):
            value = values.get(ticket)
            if value is None:
                value = values[ticket] = self._exact(leaf, key)
            if value < lowest or best is None:
                best, lowest = leaf, value
        return best

    def take(self, leaf: Leaf) -> None:
        if leaf.id in self._entries:
            self._values.pop(self._entries[leaf.id][1], None)
        super().take(leaf)


class ClassIndex(Set[Any]):
    """Leaves in classes, each in an order of its own; which class gives the next victim is decided at that moment.

    Exact for any policy whose value of a leaf depends on its class and falls along the class's order. A victim looks only at
    classes in which something has changed since the last one.

    Args:
        make_order: the index of one class.
        classify: class of a leaf now.
        value: of the lowest leaf of a class; the class of the lowest value gives the victim.
        moment: while what it returns stays the same, so do values of leaves that nobody uses or touches.
    """

    _MOST = 64  # leaves that one victim moves because they are of another class now, without a word

    def __init__(
        self,
        make_order: Callable[[], LeafIndex],
        classify: Callable[[Any], Any],
        value: Callable[[Any, Any], float],
        moment: Callable[[], Any],
    ) -> None:
        self._make_order = make_order
        self._classify = classify
        self._value = value
        self._moment = moment
        self._valued_at: Any = None
        self._queues: dict[Any, LeafIndex] = {}
        self._numbers: dict[Any, int] = {}
        """Of classes, in the order in which they came; breaks ties."""
        self._classes: dict[int, Any] = {}
        self._lowest: dict[Any, tuple[float, int, Any, Any]] = {}
        """Class -> value of its lowest leaf, number, class, leaf."""
        self._changed: dict[Any, None] = {}
        """Classes whose lowest leaf may be another now."""

    def add(self, leaf: Leaf) -> None:
        if leaf.id not in self._classes:
            self._put(leaf)

    def discard(self, leaf: Leaf) -> None:
        if leaf.id in self._classes:
            known = self._classes.pop(leaf.id)
            self._queues[known].discard(leaf)
            self._changed[known] = None

    def refresh(self, leaf: Leaf) -> None:
        """As :meth:`LeafIndex.refresh`; also for a leaf that may be of another class now."""
        known = self._classes.get(leaf.id)
        if known is None:
            return
        if self._classify(leaf) == known:
            self._queues[known].refresh(leaf)
            self._changed[known] = None
        else:
            self._move(leaf)

    def pop_lowest(self) -> Any | None:
        moment = self._moment()
        if self._valued_at != moment:
            self._valued_at = moment
            self._changed.update(dict.fromkeys(self._queues))
        moved = 0
        while True:
            self._look_again()
            if not self._lowest:
                return None
            _, _, known, leaf = min(self._lowest.values())
            if moved >= self._MOST or self._classify(leaf) == known:
                self._queues[known].take(leaf)
                self._changed[known] = None
                return leaf
            self._move(leaf)
            moved += 1

    def _look_again(self) -> None:
        for known in self._changed:
            leaf = self._queues[known].peek()
            if leaf is None:
                self._lowest.pop(known, None)
            else:
                self._lowest[known] = self._value(known, leaf), self._numbers[known], known, leaf
        self._changed.clear()

    def file_all(self) -> None:
        """As :meth:`LeafIndex.file_all`; classes are what they were."""
        for known, queue in self._queues.items():
            queue.file_all()
            self._changed[known] = None

    def _put(self, leaf: Leaf) -> None:
        known = self._classes[leaf.id] = self._classify(leaf)
        queue = self._queues.get(known)
        if queue is None:
            queue = self._queues[known] = self._make_order()
            self._numbers[known] = len(self._numbers)
        queue.add(leaf)
        self._changed[known] = None

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
