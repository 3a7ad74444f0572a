"""SGLang's waiting queue, ordered by adapters.

Hooks (all do nothing while ``--lora-tree`` is off), on ``sglang.srt.managers``:

* ``scheduler.Scheduler._add_request_to_queue`` (AFTER): a request joined the queue, perhaps again.
* ``schedule_policy.SchedulePolicy.calc_priority`` (AROUND): SGLang's order first (priorities, LPM), ours within it.

and on ``sglang.srt.lora.lora_drainer``, whose per-process clock and unordered sets would let ranks decide differently:

* ``LoRADrainer._update_adapter_stats`` (AFTER): waiting times by the clock that the ranks share.
* ``LoRADrainer._update_draining_loras`` (AROUND): the same choice, ties broken by name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.scheduling.orders import Situation
from sglang_lora_tree.scheduling.scheduler_hooks import STATE, id_of, members_of
from sglang_lora_tree.scheduling.waiting_queue import arrival_of


def note_queued(result: None, scheduler: Any, req: Req, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler._add_request_to_queue``."""
    if STATE.queue is not None:
        STATE.queue.note_queued(req)
        if STATE.plans is not None and STATE.plans.reporter is not None:
            STATE.plans.reporter.note_queued(req)


def order_queue(
    original: Callable[..., None], policy: Any, waiting_queue: list[Req], running_batch: Any = None, *args: Any, **kwargs: Any
) -> None:
    """AROUND ``SchedulePolicy.calc_priority``: sorts the list in place."""
    queue, manager = STATE.queue, STATE.manager
    if queue is None or manager is None or manager.residency is None:
        original(policy, waiting_queue, running_batch, *args, **kwargs)
        return
    residency, is_split = manager.residency, STATE.is_split
    STATE.is_ordered = True
    version = None if queue.order.needs_running else residency.version
    if is_split and queue.keep_order(waiting_queue, version):
        residency.begin_pass(map(id_of, waiting_queue), queue.has_lost)
        return
    waiting_queue.sort(key=arrival_of)  # the pass before has left it in another order
    if not is_split or policy.policy is CacheAgnosticPolicy.FCFS:
        original(policy, waiting_queue, running_batch, *args, **kwargs)
    running = running_batch.reqs if queue.order.needs_running and running_batch is not None else ()
    members = frozenset[str]().union(*[req.lora_tree_ticket.waiting.members for req in running])
    situation = Situation(queue.now, members, residency.resident)
    if policy.enable_priority_scheduling:
        # A request of higher priority never waits for one of lower: the order rules among equals.
        ordered: list[Req] = []
        for _, equals in groupby(waiting_queue, key=lambda req: req.priority):
            ordered += queue.arrange(list(equals), situation)
        waiting_queue[:] = ordered
    else:
        waiting_queue[:] = queue.arrange(waiting_queue, situation, version)
    residency.begin_pass(map(id_of, waiting_queue), not is_split or queue.has_lost)


def share_waiting_times(result: None, drainer: Any, waiting_queue: list[Req], running_reqs: list[Req]) -> None:
    """AFTER ``LoRADrainer._update_adapter_stats``."""
    queue = STATE.queue
    if queue is None:
        return
    for stats in drainer.adapter_to_stats.values():
        stats.max_wait_time_secs = 0.0
    for req in waiting_queue:
        stats = drainer.adapter_to_stats[req.lora_id]
        stats.max_wait_time_secs = max(stats.max_wait_time_secs, queue.now - req.lora_tree_ticket.waiting.arrived_at)


def choose_draining(original: Callable[..., None], drainer: Any, running_reqs: list[Req]) -> None:
    """AROUND ``LoRADrainer._update_draining_loras``: the longest waiting adapters each get one that is close to its end."""
    if STATE.queue is None:
        original(drainer, running_reqs)
        return
    running = {req.lora_id for req in running_reqs}
    adapters = {member for lora_id in running for member in members_of(lora_id)}
    if max(len(running), len(adapters)) < drainer.max_loras_per_batch:
        return
    stats = drainer.adapter_to_stats
    served = {entry.is_draining_for for entry in stats.values()}
    starving = [lora_id for lora_id, entry in stats.items() if entry.is_starving(drainer.max_wait_time_secs)]
    starving = [lora_id for lora_id in starving if lora_id not in served]
    starving.sort(key=lambda lora_id: (-stats[lora_id].max_wait_time_secs, lora_id or ""))
    eligible = [lora_id for lora_id in running if stats[lora_id].is_draining_for is None]
    eligible.sort(key=lambda lora_id: (stats[lora_id].max_remaining_tokens, lora_id or ""))
    for waiting, draining in zip(starving, eligible, strict=False):
        stats[draining].is_draining_for = waiting


_DRAINER = "sglang.srt.lora.lora_drainer.LoRADrainer"
HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", note_queued, HookType.AFTER),
    ("sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority", order_queue, HookType.AROUND),
    (f"{_DRAINER}._update_adapter_stats", share_waiting_times, HookType.AFTER),
    (f"{_DRAINER}._update_draining_loras", choose_draining, HookType.AROUND),
]
