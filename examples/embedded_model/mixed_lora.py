"""All adapters of a PEFT model at once, each row of a batch with its own mix: dW = sum_i w_i s_i B_i A_i per row.

PEFT runs one adapter (or one per row) at a time; training adapters so that their mixes mean something needs mixes inside
the batch. The adapters' weights stay where PEFT has them, so PEFT saves and loads them as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


class MixedLinear(nn.Module):
    """A linear layer with its adapters. `shares` (batch, adapters) is set before each forward pass."""

    def __init__(self, layer: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        assert isinstance(layer, LoraLayer)
        self.layer = layer
        self.members = [index for index, name in enumerate(names) if name in layer.lora_A]
        self.names = [names[index] for index in self.members]
        ranks = torch.tensor([layer.lora_A[name].out_features for name in self.names])
        self.columns = torch.tensor(self.members).repeat_interleave(ranks)  # (total rank,): whose column it is
        self.scalings = torch.tensor([layer.scaling[name] for name in self.names]).repeat_interleave(ranks)
        self.shares: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.shares is not None, "call set_mixes first"
        base = self.layer.get_base_layer()(x)
        a = torch.cat([self.layer.lora_A[name].weight for name in self.names])
        b = torch.cat([self.layer.lora_B[name].weight for name in self.names], dim=1)
        weights = self.shares[:, self.columns.to(x.device)] * self.scalings.to(x.device)
        return base + (x @ a.mT * weights[:, None]) @ b.mT


def mix_rows(model: PeftModel, names: Sequence[str]) -> list[MixedLinear]:
    """Replaces every layer that has adapters by a MixedLinear of it (for training: PEFT cannot save such a model)."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    mixed = []
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        mixed.append(MixedLinear(layer, names))
        setattr(model.get_submodule(parent), name, mixed[-1])
    return mixed


def unmix_rows(model: PeftModel) -> None:
    """Puts PEFT's own layers back."""
    for path, module in list(model.named_modules()):
        if isinstance(module, MixedLinear):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.layer)


def set_mixes(layers: Sequence[MixedLinear], shares: Tensor) -> None:
    """`shares` (batch, adapters): the weight of each adapter in each row of the next batch."""
    for layer in layers:
        layer.shares = shares
