"""The retained-rank contract: a compressed adapter as a PEFT folder that any tool loads, and that says its ranks.

Scalings go into the factors, so alpha is the rank everywhere and s = alpha / r = 1: with rank_pattern and alpha_pattern for
tools that read them (PEFT, this package), and just as well for those that take one alpha / r for all modules (vLLM, stock
SGLang). Directions are ordered: the first k rows of A and columns of B are the best k. The header of the tensor file has
each module's effective rank under `effective_ranks`, also where the tensors are padded to one rank, which stock SGLang
needs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from sglang_lora_tree.adapters.adapter import Adapter
from sglang_lora_tree.adapters.config import CONFIG_NAME
from sglang_lora_tree.adapters.names import TensorNames, parse_names
from sglang_lora_tree.adapters.tensors import BIN_NAME, SAFETENSORS_NAME, find_tensor_file, list_names, read_tensors

EFFECTIVE_RANKS = "effective_ranks"
NOT_COPIED = {CONFIG_NAME, SAFETENSORS_NAME, BIN_NAME, "README.md"}
LARGEST_COPIED = 64 << 20
"""Bytes of a file beside the adapter (a tokenizer) that are copied; larger ones are training state."""


def write_adapter(source: Path, target: Path, adapter: Adapter, *, padded: bool = False) -> None:
    """Writes a compressed adapter of scaling 1 into the new folder `target`.

    source: the folder of the original, for its config, tensor names and small files. padded: all modules to the largest
    rank, with zeros, instead of a rank per module. The folder appears whole or not at all. Raises FileExistsError.
    """
    if target.exists():
        raise FileExistsError(f"{target} is there already: choose another folder or delete it")
    assert all(module.scaling == 1 for module in adapter.modules.values()), "scalings must be inside the factors"
    names = _names(source)
    paths = {place: names.module_path(*place) for place in adapter.modules}
    ranks = {paths[place]: module.rank for place, module in adapter.modules.items()}
    largest = max(ranks.values())
    tensors = {}
    for place, module in adapter.modules.items():
        for half, tensor in (("A", module.a), ("B", module.b)):
            tensors[f"base_model.model.{paths[place]}.lora_{half}.weight"] = (
                _pad(tensor, largest, 0 if half == "A" else 1) if padded else tensor.contiguous()
            )
    config = _config(source, ranks, largest, padded)

    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in NOT_COPIED and _is_small_text(file):
            shutil.copyfile(file, partial / file.name)
    metadata = {"format": "pt", EFFECTIVE_RANKS: json.dumps(ranks)}
    safetensors.torch.save_file(tensors, partial / SAFETENSORS_NAME, metadata=metadata)
    (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.rename(partial, target)


def read_effective_ranks(folder: Path) -> dict[str, int] | None:
    """Module path -> effective rank, from the tensor file's header; None for an adapter that was not compressed."""
    file = folder / SAFETENSORS_NAME
    if not file.is_file():
        return None
    with safetensors.safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(EFFECTIVE_RANKS)
    return None if text is None else {path: int(rank) for path, rank in json.loads(text).items()}


def _names(source: Path) -> TensorNames:
    file = find_tensor_file(source)
    return parse_names(list_names(file) or read_tensors(file), file, None)


def _config(source: Path, ranks: Mapping[str, int], largest: int, padded: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / CONFIG_NAME).read_text(encoding="utf-8"))
    others = {} if padded else {path: rank for path, rank in ranks.items() if rank != largest}
    return config | {
        "r": largest,
        "lora_alpha": largest,
        "use_rslora": False,
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "inference_mode": True,
        # How the original was initialised says nothing of these factors, and some ways make tools ask for more.
        "init_lora_weights": True,
    }


def _pad(tensor: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = rank
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded


def _is_small_text(file: Path) -> bool:
    return file.suffix in (".json", ".jinja", ".txt", ".model") and file.stat().st_size <= LARGEST_COPIED
