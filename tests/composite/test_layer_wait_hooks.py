"""No row of an adapter that comes in with a prefill is read before it is there."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_lora_tree.adapters.base_shape import MODULES
from sglang_lora_tree.composite import backend_hooks
from sglang_lora_tree.composite.layer_wait_hooks import LayerWait, is_hooked, wait_for_next_layer
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.table import AdapterTable
from sglang_lora_tree.radix.layout import Outline, Packer, PoolShape
from tests.radix.tree import BASE

NUM_LAYERS = 4
PACKER = Packer(dataclasses.replace(BASE, num_layers=NUM_LAYERS), PoolShape(NUM_LAYERS, 8, 1))


class Counter:
    """Stands for SGLang's events: remembers up to which pool layer the stream has waited."""

    def __init__(self) -> None:
        self.there = -1

    def wait_until(self, layer: int) -> None:
        assert 0 <= layer < NUM_LAYERS, f"no event {layer}: -1 would be the last one, and wait for everything"
        self.there = max(self.there, layer)


def ranks(*by_layer: int) -> np.ndarray:
    """The same rank for all modules of a layer."""
    return np.repeat(np.array(by_layer, np.int32)[:, None], len(MODULES), axis=1)


CASES = {
    "uniform": [ranks(4, 4, 4, 4)],
    "front": [ranks(16, 1, 1, 1)],
    "back": [ranks(1, 1, 1, 16)],
    "gap": [ranks(0, 8, 0, 0)],
    "first_only": [ranks(3, 0, 0, 0)],
    "two": [ranks(16, 0, 0, 1), ranks(1, 0, 0, 16)],
    "some_modules": [ranks(4, 4, 4, 4) * (np.arange(len(MODULES)) > 4).astype(np.int32)],
}


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(backend_hooks, "_current", None)
    backend = backend_hooks.LoraTreeBackend(8, torch.device("cpu"))
    pool = PoolView.from_planes([torch.zeros(64, 8) for _ in range(2 * NUM_LAYERS)])
    backend.attach(pool, AdapterTable(2, 64, NUM_LAYERS, 16, "cpu"), max_members=1)
    return backend


@pytest.mark.parametrize("case", CASES)
def test_every_layer_finds_its_rows_and_the_pass_leaves_none_behind(case, backend):
    """Rows as the packer lays them out; a pass as SGLang makes it: prepared, then layer after layer, attention in each."""
    layouts = [PACKER.plan(Outline("", rank, np.ones(rank.shape, np.float32))) for rank in CASES[case]]
    counter = Counter()
    wait = LayerWait.of(counter, layouts)
    backend.prepare([1], [()], use_decode_graph=False, layer_wait=wait)
    for layer in range(NUM_LAYERS):
        for layout in layouts:
            starts = layout.row_start.ravel()
            ends = np.append(starts, layout.num_rows)[1:].copy()
            for place in range(len(ends) - 1, 0, -1):  # a module that is not there has no rows
                if ends[place - 1] < 0:
                    ends[place - 1] = ends[place]
            here = slice(layer * len(MODULES), (layer + 1) * len(MODULES))
            last_rows = ends[here][starts[here] >= 0] - 1
            assert all(counter.there >= row // layout.num_slots // 2 for row in last_rows), f"layer {layer} reads too early"
        wait_for_next_layer(None, None, None, None, SimpleNamespace(layer_id=layer), None)
    assert all(counter.there >= (layout.num_rows - 1) // layout.num_slots // 2 for layout in layouts)


def test_a_pass_that_brings_nothing_in_waits_for_nothing(backend):
    counter = Counter()
    assert LayerWait.of(counter, []) is None
    backend.prepare([1], [()], use_decode_graph=False, layer_wait=LayerWait(counter, np.array([0, 1, 2, 3])))
    backend.prepare([1], [()], use_decode_graph=False)
    counter.there = -1
    wait_for_next_layer(None, None, None, None, SimpleNamespace(layer_id=0), None)
    assert counter.there == -1


def test_only_backends_whose_prefills_pass_the_hook_count():
    class Other(TorchNativeAttnBackend):
        def forward(self, *args, **kwargs): ...

    plain, other = (kind.__new__(kind) for kind in (TorchNativeAttnBackend, Other))
    hybrid = HybridAttnBackend.__new__(HybridAttnBackend)
    assert is_hooked(plain) and not is_hooked(other)
    for prefill, hooked in ((plain, True), (other, False)):
        hybrid.prefill_backend, hybrid.decode_backend = prefill, plain
        assert is_hooked(hybrid) is hooked
