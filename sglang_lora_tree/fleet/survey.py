"""What is kept of an adapter between looking at the fleet and writing it: spectra and small factors, never the tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from sglang_lora_tree.adapters.adapter import Adapter
from sglang_lora_tree.adapters.base_shape import BaseShape
from sglang_lora_tree.fleet.budget import Spectrum
from sglang_lora_tree.fleet.factorisation import Factors, Place


@dataclass(frozen=True, eq=False)
class Survey:
    """One adapter, looked at. spectra: one per module, in the order of `shapes`."""

    name: str
    folder: Path
    digest: str
    shapes: dict[Place, tuple[int, int, int]]
    """(rank, d_in, d_out) per module."""
    num_bytes: int
    spectra: list[Spectrum]

    @classmethod
    def of(cls, adapter: Adapter, folder: Path, factors: Mapping[Place, Factors]) -> Survey:
        shapes = {
            place: (module.rank, module.a.shape[1], module.b.shape[0]) for place, module in adapter.modules.items()
        }
        spectra = [spectrum(factors[place].sigma, *shape[1:]) for place, shape in shapes.items()]
        return cls(adapter.name, folder, adapter.digest, shapes, adapter.num_bytes, spectra)

    @property
    def ranks(self) -> list[int]:
        return [rank for rank, _, _ in self.shapes.values()]

    def slots(self, ranks: list[int], base: BaseShape) -> int:
        """Token slots that the adapter takes in the server's pool at these ranks, before rounding to pages."""
        rows = sum(
            rank * (-(-d_in // base.kv_width) + -(-d_out // base.kv_width))
            for rank, (_, d_in, d_out) in zip(ranks, self.shapes.values(), strict=True)
        )
        return -(-rows // (2 * base.num_layers))


def spectrum(sigma: torch.Tensor, d_in: int, d_out: int) -> Spectrum:
    """Energies of a module with these singular values."""
    return Spectrum(sigma.double().square().numpy(), d_in + d_out)


def write_survey(survey: Survey, factors: Mapping[Place, Factors], file: Path) -> None:
    """Whole or not at all."""
    tensors = {}
    for (layer, module), found in factors.items():
        for part in "sigma", "of_a", "of_b":
            tensors[f"{layer}.{module}.{part}"] = getattr(found, part).contiguous()
    shapes = [[layer, module, *shape] for (layer, module), shape in survey.shapes.items()]
    head = {"name": survey.name, "digest": survey.digest, "num_bytes": survey.num_bytes, "shapes": shapes}
    partial = file.with_suffix(".partial")
    safetensors.torch.save_file(tensors, partial, metadata={"survey": json.dumps(head)})
    os.replace(partial, file)


def read_survey(file: Path, folder: Path) -> Survey:
    """What `write_survey` wrote, without the factors. folder: of the adapter."""
    with safetensors.safe_open(file, framework="pt") as opened:
        head = json.loads(opened.metadata()["survey"])
        shapes = {(layer, module): (rank, d_in, d_out) for layer, module, rank, d_in, d_out in head["shapes"]}
        spectra = [
            spectrum(opened.get_tensor(f"{layer}.{module}.sigma"), d_in, d_out)
            for (layer, module), (_, d_in, d_out) in shapes.items()
        ]
    return Survey(head["name"], folder, head["digest"], shapes, head["num_bytes"], spectra)


def read_factors(file: Path) -> dict[Place, Factors]:
    """The factors that `write_survey` wrote."""
    parts: dict[Place, dict[str, torch.Tensor]] = {}
    for key, tensor in safetensors.torch.load_file(file).items():
        layer, module, part = key.split(".")
        parts.setdefault((int(layer), module), {})[part] = tensor
    return {place: Factors(**found) for place, found in parts.items()}
