"""What FlashTSQR is timed against factorises the same products, and the fleets are as large as they say."""

from __future__ import annotations

import pytest
import torch

from benchmarks import fleet
from benchmarks.fleet_baselines import BASELINES, OURS

RANK = 8
WIDTHS = ((48, 32), (32, 64), (40, 40), (48, 32))
"""(d_in, d_out): wider, taller, square, and one shape twice."""


def padded(product: torch.Tensor) -> torch.Tensor:
    """With zeros up to the largest shape."""
    whole = torch.zeros(64, 48)
    whole[: product.shape[0], : product.shape[1]] = product
    return whole


@pytest.mark.parametrize("name", sorted(set(BASELINES) - set(OURS)))
def test_a_baseline_keeps_every_product_and_balances_its_factors(name: str) -> None:
    """Otherwise something easier would be timed."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pairs = [(random(RANK, d_in), random(d_out, RANK)) for d_in, d_out in WIDTHS]
    left = []
    for b, a in BASELINES[name](pairs):
        left += [(b, a)] if b.dim() == 2 else list(zip(b, a, strict=True))
    assert len(left) == len(pairs)
    for a, b in pairs:
        wanted = padded(b @ a)
        place = next((k for k, (y, x) in enumerate(left) if torch.allclose(padded(y @ x), wanted, atol=2e-3)), None)
        assert place is not None, f"no factors of the module of shape {tuple(b.shape[:1] + a.shape[1:])}"
        y, x = left.pop(place)
        assert torch.allclose(y.norm(dim=0), x.norm(dim=1), rtol=1e-2), "the factors are not balanced"


def test_a_fleet_has_its_adapters_modules_and_shapes() -> None:
    tiny = fleet.FLEETS["tiny"]
    adapters = fleet.make_fleet(tiny)
    assert len(adapters) == tiny.num_adapters
    for pairs in adapters:
        assert [(a.shape[1], b.shape[0]) for a, b in pairs] == list(tiny.widths) * tiny.num_layers
        assert all(a.shape[0] == b.shape[1] == tiny.rank for a, b in pairs)
    assert [len(chunk) for chunk in fleet.chunks(adapters, 2)] == [2 * tiny.num_modules, tiny.num_modules]


def test_a_baseline_runs_as_many_adapters_as_its_time_allows() -> None:
    tiny = fleet.FLEETS["tiny"]
    adapters = fleet.make_fleet(tiny)
    consumed = []

    def baseline(pairs):
        for pair in pairs:
            consumed.append(pair)
            yield pair

    seconds, count = fleet.time_baseline(baseline, tiny, adapters, 1e9)
    assert count == tiny.num_adapters and seconds > 0
    assert len(consumed) == len(tiny.widths) + tiny.num_modules * (1 + tiny.num_adapters), "factors were never computed"
    assert fleet.time_baseline(baseline, tiny, adapters, 0.0)[1] == 1


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
