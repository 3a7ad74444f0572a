"""Plans of the advisor, and the clock, into SGLang's loop: the same on every rank, at one point.

Hooks (all do nothing while ``--lora-tree`` is off), on ``sglang.srt.managers``:

* ``scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs`` (AFTER): the entry rank adds a
  :class:`~sglang_lora_tree.scheduling.protocol.Step` to the list that SGLang broadcasts to all ranks.
* ``scheduler.Scheduler.init_request_dispatcher`` (AFTER): every rank applies it, before the requests that came with it.
* ``scheduler.Scheduler.get_next_batch_to_run`` (BEFORE): a little of what the plan asks for.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.utils import TypeBasedDispatcher

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.identity import identity_of
from sglang_lora_tree.radix.residency import Residency
from sglang_lora_tree.scheduling.client import AdvisorClient
from sglang_lora_tree.scheduling.protocol import Plan, Step
from sglang_lora_tree.scheduling.reporter import Reporter
from sglang_lora_tree.scheduling.scheduler_hooks import STATE
from sglang_lora_tree.scheduling.swapper import Swapper
from sglang_lora_tree.scheduling.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_STEPS = 0.05
"""The clock goes on at least so often, with every request and every plan; that no plans come is noticed then."""

SECONDS_BETWEEN_PLANS = 0.2
"""A step with requests has enough to do without a plan, unless the last one is so old."""


@dataclass
class PlanCounters:
    """What happened since start; read by ``observability``."""

    applied: int = 0
    near_low_lora: int = 0
    """Of these plans, those that found the number of adapters on the GPU within 5 % of Low_lora, or one of it."""
    fallbacks: int = 0
    """How often plans stopped coming."""


class Plans:
    """What one scheduler process does with plans.

    Args:
        residency: whose tree they are about.
        queue: likewise.
        settings: of ``--lora-tree``.
        client: on the entry rank, if there is to be an advisor.
        busy: identities that running requests compute under.
    """

    def __init__(
        self,
        residency: Residency,
        queue: WaitingQueue,
        settings: Settings,
        client: AdvisorClient | None,
        busy: Callable[[], Iterable[str]],
    ) -> None:
        self.client = client
        self.swapper = Swapper(residency, settings, busy)
        self.reporter = None if client is None else Reporter(residency, client)
        self.last: Plan | None = None
        """The plan that rules; None: none does."""
        self.is_fallback = False
        self.counters = PlanCounters()
        self._residency = residency
        self._queue = queue
        self._origin = time.monotonic()
        self._next_step = 0.0
        self._plan_due = 0.0
        self._worked_at = -1.0

    def next_step(self, has_requests: bool) -> Step | None:
        """On the entry rank, once per loop step: what to tell all ranks, if anything."""
        now = time.monotonic() - self._origin
        client = self.client
        plan = None
        if client is not None and not (has_requests and now < self._plan_due):
            plan = client.take_plan()
            if plan is not None:
                self._plan_due = now + SECONDS_BETWEEN_PLANS
        if plan is None and not has_requests and now < self._next_step:
            return None
        self._next_step = now + SECONDS_BETWEEN_STEPS
        return Step(now, plan, plan is None and client is not None and not client.is_alive)

    def apply(self, step: Step) -> None:
        """On every rank: the one place where a plan takes effect."""
        core, queue = self._residency.core, self._queue
        queue.now = step.now
        if step.is_fallback != self.is_fallback:
            self._change_mode(step.is_fallback)
        if step.plan is not None:
            self.last = step.plan
            self._count(step.plan)
            core.set_eval_parameters(step.plan.parameters, step.now)
            queue.want(step.plan.candidates)
            self.swapper.follow(step.plan)

    def _count(self, plan: Plan) -> None:
        low_lora, resident = plan.parameters.low_lora, self._residency.num_resident
        self.counters.applied += 1
        self.counters.near_low_lora += abs(resident - low_lora) <= max(0.05 * low_lora, 1.0)

    def summary(self) -> dict[str, Any]:
        """For people: how plans are doing, and what they led to."""
        client = self.client
        return {
            "is_fallback": self.is_fallback,
            "low_lora": None if self.last is None else self.last.parameters.low_lora,
            "hit_probability": None if self.last is None else self.last.hit_probability,
            "resident_adapters": self._residency.num_resident,
            "candidates_found": self._queue.candidates_found,
            "refused": 0 if self._queue.control is None else self._queue.control.refused,
            "pid": None if client is None else client.pid,
            **dataclasses.asdict(self.counters),
            **dataclasses.asdict(self.swapper.counters),
            **({} if client is None else dataclasses.asdict(client.counters)),
        }

    def _change_mode(self, is_fallback: bool) -> None:
        self.is_fallback = self._queue.is_fallback = is_fallback
        if not is_fallback:
            logger.info("plans come: the queue is ordered and leaves leave by them")
            return
        self.counters.fallbacks += 1
        logger.warning("no plans come: requests go as they came, and leaves leave least recently used first")
        self.last = None
        self._residency.core.set_eval_parameters(None)
        self._queue.want(())
        self.swapper.stop()

    def work(self, waiting: list[Any], num_running: int) -> None:
        """On every rank, once per loop step."""
        now = self._queue.now
        self.swapper.step(now)
        if now != self._worked_at:  # the clock goes on more often than reports are made
            self._worked_at = now
            if self.reporter is not None:
                self.reporter.step(now, waiting, num_running)


def attach(scheduler: Any, is_entry_rank: bool) -> None:
    """Take over a scheduler that ``scheduler_hooks`` has been attached to."""
    residency, queue, manager = STATE.residency, STATE.queue, STATE.manager
    assert residency is not None and queue is not None and manager is not None, "scheduler_hooks.attach comes first"
    client = AdvisorClient(manager.settings) if manager.settings.advisor and is_entry_rank else None
    STATE.plans = Plans(residency, queue, manager.settings, client, lambda: _busy_identities(scheduler))


def _busy_identities(scheduler: Any) -> Iterable[str]:
    """What running requests compute under."""
    reqs = scheduler.collect_inflight_reqs()
    if scheduler.chunked_req is not None:
        reqs.add(scheduler.chunked_req)
    return {identity_of(req.extra_key) for req in reqs}


def add_step(result: list[Any] | None, receiver: Any) -> list[Any] | None:
    """AFTER ``SchedulerRequestReceiver._pull_raw_reqs``: a list on the entry rank only."""
    if result is None or STATE.plans is None:
        return None
    step = STATE.plans.next_step(bool(result))
    return None if step is None else [step, *result]


def dispatch_step(result: None, scheduler: Any) -> None:
    """AFTER ``Scheduler.init_request_dispatcher``."""
    scheduler._request_dispatcher += TypeBasedDispatcher([(Step, _apply)])


def _apply(step: Step) -> None:
    if STATE.plans is not None:
        STATE.plans.apply(step)


def work(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Scheduler.get_next_batch_to_run``."""
    if STATE.plans is not None:
        STATE.plans.work(scheduler.waiting_queue, len(scheduler.running_batch.reqs))


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    (f"{_RECEIVER}._pull_raw_reqs", add_step, HookType.AFTER),
    (f"{_SCHEDULER}.init_request_dispatcher", dispatch_step, HookType.AFTER),
    (f"{_SCHEDULER}.get_next_batch_to_run", work, HookType.BEFORE),
]
