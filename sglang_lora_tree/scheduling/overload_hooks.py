"""Refusals under overload, and the service that each adapter has had, where SGLang's scheduler and HTTP server see them.

Hooks (all do nothing unless ``ttft_slo_seconds`` or ``fairness`` is set):

* ``sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run`` (BEFORE): refuses requests that would be late.
* ``sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw`` (AFTER): counts what was served.
* ``sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason`` (AROUND) and
  ``sglang.srt.entrypoints.http_server._setup_and_run_http_server`` (BEFORE): the answer is 503 with Retry-After.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.config import current_settings
from sglang_lora_tree.scheduling.admission import AdmissionControl
from sglang_lora_tree.scheduling.fairness import FairOrder
from sglang_lora_tree.scheduling.scheduler_hooks import STATE

logger = logging.getLogger(__name__)

LOOKS_PER_STEP = 64
"""Requests of the queue that one step of the loop looks at; a queue of 2,000 is gone through three times a second."""
_MESSAGE = "the server is overloaded and the first token would come too late: retry after {} s"
_RETRY_AFTER = re.compile(r"retry after (\d+) s$")
_retry_after: ContextVar[list[str] | None] = ContextVar("lora_tree_retry_after", default=None)


# ---- In the scheduler ----


def refuse_late(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Scheduler.get_next_batch_to_run``: goes through the queue, ``LOOKS_PER_STEP`` at a time."""
    queue = STATE.queue
    if queue is None or queue.control is None or not scheduler.waiting_queue:
        return
    control, now, waiting_queue = queue.control, queue.now, scheduler.waiting_queue
    position, before = control.sweep
    if position >= len(waiting_queue):
        position, before = 0, 0
    leaving: list[tuple[Req, int]] = []
    for _ in range(LOOKS_PER_STEP):
        if position >= len(waiting_queue):
            break
        req = waiting_queue[position]
        waiting = req.lora_tree_ticket.waiting
        # Who has had a first token already (retracted) is not late any more.
        seconds = None if req.output_ids else control.retry_after(_tokens_before(control, before), waiting, now)
        if seconds is None:
            before += waiting.length
            position += 1
        else:
            leaving.append((waiting_queue.pop(position), seconds))
    control.sweep = position, before
    for req, seconds in leaving:
        _refuse(scheduler, req, seconds)


def _tokens_before(control: AdmissionControl, older: int) -> int:
    """The newest go first under overload, so that older requests do not stand before them."""
    return 0 if control.is_overloaded else older


def _refuse(scheduler: Any, req: Req, seconds: int) -> None:
    prepare_abort(req, _MESSAGE.format(seconds), status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    scheduler.output_streamer.stream_output([req], req.return_logprob)
    if STATE.plans is not None and STATE.plans.reporter is not None:
        STATE.plans.reporter.note_admitted([req])


def count_service(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler._get_new_batch_prefill_raw``."""
    queue = STATE.queue
    if queue is None or (queue.control is None and queue.fair is None):
        return
    started = [] if result[0] is None else [req for req in result[0].reqs if not req.output_ids]
    if queue.control is not None and started:
        tokens = sum(len(req.origin_input_ids) for req in started)
        queue.control.note_started(len(started), tokens, queue.now, not scheduler.waiting_queue)
    if queue.fair is not None:
        for req in started:
            queue.fair.charge(req.lora_tree_ticket.waiting.members, len(req.origin_input_ids))
        _charge_output(queue.fair, scheduler.running_batch.reqs)


def _charge_output(fair: FairOrder, reqs: list[Req]) -> None:
    for req in reqs:
        new = len(req.output_ids) - req.lora_tree_ticket.charged
        if new > 0:
            req.lora_tree_ticket.charged += new
            fair.charge(req.lora_tree_ticket.waiting.members, 0, new)


# ---- In the API process ----


async def note_retry_after(original: Callable[..., Awaitable[Any]], manager: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``TokenizerManager._handle_abort_finish_reason``: remember for the response what the refusal says."""
    match = _RETRY_AFTER.search(str(out["meta_info"]["finish_reason"].get("message", "")))
    holder = _retry_after.get()
    if match is not None and holder is not None:
        holder[:] = [match[1]]
    return await original(manager, out, *args, **kwargs)


class RetryAfter:
    """ASGI middleware: a 503 that says when to retry says so in its header too."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        holder: list[str] = []
        token = _retry_after.set(holder)  # a list, because tasks below this one get copies of the context

        async def add_header(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503 and holder:
                message["headers"] = [*message["headers"], (b"retry-after", holder[0].encode())]
            await send(message)

        try:
            await self._app(scope, receive, add_header)
        finally:
            _retry_after.reset(token)


def add_middleware(*args: Any, **kwargs: Any) -> None:
    """BEFORE ``http_server._setup_and_run_http_server``."""
    settings = current_settings()
    if settings is None or settings.ttft_slo_seconds is None:
        return
    from sglang.srt.entrypoints import http_server

    http_server.app.add_middleware(RetryAfter)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    (f"{_SCHEDULER}.get_next_batch_to_run", refuse_late, HookType.BEFORE),
    (f"{_SCHEDULER}._get_new_batch_prefill_raw", count_service, HookType.AFTER),
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
        note_retry_after,
        HookType.AROUND,
    ),
    ("sglang.srt.entrypoints.http_server._setup_and_run_http_server", add_middleware, HookType.BEFORE),
]
