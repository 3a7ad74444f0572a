from types import SimpleNamespace

import pytest

from sglang_lora_tree.composite.demand import DemandResolver
from sglang_lora_tree.composite.lora_id import encode_lora_id
from sglang_lora_tree.observability import state_hooks
from sglang_lora_tree.observability.state_hooks import NODES_WANTED, ReportState, add_snapshot, count_prompt_tokens


@pytest.fixture
def manager(busy_tree, monkeypatch):
    """The scheduler process's state, with the busy tree in it."""
    store = busy_tree.store
    manager = SimpleNamespace(residency=busy_tree.residency, store=store, resolver=DemandResolver(store))
    monkeypatch.setattr(state_hooks.STATE, "manager", manager)
    monkeypatch.setattr(state_hooks, "REPORT", ReportState())
    return manager


def ask(rid=None):
    result = SimpleNamespace(internal_state={})
    add_snapshot(result, scheduler=None, recv_req=SimpleNamespace(rid=rid))
    return result.internal_state.get("lora_tree")


def test_server_info_has_no_nodes_and_lora_tree_has(manager):
    assert "nodes" not in ask() and ask()["invalid_kv"] == 0
    assert len(ask(NODES_WANTED)["nodes"]) == len(manager.residency.core._node_arena)


def test_weights_of_a_mix_come_from_the_requests_that_named_it(manager):
    def weights():
        return [[member["weight"] for member in node["members"]] for node in ask(NODES_WANTED)["nodes"] if node["kind"] == "mix"]

    assert weights() == [[None, None]]
    demand = manager.resolver.resolve(encode_lora_id([("math", 0.5), ("json", -2.0)]))
    assert weights() == [list(demand.weights)]


def test_without_the_flag_nothing_is_added(monkeypatch):
    monkeypatch.setattr(state_hooks.STATE, "manager", None)
    assert ask(NODES_WANTED) is None


def test_prompt_tokens_of_first_attempts(manager):
    stats = SimpleNamespace(
        log_hit_tokens=100,
        reprocessed_log_hit_tokens=30,
        log_host_hit_tokens=20,
        log_input_tokens=50,
        reprocessed_log_input_tokens=8,
    )
    for _ in range(2):
        count_prompt_tokens(None, None, batch=None, prefill_stats=stats, can_run_cuda_graph=False)
    counters = ask()["counters"]
    assert (counters["kv_hit_tokens"], counters["kv_host_hit_tokens"], counters["kv_miss_tokens"]) == (140, 40, 84)


def test_adapters_of_requests_by_name(manager):
    mix = encode_lora_id([("math", 0.5), ("json", -2.0)])
    assert sorted(state_hooks._names([mix, "sql", "math", None, "gone"])) == ["json", "math", "sql"]


def test_a_report_that_fails_stops_itself_and_not_the_server(manager, monkeypatch):
    def broken(*args):
        raise TypeError("a label that is no text")

    monkeypatch.setattr(state_hooks, "TreeMetrics", broken)
    reporter = SimpleNamespace(current_scheduler_metrics_enabled=True, metrics_collector=SimpleNamespace(labels={}))
    plan = SimpleNamespace(running_batch=None, batch_to_run=None)
    scheduler = SimpleNamespace(metrics_reporter=reporter, waiting_queue=[], max_loras_per_batch=8)
    state_hooks.publish_metrics(plan, scheduler)
    assert state_hooks.REPORT.next_metrics == float("inf")
