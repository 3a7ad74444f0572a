"""The advisor's picture of one scheduler: its tree in numpy, its queue, and how often adapters are asked for.

In: reports. Out: arrays that Eval takes (``radix.eval``), and the waiting requests. Requests that end without a word
(aborted ones) stay here until the numbers no longer agree and everything is reported again.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from sglang_lora_tree.radix.eval import EvalStatistics
from sglang_lora_tree.scheduling.orders import Waiting
from sglang_lora_tree.scheduling.protocol import ABSENT, NODE_ROW, REQUEST_ROW, Load, Report

BATCH_SECONDS = 5.0
"""Over which the batch size of Eq. 3 is taken."""
_GHOSTS = 256  # requests that have ended unseen, before all is reported again


class Mirror:
    """What reports have said.

    Args:
        visit_window: seconds after which a request counts 1/e in usage probabilities.
    """

    def __init__(self, visit_window: float) -> None:
        self._visit_window = visit_window
        self._batches: deque[tuple[float, int]] = deque()
        self._usage: dict[str, float] = {}
        self._requests = 0.0
        self._usage_at = 0.0
        self._latest_arrival = -1
        self.now = 0.0
        self.load: Load | None = None
        self._sequence: int | None = None
        self._clear()

    def _clear(self) -> None:
        self.queue: dict[int, Waiting] = {}
        """Requests that wait, by arrival."""
        self._sets: list[tuple[str, ...]] = []
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self.identities: dict[str, int] = {}
        """Place of each LoRA node..."""
        self._identity_at: dict[int, str] = {}
        """... and back."""
        self._allocate(1024)

    def _allocate(self, size: int) -> None:
        self.node_id = np.full(size, -1, np.int64)
        self.parent = np.full(size, -1, np.int64)
        self.parent_place = np.zeros(size, np.int64)
        self.slots = np.zeros(size, np.int64)
        self.is_known = np.zeros(size, np.bool_)
        self.is_adapter = np.zeros(size, np.bool_)
        self.on_gpu = np.zeros(size, np.bool_)
        self.on_host = np.zeros(size, np.bool_)
        self.visits = np.zeros(size, np.float64)
        self.used_at = np.zeros(size, np.float64)

    _ARRAYS = (
        "node_id", "parent", "parent_place", "slots", "is_known", "is_adapter", "on_gpu", "on_host", "visits", "used_at",
    )  # fmt: skip

    def __len__(self) -> int:
        """Nodes that were reported and have not left."""
        return int(np.count_nonzero(self.is_known))

    # ---- Reports ----

    def apply(self, report: Report) -> bool:
        """Take a report in; False if one before it is missing, or requests have ended unseen: ask for all of it again.

        Raises:
            ValueError: a row refers to a set that was never sent.
        """
        if report.is_reset:
            self._clear()
        elif self._sequence is None or report.sequence != self._sequence + 1:
            self._sequence = None
            return False
        self._sequence = report.sequence
        self.now, self.load = report.now, report.load
        self._sets += map(tuple, report.sets)
        self._take_requests(np.asarray(report.requests, np.float64).reshape(-1, len(REQUEST_ROW)))
        self._take_nodes(np.asarray(report.nodes, np.float64).reshape(-1, len(NODE_ROW)))
        if self._batches and self._batches[-1][0] == report.now:
            self._batches.pop()  # the loop sleeps, and its clock stands still
        self._batches.append((report.now, report.load.running))
        while self._batches[0][0] < report.now - BATCH_SECONDS:
            self._batches.popleft()
        return len(self.queue) <= report.load.waiting + _GHOSTS

    def _set(self, place: float) -> tuple[str, ...]:
        if not 0 <= place < len(self._sets):
            raise ValueError(f"a row refers to set {place:g} of {len(self._sets)}")
        return self._sets[int(place)]

    def _take_requests(self, rows: NDArray[np.float64]) -> None:
        for arrival, arrived_at, length, members in rows.tolist():
            if members == ABSENT:
                self.queue.pop(int(arrival), None)
                continue
            row = self.queue[int(arrival)] = Waiting(int(arrival), arrived_at, self._set(members), int(length))
            if row.arrival > self._latest_arrival:
                self._latest_arrival = row.arrival
                self._count_usage(row)

    def _take_nodes(self, rows: NDArray[np.float64]) -> None:
        """Where a node has several rows the last one counts, as numpy's assignment has it."""
        ids, parents, adapters, slots, tiers = rows[:, :5].T.astype(np.int64)
        stay = tiers >= 0
        # Places for parents that are not known yet, too, so that theirs never have to be looked up again.
        above = np.array([self._place(parent) for parent in parents[stay].tolist()], np.int64)
        places = np.array([self._place(node_id) for node_id in ids[stay].tolist()], np.int64)
        self.parent[places], self.parent_place[places], self.slots[places] = parents[stay], above, slots[stay]
        self.is_known[places], self.is_adapter[places] = True, adapters[stay] >= 0
        self.on_gpu[places], self.on_host[places] = (tiers[stay] & 1) > 0, (tiers[stay] & 2) > 0
        self.visits[places], self.used_at[places] = rows[stay, 5], rows[stay, 6]
        for node_id, adapter in zip(ids[adapters >= 0].tolist(), adapters[adapters >= 0].tolist(), strict=True):
            (identity,) = self._set(adapter)
            place = self._places[node_id]
            self.identities[identity], self._identity_at[place] = place, identity
        for node_id in ids[~stay].tolist():
            self._remove(node_id)

    def _place(self, node_id: int) -> int:
        place = self._places.get(node_id)
        if place is None:
            place = self._free.pop() if self._free else len(self._places)
            if place == len(self.node_id):
                for name in self._ARRAYS:
                    array = getattr(self, name)
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
                self.node_id[place:] = -1
            self._places[node_id] = place
            self.node_id[place] = node_id
        return place

    def _remove(self, node_id: int) -> None:
        place = self._places.pop(node_id, None)
        if place is None:
            return
        identity = self._identity_at.pop(place, None)
        if identity is not None and self.identities.get(identity) == place:
            del self.identities[identity]
        self.node_id[place] = -1
        for flags in (self.is_known, self.on_gpu, self.on_host, self.is_adapter):
            flags[place] = False
        self._free.append(place)

    def _count_usage(self, row: Waiting) -> None:
        decay = math.exp(min(self._usage_at - self.now, 0.0) / self._visit_window)
        if decay < 0.99:  # else not worth touching every adapter
            self._usage = {name: count * decay for name, count in self._usage.items() if count * decay > 1e-6}
            self._requests *= decay
            self._usage_at = self.now
        self._requests += 1.0
        for member in row.members:
            self._usage[member] = self._usage.get(member, 0.0) + 1.0

    # ---- What plans are made of ----

    @property
    def usage(self) -> dict[str, float]:
        """prob_i of Eq. 3: share of requests that use each adapter."""
        return {name: min(count / self._requests, 1.0) for name, count in self._usage.items()}

    @property
    def batch_size(self) -> float:
        """Mean number of running requests over the last five seconds."""
        sizes = [size for _, size in self._batches]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def is_resident(self, identity: str) -> bool:
        place = self.identities.get(identity)
        return place is not None and bool(self.on_gpu[place])

    def resident(self) -> set[str]:
        """Identities of adapters on the GPU."""
        return {identity for identity, place in self.identities.items() if self.on_gpu[place]}

    def waiting(self) -> list[Waiting]:
        """The queue by arrival."""
        return [row for _, row in sorted(self.queue.items())]

    @property
    def resident_adapters(self) -> int:
        return int(np.count_nonzero(self.is_adapter & self.on_gpu))

    def swap_in_candidates(self) -> NDArray[np.int64]:
        """Places of the topmost nodes in host memory: those whose parent is on the GPU, or the virtual root."""
        places = np.flatnonzero(self.on_host & ~self.on_gpu)
        above = self.parent_place[places]
        # The virtual root has a place and is never reported; a place may have passed on to another node.
        is_absent = ~self.is_known[above] | (self.node_id[above] != self.parent[places])
        return places[is_absent | self.on_gpu[above]]

    def statistics(self, places: NDArray[np.int64]) -> EvalStatistics:
        """What Eval needs of some nodes."""
        assert self.load is not None, "no report yet"
        return EvalStatistics(
            slots=self.slots[places],
            is_adapter=self.is_adapter[places],
            has_copy=self.on_host[places],
            visits=self.visits[places],
            used_at=self.used_at[places],
            resident_adapters=self.resident_adapters,
            bytes_per_slot=self.load.bytes_per_slot,
        )
