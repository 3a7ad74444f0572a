"""The flag ``--lora-tree``, and what it implies.

Hooks:

* ``sglang.srt.server_args.ServerArgs.add_cli_args`` (AFTER): the flag itself, also for ``sglang serve`` and ``--config``.
* ``sglang.srt.server_args.ServerArgs.from_cli_args`` (BEFORE): turns the plugin on and sets what it implies; refuses what
  the user wrote, or set in the environment, that cannot be served exactly.
* ``sglang.srt.server_args.ServerArgs.check_server_args`` (AFTER): refuses what came of it that cannot.

and, because SGLang loads plugins inside the first ``Engine.__init__``, when a hook on it would come too late:

* ``sglang.srt.entrypoints.engine.Engine.server_args_class`` (assigned): ``sgl.Engine(lora_tree=...)``.
"""

from __future__ import annotations

import argparse
import atexit
import os
from collections.abc import Callable, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

import msgspec
from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.adapters.base_shape import MODULES
from sglang_lora_tree.config import (
    ENVIRONMENT_VARIABLE,
    Settings,
    current_settings,
    parse_settings,
    publish_settings,
)
from sglang_lora_tree.radix.leftovers import remove_all_leftovers
from sglang_lora_tree.refusals import check_config, check_options

NAME = "lora_tree"
MAX_LORAS_PER_BATCH = 256
"""--max-loras-per-batch where the user gives none: nothing is reserved for it, so SGLang's 8 would only hold batches back."""


class _Untouched(int):
    """A default of SGLang's that the user has not overwritten (argparse cannot tell otherwise)."""


def add_flag(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``."""
    parser.add_argument(
        "--lora-tree",
        nargs="?",
        const="",
        default=None,
        metavar="SETTINGS",
        help="Serve LoRA adapters and weighted mixes of them from one tree and one pool, shared with the KV cache "
        "(sglang-lora-tree). SETTINGS: JSON text or the path of a JSON or YAML file; without it, the defaults.",
    )
    stock = parser.get_default("max_loras_per_batch")
    if stock is not None:
        parser.set_defaults(max_loras_per_batch=_Untouched(stock))


def apply_flag(cls: type, namespace: argparse.Namespace) -> None:
    """BEFORE ``ServerArgs.from_cli_args``."""
    options = vars(namespace)
    settings = parse_settings(options.pop(NAME, None)) or current_settings()
    untouched = isinstance(options.get("max_loras_per_batch"), _Untouched)
    if untouched:
        options["max_loras_per_batch"] = int(options["max_loras_per_batch"])
    if settings is not None:
        enable(settings, options, given_max_loras=not untouched)


def enable(settings: Settings, options: MutableMapping[str, Any], given_max_loras: bool) -> None:
    """Turn the plugin on in this process and its children, and set what it needs among SGLang's options."""
    from sglang_lora_tree.plugin import check_hooks

    check_hooks()
    publish_settings(settings)
    # SGLang kills its scheduler where the server is interrupted, and an engine's always: this process ends after it.
    atexit.register(remove_all_leftovers, settings.spool_dir)
    options.update(
        enable_lora=True,
        lora_backend=NAME,
        radix_cache_backend=NAME,
        enable_hierarchical_cache=True,
        hicache_mem_layout="layer_first",
        max_lora_rank=settings.max_rank,
        lora_target_modules=list(MODULES),
    )
    check_options(options, not_at_default(options), os.environ)
    if not given_max_loras:
        most = options.get("max_loaded_loras")
        options["max_loras_per_batch"] = MAX_LORAS_PER_BATCH if most is None else min(MAX_LORAS_PER_BATCH, most)


def refuse(result: None, server_args: Any) -> None:
    """AFTER ``ServerArgs.check_server_args``."""
    if current_settings() is not None:
        written = msgspec.structs.asdict(server_args)
        check_options(written, not_at_default(written), os.environ)
        check_config(resolving_view(server_args))
        # The model's own files may say what no option does.
        check_config(SimpleNamespace(quantization=model_config_of(server_args).quantization))


def not_at_default(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of SGLang's options whose value is not the default; other entries are passed over."""
    from sglang.srt.server_args import ServerArgs

    changed = {}
    for field in msgspec.structs.fields(ServerArgs):
        if field.name in options:
            has_factory = field.default_factory is not msgspec.NODEFAULT
            if options[field.name] != (field.default_factory() if has_factory else field.default):
                changed[field.name] = options[field.name]
    return changed


def build_server_args(**kwargs: Any) -> Any:
    """In place of ``Engine.server_args_class``: without ``lora_tree=`` an engine is SGLang's own, whatever engines were made
    before it in this process (unless the environment turns the plugin on)."""
    given = kwargs.pop(NAME, None)
    settings = parse_settings(given if given is not None else _environment_at_start)
    if settings is None:
        os.environ.pop(ENVIRONMENT_VARIABLE, None)
    else:
        enable(settings, kwargs, given_max_loras="max_loras_per_batch" in kwargs)
    return _stock_server_args(**kwargs)


_environment_at_start = None if os.environ.get(ENVIRONMENT_VARIABLE) in (None, "0") else current_settings()
_stock_server_args: Callable[..., Any]


def install() -> None:
    """Assign what is not a hook; safe to call again."""
    global _stock_server_args
    from sglang.srt.entrypoints.engine import Engine

    if Engine.server_args_class is not build_server_args:
        _stock_server_args = Engine.server_args_class
        Engine.server_args_class = staticmethod(build_server_args)


def is_installed() -> bool:
    from sglang.srt.entrypoints.engine import Engine

    return Engine.server_args_class is build_server_args


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.server_args.ServerArgs.add_cli_args", add_flag, HookType.AFTER),
    ("sglang.srt.server_args.ServerArgs.from_cli_args", apply_flag, HookType.BEFORE),
    ("sglang.srt.server_args.ServerArgs.check_server_args", refuse, HookType.AFTER),
]
