"""A pool view shares the pool's memory and refuses what the kernels cannot read."""

from __future__ import annotations

import pytest
import torch

from sglang_lora_tree.kernels.pool import PoolView


def test_from_kv_orders_planes_and_shares_memory():
    keys, values = [torch.zeros(5, 2, 4) for _ in range(3)], [torch.zeros(5, 2, 4) for _ in range(3)]
    pool = PoolView.from_kv(keys, values)
    keys[1][3] = 7
    assert pool.num_layers == 3 and pool.width == 8 and pool.aligned
    assert (pool.planes[2][3] == 7).all()
    assert pool.pointers.tolist() == [t.data_ptr() for pair in zip(keys, values, strict=True) for t in pair]


def test_rows_at_odd_addresses_are_not_called_aligned():
    assert not PoolView.from_planes([torch.zeros(5, 7)] * 2).aligned
    memory = torch.zeros(41)
    assert not PoolView.from_planes([memory[1:].view(5, 8)] * 2).aligned


@pytest.mark.parametrize(
    ("planes", "named"),
    [
        ([], "0 planes"),
        ([torch.zeros(5, 8)], "1 planes"),
        ([torch.zeros(5, 8), torch.zeros(5, 4)], "plane 1"),
        ([torch.zeros(5, 8), torch.zeros(5, 8).half()], "plane 1"),
        ([torch.zeros(8, 5).T] * 2, "plane 0"),
        ([torch.zeros(5, 8, dtype=torch.uint8)] * 2, "uint8"),
    ],
)
def test_refusals(planes, named):
    with pytest.raises(ValueError, match=named):
        PoolView.from_planes(planes)
