"""Which waiting request may bring in which adapters, and who runs when they are there.

In: what requests need (:class:`Demand`), in queue order, once per scheduling pass. Out: READY, WAIT or FAILED for each,
with copies and reads under way (``tiers``) for those that wait. Everything here runs in the scheduler loop and never waits.
Every decision depends only on the order of calls, so ranks agree.

How nobody starves: an adapter brought in for a request is held (locked) until that request is admitted. The oldest request
that finds no room for ``patience_passes`` passes becomes the blocker: from then on younger requests bring in nothing and
lose what they hold, and after four times as many passes none of them is admitted before it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_lora_tree.config import Settings
from sglang_lora_tree.kernels.table import AdapterTable
from sglang_lora_tree.radix.identity import BASE_IDENTITY
from sglang_lora_tree.radix.layout import Packer
from sglang_lora_tree.radix.pins import Pins
from sglang_lora_tree.radix.store import AdapterStore, StoredAdapter
from sglang_lora_tree.radix.tiers import Counters, Demand, Tiers

if TYPE_CHECKING:
    from sglang_lora_tree.radix.cache_hooks import LoraTreeCache
    from sglang_lora_tree.radix.lora_node_hooks import LoraNode

__all__ = ["Counters", "Demand", "Residency", "Verdict"]

MOST_LATE_SLOTS = 3200
"""Of adapters that come in with one batch, which all of it waits for. Their copy takes about as long as a decode step (8B model,
H200: docs/eval.md)."""

OVERTAKE_FACTOR = 4
"""After this many times ``patience_passes``, nobody younger than the blocker is admitted."""


class Verdict(enum.Enum):
    READY = enum.auto()
    WAIT = enum.auto()
    FAILED = enum.auto()


@dataclass
class _Hold:
    """What one waiting request keeps from being evicted; called to let go."""

    device: dict[str, Callable[[], None]] = field(default_factory=dict)
    host: dict[str, Callable[[], None]] = field(default_factory=dict)

    def release(self) -> None:
        for undo in (*self.device.values(), *self.host.values()):
            undo()
        self.device.clear()
        self.host.clear()


class Residency(Tiers):
    """The tiers, as requests use them.

    Args:
        cache, store, packer, table, settings: as for :class:`Tiers`.
    """

    def __init__(
        self, cache: LoraTreeCache, store: AdapterStore, packer: Packer, table: AdapterTable, settings: Settings
    ) -> None:
        super().__init__(cache, store, packer, table, settings)
        self.pins = Pins(self)
        self.on_cold_start: Callable[[float], None] = lambda seconds: None
        self.release_ahead: Callable[[], bool] = lambda: False
        """Lets go of what came in before anybody asked for it; True if there was any."""
        self.on_read_failed = self._note_failure
        self._failures: dict[str, tuple[str, frozenset[str]]] = {}
        """Adapters that could not be read: why, and who waited when that became known; whoever comes later tries again."""
        self._holds: dict[str, _Hold] = {}
        self._passes_waited: dict[str, int] = {}
        self._first_look: dict[str, float] = {}
        self._waiting: Iterable[str] = []
        """Ids of the requests of the last pass, in order; only read when it matters who they are."""
        self._blocker: str | None = None
        self._kv_in_flight: dict[int, str] = {}
        cache.on_reset = self._forget_everything
        cache.on_shortage = lambda: self.release_ahead() or self.release_holds()

    # ---- Registration ----

    def note_registered(self, stored: StoredAdapter) -> None:
        super().note_registered(stored)
        self.pins.update(stored)

    def note_unregistered(self, stored: StoredAdapter) -> None:
        self.pins.update(stored)
        super().note_unregistered(stored)

    # ---- What a request may need ----

    def pinned_slots(self, but: Iterable[str] = ()) -> int:
        """Slots of pinned adapters, other than those named."""
        return self.pins.slots(but)

    def reserved_slots(self, demand: Demand | None) -> int:
        """Slots that a request can never have for its tokens: its adapters', its mix node's and those of pinned adapters."""
        return self.pinned_slots() if demand is None else self.slots_of(demand) + self.pinned_slots(but=demand.members)

    def room_for_output(self, demand: Demand | None, prompt_length: int) -> int:
        """New tokens that a request may ever have; less than one: it can never run."""
        # One page for its last token's, one for the allocator's rounding, as SGLang's own bound keeps it.
        return self.cache.num_pool_slots - self.reserved_slots(demand) - prompt_length - 2 * self.cache.page_size

    def find_misfit(self, demand: Demand | None, prompt_length: int) -> str | None:
        """Why a request can never run beside its adapters and the pinned ones, for its sender; None if it can."""
        reserved = self.reserved_slots(demand)
        if reserved == 0:
            return None  # the whole pool is there for it, and SGLang has looked at that
        members = () if demand is None else demand.members
        pinned = len(self.pins.others(members))
        if members and len(members) + pinned > self.table.capacity:
            return (
                f"the request needs {len(members)} adapters on the GPU at once, beside {pinned} pinned ones, and there is room "
                f"for {self.table.capacity}: unpin adapters, send a smaller mix, or raise max_resident_adapters"
            )
        if self.room_for_output(demand, prompt_length) >= 1:
            return None
        slots = 0 if demand is None else self.slots_of(demand)
        return (
            f"the request does not fit the pool: its adapters take {slots} slots, pinned adapters {reserved - slots}, its prompt "
            f"{prompt_length}, of {self.cache.num_pool_slots} in all; send a shorter prompt or a smaller mix, unpin adapters, or "
            "raise --max-total-tokens"
        )

    # ---- One scheduling pass ----

    def poll(self, live: Callable[[], Iterable[tuple[Demand | None, int]]] = tuple) -> None:
        """Once per loop step, before a pass: take in what threads have read, and move pinned adapters along.

        Args:
            live: what every request that is not finished needs, with the most tokens that it may ever have.
        """
        # In most steps there is none of this, and a call that finds nothing to do costs as much as what calls it.
        if self.reader.jobs:
            self.reader.poll()
        if self.cache.delayed_loads:
            self.cache.advance_delayed_loads()
        if self.pins.wanted:
            self.pins.advance(live)

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that needs the loop to go on."""
        return self.reader.num_pending > 0 or bool(self.pins.missing)

    def begin_pass(self, waiting: Iterable[str], has_lost: bool = True) -> None:
        """Start a pass over the queue.

        Args:
            waiting: ids of its requests, in order.
            has_lost: whether requests may have left the queue since the last pass, other than by :meth:`note_admitted`.
        """
        self._waiting = waiting
        if has_lost and (self._holds or self._failures or self._passes_waited or self._first_look):
            self._forget_absent(set(self._order))
        # Few requests have found no room; the whole queue is looked through only if one of them has lost patience.
        waited, patience = self._passes_waited, self.settings.patience_passes
        if waited and max(waited.values()) >= patience:
            self._blocker = next((name for name in self._order if waited.get(name, 0) >= patience), None)
        else:
            self._blocker = None

    @property
    def _order(self) -> list[str]:
        if not isinstance(self._waiting, list):
            self._waiting = list(self._waiting)
        return self._waiting

    def _forget_absent(self, present: set[str]) -> None:
        """Nothing is kept of, or for, requests that are gone."""
        for request_id in [request_id for request_id in self._holds if request_id not in present]:
            self._holds.pop(request_id).release()
        self._failures = {name: failure for name, failure in self._failures.items() if not present.isdisjoint(failure[1])}
        self._passes_waited = {name: count for name, count in self._passes_waited.items() if name in present}
        self._first_look = {name: since for name, since in self._first_look.items() if name in present}

    def admit(self, request_id: str, demand: Demand | None, room: int, alone: bool) -> Verdict:
        """Whether a waiting request can run now; if not, what it needs is on its way.

        Args:
            request_id: of the request, as given to :meth:`begin_pass`.
            demand: None for the base model.
            room: slots that may still be taken in this pass without touching what admitted requests were promised.
            alone: nothing runs and nothing has been admitted in this pass.
        """
        if self._blocker is not None and self._must_wait_for_blocker(request_id, demand):
            return Verdict.WAIT
        if self._kv_in_flight and self._must_wait_for_kv(demand):
            return Verdict.WAIT
        if demand is None:
            return Verdict.READY
        if self._failures and self.failure_of(request_id, demand) is not None:
            return Verdict.FAILED
        members, resident, is_new = demand.members, self._indices, request_id not in self._first_look
        if is_new:
            self._first_look[request_id] = time.monotonic()
            self.counters.adapter_hits += len(members)
        if not all(map(resident.__contains__, members)):
            absent = [member for member in members if member not in resident]
            if is_new:
                self.counters.adapter_hits -= len(absent)
                self.counters.adapter_misses += len(absent)
            self._bring(request_id, demand, absent, room, alone)
            if self.failure_of(request_id, demand) is not None:
                return Verdict.FAILED
            if not all(map(resident.__contains__, members)):
                return Verdict.WAIT
        if self.cache.has_loads_in_flight and not all(map(self._may_be_used, members)):
            return Verdict.WAIT
        if demand.is_mix and not self.core.is_resident(demand.identity) and not self._make_mix(demand):
            self._note_no_room(request_id, alone)
            return Verdict.WAIT
        return Verdict.READY

    def _may_be_used(self, member: str) -> bool:
        """Whether a batch that is formed now finds every row of an adapter, which is on the GPU or comes, when it needs it."""
        lora_node = self.core.lora_nodes[member]
        return not self.cache.is_in_flight(lora_node.node.id) or self.cache.comes_with_batch(lora_node)

    def note_rejected(self, request_id: str, alone: bool) -> None:
        """A request that was READY found no room for its tokens."""
        self._note_no_room(request_id, alone)

    def note_admitted(self, request_id: str, demand: Demand | None) -> None:
        """A request runs, and keeps what it needs itself: count the visit of its node and of its adapters."""
        self._passes_waited.pop(request_id, None)
        since, hold = self._first_look.pop(request_id, None), self._holds.pop(request_id, None)
        if hold is not None:
            assert since is not None, "nothing is brought in for a request that nobody has looked at"
            seconds = time.monotonic() - since
            self.counters.cold_starts += 1
            self.counters.cold_start_seconds += seconds
            self.on_cold_start(seconds)
            hold.release()
        # In one order: what policies learn depends on it, and sets of strings have another on every rank.
        for identity in () if demand is None else dict.fromkeys((demand.identity, *demand.members)):
            lora_node = self.core.lora_nodes.get(identity)
            if lora_node is not None:
                self.core.note_visit(lora_node)

    def failure_of(self, request_id: str, demand: Demand | None) -> str | None:
        """Why a request can not be served, if it can not."""
        for member in () if demand is None else demand.members:
            error, waiting = self._failures.get(member, ("", frozenset()))
            if request_id in waiting:
                return error
        return None

    def end_pass(self, batch_formed: bool) -> None:
        """Finish a pass; without a batch, nothing else would start the copies that were queued."""
        if not batch_formed:
            self.cache.submit_loads()

    def release_holds(self, younger_than: str | None = None, but: str | None = None) -> bool:
        """Take back what waiting requests hold: all, those behind one in the queue, or all but one. True if there was any."""
        places = {} if younger_than is None else {name: place for place, name in enumerate(self._order)}
        place = -1 if younger_than is None else places.get(younger_than, -1)
        names = [
            name
            for name, hold in self._holds.items()
            if places.get(name, 0) > place and name != but and (hold.device or hold.host)
        ]
        for name in names:
            self._holds[name].release()  # not popped: its request may be bringing something in at this moment
        return bool(names)

    # ---- Ahead of requests ----

    def read_ahead(self, identity: str) -> bool:
        """Start reading an adapter that is on disk only; False if it is not, or host memory has no room."""
        if identity not in self._layouts or identity in self._reading or identity in self.core.lora_nodes:
            return False
        host, needed = self.cache.host_pool, self._layouts[identity].num_slots
        if host.available_size() < needed:
            self.cache.evict_host(needed - host.available_size())  # cold leaves; what is on the GPU stays
        return host.available_size() >= needed and self.store.get(identity) is not None and self.start_reading(identity)

    def swap_in_ahead(self, identity: str, room: int) -> LoraNode | None:
        """Start copying an adapter from host memory, if it takes no more than ``room`` slots; its node, or None."""
        lora_node = self.core.lora_nodes.get(identity)
        if lora_node is None or lora_node.is_resident or self._layouts[identity].num_slots > room:
            return None
        if not self.has_free_index or not self.start_swap_in(lora_node):
            return None
        self.cache.submit_loads()
        return lora_node

    def swap_in_node(self, node_id: int, room: int, busy: Callable[[], Iterable[str]]) -> bool:
        """Start copying a node whose parent is on the GPU; False if that is no longer so, or it does not fit ``room``.

        Args:
            busy: identities that running requests compute under. A chunk of theirs could come to share history KV that is
                still on its way, and nothing would make it wait.
        """
        node = self.core.get_node(node_id)
        if node is None or not node.evicted or not node.backuped or len(node.key) > room:
            return False
        lora_node = self.core.find(node_id)
        if lora_node is not None:
            return not lora_node.is_mix and self.swap_in_ahead(lora_node.identity, room) is not None
        owner = self.core.lora_node_of(node)
        identity = BASE_IDENTITY if owner is None else owner.identity
        if node.parent.evicted or identity in set(busy()) or not self.cache.start_load(node_id):
            return False
        self._kv_in_flight[node_id] = identity
        return True

    def _must_wait_for_kv(self, demand: Demand | None) -> bool:
        """Whether history KV that a request may match is on its way to the GPU without a batch to wait for it."""
        self._kv_in_flight = {node: name for node, name in self._kv_in_flight.items() if self.cache.is_in_flight(node)}
        return (BASE_IDENTITY if demand is None else demand.identity) in self._kv_in_flight.values()

    # ---- What a request that waits brings in ----

    def _must_wait_for_blocker(self, request_id: str, demand: Demand | None) -> bool:
        if self._blocker is None or self._blocker == request_id:
            return False
        if self._holds_everybody_back():
            return True
        return demand is not None and not all(self.core.is_resident(member) for member in demand.members)

    def _holds_everybody_back(self) -> bool:
        """Whether nobody but the blocker may be admitted."""
        if self._blocker is None:
            return False
        return self._passes_waited[self._blocker] >= OVERTAKE_FACTOR * self.settings.patience_passes

    def _bring(self, request_id: str, demand: Demand, absent: list[str], room: int, alone: bool) -> None:
        hold = self._holds.setdefault(request_id, _Hold())
        for member in demand.members:
            lora_node = self.core.lora_nodes.get(member)
            if lora_node is None:
                if member not in self._reading and not self.start_reading(member):
                    self._note_no_room(request_id, alone)
            elif lora_node.is_resident:
                if member not in hold.device:
                    hold.device[member] = self.cache.hold(lora_node)
            elif member not in hold.host:
                hold.host[member] = self.cache.hold_host(lora_node)
        on_host = [member for member in absent if member in self.core.lora_nodes]
        if not on_host or not self.cache.has_load_slot():
            return
        needed = sum(self._layouts[member].num_slots for member in absent)
        late = needed + sum(self._layouts[lora_node.identity].num_slots for lora_node in self.cache.queued_adapters)
        is_too_late = self.cache.waits_by_layer and late > MOST_LATE_SLOTS
        if is_too_late and self.cache.has_queued_loads:  # to the next pass
            self._note_no_room(request_id, alone)
            return
        if needed > room or not self.ensure_indices(len(on_host)):
            self._note_no_room(request_id, alone)
            return
        for member in on_host:
            lora_node = self.core.lora_nodes[member]
            if not self.start_swap_in(lora_node):
                self._note_no_room(request_id, alone)
                return
            hold.device[member] = self.cache.hold(lora_node)
        if is_too_late:  # by itself: no batch waits for it, and the request does so in the queue
            self.cache.submit_loads()

    def _note_no_room(self, request_id: str, alone: bool) -> None:
        self._passes_waited[request_id] = self._passes_waited.get(request_id, 0) + 1
        if self._blocker == request_id and self._holds_everybody_back():
            # One that was retracted stands before the blocker, and what it holds is of no use while it may not run.
            self.release_holds(but=request_id)
        elif alone or self._blocker == request_id:
            # Nothing runs that would make room by finishing: what younger requests hold is all there is.
            self.release_holds(younger_than=request_id)

    def _make_mix(self, demand: Demand) -> bool:
        """Put a mix node on the GPU, whose members are there; False: no room for its page."""
        mix = self.core.lora_nodes.get(demand.identity)
        undo = [self.cache.hold(self.core.lora_nodes[member]) for member in demand.members]
        try:
            if mix is None:
                host_slots = self.cache.allocate_host(self.cache.page_size)
                if host_slots is None:
                    return False
                mix = self.core.add_mix(demand.identity, demand.members, host_slots)
            device_slots = self.cache.allocate_device(self.cache.page_size)
            if device_slots is None:
                return False
            self.core.materialize(mix, device_slots)
            return True
        finally:
            for release in undo:
                release()

    def _note_failure(self, stored: StoredAdapter, error: str) -> None:
        self._failures[stored.identity] = error, frozenset(self._order)
        self.pins.note_unreadable(stored.identity, error)

    def _forget_everything(self) -> None:
        self.forget_everything()  # first: reads under way come to their end in it
        self.pins.reset()
        self._failures.clear()
        self._holds.clear()
        self._passes_waited.clear()
        self._first_look.clear()
        self._kv_in_flight.clear()
