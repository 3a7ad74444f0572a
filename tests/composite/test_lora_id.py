"""lora_id strings: a pure function of the members and their float32 bits, readable back."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lora_tree.composite.lora_id import decode_lora_id, encode_lora_id

ids = st.uuids().map(lambda value: value.hex)
weights = st.floats(width=32, allow_nan=False, allow_infinity=False)
A, B = "a" * 32, "b" * 32


@given(st.dictionaries(ids, weights.filter(bool), min_size=1, max_size=8), st.randoms())
def test_members_read_back_bit_for_bit_in_any_order(members, random):
    pairs = list(members.items())
    random.shuffle(pairs)
    encoded = encode_lora_id(pairs)
    assert encoded == encode_lora_id(sorted(pairs))
    assert decode_lora_id(encoded) == tuple(sorted(pairs))


@given(
    st.dictionaries(ids, weights.filter(bool), min_size=1, max_size=3),
    st.dictionaries(ids, weights, min_size=1, max_size=3),
)
def test_different_mixes_have_different_strings(left, right):
    same = left == {member: weight for member, weight in right.items() if weight}
    assert (encode_lora_id(list(left.items())) == encode_lora_id(list(right.items()))) == same


def test_one_adapter_at_weight_one_is_its_own_id():
    assert encode_lora_id([(A, 1.0)]) == A
    assert encode_lora_id([(A, 0.25), (B, 0.0), (A, 0.75)]) == A
    assert decode_lora_id(A) == ((A, 1.0),)


def test_the_bits_are_those_of_the_nearest_float32():
    assert encode_lora_id([(B, 0.7), (A, -0.3)]) == f"mix:{A}*be99999a,{B}*3f333333"
    next_up = struct.unpack(">f", bytes.fromhex("3f333334"))[0]
    assert encode_lora_id([(A, next_up)]) != encode_lora_id([(A, 0.7)])


@pytest.mark.parametrize("members", [[], [(A, 0.0)], [(A, -0.0)], [(A, 1e-60)], [(A, 0.5), (A, -0.5)]])
def test_no_weight_left_is_the_base_model(members):
    assert encode_lora_id(members) is None


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e39])
def test_weights_out_of_range_are_refused(weight):
    with pytest.raises(ValueError, match="not a finite float32"):
        encode_lora_id([(A, weight)])


@pytest.mark.parametrize("member", ["", "a,b", "a*b", "mix:a"])
def test_ids_that_could_be_misread_are_refused(member):
    with pytest.raises(ValueError, match="cannot stand in a lora_id"):
        encode_lora_id([(member, 0.5)])


@pytest.mark.parametrize(
    "text",
    [
        "mix:",
        f"mix:{A}",
        f"mix:{A}*3f8000000",
        f"mix:{A}*3f800000",
        f"mix:{B}*3f000000,{A}*3f000000",
        f"mix:{A}*7fc00000",
    ],
)
def test_malformed_strings_are_refused(text):
    with pytest.raises(ValueError, match=r"malformed|not a finite"):
        decode_lora_id(text)
