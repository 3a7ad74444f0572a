"""The self-check of every process: SGLang's version, the hooks, and what the scheduler has built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_lora_tree import arguments_hooks, plugin
from sglang_lora_tree.config import ENVIRONMENT_VARIABLE
from sglang_lora_tree.radix.cache_hooks import LoraTreeCache
from sglang_lora_tree.scheduling import plan_hooks, scheduler_hooks


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A process in which every hook took."""
    targets = {target for target, _, _ in plugin.all_hooks()}
    monkeypatch.setattr(HookRegistry, "_patched", targets)
    monkeypatch.setattr(arguments_hooks, "is_installed", lambda: True)
    monkeypatch.delenv(plugin.VERSION_OVERRIDE, raising=False)
    return targets


def test_a_tested_version_with_every_hook_passes(hooked: set[str]) -> None:
    assert sglang.__version__ in plugin.TESTED_VERSIONS
    plugin.check_hooks()


def test_another_version_is_refused_unless_the_user_insists(hooked: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.5.99")
    with pytest.raises(RuntimeError, match=r"0\.5\.99.*install a tested version, or set SGLANG_LORA_TREE_ANY_VERSION=1"):
        plugin.check_hooks()
    monkeypatch.setenv(plugin.VERSION_OVERRIDE, "1")
    plugin.check_hooks()
    hooked.pop()
    with pytest.raises(RuntimeError, match="did not take"):
        plugin.check_hooks()


def test_every_hook_that_did_not_take_is_named(hooked: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gone = sorted(hooked)[::7]
    hooked.difference_update(gone)
    monkeypatch.setattr(arguments_hooks, "is_installed", lambda: False)
    with pytest.raises(RuntimeError) as failure:
        plugin.check_hooks()
    assert all(target in str(failure.value) for target in (*gone, "Engine.server_args_class"))


class Quantized:
    """Of a layer whose weights are packed."""


def model(quant_method: Any = None) -> torch.nn.Module:
    from sglang.srt.layers.linear import ReplicatedLinear

    layers = torch.nn.ModuleDict({"q_proj": ReplicatedLinear(4, 4), "o_proj": ReplicatedLinear(4, 4)})
    if quant_method is not None:
        layers["o_proj"].quant_method = quant_method
    return layers


@pytest.fixture
def attached(hooked: set[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the scheduler was given to, with ``--lora-tree`` on."""
    calls: list[Any] = []
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1")
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(attn_tp_rank=1))
    monkeypatch.setattr(scheduler_hooks, "attach", calls.append)
    monkeypatch.setattr(plan_hooks, "attach", lambda scheduler, is_entry_rank: calls.append((scheduler, is_entry_rank)))
    return calls


def scheduler(tree_cache: Any, base_model: torch.nn.Module) -> Any:
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=base_model))
    return SimpleNamespace(tree_cache=tree_cache, tp_worker=worker)


def test_a_sound_scheduler_is_ours(attached: list[Any]) -> None:
    sound = scheduler(LoraTreeCache.__new__(LoraTreeCache), model())
    plugin.check_scheduler(None, sound)
    assert attached == [sound, (sound, False)]


def test_another_prefix_cache_stops_the_start(attached: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="the prefix cache is a SimpleNamespace"):
        plugin.check_scheduler(None, scheduler(SimpleNamespace(), model()))
    assert attached == []


def test_quantized_weights_stop_the_start(attached: list[Any]) -> None:
    """Whatever quantized them, and be it one layer."""
    with pytest.raises(ValueError, match="o_proj is kept by Quantized: start with a model that is not quantized"):
        plugin.check_scheduler(None, scheduler(LoraTreeCache.__new__(LoraTreeCache), model(Quantized())))
    assert attached == []


def test_a_hook_missing_in_the_scheduler_stops_the_start(attached: list[Any], hooked: set[str]) -> None:
    hooked.discard("sglang.srt.managers.scheduler.Scheduler.__init__")
    with pytest.raises(RuntimeError, match=r"did not take.*Scheduler\.__init__"):
        plugin.check_scheduler(None, scheduler(LoraTreeCache.__new__(LoraTreeCache), model()))


def test_without_the_flag_nothing_is_checked(attached: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    plugin.check_scheduler(None, None)
    assert attached == []
