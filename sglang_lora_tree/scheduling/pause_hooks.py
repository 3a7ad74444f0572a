"""A paused server (POST /pause_generation) still loads adapters: whoever asks would wait until somebody continues it.

Hook: ``sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine`` (BEFORE), the one call in a step of
the loop while it is paused; every rank makes the same steps then too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.scheduling.scheduler_hooks import STATE


def poll_reader(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Scheduler._record_scheduler_state_for_paused_engine``: finish what threads have read; nothing moves to the GPU."""
    if STATE.residency is not None:
        STATE.residency.reader.poll()


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    (
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        poll_reader,
        HookType.BEFORE,
    ),
]
