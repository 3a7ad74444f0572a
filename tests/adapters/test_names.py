"""Tensor names in all usual schemes give the same modules; every problem is listed in one error."""

import pytest

from sglang_lora_tree.adapters.base_shape import MODULE_PATHS
from sglang_lora_tree.adapters.error import AdapterError
from sglang_lora_tree.adapters.names import parse_names

PREFIX = "base_model.model.model."


def pair(module: str = "q_proj", layer: int | str = 0, prefix: str = PREFIX, infix: str = "") -> list[str]:
    path = MODULE_PATHS.get(module, module)
    return [f"{prefix}layers.{layer}.{path}.lora_{half}{infix}.weight" for half in "AB"]


def refusal(names: list[str], num_layers: int | None = None) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        parse_names(names, "the_file", num_layers)
    error = caught.value
    for part in "the_file", "tensor names", error.cause, error.cure:
        assert part in str(error)
    return error


@pytest.mark.parametrize("infix", ["", ".default", ".math", ".数学"])
@pytest.mark.parametrize(
    ("prefix", "root"), [(PREFIX, "model."), ("base_model.model.", ""), ("model.", "model."), ("", "")]
)
def test_schemes(prefix: str, root: str, infix: str) -> None:
    places = [(layer, module) for layer in (10, 2) for module in reversed(MODULE_PATHS)]
    names = [name for layer, module in places for name in pair(module, layer, prefix, infix)]
    parsed = parse_names(names, "", None)
    assert list(parsed.halves) == [(layer, module) for layer in (2, 10) for module in MODULE_PATHS]
    for (layer, module), halves in parsed.halves.items():
        assert [halves["A"], halves["B"]] == pair(module, layer, prefix, infix)
    assert parsed.module_path(2, "up_proj") == f"{root}layers.2.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("base_model.model.model.embed_tokens.weight", "embeddings"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "embeddings"),
        ("base_model.model.lm_head.lora_A.weight", "lm_head"),
        ("base_model.model.score.modules_to_save.weight", "modules_to_save"),
        (f"{PREFIX}layers.0.mlp.experts.3.up_proj.lora_A.weight", "mixture-of-experts"),
        (f"{PREFIX}layers.0.block_sparse_moe.gate.lora_A.weight", "mixture-of-experts"),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_diag.weight", "KaSA"),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_E", "AdaLoRA"),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_B.bias", "biases"),
        (f"{PREFIX}layers.0.self_attn.q_proj.bias", "biases"),
        (f"{PREFIX}layers.0.self_attn.qkv_proj.lora_A.weight", "no LoRA tensor"),
        (f"{PREFIX}layers.0.mlp.q_proj.lora_A.weight", "no LoRA tensor"),
        (f"{PREFIX}layers.00.self_attn.q_proj.lora_A.weight", "no LoRA tensor"),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_A.weight\n", "no LoRA tensor"),
        ("base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight", "no LoRA tensor"),
        ("", "no LoRA tensor"),
        ("重み", "no LoRA tensor"),
    ],
)
def test_foreign_name_is_listed_with_its_meaning(name: str, meaning: str) -> None:
    error = refusal([*pair(), name])
    assert meaning in error.cause and name in error.cause


def test_all_problems_come_in_one_error() -> None:
    lonely_a, lonely_b = pair("k_proj")[0], pair("v_proj")[1]
    foreign = [f"foreign.{i}" for i in range(10)]
    beyond = pair("q_proj", 3)
    other_scheme = pair("up_proj", prefix="model.")
    cause = refusal([*pair(), *foreign, lonely_a, lonely_b, *beyond, *other_scheme], num_layers=3).cause
    for name in [*foreign, lonely_a, lonely_b, *beyond]:
        assert name in cause
    assert "lora_A without its lora_B" in cause and "lora_B without its lora_A" in cause
    assert "has 3" in cause and "different schemes" in cause


def test_thousands_of_foreign_names_are_counted_not_printed() -> None:
    error = refusal([f"model.embed_tokens.{i}" for i in range(5000)])
    assert "and 4960 more" in error.cause and len(str(error)) < 3000


@pytest.mark.parametrize("others", [pair(infix=".other"), pair(prefix="model."), pair("k_proj", infix=".default")])
def test_two_schemes_in_one_file(others: list[str]) -> None:
    assert "different schemes" in refusal([*pair(), *others]).cause


def test_no_tensor_at_all() -> None:
    assert "no tensor at all" in refusal([]).cause


@pytest.mark.parametrize("layer", [4096, 10**8, 10**30])
def test_absurd_layer_numbers(layer: int) -> None:
    assert str(layer) in refusal(pair(layer=layer)).cause
