"""The plain-torch path, which serves on a CPU, against the dense float64 answer."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DOWN, GROUPS, OUT, UP, WIDTHS, K, Q, all_modules, assert_rounded_once, make_world

from sglang_lora_tree.kernels import reference
from sglang_lora_tree.kernels.pairs import Pairs

NAN = float("nan")


ADAPTERS = [all_modules(3), all_modules(16), {(1, Q): 40, (1, K): 1, (0, DOWN): 2, (1, UP): 5}, {(0, OUT): 4}]
BATCHES = {
    "mixed": (
        [1, 17, 2, 1, 0, 33, 1],
        [[(0, 1.0)], [(0, 0.7), (1, -0.3), (2, 1.5)], [], [(2, 0.25)], [(1, 1.0)], [(2, -1.0), (0, 0.5)], [(3, 2.0)]],
    ),
    "skewed": ([100] + [1] * 20, [[(0, 1.0), (1, 0.5)]] + [[(i % 3, 1.0)] for i in range(20)]),
    "one mix": ([1] * 8, [[(0, 0.5), (2, 0.5)]] * 8),
    "one adapter twice": ([2, 1], [[(0, 1.0), (0, -0.5)], [(1, 1.0), (0, 2.0)]]),
    "one token": ([1], [[(1, 1.0)]]),
    "base only": ([2, 3], [[], []]),
    "empty": ([], []),
}


def run(world, x, y, pairs: Pairs, group: str, layer: int) -> None:
    modules, offsets = GROUPS[group]
    widths = tuple(WIDTHS[module][1] for module in modules)
    z = reference.shrink(x, world.table, world.pool, pairs, layer, modules)
    reference.expand(z, y, world.table, world.pool, pairs, layer, modules, offsets, widths, x.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [7, 16, 64])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_equals_dense_float64(batch, width, dtype):
    """Every group of modules on both layers; outputs that no adapter reaches keep their bits."""
    world = make_world(WIDTHS, ADAPTERS, width=width, dtype=dtype)
    seg_lens, members = BATCHES[batch]
    pairs = world.batch(seg_lens, members)
    tokens = sum(seg_lens)
    for group, (modules, offsets) in GROUPS.items():
        for layer in range(2):
            x = world.random(tokens, WIDTHS[modules[0]][0], seed=1)
            base = world.random(tokens, offsets[-1] + WIDTHS[modules[-1]][1], seed=2)
            y = base.clone()
            run(world, x, y, pairs, group, layer)
            begin = 0
            for length, mix in zip(seg_lens, members, strict=True):
                rows = slice(begin, begin + length)
                begin += length
                for module, offset in zip(modules, offsets, strict=True):
                    columns = slice(offset, offset + WIDTHS[module][1])
                    if any((adapter, layer, module) in world.matrices for adapter, _ in mix):
                        exact = base[rows, columns].double() + world.dense(x[rows], mix, layer, module)
                        assert_rounded_once(y[rows, columns], exact, scale=10)
                    else:
                        assert torch.equal(y[rows, columns], base[rows, columns])


def test_a_token_hardly_depends_on_the_batch():
    """On the CPU a matmul over more rows may differ in the last bits, and in no more."""
    world = make_world(WIDTHS, ADAPTERS)
    mix = [(1, 0.7), (0, -0.5)]
    x, base = world.random(30, 40, seed=1), world.random(30, 112, seed=2)
    together, alone = base.clone(), base[17:18].clone()
    run(world, x, together, world.batch([10, 20], [[(0, 1.0)], mix]), "gate_up", 1)
    run(world, x[17:18], alone, world.batch([1], [mix]), "gate_up", 1)
    torch.testing.assert_close(together[17:18], alone, rtol=1e-6, atol=1e-6)


def test_sees_an_adapter_that_moved():
    """What is remembered of the table is forgotten at the next flush: an index that now holds another adapter."""
    world = make_world(WIDTHS, ADAPTERS[:2])
    pairs = world.batch([4], [[(1, 1.0)]])
    x, base = world.random(4, 48, seed=1), world.random(4, 40, seed=2)
    y = base.clone()
    run(world, x, y, pairs, "o", 1)
    table = world.table
    first, count = int(table.first_slot[0]), int(table.slot_count[0])
    slots = table.slots[first : first + count].clone()
    table.write(1, slots, table.row_start[0].clone(), table.rank[0].clone(), table.scaling[0].clone())
    table.flush()
    y = base.clone()
    run(world, x, y, pairs, "o", 1)
    assert_rounded_once(y, base.double() + world.dense(x, [(0, 1.0)], 1, OUT), scale=10)
