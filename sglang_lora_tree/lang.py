"""sglang.lang with adapters per call: ``gen("answer", adapters={"math": 0.7, "json": 0.3})``.

Use it as sglang.lang, with :class:`RuntimeEndpoint` from here as the backend::

    from sglang_lora_tree.lang import RuntimeEndpoint, function, gen, set_default_backend

    set_default_backend(RuntimeEndpoint("http://localhost:30000"))

    @function
    def agent(s, question):
        s += question + gen("plan", max_tokens=32)
        s += gen("answer", adapters={"math": 0.7, "json": 0.3})

``adapters`` is an adapter's name, a mix in any form of the grammar (``composite/mix.py``), or None for the base model.
It holds for that one call, in forks, batches and streams, on whatever thread it runs. The server needs ``--lora-tree``.

sglang.lang hands a backend the text and the sampling parameters, not the expression they come from. So the two methods
of its ``StreamExecutor`` that call the backend are wrapped, when this module is imported, to hold the expression's
adapters in a context variable during the call; for expressions without adapters they do what they did.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang.lang import api
from sglang.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    function,
    get_server_info,
    image,
    set_default_backend,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from sglang.lang.backend import runtime_endpoint
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglArgument, SglExpr, SglGen, SglSelect

__all__ = [
    "Adapters",
    "RuntimeEndpoint",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "image",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
]

Adapters = str | dict[str, float] | list[dict[str, Any]] | None

_call_adapters: ContextVar[Adapters] = ContextVar("lora_tree_call_adapters", default=None)


def gen(name: str | None = None, *args: Any, adapters: Adapters = None, **kwargs: Any) -> SglGen | SglSelect:
    """``sglang.gen`` under a mix of adapters; with ``choices`` it selects under that mix.

    Raises:
        ValueError: ``adapters`` cannot be written as JSON, NaN for example.
    """
    return _with_adapters(api.gen(name, *args, **kwargs), adapters)


def gen_int(name: str | None = None, *args: Any, adapters: Adapters = None, **kwargs: Any) -> SglGen:
    """``sglang.gen_int`` under a mix of adapters. Raises as :func:`gen`."""
    return _with_adapters(api.gen_int(name, *args, **kwargs), adapters)


def gen_string(name: str | None = None, *args: Any, adapters: Adapters = None, **kwargs: Any) -> SglGen:
    """``sglang.gen_string`` under a mix of adapters. Raises as :func:`gen`."""
    return _with_adapters(api.gen_string(name, *args, **kwargs), adapters)


def select(name: str | None = None, *args: Any, adapters: Adapters = None, **kwargs: Any) -> SglSelect:
    """``sglang.select`` under a mix of adapters: every choice is scored under it. Raises as :func:`gen`."""
    return _with_adapters(api.select(name, *args, **kwargs), adapters)


def _with_adapters(expr: Any, adapters: Adapters) -> Any:
    try:
        json.dumps(adapters, allow_nan=False, default=_accept_argument)
    except (TypeError, ValueError) as error:
        raise ValueError(f"adapters={adapters!r}: {error}; give a name, or for example {{'math': 0.7}}") from None
    expr.adapters = adapters
    return expr


def _accept_argument(value: Any) -> None:
    """Before a batch sglang.lang traces the function, with placeholders for its arguments."""
    if not isinstance(value, SglArgument):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")


class RuntimeEndpoint(runtime_endpoint.RuntimeEndpoint):
    """sglang.lang's HTTP backend; every request of a call carries the call's adapters as the field ``lora``."""

    def _add_images(self, s: StreamExecutor, data: dict[str, Any]) -> None:
        """Extends the one method that sees the body of every request: generate, stream, select and its prefix."""
        super()._add_images(s, data)
        adapters = _call_adapters.get()
        if adapters is not None:
            data["lora"] = adapters


def _hold_adapters(execute: Callable[[StreamExecutor, Any], None]) -> Callable[[StreamExecutor, Any], None]:
    @functools.wraps(execute)
    def execute_under_adapters(executor: StreamExecutor, expr: SglExpr) -> None:
        adapters = getattr(expr, "adapters", None)
        if adapters is not None:
            _refuse_what_would_ignore_adapters(executor)
        token = _call_adapters.set(adapters)
        try:
            execute(executor, expr)
        finally:
            _call_adapters.reset(token)

    return execute_under_adapters


def _refuse_what_would_ignore_adapters(executor: StreamExecutor) -> None:
    if not isinstance(executor.backend, RuntimeEndpoint):
        raise TypeError(
            f"adapters= with the backend {type(executor.backend).__name__}: it would ignore them; "
            "use sglang_lora_tree.lang.RuntimeEndpoint"
        )
    if executor.num_api_spec_tokens is not None:
        raise ValueError(
            "adapters= in a function with num_api_spec_tokens: text speculated by one call would be reused by calls "
            "under other adapters; leave num_api_spec_tokens out"
        )


StreamExecutor._execute_gen = _hold_adapters(StreamExecutor._execute_gen)
StreamExecutor._execute_select = _hold_adapters(StreamExecutor._execute_select)
