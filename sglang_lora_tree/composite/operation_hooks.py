"""What a running server is asked to do beside answering: refused, before it reaches the scheduler, where ``refusals`` says so.

Hooks (BEFORE, they do nothing without ``--lora-tree``): every refused method of ``sglang.srt.managers.tokenizer_manager.
TokenizerManager``, which both HTTP and ``sgl.Engine`` call. ``http_hooks`` makes a 400 of the error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.config import current_settings
from sglang_lora_tree.refusals import OPERATIONS, check_operation, check_weights_action


def refuse(operation: str, *args: Any, **kwargs: Any) -> None:
    """BEFORE a refused method of ``TokenizerManager``.

    Raises:
        OperationError: why.
    """
    if current_settings() is not None:
        check_operation(operation)


def check_action(tokenizer_manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``TokenizerManager.check_weights``."""
    if current_settings() is not None:
        check_weights_action(obj.action)


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    *(
        (f"{_MANAGER}.{operation}", partial(refuse, operation), HookType.BEFORE)
        for operation, reason in OPERATIONS.items()
        if reason is not None
    ),
    (f"{_MANAGER}.check_weights", check_action, HookType.BEFORE),
]
