"""A validated adapter: dW = scaling * B @ A for each of its modules."""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_lora_tree.adapters.base_shape import MODULES, BaseShape
from sglang_lora_tree.adapters.config import CONFIG_NAME, AdapterConfig, parse_config, read_config
from sglang_lora_tree.adapters.error import AdapterError, listing
from sglang_lora_tree.adapters.names import TensorNames, parse_names
from sglang_lora_tree.adapters.tensors import find_tensor_file, list_names, own_tensors, read_tensors

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ADDED_TOKENS_NAME = "added_tokens.json"


@dataclass(frozen=True, eq=False)
class AdapterModule:
    """One adapted module. a: (rank, d_in), b: (d_out, rank), contiguous CPU tensors in the file's dtype."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that can be served exactly.

    digest: 64 hex digits (SHA-256) of the tensors, without padding, and scalings; not of the name, path, format or prefix.
    modules: (layer, module) -> AdapterModule, by layer, then in the order of MODULES.
    """

    name: str
    digest: str
    modules: dict[tuple[int, str], AdapterModule]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The different effective ranks, ascending."""
        return tuple(sorted({module.rank for module in self.modules.values()}))

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The different dtypes of the tensors; nearly always one."""
        return tuple(sorted({t.dtype for module in self.modules.values() for t in (module.a, module.b)}, key=str))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the file's dtype."""
        return sum(module.a.nbytes + module.b.nbytes for module in self.modules.values())


def load_adapter(folder: str | Path, base: BaseShape | None = None, name: str | None = None) -> Adapter:
    """Loads a PEFT LoRA folder.

    base: shape of the base model; without it widths and the number of layers are not checked. name: default, the
    folder's name. Reads the disk; raises AdapterError for whatever cannot be served exactly.
    """
    if not os.path.isdir(folder):
        cure = "name a local PEFT folder (download it first)"
        raise AdapterError(folder or "''", "the folder", "is no folder", cure)
    folder = Path(folder)
    config = read_config(folder)
    file = find_tensor_file(folder)
    if base is not None:
        _refuse_added_tokens(_read_added_tokens(folder / ADDED_TOKENS_NAME), base, folder / ADDED_TOKENS_NAME)
    header = list_names(file)
    if header is not None:
        parse_names(header, file, base.num_layers if base else None)
    return _build(read_tensors(file), config, base, name or Path(os.path.abspath(folder)).name, str(file))


def adapter_from_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: dict[str, Any],
    base: BaseShape | None = None,
    name: str = "",
    added_tokens: dict[str, int] | None = None,
) -> Adapter:
    """From tensors by PEFT's names and the content of adapter_config.json.

    The adapter takes the tensors over where they are already contiguous CPU tensors with memory of their own, so the
    caller must not write to them afterwards. added_tokens: content of added_tokens.json. Raises AdapterError.
    """
    source = f"adapter {name!r} from tensors"
    parsed = parse_config(config, f"{source}, {CONFIG_NAME}")
    if base is not None:
        _refuse_added_tokens(added_tokens, base, f"{source}, {ADDED_TOKENS_NAME}")
    return _build(own_tensors(dict(tensors), source), parsed, base, name, source)


def _build(
    tensors: dict[str, torch.Tensor], config: AdapterConfig, base: BaseShape | None, name: str, file: str
) -> Adapter:
    names = parse_names(tensors, file, base.num_layers if base else None)
    with config.limited_matching():
        _refuse_untargeted(names, config, base, file)
        paths = {(layer, module): names.module_path(layer, module) for layer, module in names.halves}
        ranks = {place: config.rank(path) for place, path in paths.items()}
        scalings = {place: config.scaling(path) for place, path in paths.items()}
    _refuse_tensors(tensors, names, config, ranks, base, file)
    modules = {}
    for place, halves in names.halves.items():
        modules[place] = AdapterModule(*_without_padding(tensors[halves["A"]], tensors[halves["B"]]), scalings[place])
    return Adapter(name, _digest(modules), modules)


def _refuse_untargeted(names: TensorNames, config: AdapterConfig, base: BaseShape | None, file: str) -> None:
    """The tensors decide which modules exist; the config has to agree, or one of the two is not what was trained."""
    heads = [path for path in ("lm_head", "embed_tokens", "model.embed_tokens") if config.targets(path)]
    if heads:
        raise AdapterError(
            config.file,
            config.target_fields,
            f"adapts embeddings or lm_head ({listing(heads)}), which are not served",
            f"train the adapter on {', '.join(MODULES)} only",
        )
    # Without a base the layers above the file's last one cannot be known.
    num_layers = base.num_layers if base else 1 + max(layer for layer, _ in names.halves)
    paths = {(layer, module): names.module_path(layer, module) for layer in range(num_layers) for module in MODULES}
    targeted = {place for place, path in paths.items() if config.targets(path)}
    problems = []
    absent = [path for place, path in paths.items() if place in targeted and place not in names.halves]
    if absent:
        problems.append(f"these modules are targeted but have no tensors in {file}: {listing(absent)}")
    excluded = [path for place, path in paths.items() if place in names.halves and place not in targeted]
    if excluded:
        problems.append(f"these modules have tensors in {file} but are not targeted: {listing(excluded)}")
    if problems:
        raise AdapterError(
            config.file,
            config.target_fields,
            "; ".join(problems),
            "use the config that was saved with these tensors, and the base model they were trained on",
        )


def _refuse_tensors(
    tensors: dict[str, torch.Tensor],
    names: TensorNames,
    config: AdapterConfig,
    ranks: Mapping[tuple[int, str], int],
    base: BaseShape | None,
    file: str,
) -> None:
    """Dtypes, shapes and ranks of all tensors, then their values; each kind of problem in one message."""
    dtypes = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if dtypes:
        raise AdapterError(
            file, "dtype", f"not float32, float16 or bfloat16: {listing(dtypes)}", "save the adapter in one of these"
        )
    shapes, wrong_ranks = [], []
    for (layer, module), halves in names.halves.items():
        a, b = tensors[halves["A"]], tensors[halves["B"]]
        d_in, d_out = base.widths[module] if base else (a.shape[-1] if a.ndim else 0, b.shape[0] if b.ndim else 0)
        rank = a.shape[0] if a.ndim else 0
        wanted = ranks[layer, module]
        for name, shape, fitting in (halves["A"], a.shape, (rank, d_in)), (halves["B"], b.shape, (d_out, rank)):
            if tuple(shape) != fitting or 0 in fitting:
                shapes.append(f"{name} is {tuple(shape)}, should be {_shape_text(fitting)}")
        if rank != wanted:
            wrong_ranks.append(f"{halves['A']} has rank {rank}, not {wanted}")
    if shapes:
        raise AdapterError(
            file, "shape", listing(shapes), "use the base model it was trained on, and gather shards before saving"
        )
    if wrong_ranks:
        cure = "use the config that was saved with these tensors"
        raise AdapterError(config.file, "r, rank_pattern", f"disagrees with {file}: {listing(wrong_ranks)}", cure)
    # The extremes are NaN if any value is: no mask of the tensor's size is made.
    bad = [name for name, tensor in tensors.items() if not all(map(torch.isfinite, torch.aminmax(tensor)))]
    if bad:
        cure = "use a checkpoint from before the training diverged"
        raise AdapterError(file, "values", f"NaN or infinity in {listing(bad)}", cure)


def _without_padding(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B without the last directions that are zero in both: they add nothing and would take room in the pool.

    A compressed adapter may be padded to one rank for tools that know no other. At least one direction stays.
    """
    rank = a.shape[0]
    while rank > 1 and not (a[rank - 1].any() or b[:, rank - 1].any()):
        rank -= 1
    return (a, b) if rank == a.shape[0] else (a[:rank].clone(), b[:, :rank].clone(memory_format=torch.contiguous_format))


def _shape_text(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(size) if size else "at least 1" for size in shape) + ")"


def _digest(modules: dict[tuple[int, str], AdapterModule]) -> str:
    """SHA-256 over all that changes the result, each part with its length or in a fixed one."""
    digest = hashlib.sha256(b"sglang-lora-tree adapter 1\n")
    for (layer, module), adapted in modules.items():
        head = f"{layer} {module} {adapted.a.dtype} {list(adapted.a.shape)} {adapted.b.dtype} {list(adapted.b.shape)}\n"
        digest.update(head.encode())
        digest.update(struct.pack("<d", adapted.scaling))
        for tensor in adapted.a, adapted.b:
            digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_added_tokens(file: Path) -> object:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(file, "the file", f"is not JSON ({error})", "restore or delete it") from error


def _refuse_added_tokens(added_tokens: object, base: BaseShape, file: object) -> None:
    """Tokenizers save this file beside an adapter, mostly with tokens that the base has; others need new embeddings."""
    if added_tokens is None:
        return
    if not isinstance(added_tokens, dict) or not all(isinstance(index, int) for index in added_tokens.values()):
        raise AdapterError(file, "the file", "is not an object: token -> number", "restore or delete it")
    added = [f"{token!r}: {index}" for token, index in added_tokens.items() if index >= base.vocab_size]
    if added:
        raise AdapterError(
            file,
            "added tokens",
            f"beyond the base's vocabulary of {base.vocab_size}: {listing(added)}",
            "train the adapter without adding tokens, or delete the file if the adapter does not need them",
        )
