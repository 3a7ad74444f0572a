"""The benchmark of what compression costs in scores: two adapters of the embedded model, two questions each."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from benchmarks import fleet_quality, fleet_serving
from sglang_lora_tree.adapters.base_shape import BaseShape


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("fleets") / "decay_4"
    base = BaseShape.from_folder(fleet_serving.EMBEDDED)
    for seed, task in enumerate(("lower", "xml")):
        fleet_serving.write_adapter(folder / task, base, 24, seed, "cpu")
    return fleet_quality.Fleet.of(folder, 2, "cpu")


def test_side_by_side_they_are_what_they_are_alone(fleet):
    """One of several is found by its index, with its scaling inside."""
    (layer, module), one = next(iter(fleet.adapters[1].modules.items()))
    a, b = fleet_quality.side_by_side(fleet.adapters)[f"model.layers.{layer}.{fleet_quality.MODULE_PATHS[module]}"]
    torch.testing.assert_close(b[1] @ a[1], one.scaling * one.b.float() @ one.a.float())


def test_a_budget_of_everything_changes_nothing_and_spectral_keeps_most(fleet):
    for policy in ("uniform", "spectral", "fleet"):
        fleet.compress(policy, Fraction(1))
        assert fleet.energies[f"{policy} 1"] == pytest.approx([1, 1])
        assert fleet.scores[f"{policy} 1"] == fleet.scores["original"]
    for policy in (*fleet_quality.POLICIES, fleet_quality.JD_FULL):
        fleet.compress(policy, Fraction(1, 12))
    pairs = zip(fleet.energies["spectral 1/12"], fleet.energies["uniform 1/12"], strict=True)
    assert all(0 < uniform < spectral < 1 for spectral, uniform in pairs)
    records = {record["metric"]: record for record in fleet.records(2)}
    limited = {metric for metric, record in records.items() if record["limit"] is not None}
    assert limited == {"lost/decay_4/spectral/1_12", "lost/decay_4/fleet/1_12"}, "wanted is a loss with spectral ranks at 1/12"
    assert fleet.shares["fleet 1/12"] <= fleet.shares["uniform 1/12"] < fleet.shares["bounded 1/12"]
    assert min(fleet.energies["bounded 1/12"]) >= 0.998
    assert "xml" in records["score/decay_4/jd_full/1_12"]["note"]
    assert fleet_quality.markdown(fleet).count("\n| ") == 2 + 1 + len(fleet_quality.BUDGETS) + 2
