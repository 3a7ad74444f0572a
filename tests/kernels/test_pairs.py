"""The batch's device tensors say what was given, and stay where they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lora_tree.kernels.pairs import BLOCK_T, Pairs

MAX_BS, MAX_TOKENS, MAX_MEMBERS = 6, 200, 3
MIX = st.lists(st.tuples(st.integers(0, 9), st.floats(-4, 4, width=32)), max_size=MAX_MEMBERS)
BATCHES = st.lists(st.tuples(st.integers(0, 33), MIX), max_size=MAX_BS)


@settings(max_examples=100, deadline=None)
@given(st.lists(BATCHES, min_size=1, max_size=3))
def test_update_describes_the_last_batch(batches):
    pairs = Pairs.allocate(MAX_BS, MAX_TOKENS, MAX_MEMBERS, "cpu")
    tensors = [pairs.seg_indptr, pairs.pair_indptr, pairs.pair_adapter, pairs.pair_weight, pairs.tile_req]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for batch in batches:
        pairs.update([length for length, _ in batch], [mix for _, mix in batch])
    assert [tensor.data_ptr() for tensor in tensors] == addresses, "a captured graph would read stale memory"

    tokens_of: dict[int, list[int]] = {}
    for tile in range(pairs.num_tiles):
        req, start = int(pairs.tile_req[tile]), int(pairs.tile_start[tile])
        stop = min(start + BLOCK_T, int(pairs.seg_indptr[req + 1]))
        assert start < stop, "an empty tile"
        tokens_of.setdefault(req, []).extend(range(start, stop))
    assert (pairs.tile_req[pairs.num_tiles :] == -1).all(), "stale tiles after the last one"

    token, groups = 0, {}
    for req, (length, mix) in enumerate(batch):
        span = list(range(token, token + length))
        token += length
        assert tokens_of.get(req, []) == span
        begin, end = int(pairs.pair_indptr[req]), int(pairs.pair_indptr[req + 1])
        got = list(zip(pairs.pair_adapter[begin:end].tolist(), pairs.pair_weight[begin:end].tolist(), strict=True))
        assert got == mix
        if mix and span:
            groups.setdefault(tuple(mix), []).extend(span)
    assert {mix: tokens.tolist() for mix, tokens in pairs.groups.items()} == groups
    assert (pairs.seg_indptr[len(batch) :] == token).all() and pairs.num_tokens == token
    assert pairs.num_tiles <= Pairs.bound_tiles(len(batch), token) <= pairs.max_tiles


def test_decode_has_one_tile_per_request_members_or_not():
    """A decode graph is captured without adapters and replayed with them: the same grid."""
    pairs = Pairs.allocate(8, 8, 2, "cpu")
    pairs.update([1] * 8, [()] * 8)
    captured = pairs.num_tiles
    pairs.update([1] * 8, [[(1, 0.5)]] * 3 + [()] * 5)
    assert captured == pairs.num_tiles == Pairs.bound_tiles(8, 8) == 8


def test_weights_are_float32_and_views_are_aligned():
    pairs = Pairs.allocate(3, 50, 3, "cpu")
    pairs.update([1], [[(0, 0.1)]])
    assert pairs.pair_weight[0] == torch.tensor(0.1)
    assert list(pairs.groups) == [((0, float(torch.tensor(0.1))),)]
    for tensor in (pairs.seg_indptr, pairs.pair_indptr, pairs.pair_adapter, pairs.pair_weight, pairs.tile_req):
        assert tensor.data_ptr() % 16 == pairs.seg_indptr.data_ptr() % 16


@pytest.mark.parametrize(
    ("seg_lens", "members", "named"),
    [([1] * 4, [()] * 4, "4 requests"), ([51], [()], "51 tokens"), ([1], [[(0, 1.0)] * 4], "4 members")],
)
def test_too_large_a_batch_is_refused(seg_lens, members, named):
    pairs = Pairs.allocate(3, 50, 3, "cpu")
    with pytest.raises(ValueError, match=named):
        pairs.update(seg_lens, members)
