"""Expected reuse: how soon nodes of a kind are used again, learned from the tree's own uses.

In: ages at which nodes were used again, or left the tree unused. Out: for a kind of node and an age, the most uses per request
that keeping the node may bring: over all horizons T, P(used within T) / E[time kept], the Gittins index of a node that is
kept until it is used or given up. (Least hit density, Beckmann et al., NSDI 2018, ranks by the same quotient for one horizon;
hazard rates as the best order without knowledge of the future: Panigrahy et al., 2022.)

Time is counted in requests, so it is the same on every rank and needs no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import add

_BUCKETS = 40
_GROWTH = 1.4
_LOG_GROWTH = math.log(_GROWTH)
_EDGES = [0.0, *(_GROWTH**power for power in range(_BUCKETS))]
"""Bucket i holds ages from ``_EDGES[i]`` to ``_EDGES[i + 1]``: up to 500,000 requests."""
_WIDTHS = [after - before for before, after in pairwise(_EDGES)]
_PRIOR = 1.0  # uses that the prior of a group is worth in each bucket
_GROUP = 4.0  # uses that its group is worth to a kind


def bucket_of(age: float) -> int:
    """The bucket of an age, in requests."""
    return 0 if age < 1.0 else min(1 + int(math.log(age) / _LOG_GROWTH), _BUCKETS - 1)


class ReuseTable:
    """What is known about kinds of nodes.

    Args:
        groups: how many kinds, one after another, are alike: where little is known of one, its group's rates stand in.
        refresh: events after which values are worked out anew.
        memory: events after which old ones count 1/e.
    """

    def __init__(self, groups: Sequence[int], refresh: int = 256, memory: int = 20_000) -> None:
        num_kinds = sum(groups)
        self._group_of = [group for group, size in enumerate(groups) for _ in range(size)]
        self._uses = [[0.0] * _BUCKETS for _ in range(num_kinds)]
        self._ends = [[0.0] * _BUCKETS for _ in range(num_kinds)]
        """Stays that ended in each bucket, used or not."""
        self._refresh = refresh
        self._decay = math.exp(-refresh / memory)
        self._events = 0
        self.values: list[list[float]] = []
        self.version = 0
        """How often they have been worked out."""
        self._work = self._work_out()
        """Works new values out, a little at every event: all at once it would hold the loop up for more than a millisecond."""
        self._finish_work()

    def _finish_work(self) -> None:
        for _ in self._work:
            pass

    def note(self, kind: int, age: float, used: bool, weight: float = 1.0) -> None:
        """A stay ended: the node was used again, or left the tree."""
        bucket = bucket_of(age)
        self._ends[kind][bucket] += weight
        if used:
            self._uses[kind][bucket] += weight
        self._events += 1
        if self._events % self._refresh == 0:
            self._finish_work()  # nothing is left, but for a very small ``refresh``
            self._work = self._work_out()
        next(self._work, None)

    def value(self, kind: int, age: float) -> float:
        """Uses per request that keeping such a node may bring. Never rises with age."""
        return self.values[kind][bucket_of(age)]

    def _work_out(self) -> Iterator[None]:
        """In about ninety steps of 5 to 30 microseconds, all done long before the next time; values are known after forty."""
        known, group_uses, group_times = [], self._zeros(), self._zeros()
        for uses, ends, group in zip(self._uses, self._ends, self._group_of, strict=True):
            times = _time_in_buckets(ends)
            known.append((list(uses), times))  # events go on meanwhile
            _add(group_uses[group], uses)
            _add(group_times[group], times)
            if len(known) % 2 == 0:
                yield
        group_rates = []
        for group_use, group_time in zip(group_uses, group_times, strict=True):
            group_rates.append(_group_rates(group_use, group_time))
            yield
        values = []
        for (uses, times), group in zip(known, self._group_of, strict=True):
            rows = zip(uses, times, group_rates[group], strict=True)
            rates = [(use + _GROUP) / (time + _GROUP / rate) for use, time, rate in rows]
            values.append(list(gittins(rates, _WIDTHS))[::-1])
            yield
        self.values = values
        self.version += 1
        for counts in (*self._uses, *self._ends):
            yield
            counts[:] = [count * self._decay for count in counts]

    def _zeros(self) -> list[list[float]]:
        return [[0.0] * _BUCKETS for _ in range(max(self._group_of) + 1)]


def _add(total: list[float], counts: list[float]) -> None:
    total[:] = map(add, total, counts)


def _time_in_buckets(ends: list[float]) -> list[float]:
    """Time spent in each bucket: its whole width by stays that ended later, half of it by those that ended in it."""
    later, times = 0.0, []
    for count, width in zip(reversed(ends), reversed(_WIDTHS), strict=True):
        times.append((later + count / 2) * width)
        later += count
    times.reverse()
    return times


def _group_rates(uses: list[float], times: list[float]) -> list[float]:
    """Uses per unit of time while unused, by bucket.

    Where little is known: one use in as long as the age, and no more than at the age before.
    """
    expected, rates = 1.0, []
    for use, time, edge in zip(uses, times, _EDGES, strict=False):
        expected = min(expected, 1.0 / (1.0 + edge))
        expected = (use + _PRIOR) / (time + _PRIOR / expected)
        rates.append(expected)
    return rates


def gittins(rates: Sequence[float], widths: Sequence[float]) -> Iterator[float]:
    """For every bucket, the last one first, max over later buckets T of P(used by T) / E[time until used or T].

    A bucket whose own quotient is below that of the buckets behind it is worth joining with them; what has been joined stays
    together, so that all of it takes O(buckets).

    Args:
        rates: uses per unit of time while unused, by bucket.
        widths: lengths of the buckets.

    Yields:
        The value, or that of a later bucket if it is higher: it never rises with age.
    """
    behind: list[tuple[float, float, float]] = []
    """Buckets that stay together, the next ones last: P(used), E[time], and the one over the other."""
    best = 0.0
    for rate, width in zip(reversed(rates), reversed(widths), strict=True):
        stay = math.exp(-rate * width)  # no use within the bucket
        used = 1.0 - stay
        time = used / rate
        value = used / time
        while behind and behind[-1][2] > value:
            later_used, later_time, _ = behind.pop()
            used += stay * later_used
            time += stay * later_time
            stay *= 1.0 - later_used
            value = used / time
        behind.append((used, time, value))
        best = max(best, value)
        yield best
