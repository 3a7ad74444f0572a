"""``GET /lora_tree``: the whole tree of the running server, as JSON.

Hook: ``sglang.srt.entrypoints.http_server._setup_and_run_http_server`` (BEFORE) adds the route. SGLang's rule for
--api-key covers it as it covers /server_info.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import HTTPException, Response
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.config import current_settings
from sglang_lora_tree.observability.state_hooks import NODES_WANTED

PATH = "/lora_tree"


def add_route(*_: Any, **__: Any) -> None:
    """BEFORE ``http_server._setup_and_run_http_server``."""
    from sglang.srt.entrypoints import http_server

    app = http_server.app
    if current_settings() is not None and all(getattr(route, "path", None) != PATH for route in app.router.routes):
        app.add_api_route(PATH, describe_tree, methods=["GET"])


async def describe_tree() -> Response:
    """Pools, adapters, nodes and counters (``snapshot``); 404 if this server has no tree."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = http_server.get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=NODES_WANTED))
    tree = answers[0].internal_state.get("lora_tree")
    if tree is None:
        raise HTTPException(404, "this server runs without --lora-tree")
    return Response(orjson.dumps(tree), media_type="application/json")


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.entrypoints.http_server._setup_and_run_http_server", add_route, HookType.BEFORE),
]
