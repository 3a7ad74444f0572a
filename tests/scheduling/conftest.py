"""Adapters for trees without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_lora_tree.config import Settings
from tests.radix.tree import Tree, write_adapter

NAMES = "abcdef"
SLOTS = 15
"""Of each adapter."""


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed=seed) for seed, name in enumerate(NAMES)}


@pytest.fixture
def tree(adapters: dict[str, Path]) -> Iterator[Tree]:
    """A pool of 200 slots and a host pool of 400; a to f are registered, on disk."""
    with Tree(settings=Settings()) as tree:
        for name, folder in adapters.items():
            tree.load(name, folder)
        yield tree
