"""What a running server is asked to do beside answering: refused where ``refusals`` says so, and never left without an answer.

Hooks (they do nothing without ``--lora-tree``), on ``sglang.srt.managers``:

* every refused method of ``tokenizer_manager.TokenizerManager`` (BEFORE), which both HTTP and ``sgl.Engine`` call.
  ``http_hooks`` makes a 400 of the error.
* ``communicator.FanOutCommunicator.__call__`` (AROUND) and ``tokenizer_manager.TokenizerManager.set_server_stop_hook`` (BEFORE):
  SGLang's server ends when every connection has its answer. Adapters are loaded beside the scheduler's loop, so it may be gone
  before the answer, and the server would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.config import current_settings
from sglang_lora_tree.refusals import OPERATIONS, OperationError, check_operation, check_weights_action


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


class Calls:
    """Messages to the scheduler whose answers are awaited, in the API process."""

    def __init__(self) -> None:
        self._pending: set[asyncio.Future[Any]] = set()
        self._is_over = False

    async def call(self, original: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        """The scheduler's answer.

        Raises:
            OperationError: the scheduler ends before it answers.
        """
        call = asyncio.ensure_future(original(*args))
        self._pending.add(call)
        call.add_done_callback(self._pending.discard)
        try:
            return await call
        except asyncio.CancelledError:
            if call.cancelled() and self._is_over:
                raise OperationError("the server is shutting down; ask again when it runs") from None
            raise

    def end(self) -> None:
        """The scheduler is gone: nobody will answer."""
        self._is_over = True
        for call in self._pending:
            call.cancel()


CALLS = Calls()


async def await_answer(original: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    """AROUND ``FanOutCommunicator.__call__``."""
    return await (original(*args) if current_settings() is None else CALLS.call(original, *args))


def end_calls_too(tokenizer_manager: Any, stop: Callable[[], None]) -> tuple[tuple[Any, Callable[[], None]], dict[str, Any]]:
    """BEFORE ``TokenizerManager.set_server_stop_hook``."""

    def stop_all() -> None:
        CALLS.end()
        stop()

    return (tokenizer_manager, stop_all), {}


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    *(
        (f"{_MANAGER}.{operation}", partial(refuse, operation), HookType.BEFORE)
        for operation, reason in OPERATIONS.items()
        if reason is not None
    ),
    (f"{_MANAGER}.check_weights", check_action, HookType.BEFORE),
    ("sglang.srt.managers.communicator.FanOutCommunicator.__call__", await_answer, HookType.AROUND),
    (f"{_MANAGER}.set_server_stop_hook", end_calls_too, HookType.BEFORE),
]
