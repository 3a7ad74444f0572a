"""Pinned adapters: brought to the GPU as soon as every request that came before can finish beside them, and kept there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from sglang_lora_tree.radix.store import StoredAdapter
from sglang_lora_tree.radix.tiers import Demand, Tiers

logger = logging.getLogger(__name__)


class Pins:
    """Which adapters to keep on the GPU, and which of them are there."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.wanted: set[str] = set()
        """Pinned adapters."""
        self._held: dict[str, Callable[[], None]] = {}
        """Those that are on the GPU, with what lets them go."""
        self._unreadable: set[str] = set()

    def update(self, stored: StoredAdapter) -> None:
        """A name of an adapter came or went: it is pinned if any of its names is."""
        self._unreadable.discard(stored.identity)
        if stored.is_pinned:
            self.wanted.add(stored.identity)
        else:
            self.wanted.discard(stored.identity)
            self.let_go(stored.identity)

    def let_go(self, identity: str) -> None:
        """Let an adapter leave the GPU again, if it is held there."""
        undo = self._held.pop(identity, None)
        if undo is not None:
            undo()

    def others(self, members: Iterable[str] = ()) -> set[str]:
        """Pinned adapters, but for these."""
        return self.wanted.difference(members)

    def slots(self, but: Iterable[str] = ()) -> int:
        """Slots of pinned adapters, other than those named."""
        return sum(self._tiers.slots_of_adapter(identity) for identity in self.others(but))

    def note_unreadable(self, identity: str, error: str) -> None:
        """An adapter's file cannot be read: it is not tried in every step of the loop; a request for it does, or a flush."""
        if identity in self.wanted and identity not in self._unreadable:
            logger.error("%s (it is pinned)", error)
            self._unreadable.add(identity)

    @property
    def missing(self) -> list[str]:
        """Pinned adapters that are not on the GPU yet, but for those whose files cannot be read."""
        return [
            identity
            for identity in sorted(self.wanted.difference(self._held))
            if identity not in self._unreadable or identity in self._tiers.core.lora_nodes
        ]

    def advance(self, live: Callable[[], Iterable[tuple[Demand | None, int]]]) -> None:
        """Move every missing adapter one step along, if it may.

        Args:
            live: what every request that is not finished needs, with the most tokens that it may ever have.
        """
        if len(self._held) == len(self.wanted):
            return  # in most steps; only wanted ones are held
        missing = self.missing
        if missing:
            needs = list(live())
            for identity in missing:
                if self._may_pin(identity, needs):
                    self._advance(identity)

    def reset(self) -> None:
        """A flush: nothing is on the GPU any more, and what could not be read is tried again."""
        self._held.clear()
        self._unreadable.clear()

    def _may_pin(self, identity: str, needs: list[tuple[Demand | None, int]]) -> bool:
        """Whether every request that came before the pin can still finish beside it; those that come later count it."""
        tiers = self._tiers
        for demand, length in needs:
            members = () if demand is None else demand.members
            pinned = {identity, *self._held}.difference(members)
            slots = sum(map(tiers.slots_of_adapter, pinned)) + (0 if demand is None else tiers.slots_of(demand))
            too_long = slots + length + 2 * tiers.cache.page_size > tiers.cache.num_pool_slots
            if too_long or (members and len(members) + len(pinned) > tiers.table.capacity):
                return False
        return True

    def _advance(self, identity: str) -> None:
        tiers, cache = self._tiers, self._tiers.cache
        lora_node = tiers.core.lora_nodes.get(identity)
        if lora_node is None:
            if not tiers.is_reading(identity):
                tiers.start_reading(identity)
        elif not lora_node.is_resident:
            # Without the first check a pin that must wait for running requests would evict all history meanwhile.
            fits = tiers.slots_of_adapter(identity) <= cache.num_free_slots + cache.evictable_size()
            if fits and cache.has_load_slot() and tiers.ensure_indices(1) and tiers.start_swap_in(lora_node):
                cache.submit_loads()
        elif cache.is_loaded(lora_node):
            self._held[identity] = cache.hold(lora_node)
