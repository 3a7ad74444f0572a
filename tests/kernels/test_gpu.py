"""On a GPU: real shapes against float64, CUDA graphs against eager, and no waiting for the device."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DOWN, GATE, OUT, UP, K, Q, V, World, assert_rounded_once, make_world

from sglang_lora_tree.kernels import Pairs, add_lora, dispatch
from sglang_lora_tree.kernels.lora import expand, expand_and_rotate, shrink
from sglang_lora_tree.kernels.rotation import Rotation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTHS = {Q: (4096, 4096), K: (4096, 1024), V: (4096, 1024), OUT: (4096, 4096), DOWN: (14336, 4096)}
WIDTHS |= {GATE: (4096, 14336), UP: (4096, 14336)}
GROUPS = {
    "qkv": ((Q, K, V), (0, 4096, 5120)),
    "o": ((OUT,), (0,)),
    "gate_up": ((GATE, UP), (0, 14336)),
    "down": ((DOWN,), (0,)),
}
MIXES = [[(0, 0.7), (1, -0.3), (2, 1.5)], [(1, 1.0)], [], [(2, 0.5), (3, 0.5)], [(0, 1.0)]]


def real_world(dtype: torch.dtype, seed: int = 0, ranks: tuple[int, ...] = (16, 64, 8, 33)) -> World:
    """Llama-3-8B's widths, two layers, adapters of unequal rank."""
    adapters = [{(layer, module): rank for layer in range(2) for module in WIDTHS} for rank in ranks]
    return make_world(WIDTHS, adapters, width=1024, dtype=dtype, device="cuda", max_rank=64, seed=seed)


def operands(world: World, group: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    modules, offsets = GROUPS[group]
    columns = offsets[-1] + WIDTHS[modules[-1]][1]
    return world.random(tokens, WIDTHS[modules[0]][0], seed=1), world.random(tokens, columns, seed=2)


def run(world: World, group: str, x, y, pairs, layer: int = 1) -> None:
    modules, offsets = GROUPS[group]
    widths = tuple(WIDTHS[module][1] for module in modules)
    add_lora(y, x, world.table, world.pool, pairs, layer, modules, offsets, widths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seg_lens", [[1] * 5, [40, 1, 3, 17, 300]], ids=["decode", "prefill"])
def test_real_shapes_equal_dense_float64(seg_lens, dtype):
    world = real_world(dtype)
    pairs = world.batch(seg_lens, MIXES)
    for group, (modules, offsets) in GROUPS.items():
        x, base = operands(world, group, sum(seg_lens))
        y = base.clone()
        run(world, group, x, y, pairs)
        begin = 0
        for length, mix in zip(seg_lens, MIXES, strict=True):
            rows = slice(begin, begin + length)
            begin += length
            if not mix:
                assert torch.equal(y[rows], base[rows])
            for module, offset in zip(modules, offsets, strict=True):
                if mix:
                    columns = slice(offset, offset + WIDTHS[module][1])
                    exact = base[rows, columns].double().cpu() + world.dense(x[rows], mix, 1, module)
                    assert_rounded_once(y[rows, columns], exact, scale=10)


@pytest.mark.parametrize(
    ("width", "seg_lens"), [(1024, [16_000, 384]), (4096, [40, 1, 3, 17, 300]), (128, [1] * 256)], ids=["16384", "W4096", "W128"]
)
def test_ends_of_every_range(width, seg_lens):
    """The longest prefill, the widest and the narrowest rows, the largest decode batch."""
    world = make_world(WIDTHS, [{(1, OUT): rank} for rank in (16, 64, 8, 33)], width=width, device="cuda", max_rank=64,
                       dtype=torch.bfloat16)  # fmt: skip
    mixes = [MIXES[index % len(MIXES)] for index in range(len(seg_lens))]
    x, base = operands(world, "o", sum(seg_lens))
    y = base.clone()
    run(world, "o", x, y, world.batch(seg_lens, mixes))
    begin = 0
    for length, mix in zip(seg_lens, mixes, strict=True):
        for rows in (slice(begin, begin + min(length, 40)), slice(begin + max(length - 40, 0), begin + length)):
            exact = base[rows].double().cpu() + (world.dense(x[rows], mix, 1, OUT) if mix else 0.0)
            assert_rounded_once(y[rows], exact, scale=10)
        begin += length


@pytest.mark.parametrize("tokens", [5, 600])
def test_rotation_equals_expand_then_sglangs(tokens):
    """q and k as SGLang's own kernel rotates what `expand` leaves; v as `expand` leaves it."""
    rope = pytest.importorskip("sglang.kernels.ops.attention.rope")
    world = real_world(torch.bfloat16)
    modules, offsets = GROUPS["qkv"]
    pairs = world.batch([tokens - 4, 1, 1, 1, 1], MIXES)
    x, y = operands(world, "qkv", tokens)
    shrunk = shrink(x, world.table, world.pool, pairs, 1, modules, (4096, 1024, 1024))
    expected = y.clone()
    expand(shrunk, expected, world.table, world.pool, pairs, offsets)
    angles = torch.rand(1000, 64, device="cuda") * 7
    rotation = Rotation(torch.randint(1000, (tokens,), device="cuda"), torch.cat((angles.cos(), angles.sin()), dim=1), 128)
    expand_and_rotate(shrunk, y, world.table, world.pool, pairs, offsets, rotation)
    q, k, v = expected.split((4096, 1024, 1024), dim=1)
    rope.apply_rope_with_cos_sin_cache_inplace(
        positions=rotation.positions, q=q.view(tokens, -1, 128), k=k.view(tokens, -1, 128), cos_sin_cache=rotation.cos_sin,
        is_neox=True,
    )  # fmt: skip
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-5)  # one bit of the last place
    assert torch.equal(y[:, 5120:], v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", list(GROUPS))
def test_a_token_has_the_same_bits_in_either_half_of_an_item(group, dtype):
    """Adapters of up to 8 ranks share items: an adapter alone, first or second in one, in short and in long tiles."""
    world = real_world(dtype, ranks=(8, 3, 8, 5))
    for tokens in (1, 600):
        x, base = operands(world, group, tokens)
        answers = []
        for others in ([], [[(0, 1.0)]], [[(3, 1.0)]], [[(0, 1.0), (3, -1.0)]], [[(0, 1.0)], [(1, 2.0)], [(3, 1.0)]]):
            pairs = world.batch([tokens] + [1] * len(others), [[(2, 0.7)], *others])
            more = x[:1].repeat(len(others), 1)
            y = torch.cat((base, base[:1].repeat(len(others), 1)))
            run(world, group, torch.cat((x, more)), y, pairs)
            answers.append(y[:tokens])
        assert all(torch.equal(answer, answers[0]) for answer in answers) and not torch.equal(answers[0], base)


@pytest.mark.parametrize("group", list(GROUPS))
def test_a_token_has_the_same_bits_in_prefill_and_decode(group):
    """Whatever the batch: one token per request, or all tokens in one request, mixed with others."""
    world = real_world(torch.bfloat16)
    x, base = operands(world, group, 50)
    mix = MIXES[0]
    prefill, decode = base.clone(), base.clone()
    run(world, group, x, prefill, world.batch([50], [mix]))
    run(world, group, x, decode, world.batch([1] * 50, [mix if i % 3 else MIXES[1] for i in range(50)]))
    same = [i for i in range(50) if i % 3]
    assert torch.equal(prefill[same], decode[same])


def test_graph_replay_equals_eager_with_other_tables():
    """Captured on an empty batch and table; replayed with adapters, a smaller batch, and adapters that moved."""
    bs = 8
    world = real_world(torch.bfloat16, ranks=(16, 64, 8))
    table = world.table
    contents = {index: read_entry(world, index) for index in range(3)}
    for index in range(3):
        table.clear(index)
    table.flush()
    pairs = world.batch([1] * bs, [()] * bs, for_graphs=True)
    x, base = operands(world, "gate_up", bs)
    y = base.clone()
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        run(world, "gate_up", x, y, pairs)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(world, "gate_up", x, y, pairs)
    graph.replay()
    assert torch.equal(y, base), "a batch without adapters was touched"

    for order in ((0, 1, 2), (2, 0, 1)):  # the second time, every run of slots lies elsewhere
        for index in range(3):
            table.clear(index)
        for index in order:
            table.write(index, *contents[index])
        table.flush()
        pairs.update([1] * bs, [MIXES[0], [(2, 0.5)], [(1, 1.0)], [], [(0, -1.0)], [], [], []])
        y.copy_(base)
        graph.replay()
        eager = base.clone()
        run(world, "gate_up", x, eager, pairs)
        assert torch.equal(y, eager) and not torch.equal(y, base)


@pytest.mark.parametrize("bucket", [64, 512, 1024])
@pytest.mark.parametrize("group", list(GROUPS))
def test_prefill_graph_equals_eager(group, bucket):
    """Captured for `bucket` tokens of base requests, shrink on a side stream; replayed with shorter batches, padded by NaN."""
    world = real_world(torch.bfloat16)
    modules, offsets = GROUPS[group]
    widths = tuple(WIDTHS[module][1] for module in modules)
    block_t = dispatch.choose(bucket, world.pool.device).block_t
    static = Pairs.allocate(world.table, 8, 1024, 3, block_t, for_graphs=True, max_items=2048)
    static.update([bucket], [()])
    x, base = operands(world, group, bucket)
    y = base.clone()
    side = torch.cuda.Stream()

    def step() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            shrunk = shrink(x, world.table, world.pool, static, 1, modules, widths)
        y.copy_(base)
        main.wait_stream(side)
        expand(shrunk, y, world.table, world.pool, static, offsets)

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    assert torch.equal(y, base), "a batch without adapters was touched"
    longest = bucket - 12  # SGLang pads to the next size that it has captured, and the config is the same
    for seg_lens, mixes in (([longest - 9, 1, 3, 0, 5], MIXES), ([longest], [MIXES[0]]), ([longest], [()])):
        tokens = sum(seg_lens)
        x[:] = torch.nan
        x[:tokens] = world.random(tokens, x.shape[1], seed=3)
        static.update(seg_lens, mixes)
        graph.replay()
        eager = base.clone()
        run(world, group, x[:tokens], eager[:tokens], world.batch(seg_lens, mixes))
        assert torch.equal(y, eager)


def read_entry(world: World, index: int) -> tuple[torch.Tensor, ...]:
    """What `table.write` was given for an adapter, with its slots still on the device."""
    table = world.table
    first, count = int(table.first_slot[index]), int(table.slot_count[index])
    slots = table.slots[first : first + count].clone()
    return slots, table.row_start[index].cpu(), table.rank[index].cpu(), table.scaling[index].cpu()


def test_nothing_waits_for_the_device():
    """Update, write with slots on the device, compaction, flush and the kernels: no synchronising call."""
    world = real_world(torch.bfloat16)
    contents = {index: read_entry(world, index) for index in range(4)}
    pairs = world.batch([1] * 5, MIXES)
    x, y = operands(world, "qkv", 5)
    run(world, "qkv", x, y, pairs)  # compiled before
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        world.table.clear(0)
        world.table.clear(2)
        world.table._compact()
        world.table.write(0, *contents[0])
        world.table.flush()
        pairs.update([1] * 5, MIXES)
        run(world, "qkv", x, y, pairs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
