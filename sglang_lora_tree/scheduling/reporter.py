"""What the advisor is told: changes of the tree and of the queue, a few rows in each step of the loop.

A reset is the same thing with everything changed: there is no snapshot that would make the loop stand still.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_lora_tree.radix.residency import Residency
from sglang_lora_tree.scheduling.protocol import Load, NodeRow, QueuedRow, Report

if TYPE_CHECKING:
    from sglang_lora_tree.scheduling.client import AdvisorClient

ROWS_PER_STEP = 8
"""Rows made in one step: about 10 microseconds."""
SECONDS_BETWEEN_REPORTS = 0.1
_MOST_ROWS = 2048  # of one report; more means that the loop is slower than the tree


class Reporter:
    """Collects rows for the next report.

    Args:
        residency: whose tree is reported.
        client: where reports go.
    """

    def __init__(self, residency: Residency, client: AdvisorClient) -> None:
        self._residency = residency
        self._core = residency.core
        self._client = client
        self._core.changes = {}
        self._queue: dict[int, Any] = {}
        """Requests that joined the queue and are not reported yet, by arrival."""
        self._queued: list[QueuedRow] = []
        self._left: dict[int, None] = {}
        self._nodes: list[NodeRow] = []
        self._removed: list[int] = []
        self._is_reset = False
        self._next_report = 0.0
        self._resets = self._core.resets

    def note_queued(self, req: Any) -> None:
        """A request joined the queue."""
        arrival = req.lora_tree_ticket.waiting.arrival
        self._queue[arrival] = req
        self._left.pop(arrival, None)

    def note_admitted(self, reqs: Iterable[Any]) -> None:
        """Requests left the queue."""
        for req in reqs:
            arrival = req.lora_tree_ticket.waiting.arrival
            self._queue.pop(arrival, None)
            self._left[arrival] = None

    def step(self, now: float, waiting: Sequence[Any], num_running: int) -> None:
        """Once per loop step: make a few rows, and send them when it is time."""
        if self._client.needs_reset or self._core.resets != self._resets:
            self._reset(waiting)
        self._make_rows(ROWS_PER_STEP)
        if now >= self._next_report:
            self._next_report = now + SECONDS_BETWEEN_REPORTS
            self._send(now, len(waiting), num_running)

    def forget(self) -> None:
        """Nobody listens: keep nothing."""
        for rows in (self._core.changes, self._queue, self._queued, self._left, self._nodes, self._removed):
            rows.clear()  # type: ignore[union-attr]

    def _reset(self, waiting: Sequence[Any]) -> None:
        self.forget()
        self._client.needs_reset = False
        self._is_reset = True
        self._resets = self._core.resets
        self._core.note_all_changed()
        self._queue.update((req.lora_tree_ticket.waiting.arrival, req) for req in waiting)

    def _make_rows(self, count: int) -> None:
        changes = self._core.changes
        assert changes is not None
        if len(self._nodes) + len(self._removed) + len(self._queued) > _MOST_ROWS:
            return
        while count and self._queue:
            arrival, req = self._queue.popitem()
            waiting = req.lora_tree_ticket.waiting
            self._queued.append(QueuedRow(arrival, waiting.arrived_at, len(req.origin_input_ids), waiting.members))
            count -= 1
        while count and changes:
            node_id, _ = changes.popitem()
            count -= 1
            node = self._core.get_node(node_id)
            if node is None:
                self._removed.append(node_id)
            else:
                self._nodes.append(NodeRow(*self._core.row_of(node)))

    def _send(self, now: float, num_waiting: int, num_running: int) -> None:
        cache, counters = self._residency.cache, self._residency.counters
        load = Load(
            num_waiting,
            num_running,
            cache.num_pool_slots,
            int(cache.num_free_slots),
            int(cache.host_pool.size_per_token),
            float(cache.load_bytes),
            cache.load_seconds,
            float(counters.read_bytes),
            counters.read_seconds,
        )
        self._client.send(
            Report(
                self._client.epoch,
                self._client.next_sequence,
                self._is_reset,
                now,
                load,
                tuple(self._queued),
                tuple(self._left),
                tuple(self._nodes),
                tuple(self._removed),
            )
        )
        self._is_reset = False
        for made in (self._queued, self._left, self._nodes, self._removed):
            made.clear()  # type: ignore[attr-defined]


