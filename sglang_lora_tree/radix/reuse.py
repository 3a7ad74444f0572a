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

import numpy as np
from numpy.typing import NDArray

_BUCKETS = 40
_GROWTH = 1.4
_LOG_GROWTH = math.log(_GROWTH)
_EDGES = np.concatenate([[0.0], _GROWTH ** np.arange(_BUCKETS)])
"""Bucket i holds ages from ``_EDGES[i]`` to ``_EDGES[i + 1]``: up to 500,000 requests."""
_WIDTHS = np.diff(_EDGES)
_PRIOR = 1.0  # uses that the prior of a group is worth in each bucket
_GROUP = 4.0  # uses that its group is worth to a kind


def bucket_of(age: float) -> int:
    """The bucket of an age, in requests."""
    # Asked for at every use and for every victim: numpy would take ten times as long for one number.
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
        self._group_of = np.repeat(np.arange(len(groups)), groups)
        self._uses = [[0.0] * _BUCKETS for _ in range(num_kinds)]
        self._ends = [[0.0] * _BUCKETS for _ in range(num_kinds)]
        """Stays that ended in each bucket, used or not."""
        self._refresh = refresh
        self._decay = float(np.exp(-refresh / memory))
        self._events = 0
        self.values: list[list[float]] = []
        self._work: Iterator[None] = iter(())
        """Works new values out, a little at every event: all at once it would hold the loop up for more than a millisecond."""
        for _ in self._work_out():
            pass

    def note(self, kind: int, age: float, used: bool, weight: float = 1.0) -> None:
        """A stay ended: the node was used again, or left the tree."""
        bucket = bucket_of(age)
        self._ends[kind][bucket] += weight
        if used:
            self._uses[kind][bucket] += weight
        self._events += 1
        if self._events % self._refresh == 0:
            self._work = self._work_out()
        next(self._work, None)

    def value(self, kind: int, age: float) -> float:
        """Uses per request that keeping such a node may bring. Never rises with age."""
        return self.values[kind][bucket_of(age)]

    def _work_out(self) -> Iterator[None]:
        uses, ends = np.array(self._uses), np.array(self._ends)
        # Time spent in a bucket: its whole width by stays that ended later, half of it by those that ended in it.
        later = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1] - ends
        time = (later + ends / 2) * _WIDTHS
        members = np.eye(self._group_of[-1] + 1)[:, self._group_of]
        of_group = _rates(members @ uses, members @ time)
        rates = (uses + _GROUP) / (time + _GROUP / of_group[self._group_of])
        yield
        columns = []
        for column in gittins_columns(rates, _WIDTHS):
            columns.append(column)
            yield
        self.values = _never_rising(columns).tolist()
        yield
        for counts in (*self._uses, *self._ends):
            counts[:] = [count * self._decay for count in counts]


def _rates(uses: NDArray[np.float64], time: NDArray[np.float64]) -> NDArray[np.float64]:
    """Uses per unit of time while unused, by row and bucket.

    Where little is known: one use in as long as the age, and no more than at the age before.
    """
    rates = np.empty_like(time)
    expected = np.ones(len(time))
    for bucket in range(_BUCKETS):
        expected = np.minimum(expected, 1.0 / (1.0 + _EDGES[bucket]))
        expected = (uses[:, bucket] + _PRIOR) / (time[:, bucket] + _PRIOR / expected)
        rates[:, bucket] = expected
    return rates


def gittins(rates: NDArray[np.float64], widths: NDArray[np.float64]) -> NDArray[np.float64]:
    """For every kind and bucket, max over later buckets T of P(used by T) / E[time until used or T].

    Args:
        rates: (kinds, buckets) uses per unit of time while unused.
        widths: (buckets,) lengths of the buckets.

    Returns:
        (kinds, buckets); along the second axis the largest of what is to come, so that it never rises.
    """
    return _never_rising(list(gittins_columns(rates, widths)))


def _never_rising(columns: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.maximum.accumulate(np.stack(columns, axis=1)[:, ::-1], axis=1)[:, ::-1]


def gittins_columns(rates: NDArray[np.float64], widths: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """The columns of :func:`gittins` one by one, before what is to come is taken into account."""
    stay = np.exp(-rates * widths)  # no use within the bucket
    time = (1.0 - stay) / rates  # mean time in it
    for start in range(rates.shape[1]):
        alive = np.cumprod(stay[:, start:], axis=1)
        before = np.concatenate([np.ones((len(rates), 1)), alive[:, :-1]], axis=1)
        yield np.max((1.0 - alive) / np.cumsum(before * time[:, start:], axis=1), axis=1)
