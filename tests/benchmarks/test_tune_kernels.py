"""Tuning keeps what is cheapest, and writes what dispatch reads."""

from __future__ import annotations

import torch

from benchmarks.tune_kernels import candidates, tune, write
from sglang_lora_tree.kernels import dispatch


def test_the_cheapest_variation_of_each_kind_is_kept():
    start, shrinks, expands = candidates(32)

    def cost(config: dispatch.Config) -> float:
        shrink = [config.shrink_block_n, config.shrink_block_k] != [32, 128]
        expand = [config.expand_block_d, config.expand_items] != [64, 2]
        return shrink + expand + config.overlap

    best = tune(32, cost)
    assert (best.shrink_block_n, best.shrink_block_k, best.expand_block_d, best.expand_items) == (32, 128, 64, 2)
    assert best.max_tokens == 32 and not best.overlap and best.block_t == start.block_t
    assert len(shrinks) > 1 and len(expands) > 1


def test_dispatch_reads_what_was_written(tmp_path, monkeypatch):
    configs = write([32, 8192], lambda tokens, config: float(config.expand_block_d + tokens), tmp_path)
    monkeypatch.setattr(dispatch, "CONFIGS", tmp_path)
    monkeypatch.setattr(dispatch, "_name", lambda device: "cpu")
    dispatch._configs.cache_clear()
    try:
        device = torch.device("cuda:0")
        assert dispatch.choose(1, device) == dispatch.choose(32, device) == configs[0]
        assert dispatch.choose(33, device) == dispatch.choose(1 << 40, device) == configs[1]
    finally:
        dispatch._configs.cache_clear()
