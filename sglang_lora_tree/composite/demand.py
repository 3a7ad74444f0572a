"""From a request's ``lora_id`` to what it needs: digests instead of ids, and the weights its kernels multiply with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_lora_tree.composite.lora_id import decode_lora_id
from sglang_lora_tree.radix.identity import (
    BASE_IDENTITY,
    adapter_identity,
    canonical_members,
    mix_identity,
)
from sglang_lora_tree.radix.residency import Demand
from sglang_lora_tree.radix.store import AdapterStore


@dataclass(frozen=True)
class WeightedDemand:
    """A demand with one weight per member, in the members' order."""

    demand: Demand
    weights: tuple[float, ...]


class DemandResolver:
    """Resolves ``lora_id`` strings, remembering what it has seen lately (an id's digest never changes)."""

    CAPACITY = 16384
    """Mixes that are remembered, a kilobyte each; more than requests that run and wait, or each of them is resolved again and
    again, at 20 microseconds."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._known: dict[str, WeightedDemand | None] = {}
        self._mixes_of: dict[str, list[str]] = {}
        """What is known that names an adapter, by the adapter's id: an unload must not look through everything."""
        self._weights: dict[str, tuple[float, ...]] = {}
        self._num_resolved = 0

    def resolve(self, lora_id: str | None) -> WeightedDemand | None:
        """What a request needs; None for the base model, also for a mix whose weights cancel.

        Raises:
            KeyError: an id that is not registered.
        """
        if lora_id is None:
            return None
        if lora_id not in self._known:
            if self._num_resolved == self.CAPACITY:  # not what is left of them: mixes of what was unloaded stay listed
                self._num_resolved = 0
                for remembered in (self._known, self._mixes_of, self._weights):
                    remembered.clear()
            self._num_resolved += 1
            members = decode_lora_id(lora_id)
            weighted = self._known[lora_id] = self._resolve(members)
            for member, _ in members:
                self._mixes_of.setdefault(member, []).append(lora_id)
            if weighted is not None:
                self._weights[weighted.demand.identity] = weighted.weights
        return self._known[lora_id]

    def forget(self, lora_id: str) -> None:
        """An adapter was unloaded: nothing that names it is valid any more."""
        for mix in self._mixes_of.pop(lora_id, ()):
            self._known.pop(mix, None)  # another member's unload may have been first

    def weights_of(self, identity: str) -> tuple[float, ...] | None:
        """The weights of a mix, in its members' order, if it was resolved lately (for people to look at)."""
        return self._weights.get(identity)

    def _resolve(self, weighted_ids: Sequence[tuple[str, float]]) -> WeightedDemand | None:
        digests = []
        for member, weight in weighted_ids:
            stored = self._store.by_id(member)
            if stored is None:
                raise KeyError(f"adapter id {member} is not registered")
            digests.append((stored.outline.digest, weight))
        pairs = canonical_members(digests)
        identity = mix_identity(pairs)
        if identity == BASE_IDENTITY:
            return None
        members = tuple(sys.intern(adapter_identity(digest)) for digest, _ in pairs)  # one text for all mixes
        return WeightedDemand(Demand(identity, members), tuple(weight for _, weight in pairs))
