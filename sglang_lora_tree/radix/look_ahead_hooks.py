"""A request touches what it will use when it joins the queue, not only when its turn comes.

Without this, what a long queue needs is evicted while it waits: with the queue at its longest, when memory is shortest. It is
the cheapest look at the future there is, one walk of the tree per request (docs/eval.md has what it gives). SGLang refreshes
the first requests of the queue every few passes, if the policy is its lru; this is for every policy, and for all that wait.

Hook: ``sglang.srt.managers.scheduler.Scheduler._add_request_to_queue`` (AFTER).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.common import _req_radix_key
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.config import current_settings
from sglang_lora_tree.radix.cache_hooks import LoraTreeCache


def look_ahead(result: None, scheduler: Any, req: Req, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler._add_request_to_queue``: the same on every rank, which all queue the same requests."""
    cache = scheduler.tree_cache
    if not isinstance(cache, LoraTreeCache) or req.to_finish is not None:
        return
    settings = current_settings()
    if settings is not None and settings.look_ahead:
        cache.look_ahead(_req_radix_key(cache, req, req.origin_input_ids, None))


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", look_ahead, HookType.AFTER),
]
