"""The batch as the kernels see it: which tokens belong to which request, and which adapters each request mixes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import numpy as np
import torch

from sglang_lora_tree.kernels.staging import upload

BLOCK_T = 16
"""Tokens per tile. The same for prefill and decode: one shape, one order of additions, the same bits."""

Members = Sequence[tuple[int, float]]
"""One request's mix: (adapter index, weight) pairs, in the order in which they are added."""


class Pairs:
    """Requests, their tokens and their (adapter, weight) pairs, in device tensors changed only in place.

    Request i owns tokens [seg_indptr[i], seg_indptr[i + 1]) and pairs [pair_indptr[i], pair_indptr[i + 1]). A request
    without pairs is a base-model request: kernels do not touch its tokens. The tokens are cut into tiles of at most
    BLOCK_T tokens of one request.

    Attributes
    ----------
    seg_indptr, pair_indptr : Tensor
        int32 (max_bs + 1,); entries past the last request repeat the total.
    pair_adapter : Tensor
        int32 (max_bs * max_members,).
    pair_weight : Tensor
        float32 (max_bs * max_members,).
    tile_req, tile_start : Tensor
        int32 (max_tiles,): a tile's request (-1 = no tile) and first token.
    bs, num_tokens, num_pairs : int
        Of the last `update`.
    num_tiles : int
        Of the last `update`: how many tiles the kernels are launched for.
    """

    def __init__(self, max_bs: int, max_tokens: int, max_members: int, device: torch.device | str) -> None:
        assert max_bs > 0 and max_tokens > 0 and max_members > 0, "an empty batch shape is of no use"
        self.max_bs = max_bs
        self.max_tokens = max_tokens
        self.max_members = max_members
        self.max_tiles = self.bound_tiles(max_bs, max_tokens)
        self.device = torch.device(device)

        lengths = {
            "seg_indptr": max_bs + 1,
            "pair_indptr": max_bs + 1,
            "pair_adapter": max_bs * max_members,
            "pair_weight": max_bs * max_members,
            "tile_req": self.max_tiles,
            "tile_start": self.max_tiles,
        }
        # One buffer, so that a batch is one copy; fields start at multiples of 16 bytes for the kernels' loads.
        starts = np.cumsum([0] + [-(-length // 4) * 4 for length in lengths.values()])
        self._host = np.zeros(starts[-1], dtype=np.int32)
        self._device = torch.zeros(int(starts[-1]), dtype=torch.int32, device=self.device)
        fields = {name: slice(start, start + lengths[name]) for name, start in zip(lengths, starts, strict=False)}
        self._host_fields = {name: self._host[field] for name, field in fields.items()}
        self.seg_indptr = self._device[fields["seg_indptr"]]
        self.pair_indptr = self._device[fields["pair_indptr"]]
        self.pair_adapter = self._device[fields["pair_adapter"]]
        self.pair_weight = self._device[fields["pair_weight"]].view(torch.float32)
        self.tile_req = self._device[fields["tile_req"]]
        self.tile_start = self._device[fields["tile_start"]]
        self.update((), ())

    @classmethod
    def allocate(cls, max_bs: int, max_tokens: int, max_members: int, device: torch.device | str) -> Pairs:
        """Allocate for batches of up to `max_bs` requests, `max_tokens` tokens, `max_members` pairs per request."""
        return cls(max_bs, max_tokens, max_members, device)

    def update(
        self, seg_lens: Sequence[int], members: Sequence[Members], num_tiles: int | None = None
    ) -> None:
        """Describe the next batch: one copy to the device, on the current stream, without synchronisation.

        Not to be called while a CUDA graph is being captured; before the capture and before each replay.

        Parameters
        ----------
        seg_lens : sequence of int
            (bs,): each request's tokens, in the batch's order; 0 is fine. A decode graph's padding counts as requests
            of one token without members.
        members : sequence of sequence of (int, float)
            (bs,): each request's mix. The weights are rounded to float32.
        num_tiles : int, optional
            Launch this many tiles (at least as many as the batch has; those to spare do nothing). For CUDA graphs with
            more than one token per request: the grid of the capture, so that one graph serves every cut into requests
            (`bound_tiles`). Default: as many as the batch has, for decode the number of requests.

        Raises
        ------
        ValueError
            If the batch is larger than what was allocated.
        """
        bs = len(seg_lens)
        assert len(members) == bs, f"{bs} segment lengths but {len(members)} member lists"
        flat = list(chain.from_iterable(members))
        counts = np.fromiter(map(len, members), dtype=np.int32, count=bs)
        lens = np.fromiter(seg_lens, dtype=np.int32, count=bs)
        num_tokens = int(lens.sum())
        for name, value, limit in (
            ("requests", bs, self.max_bs),
            ("tokens", num_tokens, self.max_tokens),
            ("members in one request", int(counts.max(initial=0)), self.max_members),
        ):
            if value > limit:
                raise ValueError(f"a batch of {value} {name} is above the {limit} that were allocated")

        host = self._host_fields
        _write_indptr(host["seg_indptr"], lens)
        _write_indptr(host["pair_indptr"], counts)
        if flat:
            adapters, weights = zip(*flat, strict=True)
            host["pair_adapter"][: len(flat)] = adapters
            host["pair_weight"].view(np.float32)[: len(flat)] = weights

        tiles_per_req = -(-lens // BLOCK_T)
        used = int(tiles_per_req.sum())
        assert used <= self.max_tiles, "the bound on tiles is wrong"
        tile_req = np.repeat(np.arange(bs, dtype=np.int32), tiles_per_req)
        first_tile = np.cumsum(tiles_per_req) - tiles_per_req
        host["tile_req"][:used] = tile_req
        host["tile_req"][used:] = -1
        host["tile_start"][:used] = host["seg_indptr"][tile_req] + BLOCK_T * (np.arange(used) - first_tile[tile_req])

        self.num_tiles = used if num_tiles is None else num_tiles
        assert used <= self.num_tiles <= self.max_tiles, f"{used} tiles do not fit a grid of {num_tiles}"
        self.bs, self.num_tokens, self.num_pairs = bs, num_tokens, len(flat)
        self.__dict__.pop("groups", None)
        upload(self._device, torch.from_numpy(self._host))

    @staticmethod
    def bound_tiles(bs: int, num_tokens: int) -> int:
        """The most tiles that `num_tokens` tokens of `bs` requests can make: a grid for every such batch."""
        starts = min(bs, num_tokens)  # every request that has tokens starts a tile, full tiles or not
        return starts + (num_tokens - starts) // BLOCK_T

    @cached_property
    def groups(self) -> dict[tuple[tuple[int, float], ...], torch.Tensor]:
        """Token numbers (int64, CPU) by mix, from the host's copy: what the plain-torch path walks over."""
        host = self._host_fields
        seg_indptr = host["seg_indptr"][: self.bs + 1].tolist()
        pair_indptr = host["pair_indptr"][: self.bs + 1].tolist()
        adapters = host["pair_adapter"][: self.num_pairs].tolist()
        weights = host["pair_weight"].view(np.float32)[: self.num_pairs].tolist()
        spans: dict[tuple[tuple[int, float], ...], list[torch.Tensor]] = {}
        for i in range(self.bs):
            pairs = slice(pair_indptr[i], pair_indptr[i + 1])
            mix = tuple(zip(adapters[pairs], weights[pairs], strict=True))
            if mix and seg_indptr[i] < seg_indptr[i + 1]:
                spans.setdefault(mix, []).append(torch.arange(seg_indptr[i], seg_indptr[i + 1]))
        return {mix: torch.cat(tokens) for mix, tokens in spans.items()}


def _write_indptr(target: np.ndarray, lengths: np.ndarray) -> None:
    """Fill target (max_bs + 1,) with the running sum of lengths (bs,), the total repeated to the end."""
    bs = len(lengths)
    np.cumsum(lengths, dtype=np.int32, out=target[1 : bs + 1])
    target[bs + 1 :] = target[bs]
