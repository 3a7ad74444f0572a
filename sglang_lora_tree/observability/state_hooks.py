"""What a scheduler process says about itself, with the tree in it.

Hooks:

* ``sglang.srt.managers.scheduler.Scheduler.get_internal_state`` (AFTER): a summary for /server_info; the nodes too when
  ``GET /lora_tree`` asks (``http_hooks``).
* ``sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run`` (AFTER): metrics once a second, if SGLang's are on.
* ``sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_prefill_stats`` (AFTER):
  prompt tokens that history KV served.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.composite.lora_id import decode_lora_id
from sglang_lora_tree.observability.audit import InvalidKvAudit
from sglang_lora_tree.observability.metrics import PromptTokens, TreeMetrics
from sglang_lora_tree.observability.snapshot import list_nodes, take_summary
from sglang_lora_tree.scheduling.scheduler_hooks import STATE

logger = logging.getLogger(__name__)

NODES_WANTED = "lora_tree_nodes"
"""The request id of a GetInternalStateReq that asks for the nodes too (the message has no other field)."""
SECONDS_BETWEEN_METRICS = 1.0


class ReportState:
    """What the hooks keep between calls: one per scheduler process."""

    def __init__(self) -> None:
        self.audit: InvalidKvAudit | None = None
        self.tokens = PromptTokens()
        self.metrics: TreeMetrics | None = None
        self.next_metrics = 0.0


REPORT = ReportState()


def add_snapshot(result: Any, scheduler: Any, recv_req: Any = None, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler.get_internal_state``."""
    residency = STATE.residency
    if residency is None:
        return
    assert STATE.manager is not None
    if REPORT.audit is None:
        REPORT.audit = InvalidKvAudit(residency.core)
    tree = take_summary(residency, REPORT.audit)
    tree["counters"].update(dataclasses.asdict(REPORT.tokens))
    if STATE.plans is not None:
        tree["plans"] = STATE.plans.summary()
    if getattr(recv_req, "rid", None) == NODES_WANTED:
        tree.update(list_nodes(residency, STATE.manager.resolver.weights_of))
    result.internal_state["lora_tree"] = tree


def count_prompt_tokens(result: None, reporter: Any, batch: Any, prefill_stats: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``SchedulerMetricsReporter.report_prefill_stats``."""
    if STATE.residency is None:
        return
    tokens, stats = REPORT.tokens, prefill_stats
    tokens.kv_hit_tokens += stats.log_hit_tokens - stats.reprocessed_log_hit_tokens
    tokens.kv_host_hit_tokens += stats.log_host_hit_tokens
    tokens.kv_miss_tokens += stats.log_input_tokens - stats.reprocessed_log_input_tokens


def publish_metrics(plan: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler.get_next_batch_to_run``, which runs in every loop step, idle ones too."""
    residency = STATE.residency
    if residency is None or (now := time.monotonic()) < REPORT.next_metrics:
        return
    REPORT.next_metrics = now + SECONDS_BETWEEN_METRICS
    reporter = scheduler.metrics_reporter
    if not reporter.current_scheduler_metrics_enabled:
        return
    running = [req for batch in (plan.running_batch, plan.batch_to_run) if batch is not None for req in batch.reqs]
    try:
        if REPORT.metrics is None:
            REPORT.metrics = TreeMetrics(residency, reporter.metrics_collector.labels)
        REPORT.metrics.publish(
            REPORT.tokens,
            scheduler.max_loras_per_batch,
            _names(req.lora_id for req in running if not req.finished()),
            _names(req.lora_id for req in scheduler.waiting_queue),
            {} if STATE.plans is None else STATE.plans.summary(),
        )
    except Exception:  # whatever is wrong with a report (a full disk, a label), it must not stop the server
        logger.exception("the metrics of --lora-tree stop here")
        REPORT.next_metrics = math.inf


def _names(lora_ids: Iterable[str | None]) -> list[str]:
    """Names of the adapters of requests, as the requests named them."""
    assert STATE.manager is not None
    members = {member for lora_id in set(lora_ids) if lora_id is not None for member, _ in decode_lora_id(lora_id)}
    registrations = (STATE.manager.store.registration(member) for member in members)
    return [registration.name for registration in registrations if registration is not None]


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    (f"{_SCHEDULER}.get_internal_state", add_snapshot, HookType.AFTER),
    (f"{_SCHEDULER}.get_next_batch_to_run", publish_metrics, HookType.AFTER),
    (
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_prefill_stats",
        count_prompt_tokens,
        HookType.AFTER,
    ),
]
