"""Who gets in, and that everybody does: admission on the real cache, in pools that hold two adapters at most."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.residency import Verdict

from .tree import Loop, Tree, write_adapter

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


# ---- Nobody starves ----


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("ratio", [1.0, 0.2])
def test_five_adapters_in_a_pool_for_two_all_finish(make_tree, page_size: int, ratio: float) -> None:
    tree = make_tree("abcde", pool_slots=2 * 16 + 24, page_size=page_size)
    loop = Loop(tree, ratio)
    for number in range(10):
        assert loop.submit(str(number), {"abcde"[number % 5]: 1.0}, [number, *range(5)], num_new=12)
    loop.run(10 * 40)
    assert sorted(loop.finished) == sorted(map(str, range(10)))
    assert tree.residency.counters.swap_ins >= 5
    finish(tree, loop)


def test_an_adapter_is_admitted_although_others_keep_coming(make_tree, folder: Path) -> None:
    """A stream of requests for what is on the GPU must not keep out for ever the one request that needs room."""
    tree = make_tree("ab", pool_slots=2 * SLOTS + 60)
    tree.load("large", folder / "large")
    loop = Loop(tree)
    passes = None
    for number in range(150):
        while len(loop.waiting) < 6:
            # Short, and never done all at once: what comes free is always too little for an adapter.
            count = len(loop.finished) + len(loop.running) + len(loop.waiting)
            loop.submit(f"stream{count}.{number}", {"ab"[count % 2]: 1.0}, [count % 50, 1, 2], num_new=4 + count % 5)
        if number == 20:
            loop.submit("rare", {"large": 1.0}, [1, 2, 3], num_new=4)
        tree.finish_reads()
        loop.step()
        tree.check()
        if "rare" in loop.admitted:
            passes = number - 20
            break
    # At most OVERTAKE_FACTOR x patience passes until nobody overtakes, then what runs must finish, then the load.
    assert passes is not None and passes <= 4 * 4 + 20


def test_a_base_request_without_room_is_not_starved_by_adapters(make_tree) -> None:
    tree = make_tree("abc", pool_slots=2 * SLOTS + 20)
    loop = Loop(tree)
    for number in range(200):
        if len(loop.waiting) < 6:
            loop.submit(f"stream{number}", {"abc"[number % 3]: 1.0}, [number % 50, 1, 2], num_new=6)
        if number == 20:
            loop.submit("base", None, list(range(30)), num_new=8)
        tree.finish_reads()
        loop.step()
        if "base" in loop.admitted:
            break
    tree.check()
    assert "base" in loop.admitted


def test_mixes_that_share_members_all_finish(make_tree) -> None:
    tree = make_tree("abcd", pool_slots=3 * SLOTS + 16)
    loop = Loop(tree)
    mixes = [{"a": 0.5, "b": 0.5}, {"b": 1.0, "c": -1.0}, {"c": 1.0}, {"a": 0.5, "b": 0.25, "c": 0.25}, {"d": 2.0}, None]
    for number in range(12):
        assert loop.submit(str(number), mixes[number % 6], [number, 1, 2], num_new=8)
    loop.run(600)
    assert len(loop.finished) == 12
    finish(tree, loop)


def test_a_request_that_fits_only_alone_gets_the_pool(make_tree, folder: Path) -> None:
    tree = make_tree("ab", pool_slots=60)
    tree.load("large", folder / "large")
    loop = Loop(tree)
    for number in range(4):
        loop.submit(f"small{number}", {"ab"[number % 2]: 1.0}, [number, 1], num_new=5)
    assert loop.submit("large", {"large": 1.0}, [1, 2, 3], num_new=50)
    for number in range(4, 8):
        loop.submit(f"small{number}", {"ab"[number % 2]: 1.0}, [number, 1], num_new=5)
    loop.run(400)
    assert len(loop.finished) == 9
    finish(tree, loop)


def test_two_mixes_that_each_hold_what_the_other_needs_do_not_deadlock(make_tree) -> None:
    """Room for three adapters, two mixes of two: each would keep one and wait for its second."""
    tree = make_tree("abcd", pool_slots=3 * SLOTS + 8)
    loop = Loop(tree)
    loop.submit("one", {"a": 0.5, "b": 0.5}, [1, 2], num_new=3)
    loop.submit("two", {"c": 0.5, "d": 0.5}, [1, 2], num_new=3)
    # The reads come in crosswise, so both have a first member to hold before either has its second.
    loop.step()
    jobs = tree.residency.reader._jobs
    for index in (0, 2):
        jobs[index].future.exception()
    loop.step()
    loop.run(200)
    assert sorted(loop.finished) == ["one", "two"]
    finish(tree, loop)


# ---- What can never be ----


def test_members_that_cannot_be_resident_together_are_refused(make_tree) -> None:
    tree = make_tree("abc", pool_slots=2 * SLOTS + 10)
    loop = Loop(tree)
    assert loop.submit("two", {"a": 0.5, "b": 0.5}, [1], num_new=2)
    assert not loop.submit("three", {"a": 0.5, "b": 0.5, "c": 0.5}, [1])
    assert tree.residency.reserved_slots(tree.demand({"a": 0.5, "b": 0.5, "c": 0.5})) > tree.cache.num_pool_slots
    loop.run(100)


def test_a_request_that_fits_alone_but_not_beside_its_adapter_is_refused_and_a_long_output_is_cut(make_tree) -> None:
    tree = make_tree("a", pool_slots=50)
    loop = Loop(tree)
    assert loop.submit("base", None, [1] * 40, num_new=2)
    assert not loop.submit("adapter", {"a": 1.0}, [1] * 40)
    assert loop.submit("cut", {"a": 1.0}, [1] * 10, num_new=1000)
    assert loop.waiting[-1].num_new == 50 - SLOTS - 10 - 2
    loop.run(300)
    assert loop.finished == ["base", "cut"] or loop.finished == ["cut", "base"]
    finish(tree, loop)


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


# ---- The last running request ----


def test_a_shortage_during_decode_gets_the_slots_of_a_load_under_way(make_tree) -> None:
    """A copy under way locks its slots; the last running request must get them all the same, not be aborted."""
    tree = make_tree("ab", pool_slots=2 * SLOTS + 12, settings=Settings(delay_loads=1000))
    a, b = (tree.demand({name: 1.0}).identity for name in "ab")
    loop = Loop(tree, ratio=0.1)
    loop.submit("runs", {"a": 1.0}, [1, 2], num_new=20)
    tree.finish_reads()
    while not loop.running:
        loop.step()
        tree.finish_reads()
        tree.cache._finish_copies()
    loop.submit("waits", {"b": 1.0}, [1, 2], num_new=20)
    while not tree.core.is_resident(b):
        tree.finish_reads()
        tree.residency.poll()
        loop._pass()
    assert tree.residency.tier_of(b) == "loading" and tree.core.is_resident(a)
    for _ in range(20):
        loop._decode()
        loop._pass()
        tree.check()
    assert loop.finished == ["runs"] and loop.retractions == 0
    assert 1 <= tree.cache.last_resorts <= 3, "what was given back is brought in again while it is needed"
    tree.cache.delay_loads = 0
    loop.run(200)
    finish(tree, loop)


asked = st.tuples(
    st.sampled_from([None, {"a": 1.0}, {"b": 1.0}, {"c": 1.0}, {"a": 0.5, "b": 2.0}]), st.integers(1, 20), st.integers(1, 40)
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), phases=set(Phase) - {Phase.shrink})
@given(
    requests=st.lists(asked, min_size=1, max_size=10),
    ratio=st.sampled_from([0.05, 0.3, 1.0]),
    delay_loads=st.sampled_from([0, 3, 12]),
    pool_slots=st.sampled_from([44, 56, 72]),
    page_size=st.sampled_from([1, 4]),
    pin_after=st.integers(0, 40),
)
@example(  # a retracted mix stood before the blocker and held what that needed
    requests=[
        ({"a": 1.0}, 16, 13), ({"b": 1.0}, 15, 30), (None, 13, 22), ({"a": 0.5, "b": 2.0}, 18, 19), (None, 10, 18),
        ({"a": 0.5, "b": 2.0}, 4, 20), (None, 13, 36), (None, 9, 28), (None, 18, 13), ({"a": 0.5, "b": 2.0}, 5, 13),
    ],
    ratio=1.0, delay_loads=3, pool_slots=56, page_size=4, pin_after=23,
)  # fmt: skip
def test_no_running_request_is_ever_aborted(
    folder: Path, requests: list, ratio: float, delay_loads: int, pool_slots: int, page_size: int, pin_after: int
) -> None:
    """Whatever admission promised too little for, what loads hold, and what is pinned later: everybody who was accepted
    finishes (``Loop`` fails when the last running request finds no slot)."""
    with Tree(pool_slots, page_size=page_size, settings=Settings(patience_passes=4, delay_loads=delay_loads)) as tree:
        for name in "abc":
            tree.load(name, folder / name)
        loop = Loop(tree, ratio)
        accepted = []
        for number, (mix, length, num_new) in enumerate(requests):
            if loop.submit(str(number), mix, [number] * length, num_new):
                accepted.append(str(number))
        for count in range(3000):
            if not loop.waiting and not loop.running:
                break
            if count == pin_after:
                tree.load("pinned", folder / "d", pinned=True)
            tree.finish_reads()
            loop.step()
        assert sorted(loop.finished) == sorted(accepted) and not loop.failed
        tree.check()


# ---- Holds ----


def test_a_hold_goes_with_its_request(make_tree) -> None:
    tree = make_tree("ab", pool_slots=2 * SLOTS + 20)
    loop = Loop(tree)
    loop.submit("blocker", {"a": 1.0}, [1, 2], num_new=10)
    loop.submit("leaver", {"b": 1.0}, [1, 2], num_new=10)
    for _ in range(2):
        tree.finish_reads()
        loop.step()
    assert tree.residency._holds["leaver"].device or tree.residency._holds["leaver"].host
    loop.abort("leaver")
    loop.step()
    assert "leaver" not in tree.residency._holds
    loop.run(100)
    finish(tree, loop)


def test_a_shortage_during_decode_takes_back_what_waiting_requests_hold(make_tree) -> None:
    tree = make_tree("ab", pool_slots=2 * SLOTS + 10)
    loop = Loop(tree, ratio=0.1)
    loop.submit("runs", {"a": 1.0}, [1, 2], num_new=20)
    tree.finish_reads()
    while not loop.running:
        tree.finish_reads()
        loop.step()
    loop.submit("waits", {"b": 1.0}, [1, 2], num_new=20)
    while not tree.core.is_resident(tree.demand({"b": 1.0}).identity):
        tree.finish_reads()
        tree.residency.poll()
        loop._pass()
    tree.settle()
    # b is held; a's request needs its slots now, and takes them rather than be aborted.
    for _ in range(20):
        loop._decode()
        tree.check()
    assert loop.retractions == 0 and loop.finished in (["runs"], [])
    loop.run(200)
    assert sorted(loop.finished) == ["runs", "waits"]
    finish(tree, loop)


def test_a_hold_taken_back_while_its_request_brings_something_in_is_not_lost(make_tree) -> None:
    """An eviction for an adapter's own copy may find nothing and take back every hold, this request's too."""
    tree = make_tree("ab", pool_slots=2 * SLOTS + 4)
    residency = tree.residency
    demand = tree.demand({"a": 0.5, "b": 0.5})
    tree.bring(tree.demand({"b": 1.0}).identity)
    assert residency.start_reading(tree.demand({"a": 1.0}).identity)
    tree.finish_reads()
    residency.reader.poll()
    base = tree.cache.allocate_device(4)  # somebody's private slots: b and the free ones are all there is
    tree.private["x"] = base.tolist()
    residency.begin_pass(["mix"])
    start = tree.cache.start_swap_in

    def start_and_run_short(lora_node):
        residency.release_holds()
        return start(lora_node)

    tree.cache.start_swap_in = start_and_run_short
    assert residency.admit("mix", demand, room=100, alone=False) is Verdict.WAIT
    tree.cache.start_swap_in = start
    residency.end_pass(batch_formed=False)
    residency.begin_pass([])  # the request is aborted
    tree.settle()
    tree.allocator.free(base)
    tree.private.clear()
    tree.check()
    tree.check_everything_can_go()


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
    assert len(tree.core.evictable_device_leaves._heap) < 200
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


# ---- Pins ----


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


# ---- Flush ----


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_flush_keeps_adapters_usable(make_tree, page_size: int) -> None:
    tree = make_tree("ab", page_size=page_size)
    tokens = list(range(12))
    demands = [None, tree.demand({"a": 1.0}), tree.demand({"a": 0.5, "b": 0.5})]
    for _ in range(3):
        for demand in demands:
            if demand is not None:
                tree.bring_mix(demand)
            assert tree.matched(demand, tokens) == 0
            tree.add_kv(demand, tokens)
            tree.settle()
            assert tree.matched(demand, tokens) == 12
        tree.flush()
        tree.check()
        assert tree.cache.num_free_slots == tree.cache.num_pool_slots


def test_no_storage_backend_is_attached_while_running(make_tree) -> None:
    """SGLang can (PUT /hicache/storage-backend); adapters' rows would be stored, and found again as KV."""
    attached, message = make_tree("a").cache.attach_storage_backend(storage_backend="file")
    assert not attached and "adapter rows" in message


# ---- Conversations ----


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_second_turn_finds_at_least_the_whole_pages_of_the_first(make_tree, page_size: int) -> None:
    tree = make_tree("ab", page_size=page_size, pool_slots=200)
    for weights in (None, {"a": 1.0}, {"a": 0.25, "b": -1.0}):
        demand = tree.demand(weights)
        loop = Loop(tree)
        tokens = [3, 1, 4, 1, 5, 9, 2, 6]
        for turn in range(3):
            loop.submit(f"turn{turn}", weights, tokens, num_new=5)
            request = loop.waiting[0]
            loop.run(50)
            tokens = [*request.tokens, 7, 7, 7]
            whole = (len(tokens) - 3) // page_size * page_size
            assert tree.matched(demand, tokens) >= whole
    tree.settle()
    tree.cache.evict_some(200)  # and after a way through host memory
    loop.submit("last", {"a": 0.25, "b": -1.0}, tokens, num_new=2)
    loop.run(50)
    tree.check()
