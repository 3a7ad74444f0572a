"""When the CPU platform is active: only where nothing better is, and nobody asked for something else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_lora_tree.platforms import cpu

OURS = SimpleNamespace(name=cpu.PLATFORM_NAME)


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an accelerator, with this plugin and no settings."""
    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "entry_points", lambda group: [OURS])
    for backend in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(backend, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)


def test_a_plain_machine_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.activate() == cpu.PLATFORM_CLASS
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cpu"))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert cpu.activate() == cpu.PLATFORM_CLASS


@pytest.mark.parametrize("name", ["cuda", "xpu", "backends.mps"])
def test_an_accelerator_that_torch_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(f"torch.{name}.is_available", lambda: True)
    assert cpu.has_accelerator() and cpu.activate() is None


def test_an_accelerator_of_any_other_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: SimpleNamespace(type="npu"))
    assert cpu.has_accelerator() and cpu.activate() is None


def test_sglangs_own_cpu_engine_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert cpu.activate() is None


def test_another_platform_goes_first_unless_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "entry_points", lambda group: [OURS, SimpleNamespace(name="vendor")])
    assert cpu.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", cpu.PLATFORM_NAME)
    assert cpu.activate() == cpu.PLATFORM_CLASS
    monkeypatch.setenv("SGLANG_PLATFORM", "vendor")
    assert cpu.activate() is None
