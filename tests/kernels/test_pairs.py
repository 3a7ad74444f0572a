"""The batch's device tensors say what was given, and stay where they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lora_tree.kernels.pairs import HALF_TILE, ITEM_HEADER, Pairs
from sglang_lora_tree.kernels.table import RANK_TILE, AdapterTable

MAX_BS, MAX_TOKENS, MAX_MEMBERS = 6, 200, 3
RANKS = (1, 8, 16, 17, 33, 48, 64, 80, 100, 5)
MIX = st.lists(st.tuples(st.integers(0, 9), st.floats(-4, 4, width=32)), max_size=MAX_MEMBERS, unique_by=lambda pair: pair[0])
BATCHES = st.lists(st.tuples(st.integers(0, 33), MIX), max_size=MAX_BS)


def make_table(ranks: tuple[int, ...] = RANKS) -> AdapterTable:
    """A table whose adapters have these largest ranks."""
    table = AdapterTable(len(ranks) + 1, 100, 2, 128, "cpu")
    for index, rank in enumerate(ranks):
        entry = torch.zeros(2, 7, dtype=torch.int32)
        entry[1, 3] = rank
        table.write(index, torch.arange(1), (entry > 0).int() - 1, entry, entry.float())
    table.flush()
    return table


def read(pairs: Pairs) -> dict[int, list[tuple[int, int, float]]]:
    """Token -> (adapter, first rank, weight) of the items that reach it, checking the structure on the way."""
    reached: dict[int, list[tuple[int, int, float]]] = {}
    items = pairs.items
    lanes = pairs.block_t
    weights = items[:, ITEM_HEADER:].contiguous().view(torch.float32)
    halves = weights[:, :lanes], weights[:, lanes:]
    for tile in range(pairs.max_tiles):
        begin, end = int(pairs.item_indptr[tile]), int(pairs.item_indptr[tile + 1])
        spans: dict[int, list[int]] = {}
        for number in range(begin, end):
            shared = int(items[number, 2]) >= 0
            assert shared or not halves[1][number].any(), "weights of an adapter that is not there"
            for half in range(1 + shared):
                adapter = int(items[number, 2 * half])
                first_rank = 0 if half else int(items[number, 1])
                assert adapter >= 0 and (not shared or (first_rank == 0 and pairs.table.largest_rank[adapter] <= HALF_TILE))
                spans.setdefault(adapter, []).append(number - begin)
                for lane in halves[half][number].nonzero().flatten().tolist():
                    token = int(pairs.order[tile * lanes + lane])
                    reached.setdefault(token, []).append((adapter, first_rank, float(halves[half][number, lane])))
        for numbers in spans.values():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return reached


@settings(max_examples=100, deadline=None)
@given(st.lists(BATCHES, min_size=1, max_size=3), st.sampled_from([16, 64]))
def test_update_describes_the_last_batch(batches, block_t):
    pairs = Pairs.allocate(make_table(), MAX_BS, MAX_TOKENS, MAX_MEMBERS, block_t)
    tensors = [pairs.order, pairs.item_indptr, pairs.items]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for batch in batches:
        pairs.update([length for length, _ in batch], [mix for _, mix in batch])
    assert [tensor.data_ptr() for tensor in tensors] == addresses, "a captured graph would read stale memory"

    num_tokens = sum(length for length, _ in batch)
    assert pairs.num_tokens == num_tokens
    assert sorted(pairs.order[:num_tokens].tolist()) == list(range(num_tokens))
    assert (pairs.order[num_tokens:] == torch.arange(num_tokens, len(pairs.order))).all(), "stale lanes after the last one"
    reached = read(pairs)
    token, groups = 0, {}
    for length, mix in batch:
        span = list(range(token, token + length))
        token += length
        for t in span:
            expected = [
                (adapter, first, weight)
                for adapter, weight in mix
                if weight
                for first in range(0, RANKS[adapter], RANK_TILE)
            ]
            assert sorted(reached.pop(t, [])) == sorted(expected)
        if mix and span:
            groups.setdefault(tuple(mix), []).extend(span)
    assert not reached, "items reach tokens that have no adapters"
    assert {mix: tokens.tolist() for mix, tokens in pairs.groups.items()} == groups


def test_members_are_added_up_in_one_order_whatever_the_batch():
    """By index, then rank: beside other mixes and in any lane."""
    pairs = Pairs.allocate(make_table(), MAX_BS, MAX_TOKENS, MAX_MEMBERS)
    mix = [(9, 1.0), (6, 0.5), (2, -1.0)]
    others = [[(0, 1.0), (7, 1.0)], [(6, 1.0)], [], [(2, 3.0), (5, 1.0)]]
    for batch in ([mix], [*others, mix], [mix, *others]):
        pairs.update([1] * len(batch), batch)
        order = [adapter for adapter, *_ in read(pairs)[batch.index(mix)]]
        assert order == [2] + [6] * -(-RANKS[6] // RANK_TILE) + [9]


def test_an_adapter_is_once_in_a_tile():
    """32 requests with 8 adapters in turns: every tile of 16 has the items of 4 adapters, not of 8."""
    pairs = Pairs.allocate(make_table((16,) * 8), 32, 32, 1)
    pairs.update([1] * 32, [[(i % 8, 1.0)] for i in range(32)])
    assert pairs.item_indptr.tolist() == [0, 4, 8] and pairs.launch_items == 4


def test_two_small_adapters_share_an_item():
    """Half the items for ranks of up to 8, but not of a tile in which a request has several: see Pairs."""
    pairs = Pairs.allocate(make_table((8, 3, 16, 1)), 8, 32, 3)
    singles = [[(i % 4, 1.0)] for i in range(8)]
    pairs.update([1] * 8, singles)
    assert pairs.item_indptr.tolist()[:2] == [0, 3], "8 beside 3, 16 alone, 1 alone"
    assert pairs.items[:3, :3].tolist() == [[0, 0, 1], [2, 0, -1], [3, 0, -1]]
    assert read(pairs) == {token: [(token % 4, 0, 1.0)] for token in range(8)}
    pairs.update([1] * 8, [*singles[:7], [(1, 0.5), (3, 0.5)]])
    assert pairs.item_indptr.tolist()[:2] == [0, 4]
    pairs.update([9, 9, 1], [[(0, 1.0)], [(1, 1.0)], [(1, 0.5), (3, 0.5)]])  # the second tile alone has a mix
    assert pairs.item_indptr.tolist()[:3] == [0, 1, 3]


def test_an_adapter_twice_in_a_mix_counts_with_the_sum():
    pairs = Pairs.allocate(make_table(), 1, 1, 3)
    pairs.update([1], [[(0, 1.0), (1, 2.0), (0, -0.25)]])
    assert {(adapter, weight) for adapter, _, weight in read(pairs)[0]} == {(0, 0.75), (1, 2.0)}


def test_for_graphs_the_launch_does_not_depend_on_the_batch():
    pairs = Pairs.allocate(make_table(), 8, 8, 2, for_graphs=True)
    pairs.update([1] * 8, [()] * 8)
    captured = pairs.launch_items
    pairs.update([1] * 8, [[(1, 0.5)]] * 3 + [()] * 5)
    assert captured == pairs.launch_items > 0


def test_fits_is_never_wrong_about_the_room():
    """What fits has no more items than there is room for, also where requests share and straddle tiles."""
    rng = np.random.default_rng(0)
    table = make_table((16, 4, 40, 33))
    pairs = Pairs.allocate(table, 6, 200, 3, for_graphs=True, max_items=25)
    said_yes = said_no = 0
    for _ in range(200):
        seg_lens = rng.integers(0, 40, rng.integers(1, 7)).tolist()
        mixes = [[(int(index), 0.5) for index in rng.permutation(4)[: rng.integers(0, 4)]] for _ in seg_lens]
        if pairs.fits(seg_lens, mixes):
            pairs.update(seg_lens, mixes)  # asserts that there is room
            said_yes += 1
        else:
            said_no += 1
    assert said_yes > 20 and said_no > 20
    assert not pairs.fits([1] * 7, [()] * 7) and not pairs.fits([201], [()])


def test_an_adapter_that_changed_is_seen_in_an_unchanged_batch():
    table = make_table()
    pairs = Pairs.allocate(table, 1, 1, 1)
    pairs.update([1], [[(0, 1.0)]])
    entry = torch.zeros(2, 7, dtype=torch.int32)
    entry[0, 0] = 40
    table.write(0, torch.arange(1), (entry > 0).int() - 1, entry, entry.float())
    pairs.update([1], [[(0, 1.0)]])
    assert [first for _, first, *_ in read(pairs)[0]] == [0, 16, 32]


def test_weights_are_float32():
    pairs = Pairs.allocate(make_table(), 3, 50, 3)
    pairs.update([1], [[(0, 0.1)]])
    assert list(pairs.groups) == [((0, float(torch.tensor(0.1))),)]
    assert read(pairs)[0][0][2] == float(torch.tensor(0.1))


@pytest.mark.parametrize(
    ("seg_lens", "members", "named"),
    [([1] * 4, [()] * 4, "4 requests"), ([51], [()], "51 tokens"), ([1], [[(0, 1.0)] * 4], "4 members")],
)
def test_too_large_a_batch_is_refused(seg_lens, members, named):
    pairs = Pairs.allocate(make_table(), 3, 50, 3)
    with pytest.raises(ValueError, match=named):
        pairs.update(seg_lens, members)


@pytest.mark.parametrize(
    "form",
    [
        lambda mix: np.array(mix, dtype=np.float64),
        lambda mix: np.asfortranarray(np.array(mix, dtype=np.float64)),
        lambda mix: np.array(mix, dtype=np.float32),
        lambda mix: tuple(mix),
    ],
    ids=["rows", "columns", "float32", "tuple"],
)
def test_mixes_may_come_in_any_form(form):
    mixes = [[(9, 0.5), (6, 0.25)], [(2, -1.0)]]
    pairs, other = (Pairs.allocate(make_table(), MAX_BS, MAX_TOKENS, MAX_MEMBERS) for _ in range(2))
    pairs.update([1, 2], mixes)
    other.update([1, 2], [form(mix) for mix in mixes])
    assert read(other) == read(pairs)


def test_an_empty_request_does_not_hide_a_long_one():
    """As many tokens as requests, but not one each."""
    pairs = Pairs.allocate(make_table(), MAX_BS, MAX_TOKENS, MAX_MEMBERS)
    pairs.update([0, 2], [[(1, 1.0)], [(2, 0.5)]])
    assert read(pairs) == {0: [(2, 0, 0.5)], 1: [(2, 0, 0.5)]}
