"""The simulator plays every request, conserves slots, and counts what it says it counts."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from benchmarks.oracle import make_oracle
from benchmarks.policies import Case
from benchmarks.policies_report import ratios
from benchmarks.simulator import ADAPTER_SLOTS, BYTES_PER_SLOT, COSTS, LOOPS, Simulator
from benchmarks.workloads import CONSTANTS, TOKENS_PER_SLOT, Job, Workload
from sglang_lora_tree.radix.identity import adapter_identity

COPY = ADAPTER_SLOTS * BYTES_PER_SLOT / COSTS["host_to_device_bytes_per_s"]
"""Seconds of an adapter's."""


def jobs_of_turns(num_conversations: int = 12, turns: int = 3, adapters: int = 4) -> list[Job]:
    """Conversations whose turns repeat all that was said before, one request a tenth of a second."""
    jobs = []
    for turn in range(turns):
        for conversation in range(num_conversations):
            start = 1_000 * (conversation + 1)
            prompt = array("q", range(start, start + 10 * (turn + 1)))
            jobs.append(Job(0.1 * len(jobs), conversation % adapters, prompt, 8))
    return jobs


def play(policy: str, pool_slots: int, jobs: list[Job], **kwargs: object) -> Simulator:
    simulator = Simulator(policy, pool_slots, 2 * pool_slots, 4, **kwargs)  # type: ignore[arg-type]
    simulator.run(jobs)
    return simulator


@pytest.mark.parametrize("policy", ["lru", "eval", "reuse"])
def test_every_request_is_served_and_every_slot_is_accounted_for(policy: str):
    jobs = jobs_of_turns()
    simulator = play(policy, 150, jobs, look_ahead=True)
    warm = int(len(jobs) * CONSTANTS["warm_up_share"])
    assert len(simulator.outcome.ttft) == len(jobs) - warm == simulator.outcome.adapter_uses
    assert min(simulator.outcome.ttft) >= COSTS["decode_step_s"] * 0.999
    cache = simulator.cache
    assert cache.num_free_slots + cache.evictable_size() + cache.protected_size() == 150
    assert cache.protected_size() == 0, "somebody still holds a lock"
    simulator.core.check_invariants()


def test_with_room_for_all_every_prefix_is_found():
    jobs = jobs_of_turns()
    outcome = play("lru", 5_000, jobs).outcome
    warm = int(len(jobs) * CONSTANTS["warm_up_share"])
    repeated = sum(len(job.prompt) - 10 for job in jobs[warm:])
    assert outcome.gpu_hit_slots == repeated and outcome.host_hit_slots == 0
    assert outcome.adapter_hit_rate == 1.0 and outcome.adapter_reads == 0, "all were read in the warm-up"


def test_a_lone_request_takes_what_its_parts_take():
    tokens = 5_000 * TOKENS_PER_SLOT
    simulator = Simulator("lru", 10_000, 20_000, 1)
    simulator._warm = 0
    job = Job(0.0, 0, array("q", range(5_000)), 1)
    outcome = simulator.run([job])
    bytes_of_adapter = ADAPTER_SLOTS * TOKENS_PER_SLOT * CONSTANTS["bytes_per_token"]
    wanted = bytes_of_adapter / COSTS["disk_bytes_per_s"] + bytes_of_adapter / COSTS["host_to_device_bytes_per_s"]
    wanted += tokens / COSTS["prefill_tokens_per_s"]
    assert outcome.ttft == [pytest.approx(wanted, rel=1e-6)]


def ttft_of_newcomer(loop: str, *, beside_another: bool, prompt_slots: int = 10) -> float:
    """Of a request whose adapter is on disk only; ``beside_another``: while another request decodes."""
    simulator = Simulator("lru", 10_000, 20_000, 2, loop=loop)
    newcomer = Job(1.0, 1, array("q", range(prompt_slots)), 1)
    other = [Job(0.0, 0, array("q", range(5_000, 5_010)), 500)]
    return simulator.run([*other, newcomer] if beside_another else [newcomer]).ttft[-1]


def test_the_fence_costs_a_step_beside_running_requests_and_waiting_in_the_prefill_saves_two():
    step = COSTS["decode_step_s"]
    loops = ("fenced", "unfenced", "by_layer", "by_batch")
    fenced, unfenced, by_layer, by_batch = (ttft_of_newcomer(loop, beside_another=True) for loop in loops)
    assert fenced - unfenced == pytest.approx(step)
    assert fenced - by_layer == pytest.approx(2 * step + COPY), "by a copy, too: the other request began earlier by that"
    assert fenced - by_batch == pytest.approx(2 * step - COPY), "the prefill begins later by a copy"


def test_on_an_idle_gpu_there_is_nothing_to_be_fenced_from():
    alone = {loop: ttft_of_newcomer(loop, beside_another=False) for loop in LOOPS}
    assert alone["fenced"] == alone["unfenced"] == alone["synchronous"] == alone["by_batch"]
    assert alone["fenced"] - alone["by_layer"] == pytest.approx(COPY), "the prefill takes longer than the copy"


def ttft_of_burst(num_absent: int, num_present: int = 0, **kwargs: object) -> list[float]:
    """Of short requests that come at once to an idle GPU, the last ``num_present`` for the first one's adapter; all adapters
    are in host memory."""
    simulator = Simulator("lru", 10_000, 20_000, num_absent, **kwargs)  # type: ignore[arg-type]
    for identity in simulator.identities:
        simulator.core.add_adapter(identity, simulator.cache.allocate_host(ADAPTER_SLOTS))
    adapters = [*range(num_absent), *[0] * num_present]
    prompts = [array("q", (100 * number, 100 * number + 1)) for number in range(len(adapters))]
    jobs = [Job(0.0, adapter, prompt, 1) for adapter, prompt in zip(adapters, prompts, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONSTANTS, "warm_up_share", 0.0)
        return simulator.run(jobs).ttft


def test_no_more_adapters_come_in_with_one_batch_than_the_bound_lets_but_for_the_first():
    step = COSTS["decode_step_s"]
    assert 4 * COPY < step < 5 * COPY
    assert ttft_of_burst(5, loop="by_layer") == pytest.approx([5 * COPY] * 5), "all wait for all copies"
    by_two = ttft_of_burst(5, loop="by_layer", late_slots=3 * ADAPTER_SLOTS - 1)
    assert by_two == pytest.approx([step, step, 2 * step, 2 * step, 3 * step])
    by_one = ttft_of_burst(3, loop="by_layer", late_slots=1)
    assert by_one == pytest.approx([step, 2 * step, 3 * step]), "the first comes in whatever its size"


def test_requests_beyond_the_bound_let_those_pass_that_bring_nothing_in():
    step = COSTS["decode_step_s"]
    by_one = ttft_of_burst(2, 2, loop="by_layer", late_slots=ADAPTER_SLOTS)  # in order of admission
    assert by_one == pytest.approx([step, step, step, 2 * step])


def test_an_adapter_that_comes_in_with_the_batch_before_is_there_for_the_next_one():
    simulator = Simulator("lru", 10_000, 20_000, 1, loop="by_layer")
    simulator.core.add_adapter(simulator.identities[0], simulator.cache.allocate_host(ADAPTER_SLOTS))
    prompts = array("q", range(8192 // TOKENS_PER_SLOT)), array("q", range(5_000, 5_010))  # the first fills a batch
    first, second = simulator.run([Job(0.0, 0, prompt, 1) for prompt in prompts]).ttft
    assert first == pytest.approx(8192 / COSTS["prefill_tokens_per_s"])
    assert second - first == pytest.approx(COSTS["decode_step_s"]), "its pass takes place while the adapter is on its way"


@pytest.mark.parametrize("late_slots", [1, 2 * ADAPTER_SLOTS])
def test_with_a_bound_every_request_is_served_and_every_slot_is_accounted_for(late_slots: int):
    jobs = jobs_of_turns()
    simulator = play("lru", 150, jobs, loop="by_layer", late_slots=late_slots)
    assert len(simulator.outcome.ttft) == len(jobs) - int(len(jobs) * CONSTANTS["warm_up_share"])
    assert simulator.cache.num_free_slots + simulator.cache.evictable_size() == 150
    simulator.core.check_invariants()


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_serves_every_request_and_accounts_for_every_slot(loop: str):
    jobs = jobs_of_turns()
    simulator = play("lru", 150, jobs, loop=loop)
    assert len(simulator.outcome.ttft) == len(jobs) - int(len(jobs) * CONSTANTS["warm_up_share"])
    assert simulator.cache.num_free_slots + simulator.cache.evictable_size() == 150
    simulator.core.check_invariants()


def test_nodes_come_in_unasked_only_below_the_threshold():
    jobs = jobs_of_turns(num_conversations=20)
    without, never, always = (Simulator("eval", 150, 600, 4, swap_in_below=threshold).run(jobs) for threshold in (None, 0.0, 1.0))
    assert never.swap_ins == 0 and not any(never.has_room) and never.ttft == without.ttft
    assert always.swap_ins > 0 and any(always.has_room)
    assert always.loaded_bytes > never.loaded_bytes and len(always.ttft) == len(without.ttft)


def test_a_run_that_is_older_than_a_field_is_one_of_its_default():
    case = Case("azure", 100, "skewed", 0.25, 0.5, "lru")
    run = {"workload": "azure", "adapters": 100, "spread": "skewed", "pool_share": 0.25, "rate_share": 0.5, "policy": "lru"}
    assert case.is_of(run) and case.is_of({**run, "loop": "synchronous"})
    assert not case.is_of({**run, "loop": "fenced"}) and not replace(case, loop="fenced").is_of(run)
    assert not replace(case, late_slots=20).is_of(run)


def test_the_oracle_loses_to_nobody():
    jobs = jobs_of_turns(num_conversations=20)
    numbers = {adapter_identity(f"{number:064x}"): number for number in range(4)}
    oracle = Simulator(make_oracle(jobs, numbers), 150, 200, 4).run(jobs)
    lru = Simulator("lru", 150, 200, 4).run(jobs)
    assert oracle.kv_hit_rate > lru.kv_hit_rate


def test_rates_change_arrivals_only():
    workload = Workload("mine", jobs_of_turns(), rate=10.0, counts={})
    faster = workload.at_rate(20.0)
    assert [job.prompt for job in faster] == [job.prompt for job in workload.jobs]
    assert faster[-1].arrival == pytest.approx(workload.jobs[-1].arrival / 2)


def test_the_working_set_is_what_a_window_uses():
    workload = Workload("mine", jobs_of_turns(num_conversations=4, turns=2), rate=10.0, counts={})
    assert workload.working_set(rate=10.0, seconds=0.4) == (4 * 10 + 4 * 20) // 2
    assert workload.working_set(rate=10.0, seconds=100.0) == 4 * 20


def test_ratios_compare_equal_cases_only():
    case = {"workload": "a", "adapters": 1, "spread": "random", "pool_share": 0.5}
    runs = [
        {**case, "rate_share": 0.1, "policy": "lru", "ttft_mean_s": 3.0},
        {**case, "rate_share": 0.1, "policy": "eval", "ttft_mean_s": 2.0},
        {**case, "rate_share": 0.2, "policy": "lru", "ttft_mean_s": 9.0},
    ]
    assert ratios(runs, "lru", "eval") == [1.5]
