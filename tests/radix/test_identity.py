"""Two requests share history KV exactly when base, adapters, weights and the user's own key are the same."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_lora_tree.radix.identity import (
    BASE_IDENTITY,
    adapter_identity,
    canonical_members,
    identity_of,
    mix_identity,
    namespace_key,
    to_float32,
)

from .tree import Tree, write_adapter

DIGESTS = [f"{number:064x}" for number in range(4)]
float32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
addable = st.floats(-(2.0**124), 2.0**124, width=32)  # five of them are a float32
members = st.lists(st.tuples(st.sampled_from(DIGESTS), addable), max_size=5)
identities = st.one_of(
    st.just(BASE_IDENTITY), st.sampled_from(DIGESTS).map(adapter_identity), members.map(mix_identity)
)
# Text that looks like what we build ourselves is the most likely to collide.
adversarial = st.one_of(
    st.none(),
    st.text(max_size=8),
    identities,
    st.tuples(st.integers(0, 80), identities).map(lambda pair: f"{pair[0]}:{pair[1]}"),
    st.tuples(identities, st.text(max_size=4)).map(lambda pair: namespace_key(*pair)),
)


def bits(pairs):
    return [(digest, struct.pack("<f", weight)) for digest, weight in pairs]


@given(members, members)
def test_identities_are_equal_exactly_when_the_mixes_are(one, other) -> None:
    same = bits(canonical_members(one)) == bits(canonical_members(other))
    assert (mix_identity(one) == mix_identity(other)) == same


@given(members, st.randoms(use_true_random=False))
def test_order_does_not_matter(mix, random) -> None:
    distinct = list(dict(mix).items())  # sums of many may round differently in another order
    shuffled = list(distinct)
    random.shuffle(shuffled)
    assert mix_identity(distinct) == mix_identity(shuffled)


@given(st.sampled_from(DIGESTS), float32)
def test_neighbouring_weights_never_meet(digest, weight) -> None:
    assume(weight != 0 and abs(weight) < 1e38)
    (number,) = struct.unpack("<I", struct.pack("<f", weight))
    (neighbour,) = struct.unpack("<f", struct.pack("<I", number + 1))
    assert mix_identity([(digest, weight)]) != mix_identity([(digest, neighbour)])


def test_what_a_mix_reduces_to() -> None:
    one, other = DIGESTS[:2]
    assert mix_identity([]) == mix_identity([(one, 0.0), (other, -0.0)]) == BASE_IDENTITY
    assert mix_identity([(one, 1.0)]) == mix_identity([(one, 0.25), (one, 0.75), (other, 0.0)]) == adapter_identity(one)
    assert mix_identity([(one, 0.5), (one, -0.5)]) == BASE_IDENTITY
    assert mix_identity([(one, -1.0)]) != adapter_identity(one)
    # Weights are what the kernel multiplies with, so what rounds to 1 is 1.
    assert to_float32(1 + 1e-12) == 1.0 and mix_identity([(one, 1 + 1e-12)]) == adapter_identity(one)
    # Added in float64 before they are rounded: one after the other in float32 would give 0.
    assert canonical_members([(one, 1e8), (one, 1.0), (one, -1e8)]) == [(one, 1.0)]


def test_weights_that_add_up_to_more_than_a_float32_are_an_error() -> None:
    """Two names of one adapter: the scheduler hears of the sum alone, and answers with a 400 to a ValueError."""
    largest = struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]
    assert canonical_members([(DIGESTS[0], largest)]) == [(DIGESTS[0], largest)]
    with pytest.raises(ValueError, match=r"add up to 6.8\d*e\+38"):
        canonical_members([(DIGESTS[0], largest), (DIGESTS[0], largest)])


@given(identities, adversarial, identities, adversarial)
def test_keys_are_equal_exactly_when_identity_and_extra_key_are(identity, extra_key, other, other_extra_key) -> None:
    one, two = namespace_key(identity, extra_key), namespace_key(other, other_extra_key)
    if (identity, extra_key) == (other, other_extra_key):
        assert one == two
    elif identity != other or (extra_key or "") != (other_extra_key or ""):  # SGLang takes an empty key for none
        assert one != two


@given(identities, adversarial)
def test_a_key_gives_its_identity_back(identity, extra_key) -> None:
    assert identity_of(namespace_key(identity, extra_key)) == identity


@given(st.text(max_size=12))
def test_a_foreign_key_is_read_without_an_error(text) -> None:
    assert isinstance(identity_of(text), str)


@pytest.mark.parametrize("text", ["\N{SUPERSCRIPT TWO}:ab", "9" * 5000 + ":ab"])
def test_a_foreign_key_with_strange_digits_is_the_base_model(text: str) -> None:
    assert identity_of(text) == BASE_IDENTITY


def test_no_extra_key_reaches_the_kv_of_another_adapter(tmp_path: Path) -> None:
    """SGLang joins extra_key and lora_id without a separator (its issue 24638)."""
    tokens = list(range(12))
    with Tree() as tree:
        tree.load("a", write_adapter(tmp_path / "a", seed=1))
        tree.load("b", write_adapter(tmp_path / "b", seed=2))
        one, mix = tree.demand({"a": 1.0}), tree.demand({"a": 0.5, "b": 0.5})
        for demand in (one, mix):
            tree.bring_mix(demand)
            tree.add_kv(demand, tokens)
        tree.add_kv(None, tokens)
        tree.check()
        assert [tree.matched(demand, tokens) for demand in (None, one, mix)] == [12, 12, 12]
        attempts = [demand.identity for demand in (one, mix)] + [tree.key(one), tree.key(mix), "a", "b", "lora-node:a"]
        attempts += [f"{len(text)}:{text}" for text in attempts] + [f"0:{text}" for text in attempts]
        for demand in (None, one, mix, tree.demand({"a": 2.0})):
            for attempt in attempts:
                assert tree.matched(demand, tokens, extra_key=attempt) == 0
