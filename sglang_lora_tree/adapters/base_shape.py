"""The shape of a base model: which modules an adapter can change, and how wide they are."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_lora_tree.adapters.error import AdapterError

# Path of each module inside its decoder layer, in canonical order.
MODULE_PATHS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
MODULES = tuple(MODULE_PATHS)

# An allow-list: these have exactly the modules above, and full attention in every layer.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class BaseShape:
    """Shape of a Llama-like base model. widths: module -> (d_in, d_out), of the whole module (not of one TP rank)."""

    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    widths: dict[str, tuple[int, int]]

    @property
    def kv_width(self) -> int:
        """Elements of one K (or V) row of one token in one layer."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, model_path: str | Path) -> "BaseShape":
        """Reads MODEL/config.json. Raises AdapterError if it is missing, not JSON, or not Llama-like."""
        file = Path(model_path) / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise AdapterError(
                file, "the file", f"cannot be read as JSON ({error})", "name the folder of a Hugging Face model"
            ) from error
        return cls.from_hf_config(config, file)

    @classmethod
    def from_hf_config(cls, config: dict[str, Any], file: str | Path = "config.json") -> "BaseShape":
        """Shape from a Hugging Face config (config.json, or `hf_config.to_dict()`).

        file: only named in errors. Raises AdapterError for an architecture outside the allow-list, for sliding-window
        attention, and for a field that is missing or makes no sense.
        """
        architecture = _architecture(config, file)
        _refuse_sliding_window(config, architecture, file)

        hidden_size = _positive_int(config, "hidden_size", file)
        num_heads = _positive_int(config, "num_attention_heads", file)
        # Only where the Hugging Face config class derives a missing value do we; the others have fixed defaults there.
        if config.get("num_key_value_heads") is None and architecture == "LlamaForCausalLM":
            num_kv_heads = num_heads
        else:
            num_kv_heads = _positive_int(config, "num_key_value_heads", file)
        if config.get("head_dim") is None and architecture != "Qwen3ForCausalLM":
            if hidden_size % num_heads:
                raise AdapterError(
                    file,
                    "hidden_size",
                    f"{hidden_size} is not a multiple of num_attention_heads = {num_heads}",
                    "set head_dim",
                )
            head_dim = hidden_size // num_heads
        else:
            head_dim = _positive_int(config, "head_dim", file)
        intermediate_size = _positive_int(config, "intermediate_size", file)

        q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        return cls(
            architecture=architecture,
            num_layers=_positive_int(config, "num_hidden_layers", file),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_positive_int(config, "vocab_size", file),
            widths={
                "q_proj": (hidden_size, q_width),
                "k_proj": (hidden_size, kv_width),
                "v_proj": (hidden_size, kv_width),
                "o_proj": (q_width, hidden_size),
                "gate_proj": (hidden_size, intermediate_size),
                "up_proj": (hidden_size, intermediate_size),
                "down_proj": (intermediate_size, hidden_size),
            },
        )


def _architecture(config: dict[str, Any], file: str | Path) -> str:
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in ARCHITECTURES:
        return str(architectures[0])
    raise AdapterError(
        file,
        "architectures",
        f"the base model is {architectures!r}, which is not known to be Llama-like",
        f"use a base model that is one of {', '.join(ARCHITECTURES)}",
    )


def _refuse_sliding_window(config: dict[str, Any], architecture: str, file: str | Path) -> None:
    """Sliding-window layers do not keep a KV row for every token, so they have no plain KV pool."""
    # Mistral's Hugging Face default is a window of 4096, so there a missing field means "on"; Qwen has its own switch.
    if architecture == "MistralForCausalLM" and config.get("sliding_window", 4096) is not None:
        field = "sliding_window"
    elif architecture != "MistralForCausalLM" and config.get("use_sliding_window"):
        field = "use_sliding_window"
    elif any(kind != "full_attention" for kind in config.get("layer_types") or []):
        field = "layer_types"
    else:
        return
    raise AdapterError(
        file,
        field,
        f"the base model uses sliding-window attention ({field} = {config.get(field)!r})",
        "use a base model with full attention in every layer",
    )


def _positive_int(config: dict[str, Any], field: str, file: str | Path) -> int:
    value = config.get(field)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise AdapterError(file, field, f"must be a positive integer, is {value!r}", "restore the model's own config.json")
