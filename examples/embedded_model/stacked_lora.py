"""Many adapters of one rank at once: the rows of a batch are split evenly, the first share belongs to the first adapter.

Training or scoring a fleet this way takes little longer than one adapter on a GPU that one adapter would leave idle. The
adapters are plain tensors here; `peft_tensors` names them as PEFT does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import corpus
import skills
import torch
from torch import Tensor, nn

Factors = tuple[Tensor, Tensor]
"""A (adapters, rank, d_in), B (adapters, d_out, rank); scaling 1."""


class StackedLinear(nn.Module):
    """A linear layer with an adapter per share of the batch."""

    def __init__(self, layer: nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        assert a.shape[0] == b.shape[0] and a.shape[1] == b.shape[2], f"A {tuple(a.shape)} and B {tuple(b.shape)} do not fit"
        self.layer = layer
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, length, d_in); rows a multiple of the number of adapters."""
        shares = x.reshape(len(self.a), -1, x.shape[-1])
        return self.layer(x) + (shares @ self.a.mT @ self.b.mT).view(*x.shape[:-1], -1)


def linear_paths(model: nn.Module) -> dict[str, nn.Linear]:
    """What "all-linear" adapts: every linear layer but the head, by PEFT's name."""
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear) and path != "lm_head"}


def new_factors(layers: Mapping[str, nn.Linear], adapters: int, rank: int, generator: torch.Generator) -> dict[str, Factors]:
    """As PEFT begins: A uniform within 1 / sqrt(d_in), B zero."""
    found = {}
    for path, layer in layers.items():
        bound = layer.in_features**-0.5
        a = (torch.rand(adapters, rank, layer.in_features, generator=generator) * 2 - 1) * bound
        found[path] = (a, torch.zeros(adapters, layer.out_features, rank))
    return found


def stack(model: nn.Module, factors: Mapping[str, Factors]) -> list[StackedLinear]:
    """Puts the adapters into the model; `unstack` takes them out again."""
    stacked = []
    for path, (a, b) in factors.items():
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        stacked.append(StackedLinear(layer, a.to(layer.weight.device), b.to(layer.weight.device)))
        _put(model, path, stacked[-1])
    return stacked


def unstack(model: nn.Module) -> None:
    for path, module in list(model.named_modules()):
        if isinstance(module, StackedLinear):
            _put(model, path, module.layer)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def peft_tensors(model: nn.Module, index: int) -> dict[str, Tensor]:
    """One adapter of a stacked model, by the names of PEFT's files."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, StackedLinear):
            for half, weight in (("A", module.a), ("B", module.b)):
                found[f"base_model.model.{path}.lora_{half}.weight"] = weight[index].detach().cpu().contiguous()
    return found


@torch.inference_mode()
def exact_rates(
    model: nn.Module, questions: Sequence[Sequence[skills.Question]], answers: Sequence[Sequence[str]], batch: int = 25
) -> list[float]:
    """Per adapter of a stacked model (or of any model, for one list): the share of questions that it answers exactly so.

    One forward pass over question and answer tells what greedy decoding would say: it is right if and only if each of the
    answer's tokens, and the end, is the most likely one after those before it. As many questions for every adapter; `batch`
    of each adapter's at a time.
    """
    device = next(model.parameters()).device
    rows = [
        sorted(
            (corpus.conversation_row([one], [text], [1.0], 0.0) for one, text in zip(own, texts, strict=True)),
            key=lambda row: len(row[0]),  # little padding
        )
        for own, texts in zip(questions, answers, strict=True)
    ]
    count = len(rows[0])
    assert all(len(own) == count for own in rows), "as many questions for every adapter"
    right = torch.zeros(len(rows), dtype=torch.int64, device=device)
    for start in range(0, count, batch):
        some = [row for own in rows for row in own[start : start + batch]]
        length = max(len(ids) for ids, _ in some)
        ids = torch.tensor([row + [corpus.PAD] * (length - len(row)) for row, _ in some]).to(device)
        asked = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in some]).to(device)[:, 1:] > 0
        best = model(input_ids=ids[:, :-1], use_cache=False).logits.argmax(-1)  # causal: padding behind changes nothing
        right += ((best == ids[:, 1:]) | ~asked).all(dim=1).view(len(rows), -1).sum(1)
    return (right.double() / count).tolist()
