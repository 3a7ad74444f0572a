"""What the advisor is told: changes of the tree and of the queue.

In the loop: what changes is noted by reference as it happens, and nothing else is done. In the thread that talks to the advisor
(``client``): :meth:`Reporter.collect` makes rows of it, a few at a time, so that it never holds the interpreter for long. It
reads nodes while the loop changes them; a row may be half old and half new, but then the change has been noted after it, and
another row follows. A reset is the same thing with everything changed, walked little by little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang_lora_tree.radix.identity import BASE_IDENTITY
from sglang_lora_tree.radix.lora_node_hooks import LoraNode
from sglang_lora_tree.radix.residency import Residency
from sglang_lora_tree.scheduling.orders import Waiting
from sglang_lora_tree.scheduling.protocol import ABSENT, Load, Report

if TYPE_CHECKING:
    from sglang_lora_tree.scheduling.client import AdvisorClient

ROWS_AT_A_TIME = 256
"""Rows that one report has at most; making them takes half a millisecond."""
_MOST_SETS = 65_536  # of one epoch's table; after that it begins again


class Reporter:
    """Collects rows for reports.

    Args:
        residency: whose tree is reported.
        client: where reports go.
    """

    def __init__(self, residency: Residency, client: AdvisorClient) -> None:
        self._residency = residency
        self._core = residency.core
        self._client = client
        self._core.changes = {}
        self._resets = self._core.resets
        self._now, self._num_waiting, self._num_running = 0.0, 0, 0
        self._events: deque[tuple[Any, bool] | list[Any]] = deque()
        """Requests that joined (True) or left (False) the queue; a list: everything is to be reported again, this queue too."""
        # The rest is the talking thread's.
        self._waiting: list[Any] = []
        """Requests of the queue as it was at the last reset, the oldest last."""
        self._walk: Iterator[int] | None = None
        """Over all nodes, after a reset."""
        self._sets: dict[tuple[str, ...], int] = {}
        self._new_sets: list[tuple[str, ...]] = []
        self._requests: list[float] = []
        self._nodes: list[float] = []
        self._is_reset = False
        client.collect = self.collect

    # ---- In the loop ----

    def note_queued(self, req: Any) -> None:
        """A request joined the queue."""
        self._events.append((req.lora_tree_ticket.waiting, True))

    def note_admitted(self, reqs: Iterable[Any]) -> None:
        """Requests left the queue."""
        for req in reqs:
            self._events.append((req.lora_tree_ticket.waiting, False))

    def step(self, now: float, waiting: Sequence[Any], num_running: int) -> None:
        """Once per loop step."""
        self._now, self._num_waiting, self._num_running = now, len(waiting), num_running
        if self._client.needs_reset or self._core.resets != self._resets:
            self._client.needs_reset = False
            self._resets = self._core.resets
            self._events = deque((list(waiting),))

    # ---- In the thread that talks ----

    @property
    def is_done(self) -> bool:
        """Whether everything that has changed is in a row."""
        return not (self._events or self._waiting or self._core.changes or self._walk)

    def collect(self) -> Report:
        """The next report."""
        events, left = self._events, ROWS_AT_A_TIME
        while left and (self._waiting or events):
            left -= 1
            if self._waiting:
                self._add_request(self._waiting.pop().lora_tree_ticket.waiting, True)
                continue
            event = events.popleft()
            if isinstance(event, list):
                self._begin_again(event)
            else:
                self._add_request(*event)
        changes = self._core.changes
        assert changes is not None
        while left and changes:
            node_id, _ = changes.popitem()
            self._add_node(node_id)
            left -= 1
        while left and self._walk is not None:
            node_id = next(self._walk, -1)
            if node_id < 0:
                self._walk = None
            elif node_id != self._core.virtual_root.id and self._core.get_node(node_id) is not None:
                self._add_node(node_id)
                left -= 1
        return self._report()

    def _begin_again(self, waiting: list[Any]) -> None:
        self._is_reset = True
        self._waiting = waiting[::-1]
        self._sets, self._new_sets, self._requests, self._nodes = {}, [], [], []
        # Changes that are noted already stay: told twice, they do no harm.
        self._walk = (node.id for node in self._core.subtree(LoraNode(BASE_IDENTITY, self._core.virtual_root)))

    def _add_request(self, waiting: Waiting, is_waiting: bool) -> None:
        if is_waiting:
            self._requests += (waiting.arrival, waiting.arrived_at, waiting.length, self._set_of(waiting.members))
        else:
            self._requests += (waiting.arrival, 0.0, 0.0, ABSENT)

    def _add_node(self, node_id: int) -> None:
        node = self._core.get_node(node_id)
        if node is None:
            self._nodes += (node_id, 0.0, ABSENT, 0.0, ABSENT, 0.0, 0.0)
            return
        try:
            _, parent, identity, slots, on_gpu, on_host, visits, used_at = self._core.row_of(node)
        except AttributeError:
            return  # it leaves the tree at this moment, and that will be noted, too
        adapter = ABSENT if identity is None else self._set_of((identity,))
        self._nodes += (node_id, parent, adapter, slots, on_gpu + 2 * on_host, visits, used_at)

    def _set_of(self, members: tuple[str, ...]) -> int:
        place = self._sets.get(members)
        if place is None:
            place = self._sets[members] = len(self._sets)
            self._new_sets.append(members)
            if place == _MOST_SETS:
                self._client.needs_reset = True
        return place

    def _report(self) -> Report:
        cache, counters, client = self._residency.cache, self._residency.counters, self._client
        load = Load(
            self._num_waiting,
            self._num_running,
            cache.num_pool_slots,
            int(cache.num_free_slots),
            int(cache.host_pool.size_per_token),
            float(cache.load_bytes),
            cache.moved_in.seconds,
            float(counters.read_bytes),
            counters.read_seconds,
        )
        rows = self._new_sets, self._requests, self._nodes
        report = Report(client.epoch, client.next_sequence, self._is_reset, self._now, load, *rows)
        self._is_reset = False
        self._new_sets, self._requests, self._nodes = [], [], []
        return report
