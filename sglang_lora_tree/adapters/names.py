"""Tensor names: base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight -> layer 3, q_proj, A."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_lora_tree.adapters.base_shape import MODULE_PATHS, MODULES
from sglang_lora_tree.adapters.error import AdapterError, listing

# No Llama-like model comes near it; it keeps a hostile name from making us count to its layer number.
MAX_LAYERS = 4096

# PEFT writes `base_model.model.` + the module's path in the base model (`model.layers...` in LlamaForCausalLM,
# `layers...` in a bare LlamaModel), and no adapter name; a raw state dict has the adapter name after lora_A.
_NAME = re.compile(
    r"(?P<prefix>(?:base_model\.model\.)?)(?P<root>(?:model\.)?)"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,8})\.(?P<path>" + "|".join(map(re.escape, MODULE_PATHS.values())) + r")"
    r"\.lora_(?P<half>[AB])(?P<infix>(?:\.[^.]+)?)\.weight"
)

# Why a name that matches nothing is there: the first substring that fits, and what it means.
_FOREIGN = (
    ("embed_tokens", "adapted, trained or resized embeddings"),
    ("lora_embedding_", "adapted, trained or resized embeddings"),
    ("lm_head", "an adapted or trained lm_head"),
    ("modules_to_save", "fully trained modules (modules_to_save)"),
    (".experts", "mixture-of-experts modules"),
    ("block_sparse_moe", "mixture-of-experts modules"),
    (".router.", "mixture-of-experts modules"),
    ("lora_magnitude_vector", "DoRA magnitudes"),
    ("lora_diag", "KaSA singular values"),
    ("lora_E", "AdaLoRA singular values"),
    ("lora_velora", "VeLoRA's training state"),
    ("lora_monteclora", "MonteCLoRA's sampler"),
    (".bias", "trained biases"),
)
_UNKNOWN = "no LoRA tensor of a module that a Llama-like model has"


@dataclass
class TensorNames:
    """Names of an adapter's tensors by place. root: the path of the decoder in PEFT's eyes, "model." or ""."""

    root: str = ""
    halves: dict[tuple[int, str], dict[str, str]] = field(default_factory=dict)  # (layer, module) -> {"A": name, ...}

    def module_path(self, layer: int, module: str) -> str:
        """The module's path as PEFT sees it; the patterns in adapter_config.json are matched against it."""
        return f"{self.root}layers.{layer}.{MODULE_PATHS[module]}"


def parse_names(names: Iterable[str], file: object, num_layers: int | None) -> TensorNames:
    """Sorts tensor names by layer, then MODULES order.

    num_layers: of the base model, None if unknown. Raises one AdapterError that lists every name that is not the A or
    B of a module the base has, every A without B and B without A, and names in more than one scheme.
    """
    parsed = TensorNames()
    foreign: dict[str, list[str]] = {}
    max_layers = MAX_LAYERS if num_layers is None else num_layers
    schemes: dict[tuple[str, str, str], str] = {}  # scheme -> first name in it
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None:
            meaning = next((meaning for part, meaning in _FOREIGN if part in name), _UNKNOWN)
            foreign.setdefault(meaning, []).append(name)
            continue
        layer, module = int(match["layer"]), match["path"].rpartition(".")[2]
        if layer >= max_layers:
            foreign.setdefault(f"layers that the base model lacks (it has {max_layers})", []).append(name)
            continue
        parsed.root = match["root"]
        schemes.setdefault((match["prefix"], match["root"], match["infix"]), name)
        parsed.halves.setdefault((layer, module), {})[match["half"]] = name

    problems = [f"{meaning}: {listing(found)}" for meaning, found in foreign.items()]
    if len(schemes) > 1:
        problems.append(f"names in different schemes, as of several adapters: {listing(schemes.values())}")
    for half, other in ("A", "B"), ("B", "A"):
        lonely = [found[half] for found in parsed.halves.values() if other not in found]
        if lonely:
            problems.append(f"lora_{half} without its lora_{other}: {listing(lonely)}")
    if not problems and not parsed.halves:
        problems.append("there is no tensor at all")
    if problems:
        raise AdapterError(
            file,
            "tensor names",
            "; ".join(problems),
            f"export plain LoRA with both lora_A and lora_B of {', '.join(MODULES)} only, one adapter in one file "
            "(PEFT's save_pretrained), trained on this base model",
        )
    order = sorted(parsed.halves, key=lambda place: (place[0], MODULES.index(place[1])))
    parsed.halves = {place: parsed.halves[place] for place in order}
    return parsed
