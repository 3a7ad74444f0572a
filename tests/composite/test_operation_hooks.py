"""What a running server may be asked for: every operation of SGLang's is decided, and none of the refused is carried out."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_lora_tree.composite import operation_hooks
from sglang_lora_tree.config import ENVIRONMENT_VARIABLE
from sglang_lora_tree.refusals import OPERATIONS, WEIGHT_CHECKS, OperationError

from .conftest import apply_hooks

REFUSED = [operation for operation, reason in OPERATIONS.items() if reason is not None]


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    apply_hooks(monkeypatch, operation_hooks.HOOKS)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1")


def test_every_operation_is_decided():
    """A new SGLang may bring one."""
    methods = {name: getattr(TokenizerManager, name) for name in dir(TokenizerManager) if not name.startswith("_")}
    operations = {
        name
        for name, method in methods.items()
        if inspect.iscoroutinefunction(inspect.unwrap(method)) or inspect.isasyncgenfunction(inspect.unwrap(method))
    }
    assert set(OPERATIONS) == operations


@pytest.mark.parametrize("operation", REFUSED)
def test_a_refused_operation_names_itself_and_the_cure(operation):
    with pytest.raises(OperationError, match=f"^{operation} is refused with --lora-tree: .*[;:,] "):
        getattr(TokenizerManager, operation)(SimpleNamespace(), SimpleNamespace())


@pytest.mark.parametrize("action", ["reset_tensors", "checksum"])
def test_checking_weights_does_not_change_them(action):
    calls = []

    async def ask(obj):
        calls.append(obj.action)
        return [SimpleNamespace(success=True, message="", payload=None)]

    manager = SimpleNamespace(auto_create_handle_loop=lambda: None, check_weights_communicator=ask)
    if action in WEIGHT_CHECKS:
        assert asyncio.run(TokenizerManager.check_weights(manager, SimpleNamespace(action=action)))[0]
    else:
        with pytest.raises(OperationError, match="check_weights 'reset_tensors' is refused"):
            TokenizerManager.check_weights(manager, SimpleNamespace(action=action))
    assert calls == [action for action in [action] if action in WEIGHT_CHECKS]


def test_whoever_waits_for_the_scheduler_is_answered_when_the_server_stops(monkeypatch):
    """A load in flight, for one: SGLang's server waits for every connection's answer before it ends."""
    from sglang.srt.managers.communicator import FanOutCommunicator

    monkeypatch.setattr(operation_hooks, "CALLS", operation_hooks.Calls())
    stops = []

    async def body():
        manager = SimpleNamespace()
        TokenizerManager.set_server_stop_hook(manager, lambda: stops.append("stop"))
        answered, unanswered = FanOutCommunicator(lambda obj: None, 1), FanOutCommunicator(lambda obj: None, 1)
        first, second, third = (asyncio.ensure_future(one("x")) for one in (answered, unanswered, unanswered))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answered.handle_recv("answer")
        assert await asyncio.wait_for(first, 1) == ["answer"]
        manager._server_stop_hook()
        for waiting in (second, third):
            with pytest.raises(OperationError, match="shutting down"):
                await asyncio.wait_for(waiting, 1)
        assert stops == ["stop"]

    asyncio.run(body())


def test_a_client_that_leaves_is_not_told_that_the_server_stops():
    async def body():
        from sglang.srt.managers.communicator import FanOutCommunicator

        waiting = asyncio.ensure_future(FanOutCommunicator(lambda obj: None, 1)("x"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(body())


def test_without_the_flag_sglang_does_what_it_is_asked(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    for operation in REFUSED:
        method = getattr(TokenizerManager, operation)
        arguments = [SimpleNamespace()] * (len(inspect.signature(method).parameters) - 1)
        method(SimpleNamespace(), *arguments).close()  # a coroutine, not a refusal
