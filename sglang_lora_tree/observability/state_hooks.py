"""What SGLang reports about itself, with the tree in it.

Hook: ``sglang.srt.managers.scheduler.Scheduler.get_internal_state`` (AFTER): /server_info, and with it GET /lora_tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.observability.snapshot import take_snapshot
from sglang_lora_tree.scheduling.scheduler_hooks import STATE


def add_snapshot(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler.get_internal_state``."""
    if STATE.residency is not None and STATE.manager is not None:
        result.internal_state["lora_tree"] = take_snapshot(STATE.residency, scheduler)


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", add_snapshot, HookType.AFTER),
]
