"""What ``--lora-tree`` refuses: start options and environment variables (the tables are in ``options``), and what a running
server may be asked to do beside answering.

What the options lead to is checked again in the scheduler process: the pool (``radix.cache_hooks.check_kv_pool``), the base
model's weights and the hooks (``plugin.check_scheduler``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sglang_lora_tree.options import ENVIRONMENT, NOT_SHOWN, RULES, SERVED, UNSERVED

_OTHER_WEIGHTS = (
    "adapters were checked against the base weights that the server started with, and history KV of every adapter and mix was "
    "computed with them; start another server with the other weights"
)
_WEIGHTS_SENT = f"layers have other names inside the LoRA wrappers, and {NOT_SHOWN}; read the weights from their folder"
_MEMORY = "adapters live in the memory that would be given back; stop the server instead"
_EXPERTS = "models with experts are not served; leave it out"
OPERATIONS: dict[str, str | None] = {
    "generate_request": None,
    "score_prompts": None,
    "score_request": None,
    "load_lora_adapter": None,
    "load_lora_adapter_from_tensors": None,
    "unload_lora_adapter": None,
    "open_session": None,
    "close_session": None,
    "flush_cache": None,
    "pause_generation": None,
    "continue_generation": None,
    "get_internal_state": None,
    "set_internal_state": None,  # nothing that it can set touches the tree
    "get_loads": None,
    "get_weights_by_name": None,
    "get_hicache_l3_cache_layout": None,
    "check_weights": None,  # but see WEIGHT_CHECKS
    "update_weight_version": None,  # a label that answers carry
    "start_profile": None,
    "stop_profile": None,
    "slow_down": None,
    "freeze_gc": None,
    "dumper_control": None,
    "handle_loop": None,
    "sigterm_watchdog": None,
    # There is no storage backend; detaching or clearing none does nothing.
    "attach_hicache_storage": "a storage backend would take adapter rows for KV; run without one",
    "detach_hicache_storage": None,
    "clear_hicache_storage": None,
    # SGLang refuses these itself, without ngram speculation.
    "add_external_corpus": None,
    "remove_external_corpus": None,
    "list_external_corpora": None,
    "update_weights_from_disk": _OTHER_WEIGHTS,
    "update_weights_from_distributed": _OTHER_WEIGHTS,
    "update_weights_from_ipc": _OTHER_WEIGHTS,
    "update_weights_from_tensor": _OTHER_WEIGHTS,
    "begin_weight_update": _OTHER_WEIGHTS,
    "end_weight_update": _OTHER_WEIGHTS,
    "init_weights_update_group": _OTHER_WEIGHTS,
    "destroy_weights_update_group": _OTHER_WEIGHTS,
    "init_weights_send_group_for_remote_instance": _WEIGHTS_SENT,
    "send_weights_to_remote_instance": _WEIGHTS_SENT,
    "release_memory_occupation": _MEMORY,
    "resume_memory_occupation": "none has been given back: " + _MEMORY,
    "start_expert_distribution_record": _EXPERTS,
    "stop_expert_distribution_record": _EXPERTS,
    "dump_expert_distribution_record": _EXPERTS,
    "scale_elastic_ep": _EXPERTS,
    "pd_role_switch": "the other side would take adapter slots for KV; start a server of the other role without --lora-tree",
}
"""What a running server may be asked for (methods of SGLang's TokenizerManager): None, or why it is refused, with the cure."""

WEIGHT_CHECKS = ("checksum", "snapshot", "compare")
"""The actions of ``check_weights`` that change nothing."""


class OperationError(ValueError):
    """A running server is asked for what cannot be right with ``--lora-tree``."""


def check_operation(operation: str) -> None:
    """Raise OperationError if a running server must not do this."""
    reason = OPERATIONS[operation]
    if reason is not None:
        raise OperationError(f"{operation} is refused with --lora-tree: {reason}")


def check_weights_action(action: str) -> None:
    """Raise OperationError if ``check_weights`` would change the weights that it checks."""
    if action not in WEIGHT_CHECKS:
        raise OperationError(
            f"check_weights {action!r} is refused with --lora-tree: want {', '.join(WEIGHT_CHECKS)}; {_OTHER_WEIGHTS}"
        )


def find_refusals(config: Any) -> list[str]:
    """One line for every option of a resolved configuration of which this value is not served."""
    refusals = []
    for name, served, reason in RULES:
        value = getattr(config, name, served[0])
        if value not in served:
            refusals.append(f"{_flag(name)} {value}: {reason}; leave it at {' or '.join(str(choice) for choice in served)}")
    return refusals


def find_unserved(given: Mapping[str, Any]) -> list[str]:
    """One line for every option that is only served at its default, or that nobody has decided.

    Args:
        given: name -> value of the options that are not at their defaults, as a user wrote them.
    """
    refusals = []
    decided = {name for name, _, _ in RULES} | SERVED
    for name in given.keys() - decided:
        reason = UNSERVED.get(name, "this version of the plugin does not know the option")
        refusals.append(f"{_flag(name)} {given[name]}: {reason}; leave it out")
    return sorted(refusals)


def find_replaced(environment: Mapping[str, str]) -> list[str]:
    """One line for every environment variable that replaces what the plugin builds on."""
    refusals = []
    for name, values, reason in ENVIRONMENT:
        value = environment.get(name)
        if value and (values is None or value.lower() in values):
            refusals.append(f"{name}={value}: {reason}; unset it")
    return refusals


def check_options(options: Mapping[str, Any], given: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """As :func:`check_config`, for what a user wrote: SGLang's own checks would speak of flags that he never gave.

    Args:
        options: name -> value.
        given: of these, the options that are not at their defaults.
        environment: of this process, which its children inherit.
    """
    config = SimpleNamespace(**{name: value for name, value in options.items() if value is not None})
    _raise_refusals([*find_refusals(config), *find_unserved(given), *find_replaced(environment)])


def check_config(config: Any) -> None:
    """Raise ValueError with every reason why this resolved configuration cannot be served."""
    _raise_refusals(find_refusals(config))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _raise_refusals(refusals: list[str]) -> None:
    if refusals:
        raise ValueError("--lora-tree refuses to start:\n  " + "\n  ".join(refusals))
