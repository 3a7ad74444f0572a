"""What a scrape of /metrics sees; in a process of its own, as prometheus_client chooses its mode when imported."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
from sglang_lora_tree.observability.metrics import PromptTokens, TreeMetrics
from tests.radix.tree import Tree, write_adapter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

def scrape():
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
    print("=====")

with Tree() as tree:
    names = ["math", "a,b"]
    ids = [tree.load(name, write_adapter(Path(sys.argv[1]) / str(seed), 1, seed)) for seed, name in enumerate(names)]
    metrics = TreeMetrics(tree.residency, {"model_name": "m", "tp_rank": 0})
    scrape()
    tree.bring(ids[0])
    tree.add_kv(tree.demand({"math": 1.0}), list(range(10)))
    tree.settle()
    tree.residency.counters.adapter_hits = 3
    print(tree.residency.slots_of_adapter(ids[0]), "=====")
    tree.residency.on_cold_start(0.2)
    metrics.publish(PromptTokens(7, 2, 5), 256, ["math", "math"], [])
    metrics.publish(PromptTokens(7, 2, 5), 256, ["math"], ["a,b"])
    scrape()
    tree.cache.evict_some(25)
    tree.bring(ids[0])
    [kv] = tree.core.lora_nodes[ids[0]].node.children.values()
    assert tree.cache.start_load(kv.id)
    tree.settle()
    tree.unload("math")
    metrics.publish(PromptTokens(9, 2, 5), 256, [], [])
    scrape()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The text of /metrics before, while and after an adapter is used: metric -> labels without the fixed -> value."""
    folder = tmp_path_factory.mktemp("metrics")
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path_factory.mktemp("adapters"))]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert output.returncode == 0, output.stderr
    before, size, *others, _ = output.stdout.split("=====")
    return int(size), [parse(text) for text in (before, *others)]


@pytest.fixture(scope="module")
def scrapes(run):
    return run[1]


@pytest.fixture(scope="module")
def size(run):
    """Slots of each adapter."""
    return run[0]


def parse(text):
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "tp_rank")}
            if sample.name.startswith("sglang:"):
                assert sample.labels["model_name"] == "m" and sample.labels["tp_rank"] == "0"
            key = tuple(sorted(labels.items()))
            assert key not in found.setdefault(sample.name, {})
            found[sample.name][key] = sample.value
    return found


def of(scrape, name, **labels):
    return scrape["sglang:lora_tree_" + name][tuple(sorted(labels.items()))]


def test_slots_add_up_to_the_pools(scrapes, size):
    _, used, _ = scrapes
    assert of(used, "slots", tier="gpu", kind="adapter") == size
    assert of(used, "slots", tier="gpu", kind="history_kv") == 10
    for tier, pool_size in (("gpu", 200), ("host", 400)):
        series = used["sglang:lora_tree_slots"].items()
        assert sum(value for labels, value in series if ("tier", tier) in labels) == pytest.approx(pool_size, abs=1)


def test_counters_advance_by_what_is_new(scrapes, size):
    _, used, after = scrapes
    assert of(used, "adapter_hits_total") == 3
    assert of(used, "kv_hit_tokens_total", tier="gpu") == 5 and of(used, "kv_hit_tokens_total", tier="host") == 2
    assert of(after, "kv_hit_tokens_total", tier="gpu") == 7
    assert of(used, "kv_miss_tokens_total") == of(after, "kv_miss_tokens_total") == 5
    assert of(used, "swap_outs_total") == 0 and of(after, "swap_outs_total") == 1
    assert of(used, "disk_reads_total") == 1 and of(used, "disk_read_bytes_total") > 0


def test_swaps_are_told_apart(scrapes, size):
    """Adapters and KV, in and out, in bytes and seconds; 10 tokens of KV leave with the adapter, and 10 come back."""
    _, used, after = scrapes
    slot_bytes = 2 * 2 * 8 * 4  # K and V, two layers, W = 8, float32
    assert of(used, "swapped_kv_tokens_total", direction="in") == of(used, "swapped_kv_tokens_total", direction="out") == 0
    assert of(after, "swapped_kv_tokens_total", direction="in") == of(after, "swapped_kv_tokens_total", direction="out") == 10
    for scrape, loads, drops, tokens in ((used, 1, 0, 0), (after, 2, 1, 10)):
        assert of(scrape, "swapped_bytes_total", direction="in", kind="adapter") == loads * size * slot_bytes
        assert of(scrape, "swapped_bytes_total", direction="out", kind="adapter") == drops * size * slot_bytes
        for direction in ("in", "out"):
            assert of(scrape, "swapped_bytes_total", direction=direction, kind="kv") == tokens * slot_bytes
    seconds = {kind: of(after, "swap_seconds_total", direction="out", kind=kind) for kind in ("adapter", "kv")}
    assert seconds["adapter"] > 0 and seconds["adapter"] / seconds["kv"] == pytest.approx(size / 10)
    assert of(after, "swap_seconds_total", direction="in", kind="kv") == 0  # no clock on a CPU


def test_time_is_shared_by_slots():
    from sglang_lora_tree.radix.cache_hooks import Moves

    moves = Moves()
    moves.add(40, 30, 2.0)
    moves.add(10, 0, 1.0)
    assert moves == Moves(slots=50, adapter_slots=30, seconds=3.0, adapter_seconds=1.5)


def test_cold_starts_are_a_histogram(scrapes):
    _, used, _ = scrapes
    assert of(used, "cold_start_seconds_count") == 1 and of(used, "cold_start_seconds_sum") == pytest.approx(0.2)
    assert of(used, "cold_start_seconds_bucket", le="0.1") == 0 and of(used, "cold_start_seconds_bucket", le="0.25") == 1


def test_adapters_by_tier_and_by_name_and_an_unloaded_one_leaves(scrapes):
    _, used, after = scrapes
    assert of(used, "adapter_tier", adapter="math") == 2 and of(used, "adapter_tier", adapter="a,b") == 0
    assert of(used, "adapters", tier="gpu") == 1 and of(used, "adapters", tier="disk") == 1
    assert list(after["sglang:lora_tree_adapter_tier"]) == [(("adapter", "a,b"),)]


def test_routers_find_one_series_with_the_latest_adapters(scrapes):
    before, used, after = scrapes
    name = "vllm:lora_requests_info"
    assert name not in before
    [(labels, seconds)] = used[name].items()
    assert dict(labels) == {"max_lora": "256", "running_lora_adapters": "math", "waiting_lora_adapters": "a,b"}
    assert seconds > 1.7e9
    [(labels, _)] = after[name].items()
    assert dict(labels) == {"max_lora": "256", "running_lora_adapters": "", "waiting_lora_adapters": ""}


def test_invalid_kv_is_reported(scrapes):
    assert all(of(scrape, "invalid_kv_tokens") == 0 for scrape in scrapes[1:])
