"""adapter_config.json: every field of PEFT's LoraConfig is decided; targets, ranks and scalings are PEFT's own."""

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from sglang_lora_tree.adapters.base_shape import MODULE_PATHS
from sglang_lora_tree.adapters.config import HONOURED, REFUSED, WITHOUT_EFFECT, parse_config, read_config
from sglang_lora_tree.adapters.error import AdapterError

PATHS = [f"{root}layers.{i}.{path}" for root in ("model.", "") for i in (0, 1, 2, 11) for path in MODULE_PATHS.values()]


def refusal(config: Any) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        parse_config(config, "some/adapter_config.json")
    error = caught.value
    for part in "some/adapter_config.json", error.field, error.cause, error.cure:
        assert part and part in str(error)
    return error


def test_every_field_of_peft_is_decided_exactly_once() -> None:
    decided = [*HONOURED, *WITHOUT_EFFECT, *REFUSED]
    assert len(decided) == len(set(decided))
    undecided = {field.name for field in dataclasses.fields(peft.LoraConfig)} - set(decided)
    assert not undecided, f"PEFT has new fields; decide each in config.py: {undecided}"


def test_the_defaults_of_peft_are_accepted() -> None:
    parse_config(json.loads(json.dumps({**peft.LoraConfig().to_dict(), "target_modules": ["q_proj"]})), "")


UNSET: list[Any] = [None, False, [], {}, ""]
SET_VALUES: dict[str, Any] = {
    "use_dora": True,
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "layer_replication": [[0, 2], [1, 3]],
    "megatron_config": {"tensor_model_parallel_size": 1},
    "alora_invocation_tokens": [5, 6],
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1e-4},
    "velora_config": {"num_groups": 64},
    "monteclora_config": {"num_samples": 8},
}


@pytest.mark.parametrize("field", REFUSED)
def test_refused_field(field: str, plain_config: dict[str, Any]) -> None:
    assert refusal({**plain_config, field: SET_VALUES[field]}).field == field
    if isinstance(SET_VALUES[field], dict):  # PEFT reads an empty object as the method with its defaults
        assert refusal({**plain_config, field: {}}).field == field
    for unset in UNSET[:3]:
        parse_config({**plain_config, field: unset}, "")


@pytest.mark.parametrize("value", [True, 1, 0, "x", [0], {"a": None}])
def test_unknown_field_that_is_set(value: object, plain_config: dict[str, Any]) -> None:
    assert refusal({**plain_config, "use_future_lora": value}).field == "use_future_lora"


@pytest.mark.parametrize("value", UNSET)
def test_unknown_field_that_is_unset(value: Any, plain_config: dict[str, Any]) -> None:
    assert parse_config({**plain_config, "use_future_lora": value}, "") == parse_config(plain_config, "")


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "lora_ga", "loftq"])
def test_init_that_changes_the_base(init: str, plain_config: dict[str, Any]) -> None:
    error = refusal({**plain_config, "init_lora_weights": init})
    assert error.field == "init_lora_weights" and "base weights" in error.cause
    assert ("path_initial_model_for_weight_conversion" in error.cure) == (init != "loftq")


@pytest.mark.parametrize("init", ["no_such_init", 3, ["eva"], {}])
def test_unknown_init(init: object, plain_config: dict[str, Any]) -> None:
    assert "unknown" in refusal({**plain_config, "init_lora_weights": init}).cause


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_init_that_keeps_the_base(init: object, plain_config: dict[str, Any]) -> None:
    parse_config({**plain_config, "init_lora_weights": init}, "")


@pytest.mark.parametrize("peft_type", [*sorted({member.value for member in peft.PeftType} - {"LORA"}), None, 3, "lora"])
def test_other_peft_types(peft_type: object, plain_config: dict[str, Any]) -> None:
    assert refusal({**plain_config, "peft_type": peft_type}).field == "peft_type"


BAD_VALUES: dict[str, list[Any]] = {
    "r": [0, -1, 4.0, "4", True, None],
    "lora_alpha": ["16", None, True, math.nan, math.inf, 10**400, []],
    "rank_pattern": [["q_proj"], "q_proj", {"(": 2}],
    "rank_pattern['q_proj']": [{"q_proj": 0}, {"q_proj": "2"}, {"q_proj": None}],
    "alpha_pattern": [{"*": 2}],
    "alpha_pattern['q_proj']": [{"q_proj": math.nan}],
    "target_modules": [None, [], "", "(", 3, ["q_proj", 3], {"q_proj": 1}],
    "exclude_modules": ["[", 3, [None]],
    "layers_to_transform": ["1", [1, "2"], True, 1.0],
    "layers_pattern": ["layers"],
    "use_rslora": ["yes"],
    "bias": ["all", "lora_only", None],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, bad in BAD_VALUES.items() for value in bad])
def test_bad_value(field: str, value: object, plain_config: dict[str, Any]) -> None:
    assert refusal({**plain_config, field.partition("[")[0]: value}).field == field


@pytest.mark.parametrize(("field", "value"), [("layers_to_transform", 0), ("layers_pattern", ["layers"])])
def test_layers_with_a_regular_expression(field: str, value: object, plain_config: dict[str, Any]) -> None:
    config = {**plain_config, "target_modules": ".*q_proj", "layers_to_transform": 1, field: value}
    assert refusal(config).field == "layers_to_transform"


@pytest.mark.parametrize("config", [[], "LORA", None, 3])
def test_config_that_is_no_object(config: object) -> None:
    refusal(config)


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe", b"[1]", b"[" * 100_000, b'{"r": 1' + b"0" * 5000])
def test_unreadable_file(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterError) as caught:
        read_config(tmp_path)
    assert caught.value.file == str(tmp_path / "adapter_config.json")
    assert len(str(caught.value)) < 1000


TARGETS = st.one_of(
    st.lists(
        st.sampled_from(["q_proj", "proj", "self_attn.k_proj", "mlp", *MODULE_PATHS, *PATHS[::5], "1.mlp.up_proj"]),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    st.sampled_from(
        [r".*\.q_proj", r"model\.layers\.[01]\..*", r".*(up|down)_proj", "q_proj", "l.*", "model", r".*\.1\..*"]
    ),
)
PATTERNS = st.dictionaries(
    st.sampled_from([*MODULE_PATHS, *PATHS[::5], "q_proj|v_proj", r"layers\.1\..*", "^model.*", ".*proj", "_proj"]),
    st.integers(1, 64),
    max_size=4,
)
LAYERS = st.one_of(st.none(), st.integers(0, 12), st.lists(st.integers(0, 12), max_size=3))
LAYERS_PATTERN = st.sampled_from([None, "layers", ["h", "layers"], "h", "", [], "model.layers", "l.*s"])


@settings(max_examples=300, deadline=None)
@given(
    targets=TARGETS,
    exclude=st.one_of(st.none(), TARGETS),
    layers=LAYERS,
    layers_pattern=LAYERS_PATTERN,
    rank_pattern=PATTERNS,
    alpha_pattern=PATTERNS,
    rslora=st.booleans(),
)
def test_targets_ranks_and_scalings_are_those_of_peft(
    targets: list[str] | str,
    exclude: list[str] | str | None,
    layers: int | list[int] | None,
    layers_pattern: str | list[str] | None,
    rank_pattern: dict[str, int],
    alpha_pattern: dict[str, int],
    rslora: bool,
) -> None:
    fields: dict[str, Any] = {"target_modules": targets, "exclude_modules": exclude, "use_rslora": rslora, "r": 8}
    fields |= {"rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern, "lora_alpha": 12}
    if not isinstance(targets, str):
        fields["layers_to_transform"] = layers
        fields["layers_pattern"] = layers_pattern if layers is not None else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.LoraConfig(**fields)
    ours = parse_config({"peft_type": "LORA", **fields}, "")
    for path in PATHS:
        assert ours.targets(path) == bool(check_target_module_exists(theirs, path)), path
        rank = rank_pattern.get(get_pattern_key(list(rank_pattern), path), 8)
        alpha = alpha_pattern.get(get_pattern_key(list(alpha_pattern), path), 12)
        assert ours.rank(path) == rank
        assert ours.scaling(path) == (alpha / math.sqrt(rank) if rslora else alpha / rank)
