"""adapter_config.json: which modules PEFT would adapt, with which rank and scaling.

Every field of PEFT's LoraConfig is in exactly one of the three tables below (a test fails when PEFT gains another), and
a field in none of them is refused as soon as it is set. Matching follows PEFT 0.21: `check_target_module_exists` and
`match_target_against_key` for targets, `get_pattern_key` for rank_pattern and alpha_pattern, `LoraLayer.update_layer`
for the scaling.
"""

import json
import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_lora_tree.adapters.base_shape import MODULES
from sglang_lora_tree.adapters.error import AdapterError

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
MATCHING_SECONDS = 3
"""Processor time that an adapter's regular expressions may take in all; sane ones take milliseconds."""

# Fields that decide the result and are read below.
HONOURED = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"),
)

# Fields that cannot change what a trained adapter computes on a Llama-like base, whatever their value.
WITHOUT_EFFECT = {
    "task_type": "a label; a head of its own would show in modules_to_save or in the tensors",
    "auto_mapping": "a label",
    "peft_version": "a label",
    "base_model_name_or_path": "a label; the tensors' shapes are what is checked",
    "revision": "a label",
    "inference_mode": "says whether to train",
    "lora_dropout": "training only",
    "merge_weights": "an old field: says when PEFT adds the adapter to the base",
    "fan_in_fan_out": "PEFT overrules it for linear layers, and it never changes A and B",
    "megatron_core": "read only with megatron_config, which is refused",
    "loftq_config": "read only with the init `loftq`, which is refused",
    "eva_config": "training only: how A is initialised",
    "corda_config": "read only with the init `corda`, which is refused",
    "lora_ga_config": "read only with the init `lora_ga`, which is refused",
    "qalora_group_size": "read only with use_qalora, which is refused",
    "runtime_config": "PEFT ignores it in a file",
    "ensure_weight_tying": "concerns embeddings and lm_head, which are refused",
}

_PLAIN = "train the adapter as plain LoRA"
# Fields that must be unset: what they mean when set, and what to do.
REFUSED = {
    "use_dora": ("DoRA also rescales the base weights", f"{_PLAIN} (use_dora=False), or merge it into the base model"),
    "lora_bias": ("lora_B has a bias", f"{_PLAIN} with lora_bias=False"),
    "modules_to_save": ("whole modules were trained beside the adapter", f"{_PLAIN} without modules_to_save"),
    "trainable_token_indices": ("token embeddings were trained", f"{_PLAIN} without trainable_token_indices"),
    "target_parameters": ("bare parameters (as of MoE experts) are adapted", f"{_PLAIN} on target_modules only"),
    "layer_replication": ("the base model's layers are repeated", f"{_PLAIN} without layer_replication"),
    "megatron_config": ("the adapter was made for Megatron's parallel layers", "export it for the Hugging Face model"),
    "alora_invocation_tokens": ("aLoRA acts on part of the tokens only", f"{_PLAIN} without alora_invocation_tokens"),
    "use_bdlora": ("BD-LoRA's A or B is block-diagonal", f"{_PLAIN} without use_bdlora"),
    "use_qalora": ("QALoRA pools the inputs of A", f"{_PLAIN} (use_qalora=False)"),
    "arrow_config": ("Arrow routes between several adapters", "load the adapters one by one and mix them by request"),
    "kasa_config": ("KaSA truncates the base weights and puts a diagonal between B and A", f"{_PLAIN} (no KaSA)"),
    "velora_config": (
        "VeLoRA's file holds training state beside A and B",
        "set velora_config to null and drop the lora_velora tensors: what remains is plain LoRA",
    ),
    "monteclora_config": (
        "MonteCLoRA's file holds a sampler beside A and B",
        "set monteclora_config to null and drop the lora_monteclora tensors: what remains is plain LoRA",
    ),
}

# Ways to initialise that leave the base weights alone; others move part of them into A and B, or are unknown.
BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal", "mica")
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says about the result. `path` below is a module's path in the base model."""

    file: str
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...]
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]  # empty: all layers
    layer_index: tuple[re.Pattern[str], ...]  # first match's group `idx` is the layer

    @property
    def target_fields(self) -> str:
        """The fields that together decide which modules are adapted."""
        fields = ["target_modules"]
        fields += ["exclude_modules"] * bool(self.exclude_modules)
        fields += ["layers_to_transform"] * bool(self.layers_to_transform)
        return ", ".join(fields)

    @contextmanager
    def limited_matching(self) -> Iterator[None]:
        """Inside, a regular expression that backtracks without end is an AdapterError.

        Python's matcher looks for signals, which only a main thread gets: adapters are read in that of a child process, of
        the console command, or of a starting scheduler. In any other thread there is no limit.
        """
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGVTALRM"):
            yield
            return

        def give_up(*_: object) -> None:
            raise AdapterError(
                self.file,
                "target_modules, exclude_modules, rank_pattern, alpha_pattern, layers_pattern",
                f"matching their regular expressions takes longer than {MATCHING_SECONDS} s",
                "write them without repetitions inside repetitions, or list the modules",
            )

        before = signal.signal(signal.SIGVTALRM, give_up)
        signal.setitimer(signal.ITIMER_VIRTUAL, MATCHING_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)

    def targets(self, path: str) -> bool:
        """Whether PEFT would put an adapter on the linear module `path`."""
        if _names(self.exclude_modules, path):
            return False
        if self.target_modules == ALL_LINEAR:
            return path.rpartition(".")[2] in MODULES
        if not _names(self.target_modules, path):
            return False
        # PEFT: a module that the list names in full is taken whatever layers_to_transform says.
        if not self.layers_to_transform or path in self.target_modules:
            return True
        match = next(filter(None, (pattern.match(path) for pattern in self.layer_index)), None)
        return match is not None and int(match["idx"]) in self.layers_to_transform

    def rank(self, path: str) -> int:
        """The rank that the config gives the module."""
        return next((rank for pattern, rank in self.rank_pattern if pattern.match(path)), self.r)

    def scaling(self, path: str) -> float:
        """s in dW = s B A: alpha / r, or alpha / sqrt(r) with use_rslora (Kalajdzievski 2023, arXiv 2312.03732)."""
        rank = self.rank(path)
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if pattern.match(path)), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _names(targets: str | tuple[str, ...], path: str) -> bool:
    """PEFT's matching: a string is a regular expression for the whole path, a list holds paths or their last parts."""
    if isinstance(targets, str):
        return bool(targets) and re.fullmatch(targets, path) is not None
    return path in targets or any(path.endswith(f".{target}") for target in targets)


def read_config(folder: Path) -> AdapterConfig:
    """Reads FOLDER/adapter_config.json. Raises AdapterError if it is missing, not JSON, or cannot be served exactly."""
    file = folder / CONFIG_NAME
    cure = "name a folder as PEFT's save_pretrained writes it"
    if not os.path.isfile(file):  # a pipe would block for ever
        raise AdapterError(file, "the file", "is missing", cure)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise AdapterError(file, "the file", f"cannot be read ({error})", cure) from error
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(file, "the file", f"is not JSON ({error})", cure) from error
    return parse_config(config, str(file))


def parse_config(config: object, file: str) -> AdapterConfig:
    """From the parsed JSON. file: named in errors. Raises AdapterError for every field that cannot be honoured."""
    if not isinstance(config, dict):
        raise AdapterError(file, "the file", f"holds a {type(config).__name__}, not an object", "use PEFT's own file")
    if config.get("peft_type") != "LORA":
        cause = f"is {_short(config.get('peft_type'))}, not 'LORA'"
        raise AdapterError(file, "peft_type", cause, "train a LoRA adapter with PEFT, or convert this one to LoRA")
    _refuse_set_fields(config, file)
    _refuse_init(config.get("init_lora_weights", True), file)
    bias = config.get("bias", "none")
    if bias != "none":
        cause = f"biases of the base were trained (bias = {_short(bias)}), which is not served"
        raise AdapterError(file, "bias", cause, f'{_PLAIN} with bias="none"')
    use_rslora = config.get("use_rslora") or False
    if not isinstance(use_rslora, bool):
        raise _bad_value(file, "use_rslora", use_rslora, "true or false")

    parsed = AdapterConfig(
        file=file,
        r=_rank(config.get("r", 8), "r", file),
        lora_alpha=_alpha(config.get("lora_alpha", 8), "lora_alpha", file),
        use_rslora=use_rslora,
        rank_pattern=tuple(
            (pattern, _rank(value, f"rank_pattern[{key!r}]", file))
            for key, pattern, value in _patterns(config, "rank_pattern", file)
        ),
        alpha_pattern=tuple(
            (pattern, _alpha(value, f"alpha_pattern[{key!r}]", file))
            for key, pattern, value in _patterns(config, "alpha_pattern", file)
        ),
        target_modules=_targets(config, "target_modules", file),
        exclude_modules=_targets(config, "exclude_modules", file),
        layers_to_transform=_layers(config, file),
        layer_index=_layer_index(config, file),
    )
    for field in "layers_to_transform", "layers_pattern":
        if isinstance(parsed.target_modules, str) and config.get(field) not in (None, [], ""):
            cause = "cannot be combined with a target_modules that is a string (PEFT refuses it too)"
            raise AdapterError(file, field, cause, "list the modules in target_modules")
    if parsed.target_modules == ():
        cause = "is missing or empty, so it is left to PEFT's version which modules the adapter has"
        raise AdapterError(file, "target_modules", cause, "list the modules that the file holds tensors for")
    return parsed


def _refuse_set_fields(config: dict[str, Any], file: str) -> None:
    for field, (meaning, cure) in REFUSED.items():
        # An empty object counts as set: PEFT takes it for the method's defaults.
        if not _is_unset(config.get(field)) or config.get(field) == {}:
            raise AdapterError(file, field, f"{meaning}, which is not served", cure)
    for field, value in config.items():
        if field not in HONOURED and field not in WITHOUT_EFFECT and field not in REFUSED and not _is_unset(value):
            cause = f"is unknown here and set to {_short(value)}, so what the adapter computes is unknown"
            raise AdapterError(file, str(field), cause, "drop the field if it does not change the result, or update us")


def _is_unset(value: object) -> bool:
    return value is None or value is False or value == "" or value == [] or value == {} or value == ()


def _refuse_init(init: object, file: str) -> None:
    if init is None or isinstance(init, bool) or init in BASE_KEEPING_INITS:
        return
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        cause = f"{init!r} moved part of the base weights into the adapter: it fits only that changed base"
        cure = "convert it to plain LoRA with save_pretrained(path_initial_model_for_weight_conversion=...)"
        if init.lower().startswith("loftq"):  # PEFT cannot convert it: the base was quantised as well
            cure = f"{_PLAIN} (init_lora_weights=True)"
    else:
        cause = f"the init {_short(init)} is unknown: it may have changed the base weights"
        cure = f"{_PLAIN} (init_lora_weights=True)"
    raise AdapterError(file, "init_lora_weights", cause, cure)


def _rank(value: object, field: str, file: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise _bad_value(file, field, value, "a positive integer")


def _alpha(value: object, field: str, file: str) -> float:
    # Zero and negative are fine: they are what PEFT computes with. Beyond float32 the kernels could not follow.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e38:
        return value
    raise _bad_value(file, field, value, "a finite number")


def _patterns(config: dict[str, Any], field: str, file: str) -> list[tuple[str, re.Pattern[str], object]]:
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise _bad_value(file, field, patterns, "an object: pattern -> number")
    # The file's order matters: the first pattern that matches wins.
    return [(key, _regex(rf"(.*\.)?({key})$", field, file), value) for key, value in patterns.items()]


def _targets(config: dict[str, Any], field: str, file: str) -> str | tuple[str, ...]:
    value = config.get(field)
    if not value:
        return ()
    if isinstance(value, str):
        if field == "target_modules" and value.lower() == ALL_LINEAR:
            return ALL_LINEAR
        _regex(value, field, file)
        return value
    if isinstance(value, list | tuple | set) and all(isinstance(target, str) for target in value):
        return tuple(value)
    raise _bad_value(file, field, value, "a list of module names, or a regular expression")


def _layers(config: dict[str, Any], file: str) -> tuple[int, ...]:
    value = config.get("layers_to_transform")
    layers = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        return tuple(layers)
    raise _bad_value(file, "layers_to_transform", value, "a layer number or a list of them")


def _layer_index(config: dict[str, Any], file: str) -> tuple[re.Pattern[str], ...]:
    patterns = config.get("layers_pattern")
    if not patterns:
        return (re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\."),)
    if config.get("layers_to_transform") is None:
        cause = "is set without layers_to_transform (PEFT refuses it too)"
        raise AdapterError(file, "layers_pattern", cause, "set layers_to_transform, or drop layers_pattern")
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, list | tuple):
        raise _bad_value(file, "layers_pattern", patterns, "a string or a list of strings")
    return tuple(_regex(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", "layers_pattern", file) for pattern in patterns)


def _regex(pattern: str, field: str, file: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        cause = f"{_short(pattern)} is no regular expression ({error})"
        raise AdapterError(file, field, cause, "use Python's regular expressions") from error


def _bad_value(file: str, field: str, value: object, wanted: str) -> AdapterError:
    return AdapterError(file, field, f"must be {wanted}, is {_short(value)}", "restore the file that PEFT wrote")


def _short(value: object) -> str:
    """repr, of a bounded length: a value may be a page long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a huge number"
    return text if len(text) <= 200 else text[:200] + "..."
