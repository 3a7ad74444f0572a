"""The batch as the kernels see it: tiles of tokens, and for every tile the adapters that its tokens use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not

import numpy as np
import torch

from sglang_lora_tree.kernels.staging import upload
from sglang_lora_tree.kernels.table import RANK_TILE, AdapterTable

ITEM_HEADER = 4
"""Numbers of an item before those of its lanes."""

HALF_TILE = RANK_TILE // 2
"""Two adapters of at most so many ranks can share an item."""

MOST_MODULES = 3
"""Modules that read one input, at most: q, k and v."""

Members = Sequence[tuple[int, float]] | np.ndarray
"""One request's mix: (adapter index, weight) pairs, or a float64 array (k, 2) of them, which is faster."""


_FLOAT64 = np.dtype(np.float64)

Batch = tuple[list[int], list[Members], int]
"""Segment lengths, mixes, and the table's version."""


class Pairs:
    """Requests, their tokens and their (adapter, weight) pairs, reordered so that an adapter is read once per tile.

    The batch's tokens are ordered by adapter and cut into tiles of `block_t` lanes, whatever requests they belong to. A
    tile has a list of items; an item is one tile of ranks of one adapter that some lane uses, with the lanes' weights, 0 for
    lanes that do not use the adapter (DyMerge-LoRA 4.3, for slots: many requests to many adapters, without a copy of any
    weight). Two adapters of at most HALF_TILE ranks share one, half of its ranks each.

    A tile's items are sorted by adapter index, then rank, so a token's members are added up in an order that does not depend
    on the other tokens; and no adapters share an item where a request of the tile has several members, because two of these
    would be added up in one step or in two, as the others' adapters have it.

    Attributes
    ----------
    order : Tensor
        int32 (max_tiles * block_t,): lane -> token; lanes after the batch's last have the tokens after its last.
    item_indptr : Tensor
        int32 (max_tiles + 1,): the items of tile i are [item_indptr[i], item_indptr[i + 1]).
    items : Tensor
        int32 (max_items, ITEM_HEADER + 2 * block_t): adapter index, first rank, the adapter that has the second half of the
        ranks or -1, unused; then the lanes' weights for the one and for the other (float32 bits).
    arrivals : Tensor
        int32 (max_items * MOST_MODULES,): 0 between kernels; programs that share a sum count themselves here.
    num_items : int
        How many items z must have room for: of the last `update`, or of any with `for_graphs`.
    num_tokens : int
        Of the last `update`.
    launch_items : int
        The most items that kernels must expect in a tile: of the last `update`, or of any with `for_graphs`.
    """

    def __init__(
        self,
        table: AdapterTable,
        max_bs: int,
        max_tokens: int,
        max_members: int,
        block_t: int,
        for_graphs: bool,
        max_items: int | None,
    ) -> None:
        assert max_bs > 0 and max_tokens > 0 and max_members > 0, "an empty batch shape is of no use"
        assert block_t >= 16 and block_t & (block_t - 1) == 0, f"a tile has 16, 32, 64 ... lanes, not {block_t}"
        self.table = table
        self.max_bs = max_bs
        self.max_tokens = max_tokens
        self.max_members = max_members
        self.block_t = block_t
        self.for_graphs = for_graphs
        self.max_tiles = -(-max_tokens // block_t)
        # A request meets at most as many tiles as it has tokens, and only its first and last tile can have others in it.
        meetings = min(max_tokens, self.max_tiles + max_bs)
        self.max_items = meetings * max_members * (table.padded_rank // RANK_TILE)
        if max_items is not None:
            self.max_items = min(self.max_items, max_items)
        self.item_stride = ITEM_HEADER + 2 * block_t

        # One buffer with the items last, so that a batch is one copy of as much as it uses.
        order_length = self.max_tiles * block_t
        items_start = -(-(order_length + self.max_tiles + 1) // 4) * 4
        self._host = np.zeros(items_start + self.max_items * self.item_stride, dtype=np.int32)
        self._device = torch.zeros(len(self._host), dtype=torch.int32, device=table.device)
        self._items_start = items_start
        self._host_order = self._host[:order_length]
        self._host_indptr = self._host[order_length : order_length + self.max_tiles + 1]
        self._host_items = self._host[items_start:].reshape(self.max_items, self.item_stride)
        self.order = self._device[:order_length]
        self.item_indptr = self._device[order_length : order_length + self.max_tiles + 1]
        self.items = self._device[items_start:].view(self.max_items, self.item_stride)
        self.arrivals = torch.zeros(self.max_items * MOST_MODULES, dtype=torch.int32, device=table.device)
        self._sums = np.zeros(self.max_tiles)
        self._last: Batch | None = None
        self.update((), ())

    @classmethod
    def allocate(
        cls,
        table: AdapterTable,
        max_bs: int,
        max_tokens: int,
        max_members: int,
        block_t: int = 16,
        for_graphs: bool = False,
        max_items: int | None = None,
    ) -> Pairs:
        """Allocate for batches of up to `max_bs` requests, `max_tokens` tokens, `max_members` pairs per request.

        Parameters
        ----------
        table : AdapterTable
            What the adapter indices mean: its ranks decide how many items an adapter makes.
        block_t : int
            Lanes per tile, a power of two from 16 on: few for decode, many for prefill (`dispatch.choose`).
        for_graphs : bool
            Kernels are launched for any batch of this shape, so that a CUDA graph serves every one.
        max_items : int, optional
            Room for so many items, instead of as many as any batch of this shape can have: only batches that `fits`.
        """
        return cls(table, max_bs, max_tokens, max_members, block_t, for_graphs, max_items)

    def fits(self, seg_lens: Sequence[int], members: Sequence[Members]) -> bool:
        """Whether there is room for a batch for sure: requests, tokens, and a bound on its items."""
        if len(seg_lens) > self.max_bs or sum(seg_lens) > self.max_tokens:
            return False
        items = 0
        for length, mix in zip(seg_lens, members, strict=True):
            if length and len(mix):
                tiles = min(length, (length - 1) // self.block_t + 2)
                ranks = self.table.largest_rank[np.asarray(mix, dtype=np.float64)[:, 0].astype(np.int64)]
                items += tiles * int((-(-ranks // RANK_TILE)).sum())
        return items <= self.max_items

    def update(self, seg_lens: Sequence[int], members: Sequence[Members]) -> None:
        """Describe the next batch: one copy to the device, on the current stream, without synchronisation.

        Not to be called while a CUDA graph is being captured; before the capture and before each replay. A batch that
        equals the last one costs a comparison.

        Parameters
        ----------
        seg_lens : sequence of int
            (bs,): each request's tokens, in the batch's order; 0 is fine.
        members : sequence of Members
            (bs,): each request's mix. The weights are rounded to float32; an adapter that comes twice counts once, with
            the sum of its weights.

        Raises
        ------
        ValueError
            If the batch is larger than what was allocated (but too many items for `max_items` are an assertion: ask `fits`).
        """
        batch = (list(seg_lens), list(members), self.table.version)
        if self._last is not None and _equal(batch, self._last):
            return
        bs = len(seg_lens)
        assert len(members) == bs, f"{bs} segment lengths but {len(members)} member lists"
        lens = np.fromiter(seg_lens, dtype=np.int64, count=bs)
        counts = np.fromiter(map(len, members), dtype=np.int64, count=bs)
        num_tokens, num_pairs = int(lens.sum()), int(counts.sum())
        for name, value, limit in (
            ("requests", bs, self.max_bs),
            ("tokens", num_tokens, self.max_tokens),
            ("members in one request", int(counts.max(initial=0)), self.max_members),
        ):
            if value > limit:
                raise ValueError(f"a batch of {value} {name} is above the {limit} that were allocated")
        flat = _flatten(members).reshape(num_pairs, 2)
        adapters, weights = flat[:, 0].astype(np.int64), flat[:, 1]

        self.num_tokens = num_tokens
        self._last = batch
        self.__dict__.pop("groups", None)
        num_items = self._write(lens, counts, adapters, weights)
        self.num_items = self.max_items if self.for_graphs else num_items
        self.launch_items = self.max_items if self.for_graphs else int(np.diff(self._host_indptr).max())
        used = self._items_start + num_items * self.item_stride
        upload(self._device[:used], torch.from_numpy(self._host[:used]))

    def _write(self, lens: np.ndarray, counts: np.ndarray, adapters: np.ndarray, weights: np.ndarray) -> int:
        """Fill the host's side; return the number of items."""
        block_t, bs, capacity, num_tokens = self.block_t, len(lens), self.table.capacity, self.num_tokens
        # Requests by their first adapter, those of the base model last: tiles then have few adapters each.
        pair_start = counts.cumsum() - counts
        first_adapter = np.full(bs, capacity)
        has_members = counts > 0
        first_adapter[has_members] = adapters[pair_start[has_members]]
        by_adapter = first_adapter.argsort(kind="stable")

        # A cell is a pair in a tile: its tile, adapter, weight, and lanes [low, low + num_lanes) there.
        self._host_order[num_tokens:] = np.arange(num_tokens, len(self._host_order))
        if num_tokens == bs and lens.min(initial=1) == 1:  # decode: a request is a lane, a pair is a cell
            self._host_order[:num_tokens] = by_adapter
            lane_of = np.empty(bs, np.int64)
            lane_of[by_adapter] = np.arange(bs)
            lane = lane_of.repeat(counts)
            tile, adapter, weight, member_counts = lane // block_t, adapters, weights, counts.repeat(counts)
            low, num_lanes = lane - tile * block_t, None
        else:
            ordered_lens = lens[by_adapter]
            ordered_stop = ordered_lens.cumsum()
            token_start = (lens.cumsum() - lens)[by_adapter]
            shift = (token_start - (ordered_stop - ordered_lens)).repeat(ordered_lens)
            self._host_order[:num_tokens] = np.arange(num_tokens) + shift
            start, stop = np.empty(bs, np.int64), np.empty(bs, np.int64)  # lanes of the whole batch
            stop[by_adapter] = ordered_stop
            start[by_adapter] = ordered_stop - ordered_lens
            # A request meets the tiles that have some of its tokens; every member of it is in each of them.
            met = np.flatnonzero(has_members & (lens > 0))
            first_tile = start[met] // block_t
            num_meetings = (stop[met] - 1) // block_t - first_tile + 1
            req = met.repeat(num_meetings)
            tile = first_tile.repeat(num_meetings) + _count_up(num_meetings)
            member = _count_up(counts[req])
            tile, req = tile.repeat(counts[req]), req.repeat(counts[req])
            member_counts = counts[req]
            adapter, weight = adapters[pair_start[req] + member], weights[pair_start[req] + member]
            low = np.maximum(start[req] - tile * block_t, 0)
            num_lanes = np.minimum(stop[req] - tile * block_t, block_t) - low

        # Groups: an adapter in a tile. Items: a tile of ranks of a group, or half a tile of each of two groups.
        groups, group_of = _distinct(tile * capacity + adapter, self.max_tiles * capacity)
        group_tile, group_adapter = np.divmod(groups, capacity)
        largest_rank = self.table.largest_rank[group_adapter]
        group_items = -(-largest_rank // RANK_TILE)
        hosts = guests = np.empty(0, np.int64)
        small = np.flatnonzero((largest_rank <= HALF_TILE) & (largest_rank > 0))
        if len(small):
            mixes_in_tile = np.bincount(tile, weights=member_counts > 1, minlength=self.max_tiles)
            small = small[mixes_in_tile[group_tile[small]] == 0]
            place = np.arange(len(small)) - np.searchsorted(group_tile[small], group_tile[small])  # among its tile's
            hosts, guests = small[np.flatnonzero(place % 2) - 1], small[place % 2 == 1]
            group_items[guests] = 0
        num_items = int(group_items.sum())
        assert num_items <= self.max_items, f"{num_items} items, but room for {self.max_items}: ask `fits` first"
        np.bincount(group_tile, weights=group_items, minlength=self.max_tiles).cumsum(out=self._sums)
        self._host_indptr[1:] = self._sums

        lane = group_of * block_t + low
        if num_lanes is not None:
            lane, weight = lane.repeat(num_lanes) + _count_up(num_lanes), weight.repeat(num_lanes)
        lane_weights = np.bincount(lane, weights=weight, minlength=len(groups) * block_t).astype(np.float32)
        bits = lane_weights.view(np.int32).reshape(-1, block_t)
        items = self._host_items[:num_items]
        firsts, seconds = items[:, ITEM_HEADER : ITEM_HEADER + block_t], items[:, ITEM_HEADER + block_t :]
        items[:, 2], seconds[:] = -1, 0
        if num_items == len(groups) and group_items.min(initial=1) == 1:
            items[:, 0], items[:, 1] = group_adapter, 0
            firsts[:] = bits
        else:
            items[:, 0] = group_adapter.repeat(group_items)
            items[:, 1] = _count_up(group_items) * RANK_TILE
            firsts[:] = bits.repeat(group_items, axis=0)
        if len(guests):
            shared = (group_items.cumsum() - group_items)[hosts]
            items[shared, 2], seconds[shared] = group_adapter[guests], bits[guests]
        self._mixes = (lens, counts, adapters, weights)
        return num_items

    @cached_property
    def groups(self) -> dict[tuple[tuple[int, float], ...], torch.Tensor]:
        """Token numbers (int64, CPU) by mix: what the plain-torch path walks over."""
        lens, counts, adapters, weights = (part.tolist() for part in (*self._mixes[:3], self._mixes[3].astype(np.float32)))
        spans: dict[tuple[tuple[int, float], ...], list[torch.Tensor]] = {}
        token = pair = 0
        for length, count in zip(lens, counts, strict=True):
            mix = tuple(zip(adapters[pair : pair + count], weights[pair : pair + count], strict=True))
            if mix and length:
                spans.setdefault(mix, []).append(torch.arange(token, token + length))
            token, pair = token + length, pair + count
        return {mix: torch.cat(tokens) for mix, tokens in spans.items()}


def _equal(batch: Batch, other: Batch) -> bool:
    """Whether two batches are the same for sure: arrays count as equal only if they are the same objects."""
    if batch[0] != other[0] or batch[2] != other[2] or len(batch[1]) != len(other[1]):
        return False
    others = compress(zip(batch[1], other[1], strict=True), map(is_not, batch[1], other[1]))
    return all(not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and a == b for a, b in others)


def _flatten(members: Sequence[Members]) -> np.ndarray:
    """float64: adapter, weight, adapter, weight, ... of all mixes."""
    if set(map(type, members)) != {np.ndarray}:
        return np.fromiter(chain.from_iterable(chain.from_iterable(members)), dtype=np.float64)
    if all(map(is_, map(attrgetter("dtype"), members), repeat(_FLOAT64))):
        try:
            return np.frombuffer(b"".join(members))  # type: ignore[arg-type]  # an eighth of what np.concatenate takes
        except TypeError:  # an array is not contiguous
            pass
    return np.concatenate(members).astype(np.float64)


def _distinct(numbers: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct numbers, of range(limit), in order; and the place of each number among them."""
    if limit > 1 << 18:
        return np.unique(numbers, return_inverse=True)
    place = np.zeros(limit, np.int32)  # without sorting: several times faster for a decode batch
    place[numbers] = 1
    distinct = np.flatnonzero(place)
    place[distinct] = np.arange(len(distinct), dtype=np.int32)
    return distinct, place[numbers]


def _count_up(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... anew for each length: [2, 3] -> [0, 1, 0, 1, 2]."""
    stops = np.cumsum(lengths)
    return np.arange(stops[-1] if len(stops) else 0) - np.repeat(stops - lengths, lengths)
