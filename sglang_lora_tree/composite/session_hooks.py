"""Sessions whose turns are replaced: SGLang changes a dictionary while it goes through it, and looks for what is gone already.

Hooks (in the scheduler process):

* ``sglang.srt.session.session_controller.Session.create_req`` (BEFORE): ``replace`` without a ``rid`` empties the session.
* ``sglang.srt.session.session_controller.SessionReqNode.clear`` (AROUND): of two turns with one ``rid`` one is in the dictionary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.session.session_controller import Session, SessionReqNode

from sglang_lora_tree.config import current_settings


def empty_first(session: Session, req: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Session.create_req``: what it is about to do itself, but over a copy."""
    params = req.session_params
    if current_settings() is None or session.streaming or not params.replace or params.rid is not None:
        return
    for node in list(session.req_nodes.values()):
        node.clear(session.req_nodes)


def clear_once(original: Callable[..., None], node: SessionReqNode, nodes: dict[str, SessionReqNode]) -> None:
    """AROUND ``SessionReqNode.clear``: ``nodes`` need not have it any more."""
    if current_settings() is not None:
        nodes.setdefault(node.req.rid, node)
    original(node, nodes)


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.session.session_controller.Session.create_req", empty_first, HookType.BEFORE),
    ("sglang.srt.session.session_controller.SessionReqNode.clear", clear_once, HookType.AROUND),
]
