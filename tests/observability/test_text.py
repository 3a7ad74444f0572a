from sglang_lora_tree.observability.text import BAR_WIDTH, _bar, render_text
from tests.observability.snapshots import SnapshotMaker, random_snapshot, small_snapshot

TREE = """\
virtual root
├─ adapter math  80 slots [GPU+host]  12 visits  1 lock
│  └─ KV  128 slots [GPU+host]  4 visits
│     └─ KV  1 slot [GPU]  2 locks
├─ adapter json  40 slots [host]  3 visits
├─ adapter sql  40 slots [loading]
├─ mix math:0.7, json:-0.25  1 slot [host]  1 visit
│  └─ KV  33 slots [host]
└─ base model
   └─ KV  7 slots [GPU+host]

on disk: cold
"""


def test_the_tree_with_names_weights_tiers_visits_and_locks():
    assert TREE in render_text(small_snapshot())


def test_names_cannot_steer_the_terminal():
    maker = SnapshotMaker()
    maker.adapter("a\x1b[2J\nb")
    assert "adapter a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b  40" in render_text(maker.snapshot())


def test_pools_adapters_counters():
    text = render_text(small_snapshot())
    assert "█ adapters 120, ▒ history KV 135, ░ running KV 1, · free" in text
    assert "4 registered: 1 on the GPU, 1 loading, 1 in host memory, 1 on disk" in text
    assert "invalid KV: 0\n" in text
    assert "  adapter hits           12\n  cold start seconds     1.234" in text


def test_a_large_tree_stays_short_unless_all_is_wanted():
    snapshot = random_snapshot(100, 20, 2000)
    assert len(render_text(snapshot).splitlines()) < 1500
    assert "more adapters and mixes, with their KV" in render_text(snapshot)
    assert len(render_text(snapshot, show_all=True).splitlines()) > 2100


def test_many_children_are_summed_up():
    maker = SnapshotMaker()
    for number in range(20):
        maker.kv(maker.root, visits=20 - number)
    text = render_text(maker.snapshot())
    assert text.count("─ KV  10 slots") == 7
    assert "└─ 13 KV nodes  130 slots on the GPU, 130 in host memory  91 visits\n" in text


def test_base_model_kv_stands_under_a_heading_of_its_own_and_nothing_else_does():
    maker = SnapshotMaker()
    maker.kv(maker.adapter("math"))
    assert "base model" not in render_text(maker.snapshot())
    maker.kv(maker.kv(maker.root))
    assert "└─ base model\n   └─ KV  10 slots [GPU+host]\n      └─ KV" in render_text(maker.snapshot())


def test_a_part_of_a_tree_says_so():
    assert "only a part of its 4 KV nodes" in render_text(small_snapshot() | {"complete": False})


def test_bars_are_as_wide_as_the_pool_and_show_what_is_little():
    assert _bar({"adapter": 1, "mix": 1, "history_kv": 0, "running_kv": 0, "free": 10**6}, 10**6) == "█▓" + "·" * 38
    full = _bar({"adapter": 1, "mix": 1, "history_kv": 10**6, "running_kv": 5, "free": 0}, 10**6)
    assert len(full) == BAR_WIDTH
