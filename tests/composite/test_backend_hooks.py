"""Batches and the tensors that captured graphs read; the layers themselves are what the live tests ask."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_lora_tree.composite import backend_hooks, finish_hooks, manager_hooks
from sglang_lora_tree.composite.backend_hooks import LoraTreeBackend, ModuleGroup, Unfinished
from sglang_lora_tree.composite.manager_hooks import TreeLoRAManager
from sglang_lora_tree.kernels import AdapterTable, PoolView
from sglang_lora_tree.kernels.lora import expand_delta, shrink
from sglang_lora_tree.kernels.rotation import Rotation
from sglang_lora_tree.kernels.table import NUM_MODULES

RANKS = (16, 4, 40)
HEAD = 8


@pytest.fixture
def backend(monkeypatch):
    """A backend that was told to capture prefill graphs of up to 1,024 tokens, with three adapters in its table."""
    monkeypatch.setattr(backend_hooks, "_current", None)
    backend = LoraTreeBackend(8, torch.device("cpu"))
    table = AdapterTable(len(RANKS), 64, 1, 64, "cpu")
    for index, rank in enumerate(RANKS):
        shape = (1, NUM_MODULES)
        table.write(index, torch.arange(20), torch.zeros(shape).int(), torch.full(shape, rank), torch.ones(shape))
    backend.attach(PoolView.from_planes([torch.zeros(64, 16) for _ in range(2)]), table, max_members=3)
    backend.init_decode_cuda_graph_batch_info(8, 1)
    backend.init_prefill_cuda_graph_batch_info(1024, 64)
    return backend


@pytest.mark.parametrize(("kind", "supported"), [(Backend.BREAKABLE, True), (Backend.FULL, False), (Backend.DISABLED, False)])
def test_prefill_graphs_are_breakable_ones(kind, supported, backend, monkeypatch):
    """Full graphs would have attention inside, which waits in Python for what comes in."""
    manager = TreeLoRAManager.__new__(TreeLoRAManager)
    manager.attn_dp_enabled, manager.lora_backend = False, backend
    monkeypatch.setattr(manager_hooks, "check_cuda_graph_backend", lambda phase, asked: (phase, asked) == (Phase.PREFILL, kind))
    assert manager.supports_prefill_cuda_graph is supported


@pytest.mark.parametrize(
    ("graph", "captured", "replayed"),
    [("decode", [1] * 8, ([1] * 8, [1] * 3, [1])), ("prefill", [1024], ([100] * 8, [513], [600, 1, 3, 40]))],
)
def test_what_a_graph_reads_keeps_its_place(backend, graph, captured, replayed):
    """One set of tensors, whatever the batch, and launches of one size: those of a capture with base requests alone."""

    def prepare(seg_lens, members):
        backend.prepare(seg_lens, members, use_decode_graph=graph == "decode", use_prefill_graph=graph == "prefill")
        pairs = backend.batch_info.pairs
        assert pairs.num_tokens == sum(seg_lens)
        addresses = [tensor.data_ptr() for tensor in (pairs.order, pairs.item_indptr, pairs.items, pairs.arrivals)]
        return addresses, pairs.num_items, pairs.launch_items, pairs.block_t

    at_capture = prepare(captured, [()] * len(captured))
    assert not backend.batch_info.has_active_lora
    for seg_lens in replayed:
        assert prepare(seg_lens, [[(index % 3, 0.5), ((index + 1) % 3, -1.0)] for index in range(len(seg_lens))]) == at_capture
        assert backend.batch_info.has_active_lora


def test_short_and_long_prefill_graphs_have_tiles_of_their_own(backend):
    """A graph of up to 512 tokens and a longer one are computed by other configs, as the same batches without graphs are."""
    tiles = []
    for tokens in (300, 900, 512):
        backend.prepare([tokens], [[(0, 1.0)]], use_decode_graph=False, use_prefill_graph=True)
        graph = backend.batch_info.pairs
        backend.prepare([tokens], [[(0, 1.0)]], use_decode_graph=False)
        assert graph is not backend.batch_info.pairs and graph.block_t == backend.batch_info.pairs.block_t
        tiles.append(graph)
    assert tiles[0] is tiles[2] and tiles[0] is not tiles[1] and tiles[0].block_t < tiles[1].block_t


def test_a_batch_that_a_graph_would_compute_otherwise_does_not_replay_it(backend):
    assert backend.fits_prefill_graph([500], [[(0, 1.0)]], graph_tokens=512)
    assert not backend.fits_prefill_graph([500], [[(0, 1.0)]], graph_tokens=1024)


def test_a_batch_of_too_many_items_does_not_replay_a_graph(backend, monkeypatch):
    """Rank 40 is three items in every tile that a request meets."""
    monkeypatch.setattr(backend_hooks, "PREFILL_GRAPH_ITEMS", 30)
    mixes = [[(2, 1.0)], [(2, 0.5), (1, 1.0)]]
    assert backend.fits_prefill_graph([64 * 5, 300], [*mixes[:1], ()], graph_tokens=1024)
    assert not backend.fits_prefill_graph([64 * 5, 300], mixes, graph_tokens=1024)


class Manager(TreeLoRAManager):
    """Only what turns a ForwardBatch into a batch of the backend: lora_ids are the numbers of adapters."""

    def __init__(self, backend, captured):
        self.lora_backend, self.attn_dp_enabled, self.max_bs_in_decode_cuda_graph = backend, False, 8
        self.residency = None
        self.model_runner = SimpleNamespace(prefill_cuda_graph_runner=SimpleNamespace(capture_num_tokens=captured))

    def attach_pool(self):
        return self.lora_backend.table

    def _members(self, lora_id):
        return () if lora_id is None else [(lora_id, 1.0)]


def forward_batch(seg_lens, lora_ids):
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(seg_lens),
        extend_num_tokens=sum(seg_lens),
        extend_seq_lens_cpu=list(seg_lens),
        lora_ids=lora_ids,
    )


@pytest.mark.parametrize(
    ("captured", "seg_lens", "replays"),
    [
        ([256, 512, 1024], [200, 100], True),
        ([256, 1024], [200, 100], False),  # 300 tokens, padded to 1,024, would go by the config of long batches
        ([256, 512, 1024], [1100], False),
        ((), [200, 100], True),  # the capture itself
    ],
)
def test_the_runner_and_the_batch_agree_about_graphs(backend, captured, seg_lens, replays):
    """What can_run_graph is told is what prepare_lora_batch has filled."""
    manager = Manager(backend, captured)
    batch = forward_batch(seg_lens, [2, None][: len(seg_lens)])
    manager.prepare_lora_batch(batch)
    assert manager.can_use_prefill_cuda_graph(batch) is replays
    assert backend.batch_info.pairs.for_graphs is replays


def test_without_prefill_graphs_no_batch_has_their_tensors(backend):
    backend.prefill_cuda_graph_max_bs = None
    manager = Manager(backend, ())
    manager.prepare_lora_batch(forward_batch([200], [1]))
    assert not backend.batch_info.pairs.for_graphs


@pytest.mark.parametrize(("use_graph", "members", "runs"), [(False, (), False), (False, [(0, 1.0)], True), (True, (), True)])
def test_base_requests_alone_launch_nothing_but_into_graphs(backend, monkeypatch, use_graph, members, runs):
    """Which of its two decode graphs SGLang captures and replays is its own affair (skip_inactive_dense_lora)."""
    launches = []
    monkeypatch.setattr(backend_hooks, "shrink", lambda *_: launches.append("shrink"))
    monkeypatch.setattr(backend_hooks, "expand", lambda *_: launches.append("expand"))
    backend.prepare([1], [members], use_decode_graph=use_graph)
    group, _ = backend_hooks.ModuleGroup.of("o_proj", 0, 40, torch.device("cpu"))
    y = backend.forward_with_base(None, torch.zeros(1, 48), lambda: torch.ones(1, 40), group, group, None, (0, 40))
    assert torch.equal(y, torch.ones(1, 40)) and launches == (["shrink", "expand"] if runs else [])


LAYERS = {"qkv_proj": (0, 32, 48, 64), "gate_up_proj": (0, 32, 64), "o_proj": (0, 64)}


def leave(backend, linear, beside):
    """A layer's output without its adapters' part, left to the next operation, and the finished output.

    beside: the part was computed beside the base product, as a delta.
    """
    backend.prepare([3, 2], [((1, 0.5),), ()], use_decode_graph=False)
    backend.pool.planes[0].normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    offsets = LAYERS[linear]
    y = torch.linspace(-2.0, 2.0, 5 * 64).view(5, 64)
    groups = ModuleGroup.of(linear, 0, 64, torch.device("cpu"))
    finished = backend.forward_with_base(None, x, y.clone, *groups, None, offsets)
    assert not torch.equal(y[:3], finished[:3]) and torch.equal(y[3:], finished[3:])
    operands = backend.table, backend.pool, backend.batch_info.pairs
    shrunk = shrink(x, *operands, 0, groups[0].modules, tuple(end - start for start, end in pairwise(offsets)))
    delta = expand_delta(shrunk, *operands, 5, offsets[:-1]) if beside else None
    backend._unfinished = Unfinished(y, shrunk, offsets[:-1], delta)
    return y, finished


def test_what_is_left_to_the_next_operation(backend):
    """By a group that says so."""
    backend.prepare([2], [((1, 0.5),)], use_decode_graph=False)
    backend.pool.planes[0].normal_(generator=torch.Generator().manual_seed(1))
    x, base = torch.ones(2, 16), torch.zeros(2, 64)
    for linear, offsets in LAYERS.items():
        groups = ModuleGroup.of(linear, 0, 64, torch.device("cpu"), finished_later=True)
        y = backend.forward_with_base(None, x, base.clone, *groups, None, offsets)
        assert torch.equal(y, base) and backend._unfinished.delta.any(), "the part is computed, and not added"
        backend._unfinished = None


def test_an_output_that_nothing_has_finished_stops_the_next_layer(backend):
    """Better than a wrong answer; the message says which and what to do."""
    leave(backend, "gate_up_proj", beside=True)
    groups = ModuleGroup.of("o_proj", 0, 64, torch.device("cpu"))
    with pytest.raises(AssertionError, match=r"gate_proj, up_proj in layer 0.*join_operations false"):
        backend.forward_with_base(None, torch.ones(5, 16), lambda: torch.zeros(5, 64), *groups, None, (0, 64))


def rotary_embedding():
    """What the hook reads of SGLang's."""
    angles = torch.arange(20)[:, None] / torch.tensor([1.0, 3.0, 9.0, 27.0])
    return SimpleNamespace(cos_sin_cache=torch.cat((angles.cos(), angles.sin()), dim=1), head_size=HEAD)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("asks_for_more", [False, True])
def test_the_rotary_embedding_adds_what_qkv_lacks(backend, asks_for_more, beside):
    """By itself, or, if it is asked for what we do not do (stored K and V), before SGLang's own runs."""
    y, finished = leave(backend, "qkv_proj", beside)
    q, k, v = y.split((32, 16, 16), dim=1)
    rotary, positions = rotary_embedding(), torch.tensor([7, 8, 9, 0, 1])
    rotation = Rotation(positions, rotary.cos_sin_cache, HEAD)
    expected = [rotation.apply(finished[:, :32]), rotation.apply(finished[:, 32:48]), finished[:, 48:]]

    def original(rotary, positions, query, key, *args, **kwargs):
        assert asks_for_more, "rotated twice"
        return rotation.apply(query), rotation.apply(key)

    stored = {"fused_set_kv_buffer_arg": object() if asks_for_more else None}
    rotated = finish_hooks.rotate(original, rotary, positions, q, k, **stored)
    for part, wanted in zip((*rotated, v), expected, strict=True):
        torch.testing.assert_close(part, wanted)
    assert backend._unfinished is None


@pytest.mark.parametrize("beside", [False, True])
def test_the_activation_adds_what_gate_and_up_lack(backend, beside):
    y, finished = leave(backend, "gate_up_proj", beside)
    activated = finish_hooks.activate(lambda *operands: pytest.fail("activated twice"), SimpleNamespace(), y)
    torch.testing.assert_close(activated, torch.nn.functional.silu(finished[:, :32]) * finished[:, 32:])
    assert backend._unfinished is None


@pytest.mark.parametrize("asks_for_more", [False, True])
def test_the_norm_adds_what_the_output_lacks(backend, asks_for_more):
    y, finished = leave(backend, "o_proj", beside=True)
    residual = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    norm = SimpleNamespace(weight=torch.linspace(0.5, 1.5, 64), variance_epsilon=1e-5)
    total = finished + residual
    expected = total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm.weight

    def original(norm, x, residual, *args, **kwargs):
        assert asks_for_more, "normalised twice"
        torch.testing.assert_close(x, finished)
        return expected, total

    normalised, added = finish_hooks.normalize(original, norm, y, residual, object() if asks_for_more else None)
    torch.testing.assert_close(normalised, expected)
    torch.testing.assert_close(added, total)
    assert backend._unfinished is None


def test_an_output_of_another_layer_is_left_alone(backend):
    """SGLang's own operations run where nothing is left to add."""
    leave(backend, "qkv_proj", beside=True)
    other = torch.ones(5, 32)
    norm = SimpleNamespace(weight=torch.ones(32), variance_epsilon=1e-5)

    def original(*operands):
        return "its own"

    assert finish_hooks.rotate(original, rotary_embedding(), torch.arange(5), other, other) == "its own"
    assert finish_hooks.activate(original, SimpleNamespace(), other) == "its own"
    assert finish_hooks.normalize(original, norm, other, other) == "its own"
    assert backend._unfinished is not None
