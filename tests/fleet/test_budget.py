"""Budgets are kept to the parameter; the spectral ranks are the best there are, and never worse than uniform ones."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lora_tree.fleet.budget import (
    BudgetError,
    Spectrum,
    count_parameters,
    kept_energy,
    parse_fraction,
    ranks_within_loss,
    spectral_ranks,
    total_energy,
    uniform_ranks,
)


@st.composite
def fleets(draw, max_modules: int = 5, max_rank: int = 4):
    costs = draw(st.lists(st.sampled_from([3, 5, 7, 8, 12, 13]), min_size=1, max_size=3, unique=True))
    energies = st.floats(0, 1, width=32).map(lambda value: value**3)
    return [
        Spectrum(
            np.sort(np.array(draw(st.lists(energies, min_size=1, max_size=max_rank)), np.float64))[::-1],
            draw(st.sampled_from(costs)),
        )
        for _ in range(draw(st.integers(1, max_modules)))
    ]


@settings(deadline=None, max_examples=150)
@given(fleets(), st.integers(0, 2), st.floats(0, 1))
def test_spectral_equals_brute_force(modules, floor, share):
    floors = [min(floor, module.rank) for module in modules]
    low = count_parameters(modules, floors)
    budget = low + int(share * (count_parameters(modules, [module.rank for module in modules]) - low))
    ranks = spectral_ranks(modules, budget, floor)
    assert count_parameters(modules, ranks) <= budget
    assert all(first <= rank <= module.rank for first, rank, module in zip(floors, ranks, modules, strict=True))
    every = itertools.product(*(range(first, module.rank + 1) for first, module in zip(floors, modules, strict=True)))
    best = max(kept_energy(modules, ranks) for ranks in every if count_parameters(modules, ranks) <= budget)
    assert kept_energy(modules, ranks) >= best - 1e-12


@settings(deadline=None, max_examples=100)
@given(fleets(max_modules=12, max_rank=32), st.integers(1, 32), st.integers(1, 3))
def test_spectral_never_keeps_less_than_uniform(modules, divisor, floor):
    uniform = uniform_ranks(modules, Fraction(1, divisor), floor)
    spectral = spectral_ranks(modules, count_parameters(modules, uniform), floor)
    assert count_parameters(modules, spectral) <= count_parameters(modules, uniform)
    assert kept_energy(modules, spectral) >= kept_energy(modules, uniform) - 1e-12


def test_uniform_is_the_paper_s():
    """u_m = max(1, floor(r / d)); 1/12 of 48 is 4 exactly, not 3 by a float's rounding."""
    modules = [Spectrum(np.ones(rank), 10) for rank in (48, 64, 8, 1)]
    assert uniform_ranks(modules, parse_fraction("1/12")) == [4, 5, 1, 1]
    assert uniform_ranks(modules, parse_fraction("1/12"), floor=2) == [4, 5, 2, 1]
    assert uniform_ranks([Spectrum(np.ones(100), 10)], parse_fraction("0.29")) == [29]


def test_spectral_spends_where_energy_per_parameter_is():
    """The same energy in a module of a third of the width is worth three times as much."""
    wide, narrow = Spectrum(np.array([4.0, 1.0, 1.0]), 30), Spectrum(np.array([4.0, 1.0, 1.0]), 10)
    assert spectral_ranks([wide, narrow], 60) == [1, 3]


def test_the_last_parameters_are_spent_best():
    """Greedy alone takes the densest direction, and then nothing else fits."""
    dense, plain = Spectrum(np.array([6.6]), 6), Spectrum(np.array([5.0, 5.0]), 5)
    assert spectral_ranks([dense, plain], 10, floor=0) == [0, 2]


def test_directions_without_energy_are_not_bought():
    assert spectral_ranks([Spectrum(np.array([1.0, 0.0, 0.0]), 5), Spectrum(np.zeros(3), 5)], 30) == [1, 1]


def test_floors_above_the_budget_are_refused():
    with pytest.raises(BudgetError, match=r"19 parameters is less than the 20 that rank 2 .* raise the budget"):
        spectral_ranks([Spectrum(np.ones(4), 10)], 19, floor=2)


@settings(deadline=None, max_examples=60)
@given(fleets(max_rank=12), st.floats(0, 0.9))
def test_loss_is_bounded(modules, max_loss):
    start = [1] * len(modules)
    ranks = ranks_within_loss(modules, start, max_loss)
    total = total_energy(modules)
    assert kept_energy(modules, ranks) >= (1 - max_loss) * total - 1e-9
    if kept_energy(modules, start) >= (1 - max_loss) * total:
        assert ranks == start


@pytest.mark.parametrize("text, value", [("1/12", Fraction(1, 12)), ("0.25", Fraction(1, 4)), ("50%", Fraction(1, 2))])
def test_fractions(text, value):
    assert parse_fraction(text) == value


@pytest.mark.parametrize("text", ["0", "12", "-1/2", "1/0", "many", "", "%"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(BudgetError, match="share of the parameters"):
        parse_fraction(text)
