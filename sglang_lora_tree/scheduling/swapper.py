"""Adapters and history KV that come to the GPU before a request waits for them.

In: the lists of a plan, the same on every rank. Out: at most one disk read and one copy started in a step of the loop, and
only where they take nothing from anybody: host slots for a waiting request's adapter, GPU slots that are free, a load path
that is idle. What came in is kept for a grace time, so that it is not swapped out again before it is used; if memory runs
short meanwhile, it goes all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.residency import Residency
from sglang_lora_tree.scheduling.protocol import Plan

PREFETCH_SHARE = 0.1
"""Of the pool: what adapters that came in ahead may hold at a time."""


@dataclass
class SwapperCounters:
    """What happened since start; read by ``observability``."""

    reads_ahead: int = 0
    """Adapters read from disk before a pass looked at a request for them."""
    swap_ins_ahead: int = 0
    """Adapters copied to the GPU likewise."""
    proactive_swap_ins: int = 0
    """Nodes copied to the GPU for their Eval, while there was room."""
    used: int = 0
    """Of all these copies, the ones that a request used."""
    thrash: int = 0
    """Of all these copies, the ones that were swapped out unused."""


@dataclass
class _Grace:
    """A node that came in ahead of its use."""

    release: Callable[[], None] | None
    """Ends the lock that keeps it; None once it has."""
    until: float
    uses: int
    """Of the node when it came."""
    slots: int


class Swapper:
    """Carries out plans, little by little.

    Args:
        residency: who is where.
        settings: of ``--lora-tree``.
        busy: identities that running requests compute under.
    """

    def __init__(self, residency: Residency, settings: Settings, busy: Callable[[], Iterable[str]]) -> None:
        self.counters = SwapperCounters()
        self._residency = residency
        self._settings = settings
        self._busy = busy
        residency.release_ahead = self.release_all
        self._plan: Plan | None = None
        self._num_read = self._num_fetched = self._num_swapped_in = 0
        """How far the lists of the plan have been followed."""
        self._graces: dict[int, _Grace] = {}
        self._resets = residency.core.resets

    def follow(self, plan: Plan) -> None:
        """The lists of a new plan replace those of the one before."""
        self._plan = plan
        self._num_read = self._num_fetched = 0 if self._settings.prefetch else len(plan.prefetch)
        self._num_swapped_in = 0

    def stop(self) -> None:
        """There is no plan any more."""
        self._plan = None

    def step(self, now: float) -> None:
        """Once per loop step: at most one read and one copy."""
        if self._residency.core.resets != self._resets:
            self._resets = self._residency.core.resets
            self._graces.clear()  # their nodes and locks went with the tree
            self.stop()
        if self._graces:
            self._end_graces(now)
        plan = self._plan
        if plan is None:
            return
        if self._num_read < len(plan.prefetch):
            self._read_next(plan.prefetch[self._num_read])
        if self._num_fetched < len(plan.prefetch):
            self._fetch_next(plan.prefetch[self._num_fetched], now)
        elif self._num_swapped_in < len(plan.swap_in):
            self._swap_in_next(plan.swap_in[self._num_swapped_in], now)

    def release_all(self) -> bool:
        """Memory is short: what came in ahead may go. True if there was any."""
        held = [grace for grace in self._graces.values() if grace.release is not None]
        for grace in held:
            _let_go(grace)
        return bool(held)

    @property
    def num_left(self) -> int:
        """Nodes that the plan would have on the GPU and that have not been looked at."""
        return 0 if self._plan is None else len(self._plan.swap_in) - self._num_swapped_in

    @property
    def spare_slots(self) -> float:
        """Free slots beyond those that keep the pool's use at ``swap_in_below``; not above 0 if nothing may come in unasked."""
        cache = self._residency.cache
        return cache.num_free_slots - (1.0 - self._settings.swap_in_below) * cache.num_pool_slots

    # ---- Steps ----

    def _tier_of(self, identity: str) -> str | None:
        residency = self._residency
        return None if residency.store.get(identity) is None else residency.tier_of(identity)

    def _read_next(self, identity: str) -> None:
        """Reads wait for no copy: the disk is slower than the link."""
        self._num_read += 1
        if self._tier_of(identity) == "disk":
            self.counters.reads_ahead += self._residency.read_ahead(identity)

    def _fetch_next(self, identity: str, now: float) -> None:
        residency, is_on_host = self._residency, self._tier_of(identity) == "host"
        if is_on_host and not residency.cache.is_load_path_idle():
            return
        self._num_fetched += 1
        if is_on_host:
            lora_node = residency.swap_in_ahead(identity, self._prefetch_room)
            if lora_node is not None:
                self.counters.swap_ins_ahead += 1
                self._keep(lora_node.node.id, now)

    def _swap_in_next(self, node_id: int, now: float) -> None:
        residency = self._residency
        if not residency.cache.is_load_path_idle():
            return
        self._num_swapped_in += 1
        if residency.swap_in_node(node_id, int(self.spare_slots), self._busy):
            self.counters.proactive_swap_ins += 1
            self._keep(node_id, now)

    @property
    def _prefetch_room(self) -> int:
        """Slots for adapters that requests wait for: the free ones, and a small part of the pool from cold history KV."""
        cache = self._residency.cache
        held = sum(grace.slots for grace in self._graces.values() if grace.release is not None)
        return int(cache.num_free_slots + max(min(cache.evictable_size(), PREFETCH_SHARE * cache.num_pool_slots - held), 0))

    def _keep(self, node_id: int, now: float) -> None:
        node = self._residency.core.node_by_id(node_id)
        release = self._residency.cache.hold_node(node_id)
        self._graces[node_id] = _Grace(release, now + self._settings.grace_seconds, node.usage.uses, len(node.key))

    def _end_graces(self, now: float) -> None:
        core = self._residency.core
        for node_id, grace in list(self._graces.items()):
            node = core.get_node(node_id)
            if node is None or node.evicted:
                self.counters.thrash += 1
            elif node.usage.uses > grace.uses:
                self.counters.used += 1
            elif now < grace.until:
                continue
            _let_go(grace)
            del self._graces[node_id]


def _let_go(grace: _Grace) -> None:
    if grace.release is not None:
        grace.release()
        grace.release = None


