"""The benchmark of serving a compressed fleet, without its servers: what it prepares, and what it makes of their speeds."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import fleet_serving, results
from sglang_lora_tree.adapters.adapter import load_adapter
from sglang_lora_tree.adapters.base_shape import BaseShape

SCALE = dataclasses.replace(fleet_serving.SMALL, num_adapters=2, rank=24, wanted=1.9)


def measure(tmp_path, monkeypatch, speeds):
    """speeds: of original and twelfth per case, in order; None: the server fails."""
    pools, stopped = [], []

    class Server:
        def stop(self):
            stopped.append(self)

    def start_servers(model, scale, pool_slots, out, stack):
        pools.extend(pool_slots.values())
        return {case: Server() for case in pool_slots}

    def serve(server, scale, fleets):
        found = speeds[len(stopped)]
        for fleet, folders in fleets.items():
            for folder in folders.values():  # what the server is given exists and can be served
                load_adapter(folder, BaseShape.from_folder(fleet_serving.EMBEDDED))
            if found is None:
                raise RuntimeError("the server ended")
            yield fleet, found[fleet == "twelfth"], 3.0

    monkeypatch.setattr(fleet_serving, "start_servers", start_servers)
    monkeypatch.setattr(fleet_serving, "serve", serve)
    report = results.Report("fleet_serving", "small", tmp_path)
    fleet_serving.measure(tmp_path / "work", report, SCALE, ("scarce", "ample"))
    return {record["metric"]: record for record in report.records}, pools


def test_speeds_become_ratios_and_the_pool_s_share(tmp_path, monkeypatch):
    records, pools = measure(tmp_path, monkeypatch, [(100.0, 240.0), (200.0, 240.0)])
    assert records["serve_small_twelfth/scarce"]["ratio"] == 2.4 and records["serve_small_twelfth/scarce"]["met"]
    assert records["serve_small_twelfth/ample"]["ratio"] == 1.2 and records["serve_small_twelfth/ample"]["limit"] is None
    assert records["serve_small_twelfth/gain_by_pool"]["value"] == 2.0
    assert records["slots/twelfth"]["met"], "a twelfth takes more of the pool than it may"
    written = json.loads((tmp_path / "fleet_serving_small.json").read_text())
    assert {record["metric"] for record in written} == set(records)
    originals = records["slots/twelfth"]["baseline"]["value"]
    assert pools[1] - SCALE.request_slots > originals, "ample memory has no room for all originals beside the requests"


def test_a_case_that_fails_leaves_the_other(tmp_path, monkeypatch, capsys):
    records, _ = measure(tmp_path, monkeypatch, [None, (200.0, 240.0)])
    assert set(records) == {"slots/twelfth", "serve_small_original/ample", "serve_small_twelfth/ample"}
    assert "scarce: RuntimeError: the server ended" in capsys.readouterr().out


def test_modules_differ_in_their_spectra(tmp_path):
    """Or spectral ranks would all be the same, and the case would show nothing of mixed ranks."""
    base = BaseShape.from_folder(fleet_serving.EMBEDDED)
    folder = fleet_serving.write_adapter(tmp_path / "x", base, 24, 0, "cpu")
    outcome = fleet_serving.compress([folder], tmp_path / "out", fleet_serving.Settings(fleet_serving.BUDGET), base)[0]
    assert len(set(outcome.ranks)) > 1
    assert max(outcome.ranks) <= 24 and min(outcome.ranks) >= 1


def test_without_a_gpu_only_the_small_shape_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["fleet_serving", "--out", str(tmp_path)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        fleet_serving.main()
    assert "--small" in capsys.readouterr().err
