"""Pinned adapters come without a request, when everybody before them can finish, and stay."""

from __future__ import annotations

import shutil
from pathlib import Path

from .conftest import SLOTS, finish
from .loop import Loop


def test_a_pinned_adapter_comes_without_a_request_and_stays(make_tree) -> None:
    tree = make_tree("abc", pinned="c", pool_slots=3 * SLOTS + 20)
    loop = Loop(tree)
    identity = tree.demand({"c": 1.0}).identity
    assert tree.residency.is_busy
    for _ in range(6):
        tree.finish_reads()
        loop.step()
    assert tree.core.is_resident(identity) and not tree.residency.is_busy
    for number in range(6):
        loop.submit(str(number), {"ab"[number % 2]: 1.0}, list(range(number, number + 12)), num_new=5)
    loop.run(200)
    tree.cache.evict_some(tree.cache.num_pool_slots)
    tree.check()
    assert tree.core.is_resident(identity)
    tree.unload("c")
    tree.cache.evict_some(tree.cache.num_pool_slots)
    assert not tree.core.is_resident(identity)
    finish(tree, loop)


def test_a_pinned_adapter_comes_back_after_a_flush(make_tree) -> None:
    tree = make_tree("ab", pinned="a")
    loop = Loop(tree)
    for _ in range(5):
        tree.finish_reads()
        loop.step()
    tree.flush()
    tree.check()
    assert tree.residency.is_busy
    for _ in range(5):
        tree.finish_reads()
        loop.step()
    assert tree.core.is_resident(tree.demand({"a": 1.0}).identity) and not tree.residency.is_busy
    tree.check()


def test_a_pinned_adapter_whose_file_vanished_does_not_keep_the_server_busy(make_tree, folder, tmp_path) -> None:
    tree = make_tree("a")
    shutil.copytree(folder / "b", tmp_path / "b")
    tree.load("b", tmp_path / "b", pinned=True)
    shutil.rmtree(tmp_path / "b")
    loop = Loop(tree)
    for _ in range(20):
        tree.finish_reads()
        loop.step()
    assert tree.residency.counters.failed_reads <= 2, "it is read again and again in every step of the loop"
    assert not tree.residency.is_busy, "the server never counts as idle, so it cannot even be flushed"
    loop.submit("x", {"a": 1.0}, [1], num_new=2)
    loop.run(30)
    assert loop.finished == ["x"]


def test_a_pin_waits_for_the_requests_that_it_would_leave_no_room(make_tree, folder: Path) -> None:
    """Those that came before it finish as they were promised; those that come later count it."""
    tree = make_tree("ab", pool_slots=2 * SLOTS + 10)
    loop = Loop(tree)
    loop.submit("mix", {"a": 0.5, "b": 0.5}, [1], num_new=2)
    loop.submit("long", None, [1], num_new=2 * SLOTS + 10 - 5)
    pinned = tree.load("c", folder / "c", pinned=True)
    assert not loop.submit("late", {"a": 0.5, "b": 0.5}, [1], num_new=2)
    assert loop.submit("a", {"a": 1.0}, [1], num_new=2)
    loop.run(200)
    assert sorted(loop.finished) == ["a", "long", "mix"] and not loop.failed
    for _ in range(3):
        tree.finish_reads()
        loop.step()
    assert tree.core.is_resident(pinned) and not tree.residency.is_busy
    finish(tree, loop)
