"""The settings of ``--lora-tree``: one dataclass, three ways to write it, one place to read it.

The flag takes nothing (the defaults), JSON text, or the path of a JSON or YAML file. The chosen settings travel to SGLang's
child processes in the environment variable ``SGLANG_LORA_TREE``, which also turns the plugin on where no flag can be given.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ENVIRONMENT_VARIABLE = "SGLANG_LORA_TREE"
QUEUE_ORDERS = ("lag", "fcfs", "lcfs", "least_adapters", "random", "clusters")
"""What ``queue_order`` may be (``scheduling.orders``)."""

LORA_TERMS = ("literal", "protect", "off")
"""What ``eval_lora_term`` may be (``radix.eval``)."""
RETENTION_POLICIES = (
    "auto", "stock", "reuse", "eval", "eval_per_slot", "eval_without_cost", "eval_without_lora", "eval_without_recency",
    "eval_without_visit", "branch", "gdsf", "halp", "hawkeye", "rrip",
)  # fmt: skip
"""What ``retention_policy`` may be (``radix.policies``)."""


@dataclass(frozen=True)
class Settings:
    """What ``--lora-tree`` can be told. Sizes are counts unless a name says otherwise."""

    max_members: int = 8
    """Most adapters in one mix."""
    max_rank: int = 64
    """Largest rank of an adapter's module that is served; scratch space of the kernels grows with it."""
    max_resident_adapters: int = 1024
    """Most adapters on the GPU at once (rows of the kernels' tables, a few kilobytes each; their weights live in the pool)."""
    patience_passes: int = 64
    """Scheduling passes after which the oldest request that waits for its adapters keeps younger ones from bringing in theirs."""
    disk_readers: int = 2
    """Processes that read adapters from disk, beside the scheduler; 0: a thread of the scheduler does (for tests)."""
    spool_dir: str | None = None
    """Where adapters loaded from tensors are kept as files; None: a private temporary folder, removed at exit."""
    host_reserve_gb: float | None = None
    """RAM that HiCache leaves free, in GB; None: SGLang's 10 GB on a GPU machine, 2 GB on the CPU platform."""
    join_operations: bool = True
    """Whether the norm, rotation or activation that follows a linear layer adds the adapters' part to its output (Llama and
    Qwen2; on a GPU in half precision), so that no launch stands between them for it: docs/kernels.md."""
    verify_invariants: bool = False
    """Check every invariant of the tree at every scheduling pass (slow; for tests)."""
    queue_order: str = "lag"
    """Who is looked at first when a batch is formed: one of :data:`QUEUE_ORDERS`; SGLang's ``--schedule-policy`` breaks ties,
    and its priorities go before."""
    theta_seconds: float = 1.0
    """Requests older than this go first, as they came (every order but fcfs and lcfs)."""
    cluster_adapters: int = 8
    """Adapters in one batch with ``queue_order`` clusters."""
    order_seed: int = 0
    """Of ``queue_order`` random."""
    ttft_slo_seconds: float | None = None
    """Requests whose first token would take longer are refused (503 with Retry-After); None: all wait."""
    fairness: bool = False
    """Whether adapters are served equal shares of tokens while they have requests waiting (virtual token counters)."""
    advisor: bool = True
    """Whether a process beside the scheduler makes plans (``scheduling.advisor``); without it the queue keeps its order, and
    leaves leave least recently used first."""
    plan_milliseconds: int = 100
    """Between two plans."""
    advisor_silence_seconds: float = 1.0
    """After so long without a plan the scheduler goes on without; after four times as long the advisor is restarted."""
    prefetch: bool = True
    """Whether adapters come in before a scheduling pass looks at the requests that wait for them."""
    swap_in_below: float = 0.7
    """Share of the pool in use below which nodes of high Eval come in from host memory unasked."""
    grace_seconds: float = 2.0
    """How long what came in ahead is kept for its first use."""
    retention_policy: str = "auto"
    """What leaves first when memory is short: a name in ``radix.policies.POLICIES``; stock: as ``--radix-eviction-policy`` says;
    auto: that, if it says other than lru, else the best that was measured (docs/eval.md)."""
    look_ahead: bool = True
    """Whether what waiting requests will use counts as used when they come."""
    eval_tau_seconds: float = 10.0
    """Unit of the time since the last use in Eval (ELORA Eq. 5)."""
    eval_visit_window_seconds: float = 300.0
    """After so long a visit counts 1/e in Eval's visit probabilities."""
    eval_lora_term: str = "protect"
    """What Eval's LoRA term does at swap-out: literal, protect or off (``radix.eval``)."""
    delay_loads: int = 0
    """Hold every copy of an adapter to the GPU back by this many loop steps, its rows full of NaN until then (for tests)."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(each.default, bool) and not isinstance(value, bool):
                raise ValueError(f"--lora-tree: {each.name} = {value!r}: give true or false")
        for field, least in (
            ("max_members", 1),
            ("max_rank", 1),
            ("max_resident_adapters", 1),
            ("patience_passes", 1),
            ("disk_readers", 0),
            ("cluster_adapters", 1),
            ("order_seed", 0),
            ("plan_milliseconds", 1),
            ("delay_loads", 0),
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"--lora-tree: {field} = {value!r}: give a whole number of at least {least}")
        for field in (
            "host_reserve_gb",
            "theta_seconds",
            "ttft_slo_seconds",
            "advisor_silence_seconds",
            "swap_in_below",
            "grace_seconds",
        ):
            value = getattr(self, field)
            optional = field in ("host_reserve_gb", "ttft_slo_seconds") and value is None
            if not optional and (not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0):
                raise ValueError(f"--lora-tree: {field} = {value!r}: give a number that is not negative")
        for field in ("eval_tau_seconds", "eval_visit_window_seconds"):
            value = getattr(self, field)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"--lora-tree: {field} = {value!r}: give a number above 0")
        for field, choices in (("retention_policy", RETENTION_POLICIES), ("eval_lora_term", LORA_TERMS)):
            if getattr(self, field) not in choices:
                raise ValueError(f"--lora-tree: {field} = {getattr(self, field)!r}: give one of {', '.join(choices)}")
        if self.queue_order not in QUEUE_ORDERS:
            raise ValueError(f"--lora-tree: queue_order = {self.queue_order!r}: give one of {', '.join(QUEUE_ORDERS)}")

    def to_json(self) -> str:
        """The settings as JSON text, as :func:`parse_settings` reads them."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def parse_settings(value: str | bool | dict[str, Any] | Settings | None) -> Settings | None:
    """Settings from what a user wrote after ``--lora-tree`` or passed as ``lora_tree=``.

    Args:
        value: None or False (off); True or "" (the defaults); a dict; JSON text; or the path of a JSON or YAML file.

    Returns:
        The settings, or None when the plugin is off.

    Raises:
        ValueError: unreadable file, malformed text, unknown name or value out of range; the message names which.
    """
    if value is None or value is False:
        return None
    if isinstance(value, Settings):
        return value
    if value is True or value == "":
        return Settings()
    if isinstance(value, dict):
        return _from_mapping(value, "lora_tree")
    text, source = str(value), "--lora-tree"
    if not text.lstrip().startswith("{"):
        source = f"--lora-tree file {text}"
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise ValueError(
                f"{source}: cannot be read ({error.strerror or error}); give JSON text or the path of a JSON or YAML file"
            ) from error
    try:
        mapping = yaml.safe_load(text)  # YAML reads JSON too
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: neither JSON nor YAML: {error}") from error
    return _from_mapping({} if mapping is None else mapping, source)


def _from_mapping(mapping: Any, source: str) -> Settings:
    if not isinstance(mapping, dict):
        raise ValueError(f"{source}: want a mapping of settings, got {type(mapping).__name__}")
    known = {field.name for field in dataclasses.fields(Settings)}
    unknown = sorted(str(name) for name in mapping if name not in known)
    if unknown:
        raise ValueError(f"{source}: unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return Settings(**mapping)


def publish_settings(settings: Settings) -> None:
    """Turn the plugin on in this process and in the children it starts from now on."""
    os.environ[ENVIRONMENT_VARIABLE] = settings.to_json()


def current_settings() -> Settings | None:
    """The settings in force in this process; None while the plugin is off."""
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    return None if text is None or text == "0" else _parse_environment(text)


@functools.lru_cache(maxsize=4)
def _parse_environment(text: str) -> Settings | None:
    return parse_settings("" if text == "1" else text)
