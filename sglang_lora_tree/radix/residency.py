"""Who is where: each adapter on disk, in host memory or on the GPU, and which waiting request may bring in which.

In: what requests need (:class:`Demand`), in queue order, once per scheduling pass. Out: READY, WAIT or FAILED for each,
with copies and reads under way for those that wait. Everything here runs in the scheduler loop and never waits; files are
read by ``disk_reader``, rows travel by HiCache. Every decision depends only on the order of calls, so ranks agree.

How nobody starves: an adapter brought in for a request is held (locked) until that request is admitted. The oldest request
that finds no room for ``patience_passes`` passes becomes the blocker: from then on younger requests bring in nothing and
lose what they hold, and after four times as many passes none of them is admitted before it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_lora_tree.config import Settings
from sglang_lora_tree.kernels.table import AdapterTable
from sglang_lora_tree.radix.adapter_files import AdapterFiles, LocalFiles, RemoteFiles
from sglang_lora_tree.radix.disk_reader import DiskReader
from sglang_lora_tree.radix.identity import BASE_IDENTITY
from sglang_lora_tree.radix.layout import AdapterLayout, Outline, Packer
from sglang_lora_tree.radix.store import AdapterStore, StoredAdapter

if TYPE_CHECKING:
    from sglang_lora_tree.radix.cache_hooks import LoraTreeCache
    from sglang_lora_tree.radix.tree_core_hooks import LoraNode

logger = logging.getLogger(__name__)

OVERTAKE_FACTOR = 4
"""After this many times ``patience_passes``, nobody younger than the blocker is admitted."""


@dataclass(frozen=True)
class Demand:
    """What a request needs on the GPU: the node its KV hangs under, and the adapters that node depends on."""

    identity: str
    members: tuple[str, ...]

    @property
    def is_mix(self) -> bool:
        return self.members != (self.identity,)


class Verdict(enum.Enum):
    READY = enum.auto()
    WAIT = enum.auto()
    FAILED = enum.auto()


@dataclass
class Counters:
    """What happened since start; read by ``observability``."""

    adapter_hits: int = 0
    adapter_misses: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    failed_reads: int = 0
    swap_ins: int = 0
    swap_in_slots: int = 0
    swap_outs: int = 0
    swap_out_slots: int = 0
    cold_starts: int = 0
    cold_start_seconds: float = 0.0
    """From a request's first look at an absent adapter to the pass that finds it ready; for metrics only."""


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


class Residency:
    """The three tiers of one scheduler process.

    Args:
        cache: SGLang's prefix cache over the LoRA tree.
        store: registered adapters.
        packer: rows of this rank's pool.
        table: where kernels look adapters up; kept in step with what is on the GPU.
        settings: of ``--lora-tree``.
    """

    def __init__(
        self, cache: LoraTreeCache, store: AdapterStore, packer: Packer, table: AdapterTable, settings: Settings
    ) -> None:
        self.cache = cache
        self.core = cache.tree_core
        self.store = store
        self.packer = packer
        self.table = table
        self.settings = settings
        self.counters = Counters()
        self.on_cold_start: Callable[[float], None] = lambda seconds: None
        self.reader = DiskReader(max(settings.disk_readers, 1), cache.agree)
        self.files: AdapterFiles = RemoteFiles(settings.disk_readers) if settings.disk_readers else LocalFiles()
        self._layouts: dict[str, AdapterLayout] = {}
        self._indices: dict[str, int] = {}
        self._free_indices = list(range(table.capacity - 1, -1, -1))
        self._reading: set[str] = set()
        self._failures: dict[str, tuple[str, frozenset[str]]] = {}
        """Adapters that could not be read: why, and who waited when that became known; whoever comes later tries again."""
        self._holds: dict[str, _Hold] = {}
        self._pinned: set[str] = set()
        """Adapters to keep on the GPU..."""
        self._pins: dict[str, Callable[[], None]] = {}
        """... and those that are there, with what lets them go."""
        self._unreadable_pins: set[str] = set()
        self._passes_waited: dict[str, int] = {}
        self._first_look: dict[str, float] = {}
        self._places: dict[str, int] = {}
        self._blocker: str | None = None
        self._kv_in_flight: dict[int, str] = {}
        self.release_ahead: Callable[[], bool] = lambda: False
        """Lets go of what came in before anybody asked for it; True if there was any."""
        cache.delay_loads = settings.delay_loads
        cache.on_reset = self._forget_everything
        cache.on_shortage = lambda: self.release_ahead() or self.release_holds()
        self.core.listener.on_resident = self._on_resident
        self.core.listener.on_evicted = self._on_evicted
        self.core.listener.on_removed = self._on_removed

    # ---- Registration ----

    def check_fits(self, outline: Outline, name: str) -> AdapterLayout:
        """Plan an adapter's rows; ValueError if it could never be served here."""
        layout = self.packer.plan(outline)
        rank = int(outline.rank.max())
        if rank > self.table.max_rank:
            raise ValueError(
                f"adapter {name}: rank {rank} is above the largest rank served, {self.table.max_rank}: start with "
                f'--lora-tree \'{{"max_rank": {rank}}}\''
            )
        for limit, where, cure in (
            (self.max_adapter_slots, "GPU pool", "raise --max-total-tokens or --mem-fraction-static"),
            (self.cache.host_pool.size, "host pool", "raise --hicache-size or --hicache-ratio"),
        ):
            if layout.num_slots > limit:
                raise ValueError(
                    f"adapter {name} takes {layout.num_slots} slots and could never fit the {where}, which has room for "
                    f"{limit}: {cure}, or compress the adapter"
                )
        return layout

    @property
    def max_adapter_slots(self) -> int:
        """Slots that adapters of one request may take: all but a page for its first token."""
        return self.cache.num_pool_slots - self.cache.page_size

    def note_registered(self, stored: StoredAdapter) -> None:
        """A name was added to the store: its history KV, if any is left, counts again."""
        self._layouts[stored.identity] = self.packer.plan(stored.outline)
        if stored.is_pinned:
            self._pinned.add(stored.identity)
        self._unreadable_pins.discard(stored.identity)
        self._refresh_registered(stored.identity)

    def note_unregistered(self, stored: StoredAdapter) -> None:
        """A name was removed: an adapter without names, and KV of it, is the first to leave from now on."""
        if not stored.is_pinned:
            self._pinned.discard(stored.identity)
            self._unpin(stored.identity)
        self._refresh_registered(stored.identity)
        self._forget_unknown(stored.identity)

    def _forget_unknown(self, identity: str) -> None:
        """Drop the layout of an adapter that neither a name nor the tree knows any more."""
        if identity not in self.core.lora_nodes and self.store.get(identity) is None:
            self._layouts.pop(identity, None)
            self._unreadable_pins.discard(identity)

    def _refresh_registered(self, identity: str) -> None:
        for lora_node in list(self.core.lora_nodes.values()):
            if identity == lora_node.identity or identity in lora_node.members:
                names = lora_node.members or (lora_node.identity,)
                registered = all(self.store.get(name) is not None for name in names)
                self.core.set_registered(lora_node.identity, registered)

    # ---- What a request needs, and may need ----

    def slots_of(self, demand: Demand) -> int:
        """Slots that a request's adapters (and its mix node) take on the GPU, besides its tokens."""
        slots = sum(self._layouts[member].num_slots for member in demand.members)
        return slots + (self.cache.page_size if demand.is_mix else 0)

    def slots_of_adapter(self, identity: str) -> int:
        """Slots that one adapter takes."""
        return self._layouts[identity].num_slots

    def tier_of(self, identity: str) -> str:
        """Where an adapter is: "gpu", "loading", "host" or "disk"."""
        lora_node = self.core.lora_nodes.get(identity)
        if lora_node is None:
            return "disk"
        if not lora_node.is_resident:
            return "host"
        return "gpu" if self.cache.is_loaded(lora_node) else "loading"

    @property
    def resident(self) -> Container[str]:
        """Identities of adapters on the GPU, or on their way there."""
        return self._indices

    @property
    def num_resident(self) -> int:
        """Adapters on the GPU."""
        return len(self._indices)

    @property
    def slots_being_read(self) -> int:
        """Host slots that reader threads are filling; no node owns them yet."""
        # An adapter that was unloaded while it is read has no layout any more.
        return sum(self._layouts[identity].num_slots for identity in self._reading if identity in self._layouts)

    def pinned_slots(self, but: Iterable[str] = ()) -> int:
        """Slots of pinned adapters, other than those named."""
        return sum(self._layouts[identity].num_slots for identity in self._pinned.difference(but))

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
        pinned = len(self._pinned.difference(members))
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

    def index_of(self, identity: str) -> int:
        """The kernels' number of an adapter on the GPU."""
        return self._indices[identity]

    # ---- One scheduling pass ----

    def poll(self, live: Callable[[], Iterable[tuple[Demand | None, int]]] = tuple) -> None:
        """Once per loop step, before a pass: take in what threads have read, and move pinned adapters along.

        Args:
            live: what every request that is not finished needs, with the most tokens that it may ever have.
        """
        self.reader.poll()
        self.cache.advance_delayed_loads()
        missing = self._missing_pins()
        if missing:
            needs = list(live())
            for identity in missing:
                self._advance_pin(identity, needs)

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that needs the loop to go on."""
        return self.reader.num_pending > 0 or bool(self._missing_pins())

    def _missing_pins(self) -> list[str]:
        """Pinned adapters that are not on the GPU yet, but for those whose files cannot be read."""
        return [
            identity
            for identity in sorted(self._pinned.difference(self._pins))
            if identity not in self._unreadable_pins or identity in self.core.lora_nodes
        ]

    def begin_pass(self, waiting: Iterable[str]) -> None:
        """Start a pass over the queue, given its request ids in order."""
        order = list(waiting)
        present = set(order)
        self._places = {request_id: place for place, request_id in enumerate(order)}
        for request_id in [request_id for request_id in self._holds if request_id not in present]:
            self._holds.pop(request_id).release()
        self._failures = {name: failure for name, failure in self._failures.items() if not present.isdisjoint(failure[1])}
        self._passes_waited = {name: count for name, count in self._passes_waited.items() if name in present}
        self._first_look = {name: since for name, since in self._first_look.items() if name in present}
        patience = self.settings.patience_passes
        self._blocker = next((name for name in order if self._passes_waited.get(name, 0) >= patience), None)

    def admit(self, request_id: str, demand: Demand | None, room: int, alone: bool) -> Verdict:
        """Whether a waiting request can run now; if not, what it needs is on its way.

        Args:
            request_id: of the request, as given to :meth:`begin_pass`.
            demand: None for the base model.
            room: slots that may still be taken in this pass without touching what admitted requests were promised.
            alone: nothing runs and nothing has been admitted in this pass.
        """
        if self._must_wait_for_blocker(request_id, demand):
            return Verdict.WAIT
        if self._kv_in_flight and self._must_wait_for_kv(demand):
            return Verdict.WAIT
        if demand is None:
            return Verdict.READY
        if self.failure_of(request_id, demand) is not None:
            return Verdict.FAILED
        absent = [member for member in demand.members if not self.core.is_resident(member)]
        if request_id not in self._first_look:
            self._first_look[request_id] = time.monotonic()
            self.counters.adapter_hits += len(demand.members) - len(absent)
            self.counters.adapter_misses += len(absent)
        if absent:
            self._bring(request_id, demand, absent, room, alone)
            return Verdict.FAILED if self.failure_of(request_id, demand) is not None else Verdict.WAIT
        nodes = [self.core.lora_nodes[member] for member in demand.members]
        if not all(self.cache.is_loaded(node) for node in nodes):
            return Verdict.WAIT
        if demand.is_mix and not self._ensure_mix(demand, nodes):
            self._note_no_room(request_id, alone)
            return Verdict.WAIT
        return Verdict.READY

    def note_rejected(self, request_id: str, alone: bool) -> None:
        """A request that was READY found no room for its tokens."""
        self._note_no_room(request_id, alone)

    def note_admitted(self, request_id: str, demand: Demand | None) -> None:
        """A request runs: count the visit of its node and of its adapters."""
        if request_id in self._holds:
            seconds = time.monotonic() - self._first_look[request_id]
            self.counters.cold_starts += 1
            self.counters.cold_start_seconds += seconds
            self.on_cold_start(seconds)
        for identity in () if demand is None else {demand.identity, *demand.members}:
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
        place = self._places.get(younger_than, -1) if younger_than is not None else -1
        names = [
            name
            for name, hold in self._holds.items()
            if self._places.get(name, 0) > place and name != but and (hold.device or hold.host)
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
        return host.available_size() >= needed and self.store.get(identity) is not None and self._start_reading(identity)

    def swap_in_ahead(self, identity: str, room: int) -> LoraNode | None:
        """Start copying an adapter from host memory, if it takes no more than ``room`` slots; its node, or None."""
        lora_node = self.core.lora_nodes.get(identity)
        if lora_node is None or lora_node.is_resident or self._layouts[identity].num_slots > room:
            return None
        if not self._free_indices or not self.cache.start_swap_in(lora_node):
            return None
        self.cache.submit_loads()
        self.counters.swap_ins += 1
        self.counters.swap_in_slots += self._layouts[identity].num_slots
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

    # ---- Steps towards the GPU ----

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
                if member not in self._reading and not self._start_reading(member):
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
        if needed > room or not self._ensure_indices(len(on_host)):
            self._note_no_room(request_id, alone)
            return
        for member in on_host:
            lora_node = self.core.lora_nodes[member]
            if not self.cache.start_swap_in(lora_node):
                self._note_no_room(request_id, alone)
                return
            self.counters.swap_ins += 1
            self.counters.swap_in_slots += self._layouts[member].num_slots
            hold.device[member] = self.cache.hold(lora_node)

    def _note_no_room(self, request_id: str, alone: bool) -> None:
        self._passes_waited[request_id] = self._passes_waited.get(request_id, 0) + 1
        if self._blocker == request_id and self._holds_everybody_back():
            # One that was retracted stands before the blocker, and what it holds is of no use while it may not run.
            self.release_holds(but=request_id)
        elif alone or self._blocker == request_id:
            # Nothing runs that would make room by finishing: what younger requests hold is all there is.
            self.release_holds(younger_than=request_id)

    def _start_reading(self, identity: str) -> bool:
        stored = self.store.get(identity)
        assert stored is not None, f"{identity} is wanted and not registered"
        # The name may be gone, or another may have come, when the thread gets to it.
        layout, paths = self._layouts[identity], stored.paths
        slots = self.cache.allocate_host(layout.num_slots)
        if slots is None:
            return False
        self._reading.add(identity)
        self.reader.submit(
            lambda: self._read(stored, paths, layout, slots),
            on_done=lambda outcome: self._on_read(stored, slots, *outcome),
            on_failed=lambda error: self._on_read_failed(identity, paths, slots, error),
        )
        return True

    def _read(
        self, stored: StoredAdapter, paths: list[str], layout: AdapterLayout, slots: torch.Tensor
    ) -> tuple[int, float]:
        """In a thread: file -> rows in host memory. Returns bytes and seconds, for metrics."""
        start = time.monotonic()
        rows, num_bytes = self.files.rows(paths, stored.name, stored.outline.digest, self.packer, self.cache.pool.dtype)
        assert len(rows) == layout.num_slots * self.packer.pool.num_planes, "the rows are not those that were planned"
        self.packer.scatter(rows, *self.cache.host_rows(), slots)
        return num_bytes, time.monotonic() - start

    def _on_read(self, stored: StoredAdapter, slots: torch.Tensor, num_bytes: int, seconds: float) -> None:
        self._reading.discard(stored.identity)
        self.counters.reads += 1
        self.counters.read_bytes += num_bytes
        self.counters.read_seconds += seconds
        if self.store.get(stored.identity) is None:
            self.cache.free_host(slots)  # unloaded meanwhile
            return
        self.core.add_adapter(stored.identity, slots)

    def _on_read_failed(self, identity: str, paths: list[str], slots: torch.Tensor, error: str) -> None:
        self._reading.discard(identity)
        self.cache.free_host(slots)
        self.counters.failed_reads += 1
        stored = self.store.get(identity)
        if stored is not None and stored.paths == paths:  # else nobody wants it, or there is another file to try
            self._failures[identity] = error, frozenset(self._places)
            if stored.is_pinned and identity not in self._unreadable_pins:
                # Not tried again in every step of the loop: a request for it does, or a flush.
                logger.error("%s (it is pinned)", error)
                self._unreadable_pins.add(identity)

    def _ensure_mix(self, demand: Demand, members: list[LoraNode]) -> bool:
        mix = self.core.lora_nodes.get(demand.identity)
        if mix is not None and mix.is_resident:
            return True
        undo = [self.cache.hold(member) for member in members]
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

    def _may_pin(self, identity: str, needs: list[tuple[Demand | None, int]]) -> bool:
        """Whether every request that came before the pin can still finish beside it; those that come later count it."""
        for demand, length in needs:
            members = () if demand is None else demand.members
            pinned = {identity, *self._pins}.difference(members)
            slots = sum(self._layouts[name].num_slots for name in pinned) + (0 if demand is None else self.slots_of(demand))
            too_long = slots + length + 2 * self.cache.page_size > self.cache.num_pool_slots
            if too_long or (members and len(members) + len(pinned) > self.table.capacity):
                return False
        return True

    def _advance_pin(self, identity: str, needs: list[tuple[Demand | None, int]]) -> None:
        if not self._may_pin(identity, needs):
            return
        lora_node = self.core.lora_nodes.get(identity)
        if lora_node is None:
            if identity not in self._reading:
                self._start_reading(identity)
        elif not lora_node.is_resident:
            # Without the first check a pin that must wait for running requests would evict all history meanwhile.
            fits = self._layouts[identity].num_slots <= self.cache.num_free_slots + self.cache.evictable_size()
            if not fits or not self.cache.has_load_slot() or not self._ensure_indices(1):
                return
            if self.cache.start_swap_in(lora_node):
                self.counters.swap_ins += 1
                self.counters.swap_in_slots += self._layouts[identity].num_slots
                self.cache.submit_loads()
        elif self.cache.is_loaded(lora_node):
            self._pins[identity] = self.cache.hold(lora_node)

    def _unpin(self, identity: str) -> None:
        undo = self._pins.pop(identity, None)
        if undo is not None:
            undo()

    # ---- The kernels' table follows ----

    def _ensure_indices(self, count: int) -> bool:
        """Make room in the table, which holds fewer adapters than a large pool could."""
        unlocked = sum(not self.core.lora_nodes[identity].is_locked for identity in self._indices)
        if len(self._free_indices) + unlocked < count:
            return False  # evicting would cost history KV and bring nobody in
        while len(self._free_indices) < count:
            victim = self.core.least_valuable(self._indices)
            assert victim is not None, "an adapter came into use by the eviction of another"
            self.cache.evict_adapter(victim)
        return True

    def _on_resident(self, lora_node: LoraNode) -> None:
        if lora_node.is_mix:
            return
        outline = self._outline(lora_node.identity)
        index = self._free_indices.pop()
        self._indices[lora_node.identity] = index
        assert lora_node.device_slots is not None
        self.table.write(
            index,
            lora_node.device_slots,
            torch.from_numpy(self._layouts[lora_node.identity].row_start),
            torch.from_numpy(outline.rank),
            torch.from_numpy(outline.scaling),
        )

    def _on_evicted(self, lora_node: LoraNode) -> None:
        if lora_node.is_mix:
            return
        index = self._indices.pop(lora_node.identity)
        self._free_indices.append(index)
        self.table.clear(index)
        self.counters.swap_outs += 1
        assert lora_node.device_slots is not None
        self.counters.swap_out_slots += len(lora_node.device_slots)

    def _on_removed(self, lora_node: LoraNode) -> None:
        if not lora_node.is_mix:
            self._forget_unknown(lora_node.identity)

    def _outline(self, identity: str) -> Outline:
        stored = self.store.get(identity)
        assert stored is not None, f"{identity} comes to the GPU without being registered"
        return stored.outline

    def _forget_everything(self) -> None:
        """A flush: the tree and both pools are empty. Names stay; adapters come back from their files on next use."""
        self.reader.drain()
        self._reading.clear()
        self._failures.clear()
        self._holds.clear()
        self._pins.clear()
        self._unreadable_pins.clear()
        self._passes_waited.clear()
        self._first_look.clear()
        self._kv_in_flight.clear()
        for index in self._indices.values():
            self.table.clear(index)
            self._free_indices.append(index)
        self._indices.clear()
        for identity in list(self._layouts):
            self._forget_unknown(identity)
