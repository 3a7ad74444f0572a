"""BaseShape holds the widths of the real Hugging Face models, and refuses models that are not Llama-like."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglang_lora_tree.adapters.base_shape import MODULE_PATHS, MODULES, BaseShape
from sglang_lora_tree.adapters.error import AdapterError

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Llama", {}),
        ("Llama", {"head_dim": 12}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": None, "head_dim": 12}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 12}),
    ],
)
def test_widths_are_those_of_the_real_model(family: str, extra: dict[str, Any], tmp_path: Path) -> None:
    architecture = f"{family}ForCausalLM"
    config = getattr(transformers, f"{family}Config")(architectures=[architecture], **{**SIZES, **extra})
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    config.save_pretrained(tmp_path)

    for shape in BaseShape.from_hf_config(config.to_dict()), BaseShape.from_folder(tmp_path):
        assert tuple(shape.widths) == MODULES
        layer = model.model.layers[0]
        for module, (d_in, d_out) in shape.widths.items():
            assert layer.get_submodule(MODULE_PATHS[module]).weight.shape == (d_out, d_in)
        assert shape.num_layers == len(model.model.layers) == 2
        assert shape.kv_width == layer.self_attn.k_proj.weight.shape[0]
        assert shape.vocab_size == 64


def llama(**changes: Any) -> dict[str, Any]:
    config = {"architectures": ["LlamaForCausalLM"], **SIZES, **changes}
    return {field: value for field, value in config.items() if value != "absent"}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (llama(architectures=["MixtralForCausalLM"]), "architectures"),
        (llama(architectures=["LlamaForCausalLM", "MixtralForCausalLM"]), "architectures"),
        (llama(architectures="absent"), "architectures"),
        ([], "architectures"),
        (llama(architectures=["MistralForCausalLM"], sliding_window=4096), "sliding_window"),
        (llama(architectures=["MistralForCausalLM"]), "sliding_window"),
        (llama(architectures=["Qwen2ForCausalLM"], use_sliding_window=True), "use_sliding_window"),
        (llama(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (llama(hidden_size="absent"), "hidden_size"),
        (llama(hidden_size="32"), "hidden_size"),
        (llama(hidden_size=33), "hidden_size"),
        (llama(num_hidden_layers=0), "num_hidden_layers"),
        (llama(vocab_size=True), "vocab_size"),
        (llama(architectures=["Qwen2ForCausalLM"], num_key_value_heads="absent"), "num_key_value_heads"),
        (llama(architectures=["Qwen3ForCausalLM"]), "head_dim"),
    ],
)
def test_refused_bases_name_file_and_field(config: Any, field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError) as caught:
        BaseShape.from_folder(tmp_path)
    assert caught.value.field == field
    assert str(tmp_path / "config.json") in str(caught.value) and caught.value.cure in str(caught.value)


def test_old_llama_without_kv_heads_is_plain_multi_head_attention() -> None:
    assert BaseShape.from_hf_config(llama(num_key_value_heads="absent")).num_kv_heads == 4


@pytest.mark.parametrize("content", [None, "", "{", "\x00"])
def test_unreadable_config(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(AdapterError, match=r"config\.json: the file: cannot be read"):
        BaseShape.from_folder(tmp_path)
