"""What is packed reads back bit for bit, for any shape; nothing is padded to the largest rank or the fullest layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lora_tree.adapters.adapter import Adapter, AdapterModule
from sglang_lora_tree.adapters.base_shape import MODULES, BaseShape
from sglang_lora_tree.radix.layout import Outline, Packer, PoolShape, Shard

from .tree import BASE


def write(
    packer: Packer, adapter: Adapter, num_slots: int, slots: torch.Tensor, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """The planes of a pool full of sevens with an adapter written into some slots."""
    pool = torch.full((packer.pool.num_planes, num_slots, packer.pool.width), 7.0, dtype=dtype)
    packer.scatter(packer.pack(adapter, dtype), pool[0::2], pool[1::2], slots)
    return list(pool)

LLAMA_3_8B = BaseShape.from_hf_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    }
)


def make_adapter(base: BaseShape, rank_of, dtype: torch.dtype = torch.float32, seed: int = 0) -> Adapter:
    """``rank_of(layer, module)``: 0 leaves the module out."""
    random = torch.Generator().manual_seed(seed)
    modules = {}
    for layer in range(base.num_layers):
        for name in MODULES:
            rank = rank_of(layer, name)
            if rank:
                d_in, d_out = base.widths[name]
                a, b = torch.randn(rank, d_in, generator=random), torch.randn(d_out, rank, generator=random)
                modules[layer, name] = AdapterModule(a.to(dtype), b.to(dtype), 0.5 + layer + rank)
    return Adapter("x", "d" * 64, modules)


def make_outline(base: BaseShape, rank_of) -> Outline:
    rank = np.array([[rank_of(layer, name) for name in MODULES] for layer in range(base.num_layers)], np.int32)
    return Outline("d" * 64, rank, np.ones_like(rank, dtype=np.float32))


def read(planes, slots, layout, first_row: int, count: int, width: int) -> torch.Tensor:
    """``count`` vectors of ``width`` elements from row ``first_row`` on, by the definition of the layout alone."""
    row_width = planes[0].shape[1]
    chunks = -(-width // row_width)
    rows = range(first_row, first_row + count * chunks)
    n = len(slots)
    flat = torch.stack([planes[row // n][slots[row % n]] for row in rows])
    flat = flat.reshape(count, chunks * row_width)
    assert not flat[:, width:].any(), "kernels read whole chunks, so the rest of the last one must be zero"
    return flat[:, :width]


@st.composite
def cases(draw):
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([2, 3, 5]))
    groups = draw(st.sampled_from([1, 2]))
    layers = draw(st.integers(1, 4))
    hidden = kv_heads * groups * head_dim
    widths = {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden, kv_heads * head_dim),
        "v_proj": (hidden, kv_heads * head_dim),
        "o_proj": (hidden, hidden),
        "gate_proj": (hidden, 4 * draw(st.integers(1, 9))),
    }
    intermediate = widths["gate_proj"][1]
    widths["up_proj"], widths["down_proj"] = (hidden, intermediate), (intermediate, hidden)
    base = replace(BASE, num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, widths=widths)
    size = draw(st.sampled_from([size for size in (1, 2, 4) if (kv_heads * groups) % size == 0]))
    shard = Shard(draw(st.integers(0, size - 1)), size, kv_heads)
    ranks = draw(st.lists(st.integers(0, 5), min_size=7 * layers, max_size=7 * layers).filter(any))
    pool = PoolShape(layers, max(kv_heads // size, 1) * head_dim, draw(st.sampled_from([1, 4, 16])))
    return Packer(base, pool, shard), ranks, draw(st.integers(0, 99))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_module_reads_back_bit_for_bit_on_every_rank(case) -> None:
    packer, ranks, seed = case
    base, pool, shard = packer.base, packer.pool, packer.shard
    adapter = make_adapter(base, lambda layer, name: ranks[7 * layer + MODULES.index(name)], seed=seed)
    outline = Outline.of(adapter, base.num_layers)
    layout = packer.plan(outline)
    n = layout.num_slots
    assert n % pool.page_size == 0
    slots = torch.randperm(n + 9, generator=torch.Generator().manual_seed(seed))[:n]
    planes = write(packer, adapter, n + 9, slots)
    widths = shard.widths(base)
    highest = np.full(base.num_layers, -1)
    for layer in range(base.num_layers):
        for place, name in enumerate(MODULES):
            start, rank = int(layout.row_start[layer, place]), int(outline.rank[layer, place])
            assert (start >= 0) == (rank > 0) == ((layer, name) in adapter.modules)
            if rank == 0:
                continue
            a, b = shard.slice(name, adapter.modules[layer, name])
            d_in, d_out = widths[name]
            assert a.shape == (rank, d_in) and b.shape == (d_out, rank), "the shard and its widths disagree"
            assert torch.equal(read(planes, slots, layout, start, rank, d_in), a)
            b_start = start + rank * -(-d_in // pool.width)
            assert torch.equal(read(planes, slots, layout, b_start, rank, d_out), b.t())
            end = b_start + rank * -(-d_out // pool.width)
            highest[layer] = max(highest[layer], (end - 1) // n // 2)
    assert layout.last_pool_layer.tolist() == highest.tolist()
    used = [layer for layer in layout.last_pool_layer if layer >= 0]
    assert used == sorted(used) and used[-1] < pool.num_layers
    untouched = torch.ones(n + 9, dtype=torch.bool)
    untouched[slots] = False
    assert all(bool((plane[untouched] == 7.0).all()) for plane in planes), "a row was written into another's slot"


@settings(max_examples=60, deadline=None)
@given(cases())
def test_shards_put_together_are_the_adapter(case) -> None:
    packer, ranks, seed = case
    base, size = packer.base, packer.shard.size
    adapter = make_adapter(base, lambda layer, name: ranks[7 * layer + MODULES.index(name)], seed=seed)
    shards = [Shard(rank, size, base.num_kv_heads) for rank in range(size)]
    assert len({Packer(base, packer.pool, s).plan(Outline.of(adapter, base.num_layers)).num_slots for s in shards}) == 1
    for (_, name), module in adapter.modules.items():
        parts = [shard.slice(name, module) for shard in shards]
        if name in ("o_proj", "down_proj"):
            assert torch.equal(torch.cat([a for a, _ in parts], 1), module.a)
            assert all(torch.equal(b, module.b) for _, b in parts)
            continue
        assert all(torch.equal(a, module.a) for a, _ in parts)
        copies = size // shards[0].kv_size if name in ("k_proj", "v_proj") else 1
        assert torch.equal(torch.cat([b for _, b in parts[::copies]]), module.b)
        for rank, (_, b) in enumerate(parts):
            assert torch.equal(b, parts[rank // copies * copies][1]), "ranks that share a kv head share its rows"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_are_cast_to_the_pool(dtype: torch.dtype) -> None:
    adapter = make_adapter(BASE, lambda layer, name: 2, dtype=torch.float32)
    packer = Packer(BASE, PoolShape(2, 8, 1))
    layout = packer.plan(Outline.of(adapter, 2))
    slots = torch.arange(layout.num_slots)
    planes = write(packer, adapter, layout.num_slots, slots, dtype)
    found = read(planes, slots, layout, 0, 2, 16)
    assert torch.equal(found, adapter.modules[0, "q_proj"].a.to(dtype))


# ---- Density, at a real shape: host slot bytes over tensor bytes at most 1.1 ----


def plan(shard: Shard, page_size: int, outline: Outline):
    width = max(LLAMA_3_8B.num_kv_heads // shard.size, 1) * LLAMA_3_8B.head_dim
    return Packer(LLAMA_3_8B, PoolShape(32, width, page_size), shard).plan(outline), 64 * width


def test_rank_16_on_llama_3_8b_takes_640_slots() -> None:
    packer = Packer(LLAMA_3_8B, PoolShape(32, 1024, 1))
    layout = packer.plan(make_outline(LLAMA_3_8B, lambda layer, name: 16))
    assert layout.num_slots == 640 and layout.num_rows == 640 * 64
    # With uniform ranks, layer l's rows lie in pool layer l: a load that goes layer by layer delivers them in step.
    assert layout.last_pool_layer.tolist() == list(range(32))


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize(
    "rank_of",
    [
        lambda layer, name: 16,
        lambda layer, name: 8 if name in ("q_proj", "v_proj") else 0,
        lambda layer, name: 64 if layer == 17 else 0,
        lambda layer, name: 1 + (7 * layer + 3 * MODULES.index(name)) % 23,
        lambda layer, name: 128 // (1 + layer),
    ],
    ids=["uniform", "attention only", "one layer", "uneven", "spectral"],
)
def test_slots_hold_little_more_than_the_tensors(rank_of, size: int) -> None:
    shard, outline = Shard(0, size, 8), make_outline(LLAMA_3_8B, rank_of)
    layout, slot_elements = plan(shard, 1, outline)
    widths = np.array([sum(shard.widths(LLAMA_3_8B)[name]) for name in MODULES])
    assert 1.0 <= layout.num_slots * slot_elements / int((outline.rank * widths).sum()) <= 1.1
    for page_size in (16, 64):
        paged, _ = plan(shard, page_size, outline)
        assert 0 <= paged.num_slots - layout.num_slots < page_size, "less than a page is lost to rounding"


def test_an_adapter_of_one_layer_is_spread_over_all_pool_layers() -> None:
    packer = Packer(LLAMA_3_8B, PoolShape(32, 1024, 1))
    layout = packer.plan(make_outline(LLAMA_3_8B, lambda layer, name: 16 if layer == 3 else 0))
    assert layout.num_slots == 20
    assert layout.last_pool_layer.tolist() == [31 if layer == 3 else -1 for layer in range(32)]


@pytest.mark.parametrize("wrong", [1, -1])
def test_writing_with_the_wrong_room_is_refused(wrong: int) -> None:
    adapter = make_adapter(BASE, lambda layer, name: 1)
    packer = Packer(BASE, PoolShape(2, 8, 1))
    slots = packer.plan(Outline.of(adapter, 2)).num_slots + wrong
    with pytest.raises(RuntimeError):
        write(packer, adapter, slots + 1, torch.arange(slots))
