import pytest

from sglang_lora_tree.radix.identity import adapter_identity
from tests.radix.tree import Running, Tree, write_adapter

RANKS = {"math": 1, "json": 2, "sql": 1}


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, rank, seed) for seed, (name, rank) in enumerate(RANKS.items())}


@pytest.fixture
def tree(adapter_folders):
    """math, json and sql are registered (about 15, 30, 15 slots) and still on disk; 200 GPU and 400 host slots."""
    with Tree(pool_slots=200, host_slots=400) as tree:
        for name, folder in adapter_folders.items():
            tree.load(name, folder)
        yield tree


@pytest.fixture
def identity(tree):
    """The identity of an adapter by name."""
    return {name: adapter_identity(tree.store.by_id(name).outline.digest) for name in RANKS}


@pytest.fixture
def sizes(tree, identity):
    """Slots of an adapter by name."""
    return {name: tree.residency.slots_of_adapter(identity[name]) for name in RANKS}


@pytest.fixture
def busy_tree(tree, identity):
    """math and a mix of math and json are on the GPU, sql in host memory; each has KV, and one request runs."""
    tree.bring(identity["sql"])
    tree.cache.evict_some(1)
    mix = tree.demand({"math": 0.5, "json": -2.0})
    math = tree.demand({"math": 1.0})
    tree.bring_mix(mix)
    tree.add_kv(math, list(range(10)))
    tree.add_kv(mix, list(range(20)))
    tree.add_kv(None, list(range(7)))
    tree.settle()
    tree.mix, tree.math = mix, math
    tree.running = Running(tree, "running", math, [*range(10), 50, 51, 52])
    tree.running.start()
    tree.settle()
    return tree
