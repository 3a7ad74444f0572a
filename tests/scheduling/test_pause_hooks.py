"""A paused server answers whoever loads an adapter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_lora_tree.radix.disk_reader import DiskReader
from sglang_lora_tree.scheduling import pause_hooks
from sglang_lora_tree.scheduling.scheduler_hooks import STATE


def test_what_threads_have_read_is_applied_while_the_loop_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    def agree(states: torch.Tensor) -> torch.Tensor:
        return states

    reader = DiskReader(1, agree)
    monkeypatch.setattr(STATE, "manager", SimpleNamespace(residency=SimpleNamespace(reader=reader)))
    outcomes: list[str] = []
    reader.submit(lambda: "read", outcomes.append, outcomes.append)
    reader.jobs[0].future.result(10)
    (_, hook, _) = pause_hooks.HOOKS[0]
    hook(SimpleNamespace())
    assert outcomes == ["read"]
    monkeypatch.setattr(STATE, "manager", None)
    hook(SimpleNamespace())  # without --lora-tree
