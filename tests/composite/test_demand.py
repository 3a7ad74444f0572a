"""From ids to digests: what is remembered is right after an unload, and never grows beyond a bound."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_lora_tree.composite import manager_hooks
from sglang_lora_tree.composite.demand import DemandResolver
from sglang_lora_tree.composite.lora_id import encode_lora_id
from sglang_lora_tree.composite.manager_hooks import TreeLoRAManager
from sglang_lora_tree.radix.layout import Outline
from sglang_lora_tree.radix.store import AdapterStore, Registration


def register(store: AdapterStore, lora_id: str, content: str) -> None:
    digest = hashlib.sha256(content.encode()).hexdigest()
    store.add(Registration(lora_id, lora_id, "/x"), Outline(digest, np.zeros((1, 7), np.int32), np.ones((1, 7), np.float32)))


@pytest.fixture
def store() -> AdapterStore:
    store = AdapterStore()
    for name in ("a", "b", "c"):
        register(store, name, name)
    return store


def mix(*names: str, weight: float = 0.5) -> str:
    lora_id = encode_lora_id([(name, weight) for name in names])
    assert lora_id is not None
    return lora_id


def test_an_unload_forgets_what_names_the_adapter_and_nothing_else(store: AdapterStore) -> None:
    resolver = DemandResolver(store)
    of_b = resolver.resolve("b")
    for lora_id in ("a", mix("a", "b"), mix("a", "b", "c")):
        resolver.resolve(lora_id)
    assert store.remove("a") is not None
    resolver.forget("a")
    for lora_id in ("a", mix("a", "b"), mix("a", "b", "c")):
        with pytest.raises(KeyError, match="adapter id a is not registered"):
            resolver.resolve(lora_id)
    assert resolver.resolve("b") is of_b
    register(store, "a", "other bytes")
    resolver.forget("c")
    assert resolver.resolve(mix("a", "b")) is not None


def test_mixes_of_endless_variety_and_names_that_come_and_go_are_not_all_remembered(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DemandResolver, "CAPACITY", 50)
    resolver = DemandResolver(store)

    def size() -> int:
        return max(
            len(resolver._known), len(resolver._weights), max(map(len, resolver._mixes_of.values()), default=0)
        )

    for number in range(1, 500):
        weighted = resolver.resolve(mix("a", "b", weight=number / 7))
        assert weighted is not None and weighted.weights == (np.float32(number / 7),) * 2
        assert size() <= 50
    for number in range(500):
        register(store, f"new{number}", str(number))
        resolver.resolve(mix("a", f"new{number}"))
        store.remove(f"new{number}")
        resolver.forget(f"new{number}")
        assert size() <= 50


def test_what_kernels_take_is_not_kept_for_every_mix_that_ever_ran(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing moves in the table while every adapter stays on the GPU."""
    monkeypatch.setattr(manager_hooks, "MOST_MEMBERS", 50)
    manager = object.__new__(TreeLoRAManager)
    manager.resolver = DemandResolver(store)
    manager._members_of, manager._members_version = {}, -1
    monkeypatch.setattr(manager, "attach_pool", lambda: SimpleNamespace(version=0))
    monkeypatch.setattr(manager, "_residency", lambda: SimpleNamespace(index_of=lambda identity: 3))
    first = manager._members(mix("a", "b"))
    assert manager._members(mix("a", "b")) is first
    for number in range(1, 500):
        members = manager._members(mix("a", "b", weight=number / 7))
        assert members.tolist() == [[3.0, np.float32(number / 7)]] * 2
        assert len(manager._members_of) <= 51
