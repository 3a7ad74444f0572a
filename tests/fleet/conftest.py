"""Adapters with known spectra, in memory and as PEFT folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang_lora_tree.adapters.base_shape import MODULE_PATHS, BaseShape

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "vocab_size": 64,
}
BASE = BaseShape.from_hf_config(HF_CONFIG)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(name, rank=8, seed=0, dtype=float32, decay=0.5, **config): a PEFT folder on all modules of BASE."""

    def write(
        name: str, rank: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32, decay: float = 0.5, **config: Any
    ) -> Path:
        random = torch.Generator().manual_seed(seed)
        folder = tmp_path / "originals" / name
        folder.mkdir(parents=True)
        tensors = {}
        for layer in range(BASE.num_layers):
            for module, (d_in, d_out) in BASE.widths.items():
                path = f"base_model.model.model.layers.{layer}.{MODULE_PATHS[module]}"
                a = torch.randn(rank, d_in, generator=random)
                b = torch.randn(d_out, rank, generator=random) * decay ** torch.arange(rank)
                tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"] = a.to(dtype), b.to(dtype)
        safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
        fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 12}
        fields |= {"target_modules": sorted(BASE.widths), **config}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        return folder

    return write


def deltas(adapter: Any) -> Mapping[tuple[int, str], torch.Tensor]:
    """Place -> s B A in float64."""
    return {place: module.scaling * module.b.double() @ module.a.double() for place, module in adapter.modules.items()}
