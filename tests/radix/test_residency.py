"""Who gets in, and that everybody does: admission on the real cache, in pools that hold two adapters at most."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix import residency
from sglang_lora_tree.radix.residency import Verdict

from .conftest import SLOTS, finish
from .loop import Loop
from .tree import Tree

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


def test_nothing_is_kept_of_the_admitted_even_if_nobody_looks_who_is_gone(make_tree, monkeypatch) -> None:
    """While nobody leaves the queue but by being admitted, a pass need not go through it."""
    tree = make_tree("abcde", pool_slots=2 * 16 + 24)
    residency, begin_pass = tree.residency, tree.residency.begin_pass
    monkeypatch.setattr(residency, "begin_pass", lambda waiting: begin_pass(waiting, has_lost=False))
    loop = Loop(tree, ratio=0.2)
    for number in range(20):
        loop.submit(str(number), {"abcde"[number % 5]: 1.0}, [number, *range(5)], num_new=12)
    loop.run(800)
    assert len(loop.finished) == 20 and loop.retractions
    assert not residency._holds and not residency._passes_waited and not residency._first_look
    finish(tree, loop)


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
    jobs = tree.residency.reader.jobs
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


# ---- Adapters that come in with a batch ----


def pass_once(loop: Loop, tree: Tree) -> list[str]:
    """One pass, with what is read by then; copies under way stay under way. Returns whom it has admitted."""
    tree.finish_reads()
    tree.residency.poll()
    before = len(loop.admitted)
    loop._pass()
    return loop.admitted[before:]


def test_a_request_runs_with_the_copy_of_its_adapter_and_those_after_it_need_not_see_the_end(make_tree) -> None:
    """Forward passes run one after the other: what the first has waited for is there for the second."""
    tree = make_tree("ab")
    loop = Loop(tree)
    a, b = (tree.demand({name: 1.0}).identity for name in "ab")
    loop.submit("first", {"a": 1.0}, [1, 2])
    assert pass_once(loop, tree) == [], "it is on disk"
    assert pass_once(loop, tree) == ["first"]
    assert tree.residency.tier_of(a) == "loading" and tree.residency.is_whole(a) and len(tree.residency.coming) == 1
    loop.submit("second", {"a": 1.0}, [3, 4])
    loop.submit("mix", {"a": 0.5, "b": 0.5}, [3, 4])
    assert pass_once(loop, tree) == ["second"] and tree.residency.coming == []
    assert pass_once(loop, tree) == ["mix"] and tree.residency.is_whole(b)
    assert tree.cache.num_came_with_batch == 2
    loop.run(50)
    finish(tree, loop)
    assert tree.cache._awaited == set()


def test_a_copy_that_no_batch_waits_for_is_waited_for_in_the_queue(make_tree) -> None:
    tree = make_tree("a")
    loop = Loop(tree)
    a = tree.demand({"a": 1.0}).identity
    loop.submit("first", {"a": 1.0}, [1, 2])
    pass_once(loop, tree)
    tree.finish_reads()
    tree.residency.poll()
    assert tree.residency.swap_in_ahead(a, room=100) is not None
    assert pass_once(loop, tree) == [] and not tree.residency.is_whole(a)
    tree.cache.check_hicache_events()
    assert pass_once(loop, tree) == ["first"] and tree.cache.num_came_with_batch == 0
    loop.run(50)
    finish(tree, loop)


def test_an_adapter_that_comes_back_has_not_been_waited_for(make_tree) -> None:
    """Its node is the one that a batch has waited for before."""
    tree = make_tree("a")
    loop = Loop(tree)
    a = tree.demand({"a": 1.0}).identity
    loop.submit("first", {"a": 1.0}, [1, 2])
    loop.run(50)
    tree.settle()
    tree.cache.evict_adapter(tree.core.lora_nodes[a])
    assert tree.residency.swap_in_ahead(a, room=100) is not None and not tree.residency.is_whole(a)
    tree.settle()
    assert tree.residency.is_whole(a)
    finish(tree, loop)


def test_a_burst_of_absent_adapters_comes_in_a_few_at_a_time(make_tree, monkeypatch) -> None:
    """All of a batch waits for what comes in with it, so no more does than is copied in a step or so."""
    monkeypatch.setattr(residency, "MOST_LATE_SLOTS", 2 * SLOTS + 1)
    tree = make_tree("abcde", pool_slots=400)
    loop = Loop(tree)
    for name in "abcde":
        loop.submit(name, {name: 1.0}, [1, 2])
    loop.submit("two", {"a": 0.5, "e": 0.5}, [1, 2])
    assert pass_once(loop, tree) == []
    assert pass_once(loop, tree) == ["a", "b"], "the others' copies have not begun"
    assert tree.residency.num_resident == 2
    assert pass_once(loop, tree) == ["c", "d"]
    tree.cache.check_hicache_events()  # no more than two loads at once, so that a batch's own has its place
    assert pass_once(loop, tree) == ["e", "two"]
    loop.run(50)
    finish(tree, loop)


def test_more_than_a_batch_may_wait_for_comes_in_by_itself(make_tree, monkeypatch) -> None:
    """And nobody waits for it but its own request."""
    monkeypatch.setattr(residency, "MOST_LATE_SLOTS", SLOTS + 1)
    tree = make_tree("abc")
    loop = Loop(tree)
    loop.submit("large", {"a": 0.5, "b": 0.5}, [1, 2])
    loop.submit("other", {"c": 1.0}, [1, 2])
    assert pass_once(loop, tree) == []
    assert pass_once(loop, tree) == ["other"]
    assert [lora_node.identity for lora_node in tree.cache.coming] == list(tree.demand({"c": 1.0}).members)
    assert tree.residency.num_resident == 3 and pass_once(loop, tree) == []
    tree.cache.check_hicache_events()
    assert pass_once(loop, tree) == ["large"]
    loop.run(50)
    finish(tree, loop)


@pytest.mark.parametrize("most", [2 * SLOTS, 10**6])
def test_who_waits_for_a_later_batch_does_not_wait_for_ever(make_tree, monkeypatch, most: int) -> None:
    """Behind a stream of requests of higher priority, each of which brings an adapter in."""
    monkeypatch.setattr(residency, "MOST_LATE_SLOTS", most)
    tree = make_tree("abcdef", pool_slots=62)
    loop = Loop(tree)
    for name in "abcdef":
        tree.residency.start_reading(tree.demand({name: 1.0}).identity)
    tree.finish_reads()
    loop.submit("large", {"e": 0.5, "f": 0.5}, [1, 2])
    for step in range(100):
        loop.submit(f"stream {step}", {"abcd"[step % 4]: 1.0}, [step % 50, 3])
        loop.waiting.sort(key=lambda request: request.id == "large")
        loop.step()
        tree.check()
        if "large" in loop.admitted:
            break
    assert "large" in loop.admitted
    loop.run(500)
    finish(tree, loop)


class Held:
    """An event that was recorded and never comes."""

    recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return not self.recorded

    def wait(self, stream: object = None) -> None: ...


def test_history_that_finds_no_place_among_the_loads_is_computed_again(make_tree, monkeypatch) -> None:
    """SGLang has three events for loads, asks nobody before it queues one, and would stop at the fourth: here two pins' copies
    are under way while two batches want history KV."""
    tree = make_tree("ab", pool_slots=400)
    prompts = [list(range(10 * number, 10 * number + 8)) for number in (1, 2)]
    for prompt in prompts:
        tree.add_kv(None, prompt)
    tree.settle()
    tree.cache.evict_some(1000)
    tree.settle()
    for event in tree.cache.cache_controller.layer_done_counter.events:
        event.load_events[-1] = Held()
    monkeypatch.setattr(tree.cache, "_count_ready_acks", lambda queue: 0)
    for name in "ab":
        assert tree.residency.start_reading(tree.demand({name: 1.0}).identity)
        tree.finish_reads()
        tree.residency.poll()
        assert tree.cache.start_swap_in(tree.core.lora_nodes[tree.demand({name: 1.0}).identity])
        tree.cache.submit_loads()
    loop = Loop(tree)
    for number, prompt in enumerate(prompts):
        assert tree.matched(None, prompt) == len(prompt)
        loop.submit(str(number), None, [*prompt, 99])
        assert pass_once(loop, tree) == [str(number)]
    assert len(tree.cache.cache_controller.ack_load_queue) == 3


def test_where_nothing_waits_layer_by_layer_an_adapter_is_whole_before_its_request_runs(make_tree) -> None:
    tree = make_tree("a", waits_by_layer=False)
    loop = Loop(tree)
    loop.submit("first", {"a": 1.0}, [1, 2])
    assert [pass_once(loop, tree) for _ in range(3)] == [[], [], []]
    tree.cache.check_hicache_events()
    assert pass_once(loop, tree) == ["first"] and tree.residency.coming == []
    loop.run(50)
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
    waits_by_layer=st.booleans(),
    pool_slots=st.sampled_from([44, 56, 72]),
    page_size=st.sampled_from([1, 4]),
    pin_after=st.integers(0, 40),
)
@example(  # a retracted mix stood before the blocker and held what that needed
    requests=[
        ({"a": 1.0}, 16, 13), ({"b": 1.0}, 15, 30), (None, 13, 22), ({"a": 0.5, "b": 2.0}, 18, 19), (None, 10, 18),
        ({"a": 0.5, "b": 2.0}, 4, 20), (None, 13, 36), (None, 9, 28), (None, 18, 13), ({"a": 0.5, "b": 2.0}, 5, 13),
    ],
    ratio=1.0, delay_loads=3, waits_by_layer=False, pool_slots=56, page_size=4, pin_after=23,
)  # fmt: skip
def test_no_running_request_is_ever_aborted(
    folder: Path,
    requests: list,
    ratio: float,
    delay_loads: int,
    waits_by_layer: bool,
    pool_slots: int,
    page_size: int,
    pin_after: int,
) -> None:
    """Whatever admission promised too little for, what loads hold, and what is pinned later: everybody who was accepted
    finishes (``Loop`` fails when the last running request finds no slot)."""
    settings = Settings(patience_passes=4, delay_loads=delay_loads)
    with Tree(pool_slots, page_size=page_size, settings=settings, waits_by_layer=waits_by_layer) as tree:
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
