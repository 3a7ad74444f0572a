"""What is where: registration, files, host memory, and the table of adapters on the GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.residency import Verdict

from .conftest import SLOTS, finish
from .loop import Loop
from .tree import write_adapter

# ---- Registration ----


def test_an_adapter_that_could_never_fit_is_refused_at_load(make_tree, folder: Path) -> None:
    for sizes, where in (({"pool_slots": 40}, "GPU pool"), ({"pool_slots": 100, "host_slots": 40}, "host pool")):
        tree = make_tree("a", **sizes)
        with pytest.raises(ValueError, match=f"adapter big takes 44 slots.*{where}.*raise"):
            tree.load("big", folder / "large")
        tree.close()


def test_a_rank_above_the_tables_is_refused_at_load(make_tree, folder: Path) -> None:
    tree = make_tree("a", settings=Settings(max_rank=2))
    with pytest.raises(ValueError, match=r'adapter big: rank 3 is above.*"max_rank": 3'):
        tree.load("big", folder / "large")


# ---- Names come and go ----


def test_history_follows_the_bytes_and_not_the_name(make_tree, folder: Path, tmp_path: Path) -> None:
    tree = make_tree("ab")
    tokens = list(range(20))
    one, mix = tree.demand({"a": 1.0}), tree.demand({"a": 0.5, "b": 2.0})
    for demand in (one, mix):
        tree.bring_mix(demand)
        tree.add_kv(demand, tokens)
    tree.settle()
    tree.unload("a")
    tree.load("a", folder / "c")  # other bytes under the same name
    other, other_mix = tree.demand({"a": 1.0}), tree.demand({"a": 0.5, "b": 2.0})
    tree.bring_mix(other_mix)
    assert tree.matched(other, tokens) == tree.matched(other_mix, tokens) == 0
    shutil.copytree(folder / "a", tmp_path / "elsewhere")
    tree.load("z", tmp_path / "elsewhere")  # the same bytes under another name
    assert tree.demand({"z": 1.0}) == one and tree.demand({"b": 2.0, "z": 0.5}) == mix
    assert tree.matched(one, tokens) == tree.matched(mix, tokens) == 20
    tree.check()


def test_two_names_for_the_same_bytes_are_one_adapter_in_the_pool(make_tree, folder: Path) -> None:
    tree = make_tree("a")
    tree.load("again", folder / "a")
    tree.bring(tree.demand({"a": 1.0}).identity)
    assert tree.demand({"again": 1.0}) == tree.demand({"a": 1.0})
    assert tree.demand({"a": 0.5, "again": 0.5}) == tree.demand({"a": 1.0})
    tree.unload("a")
    assert tree.core.lora_nodes[tree.demand({"again": 1.0}).identity].registered
    tree.check()


def test_an_unregistered_subtree_is_the_first_to_go_on_the_gpu_and_in_host_memory(make_tree) -> None:
    tree = make_tree("abc", pool_slots=200, host_slots=200)
    tokens = list(range(10))
    demands = [tree.demand({"a": 1.0}), tree.demand({"b": 1.0}), tree.demand({"c": 1.0})]
    mix = tree.demand({"a": 1.0, "b": 1.0})
    for demand in (*demands, mix):
        tree.bring_mix(demand)
        tree.add_kv(demand, tokens)
        tree.settle()
    tree.unload("c")  # the one used last but for the mix
    node = tree.core.lora_nodes[demands[2].identity]
    tree.cache.evict_some(10 + SLOTS)
    assert not node.is_resident and all(tree.core.is_resident(d.identity) for d in (*demands[:2], mix))
    tree.cache.evict_some(200)
    tree.cache.evict_host(10 + SLOTS)
    tree.check()
    assert demands[2].identity not in tree.core.lora_nodes
    assert [tree.matched(demand, tokens) for demand in (*demands[:2], mix)] == [10, 10, 10]
    tree.unload("a")  # takes the mix's KV with it, but not b's
    tree.cache.evict_host(2 * 10 + SLOTS + 1)
    assert tree.matched(demands[1], tokens) == 10 and list(tree.core.lora_nodes) == [demands[1].identity]
    tree.check()


def test_what_an_unloaded_adapter_leaves_behind_is_counted_when_it_leaves(make_tree) -> None:
    """An unload frees nothing by itself: the eviction that takes the adapter and its KV counts both, and the next one neither."""
    tree = make_tree("ab", pool_slots=200)
    for name in "ab":
        demand = tree.demand({name: 1.0})
        tree.bring(demand.identity)
        tree.add_kv(demand, list(range(10)))
        tree.settle()
    moved, free = tree.cache.moved_out, tree.cache.num_free_slots
    tree.unload("b")
    assert (tree.cache.num_free_slots, moved.slots) == (free, 0)
    tree.cache.evict_some(10 + SLOTS)
    assert (moved.slots, moved.adapter_slots) == (10 + SLOTS, SLOTS)
    tree.cache.evict_some(10)
    assert (moved.slots, moved.adapter_slots) == (20 + SLOTS, SLOTS)
    tree.check()


def test_registering_again_ends_being_the_first_to_go(make_tree, folder: Path) -> None:
    tree = make_tree("ab", pool_slots=200)
    tokens = list(range(10))
    demands = [tree.demand({"a": 1.0}), tree.demand({"b": 1.0})]
    for demand in demands:
        tree.bring(demand.identity)
        tree.add_kv(demand, tokens)
        tree.settle()
    tree.unload("b")
    tree.load("b", folder / "b")
    tree.cache.evict_some(10)
    assert tree.match(tree.key(demands[1]), tokens).device_prefix_len == 10
    assert tree.match(tree.key(demands[0]), tokens).device_prefix_len == 0


def test_nothing_is_kept_of_adapters_that_are_gone(make_tree, tmp_path: Path) -> None:
    tree = make_tree("", pool_slots=60, host_slots=60)
    loop = Loop(tree)
    for number in range(30):
        tree.load("x", write_adapter(tmp_path / "x", seed=number), lora_id=f"id{number}")
        loop.submit(str(number), {f"id{number}": 1.0}, [1, 2, 3], num_new=2)
        loop.run(50)
        tree.unload(f"id{number}")
    residency = tree.residency
    loop.step()
    held = (residency._layouts, residency._indices, tree.core.lora_nodes, tree.core._by_node)
    assert max(map(len, held)) <= 4 and not residency._holds and not residency._first_look
    assert len(tree.core.evictable_device_leaves._order) <= 4
    finish(tree, loop)
    assert not residency._layouts and not tree.core._by_node


# ---- Files ----


def test_a_file_that_vanished_fails_only_its_request(make_tree, folder: Path, tmp_path: Path) -> None:
    tree = make_tree("a")
    shutil.copytree(folder / "b", tmp_path / "b")
    tree.load("b", tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    loop = Loop(tree)
    loop.submit("bad", {"b": 1.0}, [1], num_new=3)
    loop.submit("mix", {"a": 1.0, "b": 1.0}, [1], num_new=3)
    loop.submit("good", {"a": 1.0}, [1], num_new=3)
    loop.run(60)
    assert loop.finished == ["good"] and sorted(loop.failed) == ["bad", "mix"]
    assert str(tmp_path / "b") in loop.failed["bad"] and "adapter b" in loop.failed["bad"]
    shutil.copytree(folder / "b", tmp_path / "b")  # the cure that the message names
    loop.submit("cured", {"b": 1.0}, [1], num_new=3)
    loop.run(60)
    assert loop.finished == ["good", "cured"]
    finish(tree, loop)


def test_a_file_that_vanished_fails_every_request_that_waited_for_it_with_one_read(make_tree, folder, tmp_path) -> None:
    """Also those that a pass does not reach because the batch is full before."""
    tree = make_tree("a")
    shutil.copytree(folder / "b", tmp_path / "b")
    tree.load("b", tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    residency, demand = tree.residency, tree.demand({"b": 1.0})
    waiting = ["first", "second", "third"]

    def look(*reached: str) -> list[Verdict]:
        residency.poll()
        residency.begin_pass(waiting)
        verdicts = [residency.admit(name, demand, room=100, alone=False) for name in reached]
        residency.end_pass(batch_formed=False)
        waiting[:] = [name for name, verdict in zip(reached, verdicts, strict=True) if verdict is not Verdict.FAILED] + [
            name for name in waiting if name not in reached
        ]
        return verdicts

    assert look(*waiting) == [Verdict.WAIT] * 3
    tree.finish_reads()
    assert look("first") == look("second") == look("third") == [Verdict.FAILED]
    assert residency.counters.failed_reads == 1
    shutil.copytree(folder / "b", tmp_path / "b")
    waiting.append("later")
    assert look("later") == [Verdict.WAIT]
    assert not residency._failures
    residency.begin_pass([])


def test_a_file_that_changed_fails_only_its_request(make_tree, folder: Path, tmp_path: Path) -> None:
    tree = make_tree("a")
    write_adapter(tmp_path / "b", seed=50)
    tree.load("b", tmp_path / "b")
    write_adapter(tmp_path / "b", seed=51)
    loop = Loop(tree)
    loop.submit("bad", {"b": 1.0}, [1], num_new=3)
    loop.submit("good", {"a": 1.0}, [1], num_new=3)
    loop.run(60)
    assert loop.finished == ["good"] and "other weights" in loop.failed["bad"]
    finish(tree, loop)


def test_a_second_folder_with_the_same_bytes_stands_in_for_a_vanished_one(make_tree, folder: Path, tmp_path) -> None:
    tree = make_tree("a")
    shutil.copytree(folder / "a", tmp_path / "copy")
    tree.load("copy", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")
    loop = Loop(tree)
    loop.submit("x", {"copy": 1.0}, [1], num_new=3)
    loop.run(60)
    assert loop.finished == ["x"]


def test_an_adapter_unloaded_while_it_is_read_leaves_nothing(make_tree) -> None:
    tree = make_tree("a")
    identity = tree.demand({"a": 1.0}).identity
    assert tree.residency.start_reading(identity)
    tree.check()
    tree.unload("a")
    tree.finish_reads()
    tree.residency.poll()
    tree.check()
    assert identity not in tree.core.lora_nodes
    tree.check_everything_can_go()


def test_an_adapter_loaded_again_while_a_read_for_its_old_name_fails_is_served(make_tree, folder, tmp_path) -> None:
    tree = make_tree("")
    shutil.copytree(folder / "a", tmp_path / "old")
    tree.load("a", tmp_path / "old")
    assert tree.residency.start_reading(tree.demand({"a": 1.0}).identity)
    tree.unload("a")
    shutil.rmtree(tmp_path / "old")
    tree.load("a", folder / "a", lora_id="a2")
    loop = Loop(tree)
    loop.submit("x", {"a2": 1.0}, [1], num_new=3)
    loop.run(60)
    assert loop.finished == ["x"] and not loop.failed


def test_other_requests_go_on_while_a_file_is_read(make_tree) -> None:
    tree = make_tree("ab")
    tree.bring(tree.demand({"a": 1.0}).identity)
    loop = Loop(tree)
    loop.submit("cold", {"b": 1.0}, [1, 2], num_new=2)
    loop.submit("warm", {"a": 1.0}, [1, 2], num_new=3)
    for _ in range(10):
        loop.step()  # nobody finishes the read
        tree.check()
    assert loop.finished == ["warm"] and tree.residency.is_busy
    loop.run(20)
    assert loop.finished == ["warm", "cold"]


def test_more_adapters_than_host_memory_holds(make_tree) -> None:
    tree = make_tree("abcdef", pool_slots=2 * SLOTS + 15, host_slots=3 * SLOTS)
    loop = Loop(tree)
    for number in range(18):
        loop.submit(str(number), {"abcdef"[number * 5 % 6]: 1.0}, [number, 1, 2], num_new=4)
    loop.run(600)
    assert len(loop.finished) == 18 and tree.residency.counters.reads > 6
    finish(tree, loop)


# ---- The table of adapters is smaller than the pool ----


@pytest.mark.parametrize("capacity", [1, 2])
def test_more_adapters_than_the_table_holds_take_turns(make_tree, capacity: int) -> None:
    tree = make_tree("abcd", pool_slots=200, settings=Settings(patience_passes=4, max_resident_adapters=capacity))
    loop = Loop(tree)
    for number in range(8):
        loop.submit(str(number), {"abcd"[number % 4]: 1.0}, [number, 1, 2], num_new=5)
    loop.run(300)
    assert len(loop.finished) == 8
    finish(tree, loop)


def test_a_full_table_of_adapters_in_use_costs_nobody_their_history(make_tree) -> None:
    tree = make_tree("ab", pool_slots=200, settings=Settings(max_resident_adapters=1))
    tokens = list(range(30))
    tree.add_kv(None, tokens)
    loop = Loop(tree)
    loop.submit("long", {"a": 1.0}, [1, 2], num_new=20)
    while not loop.running:
        tree.finish_reads()
        loop.step()
    loop.submit("waits", {"b": 1.0}, [1, 2], num_new=2)
    for _ in range(6):
        tree.finish_reads()
        loop.step()
    assert loop.running
    assert tree.match(None, tokens).device_prefix_len == 30, "history KV was evicted, and no index came free by it"
    loop.run(100)


def test_a_full_table_gives_up_its_least_valuable_adapter_and_nothing_else(make_tree) -> None:
    """An index comes free by evicting one adapter with what needs it, however old other history is."""
    tree = make_tree("abcd", pool_slots=300, settings=Settings(max_resident_adapters=3))
    tokens = list(range(10))
    tree.add_kv(None, tokens)  # the oldest
    a, b, c, d = (tree.demand({name: 1.0}) for name in "abcd")
    mix = tree.demand({"a": 0.5, "b": 0.5})
    for demand in (a, b, mix, c):
        tree.bring_mix(demand)
        tree.add_kv(demand, tokens)
        tree.settle()
    for demand in (a, b):
        assert tree.matched(demand, tokens) == 10  # used again
    tree.bring(d.identity)
    tree.check()
    assert not tree.core.is_resident(c.identity)
    tree.bring(c.identity)
    assert not tree.core.is_resident(a.identity) and not tree.core.is_resident(mix.identity)
    on_gpu = [tree.match(tree.key(demand), tokens).device_prefix_len for demand in (None, b, a, mix)]
    assert on_gpu == [10, 10, 0, 0]
    tree.check()
    tree.check_everything_can_go()


def test_a_copy_under_way_does_not_outlive_a_flush(make_tree) -> None:
    """SGLang forgets it, and it would come to its end in slots that are somebody else's by then."""
    tree = make_tree("ab", settings=Settings(delay_loads=3))
    for name in "ab":
        assert tree.residency.start_reading(tree.demand({name: 1.0}).identity)
    tree.finish_reads()
    tree.residency.poll()
    assert all(tree.cache.start_swap_in(tree.core.lora_nodes[tree.demand({name: 1.0}).identity]) for name in "ab")
    tree.flush()
    tree.add_kv(None, list(range(tree.cache.num_free_slots - 1)))
    for _ in range(5):
        tree.cache.advance_delayed_loads()
        tree.cache.check_hicache_events()
    tree.settle()
    tree.check()
