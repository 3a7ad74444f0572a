"""The tree benchmark runs, compares the systems it says it compares, and its trace is what it says."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import trace, tree


def test_quick_run_compares_with_the_default_tree(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sglang.srt.mem_cache.rust_tree_core.adapter")
    report = tree.main(["--quick", "--window", "10", "--calls", "3"])
    entries = {entry["metric"]: entry for entry in report.records}
    for metric in ("match_insert_p99_ms/1000", "evict_vs_default/1000", "evict_host_vs_default/1000"):
        assert "Rust" in entries[metric]["baseline"]["name"]
        assert entries[metric]["value"] > 0 and entries[metric]["ratio"] > 0
    for policy in tree.OUR_POLICIES:
        for metric in ("match_insert_p99_ms", "evict_vs_default", "evict_host_vs_default"):
            assert entries[f"{metric}/1000/{policy}"]["ratio"] > 0
    assert entries["eval_keys_agreement/1000"]["value"] <= entries["eval_index_agreement/1000"]["value"] <= 1.0
    assert entries["walk_p99_ms/1000"]["limit"] == "value <= 0.5"
    assert "match_insert_p99_ms/1000" in capsys.readouterr().out


def test_requests_of_a_conversation_share_their_prefix_and_copies_do_not() -> None:
    request = trace.Request(7, (0, 7, 8), 1100)
    longer = trace.Request(7, (0, 7, 8, 9), 1700)
    assert len(request.tokens()) == 1100
    assert longer.tokens()[:1100] == request.tokens()
    assert len(request.tokens(block=8)) == 18
    assert not set(request.tokens()) & set(request.tokens(copy=1))


def test_made_up_trace_has_the_shape_of_the_real_one() -> None:
    requests = trace.make_trace(num_requests=3000)
    turns = Counter(request.conversation for request in requests)
    mean = sum(request.length for request in requests) / len(requests)
    assert 8_000 < mean < 18_000
    assert 1.3 < len(requests) / len(turns) < 2.0
    assert {request.blocks[0] for request in requests} == {0}
    assert all(len(set(request.blocks)) == len(request.blocks) for request in requests)
