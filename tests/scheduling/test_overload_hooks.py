"""Who would be late is refused, with a header that says when to come back; what was served is counted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import fastapi
import pytest

from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling import overload_hooks
from sglang_lora_tree.scheduling.scheduler_hooks import STATE
from sglang_lora_tree.scheduling.waiting_queue import make_queue


def ask(lora_id: str, length: int = 100, output: int = 0) -> Any:
    assert STATE.queue is not None
    ticket = STATE.queue.take_ticket(lora_id, length)
    req = SimpleNamespace(rid=f"r{ticket.waiting.arrival}", lora_tree_ticket=ticket, return_logprob=False, finished_reason=None)
    req.origin_input_ids, req.output_ids = [0] * length, [0] * output
    STATE.queue.note_queued(req)
    return req


class Scheduler:
    def __init__(self, waiting: list[Any]) -> None:
        self.waiting_queue = waiting
        self.running_batch = SimpleNamespace(reqs=[])
        self.answers: list[Any] = []
        self.output_streamer = SimpleNamespace(stream_output=lambda reqs, _: self.answers.extend(reqs))


def test_late_requests_leave_the_queue_with_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(Settings(ttft_slo_seconds=2.0))
    monkeypatch.setattr(STATE, "queue", queue)
    monkeypatch.setattr(STATE, "plans", None)
    old, retracted, young = ask("a"), ask("a", output=3), ask("a")
    queue.now = 3.0
    young.lora_tree_ticket = queue.take_ticket("a", 100)
    scheduler = Scheduler([old, retracted, young])
    overload_hooks.refuse_late(scheduler)
    assert scheduler.waiting_queue == [retracted, young] and scheduler.answers == [old]
    assert old.finished_reason.status_code == 503 and "retry after 1 s" in old.finished_reason.message
    overload_hooks.refuse_late(scheduler)
    assert scheduler.answers == [old]


def test_a_step_looks_at_few_and_all_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(Settings(ttft_slo_seconds=2.0))
    monkeypatch.setattr(STATE, "queue", queue)
    monkeypatch.setattr(STATE, "plans", None)
    retracted, late = [ask("a", output=1) for _ in range(200)], [ask("a") for _ in range(500)]
    queue.now = 3.0
    young = [ask("a") for _ in range(500)]
    scheduler = Scheduler([*retracted, *late, *young])
    steps = 0
    while scheduler.answers != late:
        before = len(scheduler.answers)
        overload_hooks.refuse_late(scheduler)
        assert len(scheduler.answers) - before <= overload_hooks.LOOKS_PER_STEP
        steps += 1
        assert steps <= 1 + 700 // overload_hooks.LOOKS_PER_STEP
    for _ in range(40):
        overload_hooks.refuse_late(scheduler)
    assert scheduler.waiting_queue == [*retracted, *young]


def test_service_is_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(Settings(fairness=True))
    monkeypatch.setattr(STATE, "queue", queue)
    assert queue.fair is not None
    request = ask("a", length=100)
    scheduler = Scheduler([])
    overload_hooks.count_service((SimpleNamespace(reqs=[request]), None), scheduler)
    scheduler.running_batch.reqs = [request]
    for tokens in (1, 2, 2, 5):
        request.output_ids = [0] * tokens
        overload_hooks.count_service((None, None), scheduler)
    assert queue.fair._counters == {("a",): 100 + 2.0 * 5}


def test_off_means_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STATE, "queue", make_queue(Settings()))
    scheduler = Scheduler([SimpleNamespace()])
    overload_hooks.refuse_late(scheduler)
    overload_hooks.count_service((SimpleNamespace(reqs=[SimpleNamespace()]), None), scheduler)
    assert len(scheduler.waiting_queue) == 1


@pytest.mark.parametrize(("message", "expected"), [("overloaded: retry after 7 s", b"7"), ("The request queue is full.", None)])
def test_the_answer_has_retry_after(message: str, expected: bytes | None) -> None:
    async def original(manager: Any, out: Any, *args: Any) -> None:
        raise fastapi.HTTPException(503, out["meta_info"]["finish_reason"]["message"])

    app = fastapi.FastAPI()
    app.add_middleware(overload_hooks.RetryAfter)

    @app.get("/")
    async def endpoint() -> None:
        out = {"meta_info": {"finish_reason": {"type": "abort", "message": message}}}
        await asyncio.create_task(_call(out))

    async def _call(out: Any) -> None:
        await overload_hooks.note_retry_after(original, None, out)

    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(part: Any) -> None:
            sent.append(part)

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "http_version": "1.1"}
        await app({**scope, "root_path": "", "scheme": "http", "server": ("x", 80), "client": ("y", 1)}, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"]).get(b"retry-after") == expected
