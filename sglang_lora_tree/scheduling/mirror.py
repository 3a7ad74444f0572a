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
from sglang_lora_tree.scheduling.protocol import Load, QueuedRow, Report

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
        self.queue: dict[int, QueuedRow] = {}
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
        self.slots = np.zeros(size, np.int64)
        self.is_adapter = np.zeros(size, np.bool_)
        self.on_gpu = np.zeros(size, np.bool_)
        self.on_host = np.zeros(size, np.bool_)
        self.visits = np.zeros(size, np.float64)
        self.used_at = np.zeros(size, np.float64)

    _ARRAYS = ("node_id", "parent", "slots", "is_adapter", "on_gpu", "on_host", "visits", "used_at")

    def __len__(self) -> int:
        return len(self._places)

    # ---- Reports ----

    def apply(self, report: Report) -> bool:
        """Take a report in; False if one before it is missing, or requests have ended unseen: ask for all of it again."""
        if report.is_reset:
            self._clear()
            self._sequence = report.sequence
        elif self._sequence is None or report.sequence != self._sequence + 1:
            self._sequence = None
            return False
        else:
            self._sequence = report.sequence
        self.now, self.load = report.now, report.load
        for row in report.queued:
            self.queue[row.arrival] = row
            if row.arrival > self._latest_arrival:
                self._latest_arrival = row.arrival
                self._count_usage(row)
        for arrival in report.left:
            self.queue.pop(arrival, None)
        for node in report.nodes:
            place = self._place(node.id)
            self.node_id[place], self.parent[place], self.slots[place] = node.id, node.parent, node.slots
            self.is_adapter[place], self.on_gpu[place], self.on_host[place] = node.identity is not None, node.on_gpu, node.on_host
            self.visits[place], self.used_at[place] = node.visits, node.used_at
            if node.identity is not None:
                self.identities[node.identity], self._identity_at[place] = place, node.identity
        for node_id in report.removed:
            self._remove(node_id)
        self._batches.append((report.now, report.load.running))
        while self._batches[0][0] < report.now - BATCH_SECONDS:
            self._batches.popleft()
        return len(self.queue) <= report.load.waiting + _GHOSTS

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
        return place

    def _remove(self, node_id: int) -> None:
        place = self._places.pop(node_id, None)
        if place is None:
            return
        identity = self._identity_at.pop(place, None)
        if identity is not None and self.identities.get(identity) == place:
            del self.identities[identity]
        self.node_id[place], self.on_gpu[place], self.on_host[place], self.is_adapter[place] = -1, False, False, False
        self._free.append(place)

    def _count_usage(self, row: QueuedRow) -> None:
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
        return [Waiting(row.arrival, row.arrived_at, row.members, row.length) for _, row in sorted(self.queue.items())]

    @property
    def resident_adapters(self) -> int:
        return int(np.count_nonzero(self.is_adapter & self.on_gpu))

    def swap_in_candidates(self) -> NDArray[np.int64]:
        """Places of the topmost nodes in host memory: those whose parent is on the GPU, or the virtual root."""
        places = np.flatnonzero(self.on_host & ~self.on_gpu)
        parents = np.array([self._places.get(int(parent), -1) for parent in self.parent[places]], np.int64)
        return places[(parents < 0) | self.on_gpu[parents]] if len(places) else places

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
