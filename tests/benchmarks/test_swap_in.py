"""The swap-in benchmark moves every adapter in one operation, to the bit, and says how fast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import swap_in
from sglang_lora_tree.adapters.base_shape import BaseShape


def test_small_run(tmp_path: Path):
    """Both page sizes; the rows are checked inside."""
    records = swap_in.main(["--small", "--device", "cpu", "--rounds", "2", "--out", str(tmp_path)])
    metrics = {record["metric"] for record in records}
    assert {name for name in metrics if "page_64" in name}, "page 64 was not measured"
    assert all(record["value"] > 0 and record["baseline"]["value"] > 0 for record in records)
    assert len(list(tmp_path.glob("swap_in_*.json"))) == 1


def test_wrong_rows_are_found():
    """The check would not pass for rows that were never copied, or that another adapter left."""
    scale = swap_in.SMALL
    base = BaseShape.from_hf_config(scale.config)
    adapters = [swap_in.make_adapter(base, scale.rank, scale.dtype, seed) for seed in range(2)]
    process = swap_in.Process(scale, adapters, page_size=1, device="cpu")
    process.bring()
    process.check()
    slots = process.cache.tree_core.lora_nodes[process.demand.members[1]].device_slots
    process.cache.pool.v_buffer[-1][slots[-1]] = torch.nan
    with pytest.raises(AssertionError, match="adapter 1: wrong rows in layer 1"):
        process.check()
    process.close()
