"""Llama-3-8B's shape with random weights, and adapters for it: what the GPU benchmarks serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_lora_tree.adapters.base_shape import MODULE_PATHS, BaseShape

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""As Hugging Face writes it."""


def write_config(folder: Path) -> Path:
    """Only a config: the server makes random weights (``--load-format dummy``)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_adapter(folder: Path, seed: int, rank: int = 16) -> Path:
    """A random adapter on all linear layers, without building the model."""
    generator = torch.Generator().manual_seed(seed)

    def make(d_in: int, d_out: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randn(rank, d_in, generator=generator) / d_in**0.5,
            torch.randn(d_out, rank, generator=generator) * 0.01,
        )

    return write_factors(folder, BaseShape.from_hf_config(CONFIG), rank, make)


def write_factors(
    folder: Path, base: BaseShape, rank: int, make: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
) -> Path:
    """A PEFT folder in bfloat16: `make(d_in, d_out)` gives A (rank, d_in) and B (d_out, rank) of each linear layer in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer in range(base.num_layers):
        for module, (d_in, d_out) in base.widths.items():
            key = f"base_model.model.model.layers.{layer}.{MODULE_PATHS[module]}"
            a, b = make(d_in, d_out)
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a.bfloat16().cpu(), b.bfloat16().cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(base.widths), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
