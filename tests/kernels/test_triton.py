"""Triton kernels against the dense float64 answer, on a GPU or under the interpreter (test_reference.py asks the plain ones)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import DOWN, GROUPS, OUT, UP, WIDTHS, K, Q, V, World, all_modules, assert_rounded_once, make_world

from sglang_lora_tree.kernels import Pairs, add_lora, dispatch, finish
from sglang_lora_tree.kernels.lora import expand, expand_and_activate, expand_and_rotate, expand_delta, shrink, uses_triton
from sglang_lora_tree.kernels.rotation import Rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


MIXED = [
    all_modules(3),
    all_modules(16),
    {(1, Q): 40, (1, K): 1, (0, DOWN): 2, (1, DOWN): 17, (1, UP): 5},  # ranks differ, modules are absent
    all_modules(1),
    {(0, OUT): 4},  # nothing on layer 1
]
MEMBERS = [
    [(0, 1.0)],
    [(0, 0.7), (1, -0.3), (2, 1.5)],
    [],
    [(3, 1.0), (2, 0.25)],
    [(1, 1.0)],
    [(2, -1.0), (0, 0.5)],
    [(4, 2.0)],
]
BATCH = ([1, 17, 2, 1, 0, 33, 1], MEMBERS)


@pytest.fixture(autouse=True, scope="module")
def triton_is_tested():
    assert uses_triton(torch.device(DEVICE)), "these tests would only compare the reference with itself"


CONFIGS = {
    "tiles of 16": dispatch.DEFAULT[0],
    "tiles of 64": dispatch.DEFAULT[1],
    "wide": replace(dispatch.DEFAULT[0], shrink_split=False, shrink_block_n=64, expand_items=4),
    "narrow": replace(dispatch.DEFAULT[0], expand_block_d=16),
}


@pytest.fixture
def use(monkeypatch):
    """Compute every batch by one config, whatever its number of tokens."""

    def choose(name: str) -> None:
        config = replace(CONFIGS[name], max_tokens=1 << 62)
        monkeypatch.setattr(dispatch, "_configs", lambda device_name: (config,))

    return choose


def check(world: World, group: str, batch=BATCH, layer: int = 1, for_graphs: bool = False) -> None:
    """add_lora on poisoned, padded operands equals base + float64 delta; what no adapter reaches keeps its bits."""
    modules, offsets = GROUPS[group]
    seg_lens, members = batch
    pairs = world.batch(seg_lens, members, for_graphs)
    tokens = sum(seg_lens)
    d_in = world.widths[modules[0]][0]
    widths = tuple(world.widths[module][1] for module in modules)
    columns = offsets[-1] + widths[-1]
    x = world.random(tokens, d_in, seed=1)
    y = torch.full((tokens, columns + 8), NAN, dtype=world.pool.dtype, device=DEVICE)  # 8 columns not ours
    y[:, :columns] = world.random(tokens, columns, seed=2)
    base = y.clone()
    add_lora(y, x, world.table, world.pool, pairs, layer, modules, offsets, widths)

    assert y[:, columns:].isnan().all(), "columns past the outputs were written"
    begin = 0
    for length, mix in zip(seg_lens, members, strict=True):
        span = slice(begin, begin + length)
        begin += length
        for module, offset, width in zip(modules, offsets, widths, strict=True):
            out, before = y[span, offset : offset + width], base[span, offset : offset + width]
            if any((adapter, layer, module) in world.matrices for adapter, _ in mix):
                exact = before.double().cpu() + world.dense(x[span], mix, layer, module)
                assert_rounded_once(out, exact, scale=10)
            else:
                assert torch.equal(out, before), "outputs that no adapter reaches changed"


@pytest.mark.parametrize(
    ("group", "dtype"), [*((group, torch.float32) for group in GROUPS), ("qkv", torch.bfloat16), ("qkv", torch.float16)]
)
def test_mixed_batch(group, dtype):
    """Ragged requests, mixes of unequal ranks and modules, base requests, an empty one, negative weights."""
    check(make_world(WIDTHS, MIXED, dtype=dtype, device=DEVICE), group)


@pytest.mark.parametrize("config", list(CONFIGS))
@pytest.mark.parametrize("group", ["qkv", "down"])
def test_every_config(group, config, use, monkeypatch):
    """The same batch by every path, d_in cut into segments that programs of their own add up."""
    use(config)
    monkeypatch.setattr("sglang_lora_tree.kernels.shrink.SEGMENT", 16)
    check(make_world(WIDTHS, MIXED, device=DEVICE), group)


@pytest.mark.parametrize("width", [24, 64])
def test_segments_and_chunks_that_do_not_divide(width, use, monkeypatch):
    """Two chunks in a segment, and two segments in a chunk with a rest."""
    monkeypatch.setattr("sglang_lora_tree.kernels.shrink.SEGMENT", 48)
    world = make_world({DOWN: (150, 40)}, [{(1, DOWN): 3}, {(1, DOWN): 17}], width=width, device=DEVICE)
    check(world, "down", ([3, 1], [[(0, 1.0), (1, 0.5)], [(1, 1.0)]]))


@pytest.mark.parametrize(("group", "config"), [("qkv", "tiles of 16"), ("gate_up", "tiles of 64")])
def test_static_padded_batches_have_the_same_bits(group, config, use):
    """A prefill graph: one set of tensors for every batch, launched for its size, and tokens of no request after the last."""
    use(config)
    world = make_world(WIDTHS, MIXED, device=DEVICE)
    modules, offsets = GROUPS[group]
    widths = tuple(WIDTHS[module][1] for module in modules)
    operands = world.table, world.pool
    block_t = CONFIGS[config].block_t
    static = Pairs.allocate(world.table, 4, 96, 3, block_t, for_graphs=True, max_items=30)
    for seg_lens, members, padded in (([1, 17, 2], MEMBERS[1:4], 32), ([2], MEMBERS[3:4], 4)):
        tokens = sum(seg_lens)
        x = torch.full((padded, WIDTHS[modules[0]][0]), NAN, device=DEVICE)
        x[:tokens] = world.random(tokens, x.shape[1], seed=1)
        base = world.random(padded, offsets[-1] + widths[-1], seed=2)
        eager, graph = base.clone(), base.clone()
        pairs = world.batch(seg_lens, members)
        shrunk = shrink(x[:tokens], *operands, pairs, 1, modules, widths)
        static.update(seg_lens, members)
        static_shrunk = shrink(x, *operands, static, 1, modules, widths)
        if group == "gate_up":
            eager = expand_and_activate(shrunk, eager[:tokens], *operands, pairs)
            graph = expand_and_activate(static_shrunk, graph, *operands, static)[:tokens]
        else:
            expand(shrunk, eager[:tokens], *operands, pairs, offsets)
            expand(static_shrunk, graph, *operands, static, offsets)
        assert torch.equal(graph, eager), "other bits, or tokens of no request were touched"
        assert not static.arrivals.any(), "programs would count on in the next replay"


@pytest.mark.parametrize(("config", "dtype"), [*((config, torch.bfloat16) for config in CONFIGS), ("wide", torch.float32)])
def test_activation_equals_expand_then_silu(dtype, config, use):
    """In one pass over the output; tokens without adapters too."""
    use(config)
    world = make_world(WIDTHS, MIXED, dtype=dtype, device=DEVICE)
    modules, offsets = GROUPS["gate_up"]
    pairs = world.batch(*BATCH)
    x, y = world.random(pairs.num_tokens, 40, seed=1), world.random(pairs.num_tokens, 112, seed=2)
    shrunk = shrink(x, world.table, world.pool, pairs, 1, modules, (56, 56))
    activated = expand_and_activate(shrunk, y, world.table, world.pool, pairs)
    expand(shrunk, y, world.table, world.pool, pairs, offsets)
    expected = torch.nn.functional.silu(y[:, :56].double()) * y[:, 56:].double()
    assert_rounded_once(activated, expected.cpu(), scale=2)


@pytest.mark.parametrize(
    ("config", "dtype", "head", "width"),
    [
        ("tiles of 16", torch.bfloat16, 4, 20),
        ("tiles of 16", torch.bfloat16, 64, 64),
        ("tiles of 64", torch.bfloat16, 2, 24),
        ("wide", torch.float32, 16, 16),
        ("narrow", torch.float32, 64, 64),
        ("narrow", torch.float16, 4, 20),
    ],
)
def test_rotation_equals_expand_then_rotate(dtype, config, head, width, use):
    """In one pass over q, k and v; v and tokens without adapters too; several heads in a block of columns, or a part of one."""
    use(config)
    sizes = {16: (48, 32, 16), 64: (128, 64, 64)}.get(head, (48, 20, 20))
    widths = {**WIDTHS, **{module: (40, size) for module, size in zip((Q, K, V), sizes, strict=True)}}
    world = make_world(widths, MIXED, width=width, dtype=dtype, device=DEVICE)
    modules, offsets = (Q, K, V), (0, sizes[0], sizes[0] + sizes[1])
    pairs = world.batch(*BATCH)
    tokens, total = pairs.num_tokens, sum(sizes)
    x, y = world.random(tokens, 40, seed=1), world.random(tokens, total, seed=2)
    angles = torch.rand(50, head // 2, generator=torch.Generator().manual_seed(3)) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    rotation = Rotation(positions, cos_sin, head)
    shrunk = shrink(x, world.table, world.pool, pairs, 1, modules, sizes)
    expected = y.clone()
    expand(shrunk, expected, world.table, world.pool, pairs, offsets)
    rotated = torch.full((tokens, total + 8), NAN, dtype=dtype, device=DEVICE)  # 8 columns not ours
    rotated[:, :total] = y
    expand_and_rotate(shrunk, rotated, world.table, world.pool, pairs, offsets, rotation)

    assert rotated[:, total:].isnan().all(), "columns past the outputs were written"
    assert torch.equal(rotated[:, offsets[2] : total], expected[:, offsets[2] :]), "v is not rotated"
    cos, sin = cos_sin[positions].double().cpu()[:, None].chunk(2, dim=-1)
    first, second = expected[:, : offsets[2]].double().cpu().unflatten(1, (-1, 2, head // 2)).unbind(2)
    exact = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=2).flatten(1)
    assert_rounded_once(rotated[:, : offsets[2]], exact, scale=8)
    assert_rounded_once(rotation.apply(expected[:, : offsets[2]]), exact, scale=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", list(GROUPS))
def test_a_delta_added_later_has_the_same_bits(group, dtype):
    """By the norm after o and down, the rotation of q and k, the activation of gate and up; also where there is none."""
    world = make_world(WIDTHS, MIXED, width=20, dtype=dtype, device=DEVICE)
    modules, offsets = GROUPS[group]
    widths = tuple(WIDTHS[module][1] for module in modules)
    tokens, columns = sum(BATCH[0]), offsets[-1] + widths[-1]
    x, y = world.random(tokens, WIDTHS[modules[0]][0], seed=1), world.random(tokens, columns, seed=2)
    residual = world.random(tokens, columns, seed=3)
    weight = world.random(1, columns, seed=4)[0]
    angles = torch.rand(50, 4, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    rotation = Rotation(torch.arange(tokens, device=DEVICE) % 50, angles, 4)

    def finished(y: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if group == "qkv":
            finish.rotate_heads(y, delta, rotation, offsets[2])
        elif group == "gate_up":
            return (finish.activate_halves(y, delta),)
        else:
            added = residual.clone()
            finish.normalize(y, delta, added, weight, 1e-5)
            return y, added
        return (y,)

    for batch in (BATCH, (BATCH[0], [[]] * len(BATCH[0]))):
        pairs = world.batch(*batch)
        operands = world.table, world.pool, pairs
        shrunk = shrink(x, *operands, 1, modules, widths)
        expected = y.clone()
        expand(shrunk, expected, *operands, offsets)
        delta = expand_delta(shrunk, *operands, tokens, offsets)
        for actual, wanted in zip(finished(y.clone(), delta), finished(expected, None), strict=True):
            assert torch.equal(actual, wanted)


def test_normalize_is_the_rms_norm_of_the_sum():
    y, residual = (torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)).to(DEVICE) for seed in (1, 2))
    weight = torch.rand(40, device=DEVICE)
    total = (y + residual).double()
    finish.normalize(y, None, residual, weight, 1e-5)
    assert_rounded_once(residual, total.cpu())
    exact = total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert_rounded_once(y, exact.cpu(), scale=2)


@pytest.mark.parametrize("rank", [1, 3, 16, 40])
@pytest.mark.parametrize("width", [16, 24, 64])
def test_rank_and_width(rank, width):
    """Any rank, W that divides no d (24), and d below W (64)."""
    world = make_world(WIDTHS, [all_modules(rank), all_modules(rank)], width=width, device=DEVICE)
    check(world, "qkv", ([3, 1], [[(0, 1.0), (1, 0.5)], [(1, 1.0)]]))


@pytest.mark.parametrize("width", [7, 160])
def test_unaligned_and_wide_rows(width):
    """Rows that start at no multiple of 16 bytes, and rows of more than one block with a rest."""
    widths = {OUT: (330, 200)}
    check(make_world(widths, [{(1, OUT): 2}], width=width, device=DEVICE), "o", ([2], [[(0, 1.0)]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", ["qkv", "down"])
def test_small_adapters_share_items(group, dtype):
    """Adapters of up to 8 ranks, two in an item, beside a larger one, one without modules and one with a module of its own."""
    world = make_world(WIDTHS, [all_modules(3), all_modules(8), {(1, K): 5}, all_modules(12), all_modules(1), {(0, DOWN): 2}],
                       dtype=dtype, device=DEVICE)  # fmt: skip
    members = [[(i % 6, 1.0 - i)] for i in range(9)] + [[]]
    pairs = world.batch([1] * 10, members)
    assert pairs.num_items < 6, "nothing is shared"
    check(world, group, ([1] * 10, members))
    check(world, group, ([2, 30, 1, 0, 3, 1, 9, 1, 1, 1], members))


@pytest.mark.parametrize("group", ["qkv", "gate_up"])
def test_a_token_has_the_same_bits_in_either_half_of_an_item(group):
    """Alone in its item, first or second in it, or in a tile where nothing is shared."""
    world = make_world(WIDTHS, [all_modules(rank) for rank in (7, 4, 8, 2)], device=DEVICE)
    modules, offsets = GROUPS[group]
    widths = tuple(WIDTHS[module][1] for module in modules)
    x, base = world.random(1, 40, seed=1), world.random(1, offsets[-1] + widths[-1], seed=2)
    answers = []
    for others in ([], [[(0, 1.0)]], [[(3, 1.0)]], [[(0, 1.0), (3, -1.0)]], [[(0, 1.0)], [(1, 2.0)], [(3, 1.0)]]):
        pairs = world.batch([1] * (1 + len(others)), [[(2, 0.7)], *others])
        y = base.repeat(1 + len(others), 1)
        add_lora(y, x.repeat(1 + len(others), 1), world.table, world.pool, pairs, 1, modules, offsets, widths)
        answers.append(y[0])
    assert all(torch.equal(answer, answers[0]) for answer in answers) and not torch.equal(answers[0], base[0])


REGIMES = {
    "rank 256": (16, {OUT: (40, 48)}, (256, 200), ([2, 1], [[(0, 1.0), (1, -0.5)], [(1, 1.0)]])),
    "8 members": (16, {OUT: (40, 48)}, (1, 2, 3, 4, 5, 16, 17, 30), ([2], [[(i, 0.1 * i - 0.3) for i in range(8)]])),
    "256 adapters": (16, {OUT: (40, 48)}, tuple(1 + i % 3 for i in range(256)), ([1] * 256, [[(i, 1.0)] for i in range(256)])),
    "rows of 128": (128, {OUT: (300, 200)}, (9,), ([2], [[(0, 1.0)]])),
    "rows of 2048": (2048, {OUT: (5000, 2100)}, (2,), ([2], [[(0, 1.0)]])),
    "rows of 4096": (4096, {OUT: (8192, 4100)}, (2,), ([2], [[(0, 1.0)]])),
}
"""Width of the pool's rows, the model's widths, the adapters' ranks, a batch."""


@pytest.mark.parametrize("regime", list(REGIMES))
def test_ends_of_every_range(regime):
    """What is to be served at most and at least: ranks, members, adapters in a batch, widths of a row."""
    width, widths, ranks, batch = REGIMES[regime]
    adapters = [{(1, OUT): rank} for rank in ranks]
    check(make_world(widths, adapters, width=width, max_rank=256, max_members=8, device=DEVICE), "o", batch)


def test_skewed_segments():
    """One request of 100 tokens beside many of one token."""
    members = [[(0, 1.0), (1, 0.5)]] + [[(i % 2, 1.0)] for i in range(12)]
    world = make_world(WIDTHS, [all_modules(2), all_modules(5)], device=DEVICE)
    check(world, "o", ([100] + [1] * 12, members))


def test_same_adapter_twice_and_in_several_requests():
    world = make_world(WIDTHS, [all_modules(2), all_modules(5)], device=DEVICE)
    check(world, "down", ([2, 3, 1], [[(0, 1.0), (0, -0.5)], [(0, 1.0)], [(1, 1.0), (0, 2.0)]]))


def test_one_token():
    check(make_world(WIDTHS, MIXED, device=DEVICE), "qkv", ([1], [[(2, 1.0)]]))


@pytest.mark.parametrize("batch", [([], []), ([0], [[(0, 1.0)]]), ([2, 3], [[], []])])
def test_nothing_to_do(batch):
    check(make_world(WIDTHS, [all_modules(2)], device=DEVICE), "gate_up", batch)


def test_spare_programs_do_nothing():
    """A grid larger than the batch, as a captured graph has it."""
    check(make_world(WIDTHS, [all_modules(2)], device=DEVICE), "o", ([3, 1], [[(0, 1.0)], []]), for_graphs=True)


def test_negative_zero_survives_a_module_that_no_member_has():
    world = make_world(WIDTHS, [{(1, Q): 2}], device=DEVICE)
    y = torch.full((1, 88), -0.0, device=DEVICE)
    pairs = world.batch([1], [[(0, 1.0)]])
    add_lora(y, world.random(1, 40, 1), world.table, world.pool, pairs, 1, (Q, K, V), (0, 48, 68), (48, 20, 20))
    assert y[0, 48:].signbit().all()


@pytest.mark.parametrize("config", ["tiles of 16"] if DEVICE == "cpu" else list(CONFIGS))  # the CPU's product of 64 rows varies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_every_batch(dtype, config, use):
    """Alone, at any place in a segment, beside any other mixes: a token's outputs are bit-equal."""
    use(config)
    world = make_world(WIDTHS, MIXED, dtype=dtype, device=DEVICE)
    modules, offsets = GROUPS["qkv"]
    widths = tuple(world.widths[module][1] for module in modules)
    mix = [(2, 0.7), (1, -0.3), (0, 1.5)]
    if DEVICE == "cuda":  # others' adapters lie between, so that these share a step of expand, or do not
        mix = [(3, 0.7), (0, 1.5)]
    x = world.random(1, 40, seed=3)
    base = world.random(1, 88, seed=4)

    def run(before: int, after: int, others: list[tuple[int, list[tuple[int, float]]]]) -> torch.Tensor:
        seg_lens = [length for length, _ in others] + [before + 1 + after]
        members = [other for _, other in others] + [mix]
        pairs = world.batch(seg_lens, members)
        place = sum(seg_lens) - after - 1
        xs, ys = world.random(pairs.num_tokens, 40, seed=5), world.random(pairs.num_tokens, 88, seed=6)
        xs[place], ys[place] = x[0], base[0]
        add_lora(ys, xs, world.table, world.pool, pairs, 1, modules, offsets, widths)
        return ys[place]

    alone = run(0, 0, [])
    for before, after, others in [
        (1, 0, []),
        (15, 20, []),
        (16, 0, [(1, [(0, 1.0)])]),
        (0, 5, [(3, []), (2, [(1, 1.0), (0, 2.0)]), (18, mix)]),
        (0, 5, [(2, [(1, 1.0)]), (2, [(2, 1.0), (1, 2.0)])]),
    ]:
        assert torch.equal(run(before, after, others), alone), (before, after, others)
