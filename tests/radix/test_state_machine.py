"""Anything in any order: requests, reads, copies under way, evictions, loads, unloads, flushes, in a pool too small.

After every single step all slots, rows, locks and table entries are checked (``Tree.check``); at the end everybody has
been served, and everything can be evicted. The pool has 64 slots, an adapter takes 2 to 32 of them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_lora_tree.config import Settings

from .loop import Loop
from .tree import Tree, write_adapter

EXAMPLES = int(os.environ.get("LORA_TREE_EXAMPLES", "60"))
"""Per page size. Raise it to search longer."""

NAMES = ("a", "b", "c")
CONTENTS = {
    "small": {"rank": 1, "seed": 1, "modules": ["q_proj"]},
    "layer": {"rank": 1, "seed": 2, "layers": [1]},
    "whole": {"rank": 1, "seed": 3},
    "twin": {"rank": 1, "seed": 4},
    "large": {"rank": 2, "seed": 5},
}
names = st.sampled_from(NAMES)
contents = st.sampled_from(sorted(CONTENTS))
weights = st.one_of(
    st.none(),
    names.map(lambda name: {name: 1.0}),
    st.dictionaries(names, st.sampled_from([0.5, 1.0, -2.0]), min_size=1, max_size=3),
)
prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=12)
extra_keys = st.sampled_from([None, "x"])
requests = st.tuples(weights, prompts, st.integers(1, 25), extra_keys)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self, folder: Path, page_size: int) -> None:
        super().__init__()
        self.folder = folder
        self.page_size = page_size

    @initialize(
        delay_loads=st.sampled_from([0, 2]),
        waits_by_layer=st.booleans(),
        max_resident_adapters=st.sampled_from([1024, 2]),
        host_slots=st.sampled_from([128, 64]),
        ratio=st.sampled_from([1.0, 0.3]),
        contents=st.tuples(*[contents] * len(NAMES)),
    )
    def start(
        self,
        delay_loads: int,
        waits_by_layer: bool,
        max_resident_adapters: int,
        host_slots: int,
        ratio: float,
        contents: tuple[str, ...],
    ) -> None:
        self.tree = Tree(
            pool_slots=64,
            host_slots=host_slots,
            page_size=self.page_size,
            settings=Settings(
                delay_loads=delay_loads,
                max_resident_adapters=max_resident_adapters,
                patience_passes=4,
            ),
            waits_by_layer=waits_by_layer,
        )
        self.loop = Loop(self.tree, ratio)
        self.names: dict[str, str] = {}
        """Registered names, with their identities."""
        self.users: dict[str, set[str]] = {}
        """Names that each request was sent with; SGLang unloads none of them before it is done."""
        self.holds: list = []
        release_holds = self.tree.cache.on_shortage
        self.tree.cache.on_shortage = lambda: release_holds() or self.drop_holds()
        self.count = 0
        self.contents: dict[str, str] = {}
        self.vanished: set[str] = set()
        for name, content in zip(NAMES, contents, strict=True):
            self.load(name, content, pinned=False)

    # ---- Users ----

    @rule(name=names, content=contents, pinned=st.booleans())
    def load(self, name: str, content: str, pinned: bool) -> None:
        if name in self.names or content in self.vanished:
            return
        slots = {"small": 2, "layer": 8, "whole": 16, "twin": 16, "large": 32}[content]
        free = self.tree.residency.max_adapter_slots - self.tree.residency.pinned_slots()
        pinned = pinned and slots <= free // 2
        self.contents[name] = content
        self.names[name] = self.tree.load(name, self.folder / content, pinned)

    @rule(name=names)
    def unload(self, name: str) -> None:
        if name in self.names and not any(name in self.users[r.id] for r in self._requests()):
            del self.names[name]
            self.tree.unload(name)

    @rule(requests=st.lists(requests, min_size=1, max_size=4), steps=st.integers(0, 8), disk_is_quick=st.booleans())
    def serve(self, requests: list[tuple], steps: int, disk_is_quick: bool) -> None:
        for mix, tokens, num_new, extra_key in requests:
            mix = {name: weight for name, weight in (mix or {}).items() if name in self.names}
            if len(mix) > self.tree.settings.max_resident_adapters:
                continue
            self.count += 1
            if self.loop.submit(str(self.count), mix, tokens, num_new, extra_key):
                self.users[str(self.count)] = set(mix)
        for _ in range(steps):
            self.step(disk_is_quick)

    @precondition(lambda self: self.loop.waiting)
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        self.loop.abort(data.draw(st.sampled_from([r.id for r in self.loop.waiting])))

    @rule()
    def flush(self) -> None:
        """SGLang flushes only when nothing runs, waits or is under way."""
        for request in self.loop.running:
            request.finish()
        self.loop.running, self.loop.waiting = [], []
        self.drop_holds()
        self.tree.settle()
        self.tree.flush()

    @rule(name=names)
    def vanish(self, name: str) -> None:
        """Or come back."""
        self._move(self.contents[name])

    # ---- Time ----

    @rule(disk_is_quick=st.booleans())
    def step(self, disk_is_quick: bool) -> None:
        if disk_is_quick:
            self.tree.finish_reads()
        self.loop.step()
        self.tree.check()

    @rule()
    def finish_copies(self) -> None:
        self.tree.cache.submit_loads()
        self.tree.cache.check_hicache_events()

    @precondition(lambda self: self.loop.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.loop.running))
        self.loop.running.remove(request)
        request.finish()

    @precondition(lambda self: self.loop.running)
    @rule(data=st.data())
    def finish_a_chunk(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.loop.running)).checkpoint()

    # ---- Pressure ----

    @rule(count=st.integers(1, 64))
    def evict_device(self, count: int) -> None:
        self.tree.cache.evict_some(count)

    @rule(count=st.integers(1, 64))
    def evict_host(self, count: int) -> None:
        self.tree.cache.evict_host(count)

    @rule(data=st.data(), on_host=st.booleans())
    def hold(self, data: st.DataObject, on_host: bool) -> None:
        nodes = [n for n in self.tree.core.lora_nodes.values() if on_host or n.is_resident]
        if nodes:
            node = data.draw(st.sampled_from(nodes))
            self.holds.append(self.tree.cache.hold_host(node) if on_host else self.tree.cache.hold(node))

    @precondition(lambda self: self.holds)
    @rule()
    def let_go(self) -> None:
        self.holds.pop(0)()

    @rule(mix=weights, tokens=prompts, extra_key=extra_keys, load=st.booleans())
    def match(self, mix: dict[str, float] | None, tokens: list[int], extra_key: str | None, load: bool) -> None:
        """Split nodes, and bring KV back for nobody."""
        mix = {name: weight for name, weight in (mix or {}).items() if name in self.names}
        demand = self.tree.demand(mix)
        result = self.tree.match(self.tree.key(demand, extra_key), tokens)
        assert result.device_prefix_len + result.host_hit_length <= len(tokens)
        if load and result.host_hit_length and (demand is None or self.tree.core.is_resident(demand.identity)):
            self.tree.cache.load_back(result.best_match_node)

    # ---- What must hold ----

    @invariant()
    def everything_is_in_place(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()

    def _move(self, content: str) -> None:
        here, there = self.folder / content, self.folder / f"{content}.vanished"
        if content in self.vanished:
            there.rename(here)
            self.vanished.remove(content)
        else:
            here.rename(there)
            self.vanished.add(content)

    def drop_holds(self) -> bool:
        """Holds of this test are nobody's, so running requests come first."""
        held = bool(self.holds)
        while self.holds:
            self.holds.pop()()
        return held

    def _requests(self) -> list:
        return self.loop.waiting + self.loop.running

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        with self.tree as tree:
            for content in list(self.vanished):
                self._move(content)
            self.drop_holds()
            idle = 0
            while self._requests():
                idle = 0 if self.loop.running else idle + 1
                assert idle < 100, f"{[r.id for r in self.loop.waiting]} wait for ever: {tree.describe()}"
                tree.finish_reads()
                self.loop.step()
            tree.check()
            for message in self.loop.failed.values():
                assert "pinned" in message or "is no folder" in message, message
            for name in self.names:
                tree.unload(name)
            self.loop.step()
            tree.settle()
            tree.check()
            tree.check_everything_can_go()
            assert not tree.residency._layouts, "layouts of adapters that nobody knows are kept"


@pytest.fixture(scope="module")
def folder() -> Path:
    with tempfile.TemporaryDirectory() as name:
        for content, how in CONTENTS.items():
            write_adapter(Path(name) / content, **how)
        yield Path(name)


@pytest.mark.parametrize("page_size", [1, 4])
def test_any_order(folder: Path, page_size: int) -> None:
    run_state_machine_as_test(
        lambda: TreeMachine(folder, page_size),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[p for p in Phase if p is not Phase.shrink or os.environ.get("LORA_TREE_SHRINK") != "0"],
            report_multiple_bugs=False,
        ),
    )
