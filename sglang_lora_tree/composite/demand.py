"""From a request's ``lora_id`` to what it needs: digests instead of ids, and the weights its kernels multiply with."""

from __future__ import annotations

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
    """Resolves ``lora_id`` strings, remembering what it has seen (an id's digest never changes)."""

    _CAPACITY = 65536

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._known: dict[str, WeightedDemand | None] = {}
        self._weights: dict[str, tuple[float, ...]] = {}

    def resolve(self, lora_id: str | None) -> WeightedDemand | None:
        """What a request needs; None for the base model, also for a mix whose weights cancel.

        Raises:
            KeyError: an id that is not registered.
        """
        if lora_id is None:
            return None
        if lora_id not in self._known:
            if len(self._known) >= self._CAPACITY:
                self._known.clear()
                self._weights.clear()
            weighted = self._known[lora_id] = self._resolve(lora_id)
            if weighted is not None:
                self._weights[weighted.demand.identity] = weighted.weights
        return self._known[lora_id]

    def forget(self, lora_id: str) -> None:
        """An adapter was unloaded: nothing that names it is valid any more."""
        self._known = {known: value for known, value in self._known.items() if lora_id not in known}

    def weights_of(self, identity: str) -> tuple[float, ...] | None:
        """The weights of a mix, in its members' order, if it was resolved lately (for people to look at)."""
        return self._weights.get(identity)

    def _resolve(self, lora_id: str) -> WeightedDemand | None:
        digests = []
        for member, weight in decode_lora_id(lora_id):
            stored = self._store.by_id(member)
            if stored is None:
                raise KeyError(f"adapter id {member} is not registered")
            digests.append((stored.outline.digest, weight))
        pairs = canonical_members(digests)
        identity = mix_identity(pairs)
        if identity == BASE_IDENTITY:
            return None
        members = tuple(adapter_identity(digest) for digest, _ in pairs)
        return WeightedDemand(Demand(identity, members), tuple(weight for _, weight in pairs))
