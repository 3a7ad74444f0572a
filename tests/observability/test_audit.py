import pytest

from sglang_lora_tree.observability.audit import InvalidKvAudit


@pytest.fixture
def broken(tree, identity):
    """json has lost its slots, and five KV nodes of two tokens below it have not: what must never happen."""
    tree.bring(identity["json"])
    demand = tree.demand({"json": 1.0})
    for first in range(5):
        tree.add_kv(demand, [first, 60])
    tree.settle()
    data = tree.core.lora_nodes[identity["json"]].node.component_data[0]
    kept, data.value = data.value, None
    yield tree
    data.value = kept


def test_a_sound_tree_has_none(busy_tree):
    assert InvalidKvAudit(busy_tree.core).step() == 0


def test_invalid_kv_is_found(broken):
    assert broken.core.count_invalid_kv() == 10
    assert InvalidKvAudit(broken.core).step() == 10


def test_a_step_looks_at_its_budget_only_and_rounds_go_on(broken):
    audit = InvalidKvAudit(broken.core)
    assert [audit.step(2) for _ in range(4)] == [2, 6, 10, 10]  # the first node is the adapter's own
    for _ in range(20):
        assert audit.step(1) == 10


def test_it_is_forgotten_once_it_is_gone(broken, identity):
    audit = InvalidKvAudit(broken.core)
    audit.step()
    data = broken.core.lora_nodes[identity["json"]].node.component_data[0]
    data.value = data.host_value
    audit.step(1)
    assert audit.step() == 0


def test_an_adapter_that_comes_back_during_a_round_has_no_invalid_kv_from_then_on(broken, identity):
    audit = InvalidKvAudit(broken.core)
    assert audit.step(2) == 2
    data = broken.core.lora_nodes[identity["json"]].node.component_data[0]
    data.value = data.host_value
    assert audit.step(3) == 2


def test_a_flush_starts_anew(broken):
    audit = InvalidKvAudit(broken.core)
    assert audit.step(3) > 0
    broken.flush()
    assert audit.step() == 0
