"""The entry point (group ``sglang.srt.plugins``): the one list of every seam of SGLang that this package uses.

SGLang calls :func:`register` in every process it starts. Hooks are registered always and do nothing until ``--lora-tree``
turns them on, so an installed but unused plugin changes nothing. SGLang only logs a hook that does not take; so
:func:`check_hooks` runs in the API process when the flag is read and in the scheduler process when it has been built, and
stops the start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

TESTED_VERSIONS = ("0.5.23",)
VERSION_OVERRIDE = "SGLANG_LORA_TREE_ANY_VERSION"

Hook = tuple[str, Callable[..., Any], Any]


def all_hooks() -> list[Hook]:
    """Every hook, as (what it replaces, by what, how)."""
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_lora_tree import arguments_hooks
    from sglang_lora_tree.composite import (
        finish_hooks,
        http_hooks,
        layer_wait_hooks,
        manager_hooks,
        operation_hooks,
        request_hooks,
        session_hooks,
    )
    from sglang_lora_tree.observability import http_hooks as tree_http_hooks
    from sglang_lora_tree.observability import state_hooks
    from sglang_lora_tree.radix import look_ahead_hooks
    from sglang_lora_tree.scheduling import overload_hooks, pause_hooks, plan_hooks, queue_hooks, scheduler_hooks

    own: list[Hook] = [("sglang.srt.managers.scheduler.Scheduler.__init__", check_scheduler, HookType.AFTER)]
    rooms = (
        arguments_hooks,
        request_hooks,
        http_hooks,
        operation_hooks,
        manager_hooks,
        finish_hooks,
        layer_wait_hooks,
        session_hooks,
        scheduler_hooks,
        pause_hooks,
        queue_hooks,
        look_ahead_hooks,
        plan_hooks,
        overload_hooks,
        state_hooks,
        tree_http_hooks,
    )
    return own + [hook for room in rooms for hook in room.HOOKS]


def register() -> None:
    """Register all hooks and backends (called by SGLang in every process, once)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_lora_tree import arguments_hooks
    from sglang_lora_tree.composite import backend_hooks
    from sglang_lora_tree.platforms import cpu, cpu_hooks
    from sglang_lora_tree.radix import cache_hooks

    for target, hook, hook_type in all_hooks():
        HookRegistry.register(target, hook, hook_type)
    arguments_hooks.install()
    backend_hooks.register()
    cache_hooks.register()
    if cpu.is_active():
        cpu_hooks.install()


def check_hooks() -> None:
    """Make sure that this SGLang is a tested one and that every hook took in this process.

    Raises:
        RuntimeError: naming the version or the hooks, and what to do.
    """
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_lora_tree import arguments_hooks

    if sglang.__version__ not in TESTED_VERSIONS and not os.environ.get(VERSION_OVERRIDE):
        raise RuntimeError(
            f"--lora-tree is tested with SGLang {', '.join(TESTED_VERSIONS)} and this is {sglang.__version__}: install a "
            f"tested version, or set {VERSION_OVERRIDE}=1 to try"
        )
    missing = [target for target, _, _ in all_hooks() if target not in HookRegistry._patched]
    if not arguments_hooks.is_installed():
        missing.append("sglang.srt.entrypoints.engine.Engine.server_args_class")
    if missing:
        raise RuntimeError(
            "--lora-tree: these hooks did not take in this process, so requests would be served wrongly: "
            f"{', '.join(missing)}; SGLang's log says why (a plugin loaded before may have failed, or SGLANG_PLUGINS leaves "
            "this one out)"
        )


def check_scheduler(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler.__init__``: the scheduler process's self-check, then the scheduler is ours."""
    from sglang.srt.runtime_context import get_parallel

    from sglang_lora_tree.config import current_settings
    from sglang_lora_tree.radix.cache_hooks import LoraTreeCache
    from sglang_lora_tree.scheduling import plan_hooks, scheduler_hooks

    if current_settings() is None:
        return
    check_hooks()
    if not isinstance(scheduler.tree_cache, LoraTreeCache):
        raise RuntimeError(f"--lora-tree: the prefix cache is a {type(scheduler.tree_cache).__name__}")
    check_base_weights(scheduler.tp_worker.model_runner.model)
    # A mix of huge weights makes logits that are no numbers, and sampling from them would stop this process.
    os.environ.setdefault("SGLANG_SANITIZE_NAN_LOGITS", "1")
    scheduler_hooks.attach(scheduler)
    plan_hooks.attach(scheduler, is_entry_rank=get_parallel().attn_tp_rank == 0)


def check_base_weights(model: Any) -> None:
    """Refuse a base model whose weights are quantized, whatever quantized them: an allow-list.

    Raises:
        ValueError: naming the layer, how it is kept, and what to change.
    """
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase) and type(layer.quant_method) is not UnquantizedLinearMethod:
            raise ValueError(
                f"--lora-tree serves base models in float32, float16 or bfloat16, and {name} is kept by "
                f"{type(layer.quant_method).__name__}: start with a model that is not quantized"
            )
