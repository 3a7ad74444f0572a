"""Small random models and adapters for tests, made with transformers and PEFT; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "alpha": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR},
    "beta": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "gamma": {"r": 16, "lora_alpha": 8, "target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
    "delta": {
        "r": 3,
        "lora_alpha": 9,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"o_proj": 6},
        "alpha_pattern": {"k_proj": 1},
    },
    "epsilon": {"r": 1, "lora_alpha": 2, "target_modules": ["down_proj"], "layers_to_transform": [1]},
}
"""Ranks, modules, scalings and layers that differ in every way that the server has to honour."""


def make_llama(
    folder: Path, *, heads: int = 8, kv_heads: int = 4, layers: int = 4, hidden: int = 128, vocab: int = 320, seed: int = 0
) -> Path:
    """Save a random float32 Llama (GQA unless kv_heads == heads)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
        torch_dtype="float32",
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapters(
    model: Path, folder: Path, configs: Mapping[str, dict[str, Any]] = ADAPTERS, seed: int = 1, std: float = 0.15
) -> dict[str, Path]:
    """Save random adapters whose effect on the answers is large."""
    torch.manual_seed(seed)
    paths = {}
    for name, config in configs.items():
        peft = get_peft_model(LlamaForCausalLM.from_pretrained(model), LoraConfig(task_type="CAUSAL_LM", **config))
        for key, parameter in peft.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=std)
        peft.save_pretrained(folder / name)
        paths[name] = folder / name
    return paths


class Oracle:
    """PEFT on the same model: what every answer must equal. Mixes by ``cat``, which is exact."""

    def __init__(
        self, model: Path, adapters: Mapping[str, Path], device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        base = LlamaForCausalLM.from_pretrained(model, torch_dtype=dtype).to(device)
        for module in base.modules():
            if isinstance(module, LlamaRMSNorm):
                module.forward = partial(_normalize, module)
        self.device = device
        names = iter(adapters.items())
        first, path = next(names)
        self.model = PeftModel.from_pretrained(base, path, adapter_name=first)
        for name, path in names:
            self.model.load_adapter(path, adapter_name=name)
        self.model.to(dtype).eval()
        self.plain = next(name for name, config in self.model.peft_config.items() if _is_plain(config))
        self._mixes: set[str] = set()

    def generate(self, tokens: list[int], num_new: int, mix: Mapping[str, float] | None = None) -> list[int]:
        """Greedy continuation."""
        return self._run(tokens, num_new, mix)[0]

    def logprobs(self, tokens: list[int], num_new: int, mix: Mapping[str, float] | None = None) -> list[float]:
        """Log probability of each greedy token."""
        return self._run(tokens, num_new, mix)[1]

    @torch.inference_mode()
    def judge(
        self, prompt: Sequence[int], tokens: Sequence[int], mix: Mapping[str, float] | None
    ) -> tuple[list[float], list[float], list[int]]:
        """One pass over an answer. Of each of its tokens' places: the largest logprob, the token's own, and which has the
        largest."""
        ids = torch.tensor([[*prompt, *tokens]], device=self.device)
        with self._using(mix):
            logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        distribution = torch.log_softmax(logits.double(), -1)
        best, greedy = distribution.max(-1)
        given = distribution.gather(1, torch.tensor(tokens, device=self.device)[:, None])[:, 0]
        return best.tolist(), given.tolist(), greedy.tolist()

    def adapter_of(self, mix: Mapping[str, float]) -> str:
        """The name under which PEFT has an adapter or a mix."""
        name, weight = next(iter(mix.items()))
        return name if len(mix) == 1 and weight == 1.0 else self._mix(mix)

    @contextmanager
    def _using(self, mix: Mapping[str, float] | None) -> Iterator[None]:
        if not mix:
            with self.model.disable_adapter():
                yield
            return
        self.model.set_adapter(self.adapter_of(mix))
        yield

    @torch.inference_mode()
    def _run(self, tokens: list[int], num_new: int, mix: Mapping[str, float] | None) -> tuple[list[int], list[float]]:
        with self._using(mix):
            return self._greedy(tokens, num_new)

    def _mix(self, mix: Mapping[str, float]) -> str:
        # PEFT refuses dots in names.
        name = "mix_" + "_".join(f"{key}_{value!r}".replace(".", "p").replace("-", "m") for key, value in mix.items())
        if name not in self._mixes:
            # PEFT lays a mix out by its first member's config (its layers, its rsLoRA scaling), so a plain adapter comes
            # first, with weight zero if it is not a member.
            order = [self.plain, *(key for key in mix if key != self.plain)]
            weights = [mix.get(key, 0.0) for key in order]
            self.model.add_weighted_adapter(order, weights, name, combination_type="cat")
            self._mixes.add(name)
        return name

    def _greedy(self, tokens: list[int], num_new: int) -> tuple[list[int], list[float]]:
        ids = torch.tensor([tokens], device=self.device)
        cache, new, logprobs = None, [], []
        for _ in range(num_new):
            output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            distribution = torch.log_softmax(output.logits[0, -1].to(torch.float64), -1)
            token = int(distribution.argmax())
            new.append(token)
            logprobs.append(float(distribution[token]))
            ids = torch.tensor([[token]], device=self.device)
        return new, logprobs


def _normalize(norm: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    """What transformers' norm does, in float64 too: it rounds to float32 on the way, so that no float64 model is one."""
    if hidden.dtype is not torch.float64:
        return LlamaRMSNorm.forward(norm, hidden)
    return torch.nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _is_plain(config: LoraConfig) -> bool:
    return not (config.use_rslora or config.layers_to_transform or config.rank_pattern or config.alpha_pattern)
