"""A session's turns can be replaced, all of them or those of one id, and SGLang's own sessions do it."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.session.session_controller import Session, SessionReqNode

from sglang_lora_tree.composite import session_hooks
from sglang_lora_tree.config import ENVIRONMENT_VARIABLE

from .conftest import apply_hooks


@pytest.fixture
def session(monkeypatch):
    """Of four turns: p, two of its that are both called c, and another one."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1")
    apply_hooks(monkeypatch, session_hooks.HOOKS)
    session = Session.__new__(Session)
    session.streaming, session.req_nodes = False, {}

    def add(rid, parent=None, finished=True):
        req = SimpleNamespace(rid=rid, finished_reason="stop" if finished else None, to_finish=None)
        session.req_nodes[rid] = SessionReqNode(req, session.req_nodes.get(parent))
        return req

    session.running = [add("p"), add("c", "p"), add("c", "p", finished=False), add("other")][2]
    return session


def test_all_turns_are_replaced(session):
    session_hooks.empty_first(session, SimpleNamespace(session_params=SessionParams(id="s", replace=True)))
    assert session.req_nodes == {} and session.running.to_finish is not None, "who runs is to end"


def test_nothing_else_empties_a_session(session):
    for params in (SessionParams(id="s"), SessionParams(id="s", rid="p"), SessionParams(id="s", rid="p", replace=True)):
        session_hooks.empty_first(session, SimpleNamespace(session_params=params))
    assert list(session.req_nodes) == ["p", "c", "other"]


def test_the_turns_after_one_are_replaced_also_if_two_have_one_id(session):
    session.req_nodes["p"].clear_children(session.req_nodes)
    assert list(session.req_nodes) == ["p", "other"] and session.running.to_finish is not None
