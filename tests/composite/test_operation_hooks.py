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


def test_without_the_flag_sglang_does_what_it_is_asked(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    for operation in REFUSED:
        method = getattr(TokenizerManager, operation)
        arguments = [SimpleNamespace()] * (len(inspect.signature(method).parameters) - 1)
        method(SimpleNamespace(), *arguments).close()  # a coroutine, not a refusal
