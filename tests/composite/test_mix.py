"""The grammar of mixes: forms that mean the same give one mix, which reads back from its text; all else is refused."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lora_tree.composite.mix import Mix, MixError, UnknownAdapterError, is_one_mix, parse_mix

KNOWN = {"math", "json", "upper", "org/model:v2", "a,b", "a", "{", "math:0.5"}
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
weights = st.floats(width=32, allow_nan=False, allow_infinity=False)
mixes = st.dictionaries(names, weights.filter(bool), min_size=1, max_size=8)


def parse(value, max_members=8):
    return parse_mix(value, KNOWN.__contains__, max_members, examples=KNOWN)


def as_float32(weight):
    return struct.unpack("<f", struct.pack("<f", weight))[0]


@pytest.mark.parametrize(
    ("value", "members"),
    [
        ("math", {"math": 1.0}),
        ("math:0.7,json:0.3", {"math": 0.7, "json": 0.3}),
        (" math : .5 , json : -3e-2 ", {"math": 0.5, "json": -0.03}),
        ("math,json", {"math": 1.0, "json": 1.0}),
        ("org/model:v2", {"org/model:v2": 1.0}),
        ("org/model:v2:0.5,math", {"org/model:v2": 0.5, "math": 1.0}),
        ("org/model:v2,math:2", {"org/model:v2": 1.0, "math": 2.0}),
        ("a,b", {"a,b": 1.0}),
        ("{", {"{": 1.0}),
        ("math:0.5", {"math:0.5": 1.0}),
        ("math:0.50", {"math": 0.5}),
        ('{"a,b": 0.5, "org/model:v2": 1}', {"a,b": 0.5, "org/model:v2": 1.0}),
        ('[{"name": "math", "scale": 0.7}]', {"math": 0.7}),
        ({"math": 0.7, "json": 1}, {"math": 0.7, "json": 1.0}),
        ([{"name": "math", "scale": 0.7}, {"id": "json", "weight": 0.3}], {"math": 0.7, "json": 0.3}),
        ([{"name": "math"}], {"math": 1.0}),
        ({"name": "math", "scale": 0.25}, {"math": 0.25}),
        ({"ids": ["math", "json"], "weights": [0.7, 0.3]}, {"math": 0.7, "json": 0.3}),
        ({"ids": ["math"], "weights": [1], "merge_strategy": "linear", "density": 0.2}, {"math": 1.0}),
        ([{"name": "math", "scale": 0.5}, {"name": "math", "scale": 0.25}], {"math": 0.75}),
        ('{"math": 0.5, "math": 0.25}', {"math": 0.75}),
        ("math:0,json:1", {"json": 1.0}),
        ("math:1,json:1,math:-1", {"json": 1.0}),
    ],
)
def test_every_form_is_read(value, members):
    assert dict(parse(value).members) == {name: as_float32(weight) for name, weight in members.items()}


@pytest.mark.parametrize(
    "value", [None, "", {}, [], "math:0", {"math": 0, "json": -0.0}, "math:1,math:-1", "math:1e-60"]
)
def test_a_mix_without_members_is_the_base_model(value):
    assert parse(value) is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("maht", r"member 1 .*no adapter is called 'maht'; known are"),
        ("math:0.7,maht:0", r"member 2 \(at character 10\).*'maht'"),
        ("math:abc", "member 1 .*weight 'abc' is not a number"),
        ("math:1_0", "not a number"),
        ("math:nan", "NaN"),
        ("math:inf", "out of the range of float32"),
        ("math:1e39", "out of the range of float32"),
        ("math,,json", r"member 2 \(at character 6\): the name is empty"),
        (":0.5", "the name is empty"),
        (" ", "the name is empty"),
        ('{"math": ', "begins like JSON but is not.* at character"),
        ('{"math": 0.5} x', "Extra data at character 15"),
        ("[" * 100_000, "begins like JSON but"),
        ('{"math": 1' + "0" * 5000 + "}", "begins like JSON but"),
        ('{"math": NaN}', r"member 1 \('math'\).*NaN"),
        ({"math": True}, "must be a number, got true or false"),
        ({"math": "0.7"}, "must be a number, got text"),
        ({"math": None}, "must be a number, got null"),
        ({"math": 10**400}, "out of the range"),
        ({"math": 3e38, "json": math.inf}, "out of the range"),
        ([{"name": "math", "scale": 3e38}, {"name": "math", "scale": 3e38}], "added up.*out of the range"),
        ({"math": [0.5]}, "got a list"),
        ([{"id": 0, "scale": 0.5}], "element 1: an adapter is named by text, got 0"),
        ([{"name": "math", "scale": 1}, "json"], "element 2: want .* got text"),
        ([{"name": "math", "scale": 1}, None], "element 2: want .* got null"),
        ([{"scale": 1}], "element 1: no name"),
        ([{"name": "math", "id": "json"}], "two fields disagree"),
        ([{"name": "math", "scale": 1, "weight": 2}], "two fields disagree"),
        ([{"name": "math", "alpha": 1}], "unknown field 'alpha'"),
        ({"ids": ["math"], "weights": [1], "merge_strategy": "ties"}, "merge_strategy 'ties' is not served exactly"),
        ({"ids": ["math"], "weights": [1, 2]}, "1 ids but 2 weights"),
        ({"ids": ["math"]}, "1 ids but no list of weights"),
        ({"ids": ["math"], "weights": [1], "adapter_source": "hub"}, "unknown field 'adapter_source'"),
        ({"ids": [3], "weights": [1]}, "named by text"),
        (5, "not a number"),
    ],
)
def test_what_is_wrong_and_where(value, says):
    with pytest.raises(MixError, match=f"^mix .*{says}"):
        parse(value)


def test_an_unknown_member_is_named_beside_some_that_are_known():
    with pytest.raises(UnknownAdapterError, match=r"known are 'adapter0', .* and 95 more") as raised:
        parse_mix(
            "nope", {f"adapter{i}" for i in range(100)}.__contains__, examples=[f"adapter{i}" for i in range(100)]
        )
    assert raised.value.name == "nope"


def test_too_many_members_are_counted_after_merging():
    assert parse({"math": 1, "json": 1, "a": 0}, max_members=2) is not None
    with pytest.raises(MixError, match="3 adapters, but at most 2 can be mixed"):
        parse({"math": 1, "json": 1, "a": 1}, max_members=2)


@given(mixes)
def test_a_mix_reads_back_from_its_text_bit_for_bit(members):
    mix = parse_mix(members, lambda name: name in members)
    assert parse_mix(mix.text, lambda name: name in members) == mix


@given(mixes)
def test_the_forms_agree_with_each_other(members):
    known = members.__contains__
    entries = [{"name": name, "scale": weight} for name, weight in members.items()]
    merged = {"ids": list(members), "weights": list(members.values())}
    expected = Mix(tuple(sorted(members.items())))
    for form in (members, entries, merged):
        assert parse_mix(form, known) == expected
        if json.dumps(form) not in members:
            assert parse_mix(json.dumps(form), known) == expected


@given(
    st.dictionaries(
        names.filter(lambda n: n == n.strip() and not set(n) & set(",{[")), weights.filter(bool), min_size=2, max_size=8
    )
)
def test_the_string_form_splits_at_the_last_colon(members):
    text = ",".join(f"{name}:{weight!r}" for name, weight in members.items())
    assert parse_mix(text, members.__contains__) == Mix(tuple(sorted(members.items())))


@given(
    st.lists(st.tuples(st.sampled_from(["math", "json"]), weights.filter(lambda w: abs(w) < 1e30)), max_size=8),
    st.randoms(),
)
def test_order_does_not_matter_and_duplicates_add(entries, random):
    shuffled = list(entries)
    random.shuffle(shuffled)
    as_form = [[{"name": name, "scale": weight} for name, weight in order] for order in (entries, shuffled)]
    assert parse(as_form[0]) == parse(as_form[1])
    sums = {name: as_float32(math.fsum(w for n, w in entries if n == name)) for name, _ in entries}
    expected = {name: weight for name, weight in sums.items() if weight}
    mix = parse(as_form[0])
    assert (dict(mix.members) if mix else {}) == expected


@given(names, names)
def test_a_known_name_wins_over_anything_it_could_mean(name, other):
    assert parse_mix(name, {name, other}.__contains__).members == ((name, 1.0),)


def test_different_float32_weights_are_different_mixes():
    below = as_float32(0.7)
    above = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", below))[0] + 1))[0]
    assert parse({"math": below}) != parse({"math": above})
    assert parse({"math": below}).text != parse({"math": above}).text
    assert parse({"math": 0.7}) == parse({"math": below})


def test_an_adapter_named_like_the_text_of_a_mix_is_not_taken_for_it():
    with pytest.raises(MixError, match="registered under the very text"):
        parse_mix({"math": 0.5}, {"math", '{"math":0.5}'}.__contains__)


@pytest.mark.parametrize(
    ("value", "one"),
    [
        ([{"name": "math", "scale": 1}], True),
        ([{"id": 0, "scale": 1}], True),
        ([None, {"name": "math"}], True),
        (["math", "json:0.5", None], False),
        ([{"math": 0.7}, {"json": 1}], False),
        ([[{"name": "math"}], None], False),
        ([{"ids": ["math"], "weights": [1]}], False),
        ([], False),
    ],
)
def test_one_mix_is_told_from_one_per_prompt(value, one):
    assert is_one_mix(value) is one
