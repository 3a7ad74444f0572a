"""Trees with six small adapters, for the tests of residency and its rooms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_lora_tree.config import Settings

from .loop import Loop
from .tree import Tree, write_adapter

NAMES = "abcdef"
SLOTS = 15  # of one adapter of rank 1


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a to f: different adapters of rank 1; ``large``: rank 3, 44 slots."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(folder / name, seed=seed)
    write_adapter(folder / "large", rank=3, seed=99)
    return folder


@pytest.fixture
def make_tree(folder: Path) -> Iterator[Callable[..., Tree]]:
    trees: list[Tree] = []

    def make(names: str = NAMES, pinned: str = "", settings: Settings | None = None, **sizes: int) -> Tree:
        tree = Tree(settings=settings or Settings(patience_passes=4), **sizes)
        trees.append(tree)
        for name in names:
            tree.load(name, folder / name, pinned=name in pinned)
        return tree

    yield make
    for tree in reversed(trees):
        tree.close()


def finish(tree: Tree, loop: Loop) -> None:
    """Nothing may be left behind once the last request is gone."""
    loop.step()
    tree.settle()
    tree.check()
    for name in list(tree.residency.pins._held):
        tree.residency.pins.let_go(name)
    tree.check_everything_can_go()
