"""Messages survive the way there; whatever else comes is a ValueError, never another exception and never a plan."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lora_tree.radix.eval import EvalParameters
from sglang_lora_tree.scheduling.protocol import (
    ABSENT,
    MAX_BYTES,
    MAX_NAMED,
    VERSION,
    Load,
    Plan,
    Report,
    Resync,
    parse_reply,
    parse_report,
)

REPORT = Report(
    epoch=2,
    sequence=7,
    is_reset=True,
    now=1.5,
    load=Load(3, 4, 1000, 10, 256, 1e9, 0.5, 2e9, 1.25),
    sets=(("adapter:a", "adapter:b"), (), ("adapter:a",)),
    requests=(5, 1.25, 100, 0, 6, 1.5, 1, 1, 4, 0.0, 0.0, ABSENT),
    nodes=(9, 0, 2, 15, 3, 2.5, 1.0, 10, 9, ABSENT, 4, 2, 0.0, 0.0, 3, 0, ABSENT, 0, ABSENT, 0, 0),
)
PLAN = Plan(2, 11, EvalParameters(version=11, now=1.5, low_lora=2.5), (5, 6), ("adapter:b",), (10,), 0.75)


def test_there_and_back() -> None:
    report = parse_report(REPORT.to_bytes())
    assert np.asarray(report.requests).ravel().tolist() == list(REPORT.requests)
    assert np.asarray(report.nodes).ravel().tolist() == list(REPORT.nodes)
    assert dataclasses.replace(report, requests=(), nodes=()) == dataclasses.replace(REPORT, requests=(), nodes=())
    assert parse_reply(PLAN.to_bytes()) == PLAN
    assert parse_reply(Resync(4).to_bytes()) == Resync(4)


def test_a_report_is_no_reply_and_a_plan_is_no_report() -> None:
    with pytest.raises(ValueError):
        parse_reply(REPORT.to_bytes())
    with pytest.raises(ValueError, match="plan"):
        parse_report(PLAN.to_bytes())


@pytest.mark.parametrize(
    "change",
    [
        {"version": VERSION + 1},
        {"kind": "order"},
        {"kind": ["plan"]},
        {"epoch": -1},
        {"number": True},
        {"number": 1.5},
        {"parameters": None},
        {"parameters": {}},
        {"candidates": "5"},
        {"candidates": [5, "6"]},
        {"candidates": [0] * (MAX_NAMED + 1)},
        {"prefetch": [None]},
        {"prefetch": ["x" * 300]},
        {"swap_in": [[1]]},
        {"hit_probability": "high"},
        {"more": 1},
    ],
    ids=str,
)
def test_a_plan_with_one_thing_wrong(change: dict[str, Any]) -> None:
    body = {**orjson.loads(PLAN.to_bytes()), **change}
    with pytest.raises(ValueError):
        parse_reply(orjson.dumps(body))
    missing = orjson.loads(PLAN.to_bytes())
    del missing["candidates"]
    with pytest.raises(ValueError, match="candidates"):
        parse_reply(orjson.dumps(missing))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=200) | values.map(orjson.dumps))
def test_garbage(data: bytes) -> None:
    for parse in (parse_reply, parse_report):
        with pytest.raises(ValueError):
            parse(data)


@given(st.data())
def test_a_message_with_any_field_replaced_by_anything(data: st.DataObject) -> None:
    for message, parse in ((PLAN, parse_reply), (REPORT, parse_report)):
        line, separator, rows = message.to_bytes().partition(b"\n")
        body = orjson.loads(line)
        body[data.draw(st.sampled_from(sorted(body)))] = data.draw(values)
        try:
            parse(orjson.dumps(body) + separator + rows)
        except ValueError:
            pass


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**53])
def test_rows_with_one_thing_wrong(value: float) -> None:
    with pytest.raises(ValueError, match="range"):
        parse_report(dataclasses.replace(REPORT, nodes=(*REPORT.nodes[:-1], value)).to_bytes())
    for data in (REPORT.to_bytes()[:-1], REPORT.to_bytes() + b"\x00" * 8, REPORT.to_bytes().partition(b"\n")[0]):
        with pytest.raises(ValueError, match="rows"):
            parse_report(data)


def test_a_huge_message_is_not_read() -> None:
    with pytest.raises(ValueError, match="bytes"):
        parse_reply(b"[" * (MAX_BYTES + 1))
    with pytest.raises(ValueError, match="bytes"):
        parse_report(REPORT.to_bytes() + b"\x00" * MAX_BYTES)
    with pytest.raises(ValueError):
        parse_reply(b"[" * 100_000)  # deep nesting
