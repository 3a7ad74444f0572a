"""The record of the best baseline compares seconds with seconds, on the same adapters; FraQ with our kernel is beside it."""

from __future__ import annotations

import pytest

from benchmarks import fleet
from benchmarks.fleet_baselines import BASELINES


def test_the_best_baseline_is_the_one_that_is_least_slower_on_its_own_adapters() -> None:
    """Not the one of the fewest seconds: that may have had fewer adapters."""
    took = {50: 0.25, 28: 0.15}
    record = fleet.best_record(fleet.FLEETS["qwen50"], {"fraq": (9.5, 50), "linalg_padded": (9.0, 28)}, took)
    assert record["baseline"] == {"name": "fraq", "value": 9.5} and record["unit"] == "s"
    assert record["value"] == 0.25 and record["ratio"] == pytest.approx(0.25 / 9.5, rel=1e-3)
    assert record["met"] and "38 times as fast as fraq" in record["note"] and "wanted: 2.3" in record["note"]


@pytest.mark.parametrize("speed_up, met", [(2.2, False), (2.4, True)])
def test_what_the_paper_reports_is_the_limit(speed_up: float, met: bool) -> None:
    record = fleet.best_record(fleet.FLEETS["qwen50"], {"fraq": (speed_up, 50)}, {50: 1.0})
    assert record["met"] is met


def test_fraq_with_our_kernel_is_measured_first() -> None:
    """So it is there however little time the rest gets."""
    assert next(iter(BASELINES)) == "fraq_jacobi"
