"""Eval against a plain transcription of the paper's equations, with the worked examples of its summary."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lora_tree.radix.eval import (
    TERMS,
    EvalParameters,
    EvalStatistics,
    eval_scores,
    log_recency,
    log_swap_out_term,
    lora_term,
    low_lora,
    retain_term,
)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def plain_eval(
    is_adapter: bool, resident: int, low: float, cost: float, visit: float, age: float, tau: float, literal: bool
) -> float:
    """Eq. 6 at swap-out, as it stands in the paper (literal) or with adapters spared by Eq. 4."""
    now_lora = resident - 1 if is_adapter else resident
    lora = min(1.0, now_lora / low) if literal or not is_adapter else 1.0
    return lora * cost * visit * (1.0 - sigmoid(age / tau))


def test_low_lora_of_the_worked_example():
    # Probabilities 0.5, 0.3 and 0.2, four requests in a batch: 0.94 + 0.76 + 0.59.
    assert low_lora(np.array([0.5, 0.3, 0.2]), 4) == pytest.approx(0.9375 + 0.7599 + 0.5904)
    assert low_lora(np.array([0.5, 0.3, 0.2]), 4) == pytest.approx(2.29, abs=0.005)


def test_lora_term_of_the_worked_example():
    assert lora_term(3, 2.29) == 1.0
    assert lora_term(2, 2.29) == pytest.approx(0.87, abs=0.005)
    assert lora_term(2, 0.0) == 1.0, "without Low_lora there is no term"


@pytest.mark.parametrize(("age", "wanted"), [(0, 0.500), (1, 0.269), (2, 0.119), (3, 0.047), (5, 0.007)])
def test_recency_of_the_table(age: float, wanted: float):
    assert retain_term(1.0, 1.0, age) == pytest.approx(wanted, abs=0.0005)
    assert math.exp(log_recency(age, 1.0)) == pytest.approx(wanted, abs=0.0005)


def test_retain_term_of_the_worked_example():
    assert retain_term(1.0, 0.3, 0.0) == pytest.approx(0.15)
    assert retain_term(1.0, 0.05, 2.0) == pytest.approx(0.006, abs=0.0005)


def test_the_literal_lora_term_makes_adapters_leave_sooner_the_fewer_there_are():
    """What the paper leaves open: read literally, at swap-out, against its stated intent."""
    short = EvalParameters(low_lora=10.0, lora_term="literal")
    assert log_swap_out_term(True, 2, short) < log_swap_out_term(True, 8, short)
    assert log_swap_out_term(True, 2, short) < log_swap_out_term(False, 2, short)
    protect = dataclasses.replace(short, lora_term="protect")
    assert log_swap_out_term(True, 2, protect) > log_swap_out_term(False, 2, protect)
    off = dataclasses.replace(short, lora_term="off")
    assert log_swap_out_term(True, 2, off) == log_swap_out_term(False, 2, off) == 0.0


def random_statistics(count: int, seed: int = 0) -> EvalStatistics:
    rng = np.random.default_rng(seed)
    return EvalStatistics(
        slots=rng.integers(1, 5_000, count),
        is_adapter=rng.random(count) < 0.1,
        has_copy=rng.random(count) < 0.8,
        visits=rng.random(count) * 10 + 0.01,
        used_at=rng.random(count) * 1_000,
        resident_adapters=12,
        bytes_per_slot=131_072,
        total_visits=1_234.0,
    )


@pytest.mark.parametrize("direction", ["literal", "protect"])
def test_scores_are_the_equations(direction: str):
    statistics = random_statistics(300)
    parameters = EvalParameters(now=1_000.0, tau=60.0, low_lora=20.0, lora_term=direction, visit_window=300.0)
    scores = eval_scores(statistics, parameters)
    for i in range(300):
        slots, is_adapter = int(statistics.slots[i]), bool(statistics.is_adapter[i])
        cost = slots * 131_072 / parameters.host_to_device_bytes_per_s
        if not statistics.has_copy[i]:
            disk = slots * 131_072 / parameters.disk_bytes_per_s
            cost = cost + disk if is_adapter else slots / parameters.prefill_tokens_per_s
        age = 1_000.0 - statistics.used_at[i]
        visit = statistics.visits[i] * math.exp(-age / 300.0) / 1_234.0
        wanted = plain_eval(is_adapter, 12, 20.0, cost, visit, age, 60.0, direction == "literal")
        assert scores[i] == pytest.approx(math.log(wanted)), f"node {i}"


def test_terms_can_be_left_out():
    statistics = random_statistics(50)
    parameters = EvalParameters(now=1_000.0, low_lora=20.0)
    whole = eval_scores(statistics, parameters)
    parts = [eval_scores(statistics, parameters, terms=frozenset({term})) for term in TERMS]
    assert np.allclose(whole, sum(parts))


def test_what_nobody_used_for_hours_still_has_an_order():
    statistics = dataclasses.replace(random_statistics(3), used_at=np.array([0.0, 1.0, 2.0]), visits=np.ones(3))
    scores = eval_scores(statistics, EvalParameters(now=1e7, tau=0.1), terms=frozenset({"recency"}))
    assert np.isfinite(scores).all() and scores[0] < scores[1] < scores[2]


def test_a_swap_in_counts_one_adapter_more():
    statistics = random_statistics(50)
    parameters = EvalParameters(now=1_000.0, low_lora=20.0)
    scores = eval_scores(statistics, parameters, swap_in=True, terms=frozenset({"lora"}))
    assert np.exp(scores[statistics.is_adapter]) == pytest.approx(13 / 20)
    assert np.exp(scores[~statistics.is_adapter]) == pytest.approx(12 / 20)


@given(st.integers(0, 2**31), st.floats(1.0, 1e4), st.floats(1.0, 1e4))
def test_parameters_survive_the_wire(version: int, tau: float, now: float):
    parameters = EvalParameters(version=version, tau=tau, now=now, usage={"adapter:a": 0.25})
    assert EvalParameters.from_message(orjson.loads(orjson.dumps(parameters.to_message()))) == parameters


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tau": 0.0}, "tau"),
        ({"tau": "fast"}, "tau"),
        ({"tau": True}, "tau"),
        ({"now": math.nan}, "now"),
        ({"low_lora": -1.0}, "low_lora"),
        ({"version": 1.5}, "version"),
        ({"lora_term": "sideways"}, "lora_term"),
        ({"usage": {"a": 2.0}}, "usage"),
        ({"usage": [1]}, "usage"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_garbage_is_refused_by_name(change: dict, name: str):
    with pytest.raises(ValueError, match=name):
        EvalParameters.from_message({**EvalParameters().to_message(), **change})


@pytest.mark.parametrize("message", [None, [], 3, "text", {}])
def test_what_is_no_message_is_refused(message: object):
    with pytest.raises(ValueError, match="Eval parameters"):
        EvalParameters.from_message(message)


def test_the_static_key_orders_old_nodes_as_the_exact_value_does():
    """log(cost x visit) + t_last / tau: exact but for the LoRA term, once a node is a few tau old."""
    rng = random.Random(0)
    now, tau, window = 10_000.0, 60.0, 300.0
    nodes = [(rng.uniform(0.001, 10), rng.uniform(0.1, 50), rng.uniform(0, now - 10 * tau)) for _ in range(500)]
    exact = [math.log(c * v) - (now - t) / window + log_recency(now - t, tau) for c, v, t in nodes]
    static = [math.log(c * v) + t * (1 / window + 1 / tau) for c, v, t in nodes]
    order = sorted(range(500), key=static.__getitem__)
    assert order == sorted(range(500), key=exact.__getitem__)
