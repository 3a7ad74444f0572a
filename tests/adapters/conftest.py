"""Adapters made by PEFT itself, on a tiny random Llama whose widths all differ."""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from sglang_lora_tree.adapters.base_shape import BaseShape

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def base_config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=32,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_hidden_layers=3,
        vocab_size=64,
    )


@pytest.fixture(scope="session")
def base(base_config: transformers.LlamaConfig) -> BaseShape:
    return BaseShape.from_hf_config(base_config.to_dict())


@pytest.fixture(scope="session")
def base_folder(base_config: transformers.LlamaConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    base_config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_model(base_config: transformers.LlamaConfig) -> Callable[[], transformers.LlamaForCausalLM]:
    def make() -> transformers.LlamaForCausalLM:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(copy.deepcopy(base_config)).eval()  # PEFT may write into it

    return make


@pytest.fixture(scope="session")
def save_adapter(
    make_model: Callable[[], transformers.LlamaForCausalLM],
) -> Callable[..., Path]:
    """save(folder, safe=True, dtype=float32, **LoraConfig fields): a PEFT folder with random A and B."""

    def save(folder: Path, safe: bool = True, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
        fields = {"target_modules": ALL, "r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **fields}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(make_model(), peft.LoraConfig(**fields))
            generator = torch.Generator().manual_seed(1)
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
            model.save_pretrained(folder, safe_serialization=safe)
        return folder

    return save


@pytest.fixture(scope="session")
def plain_folder(save_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain rank-4 adapter on all modules; tests must not write into it."""
    return save_adapter(tmp_path_factory.mktemp("plain") / "plain")


@pytest.fixture
def plain_config(plain_folder: Path) -> dict[str, Any]:
    """A fresh copy of the plain adapter's adapter_config.json."""
    config: dict[str, Any] = json.loads((plain_folder / "adapter_config.json").read_text())
    return config
