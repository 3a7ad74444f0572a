"""Which outputs are finished by the operation after them: only of layers and operations that are known to do just that."""

import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import base as rotary
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding, Llama3RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel
from sglang.srt.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2Model

from sglang_lora_tree import plugin
from sglang_lora_tree.composite import backend_hooks, finish_hooks

HEAD = 64


def bare(kind, **attributes):
    """An instance of a class of SGLang's as far as it is looked at: its constructor wants a model and ranks."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def rotary_embedding(kind=rotary.RotaryEmbedding, **changes):
    """For heads of which all is rotated, half by half, with float32 angles."""
    attributes = {"head_size": HEAD, "rotary_dim": HEAD, "is_neox_style": True, "use_fallback_kernel": False}
    return bare(kind, **{**attributes, "cos_sin_cache": torch.zeros(8, HEAD), **changes})


@pytest.mark.parametrize("kind", [LlamaAttention, Qwen2Attention])
@pytest.mark.parametrize(
    "embedding",
    [rotary.RotaryEmbedding, rotary.LinearScalingRotaryEmbedding, Llama3RotaryEmbedding, YaRNScalingRotaryEmbedding],
)
def test_scaling_that_only_changes_the_angles_is_joined(kind, embedding):
    assert finish_hooks.can_rotate(bare(kind, rotary_emb=rotary_embedding(embedding), kv_size=2 * HEAD))


@pytest.mark.parametrize("embedding", [MRotaryEmbedding, DeepseekScalingRotaryEmbedding])
def test_an_embedding_with_a_form_of_its_own_is_left_to_itself(embedding):
    assert not finish_hooks.can_rotate(bare(LlamaAttention, rotary_emb=rotary_embedding(embedding), kv_size=2 * HEAD))


@pytest.mark.parametrize(
    "changes",
    [
        {"rotary_dim": HEAD // 2},
        {"is_neox_style": False},
        {"cos_sin_cache": torch.zeros(8, HEAD).bfloat16()},
        {"use_fallback_kernel": True},
        {"head_size": 48, "rotary_dim": 48},
    ],
)
def test_another_rotation_is_left_to_sglang(changes):
    assert not finish_hooks.can_rotate(bare(LlamaAttention, rotary_emb=rotary_embedding(**changes), kv_size=2 * HEAD))


@pytest.mark.parametrize(("head", "joined"), [(32, False), (64, True), (128, True), (96, False)])
def test_on_a_gpu_heads_of_the_fallback_kernel_are_not_joined(monkeypatch, head, joined):
    """It rounds the angles of all layers to the model's dtype when it first runs, long after we have looked at them."""
    monkeypatch.setattr(rotary, "_is_cuda", True)
    monkeypatch.setattr(rotary, "_is_cpu", False)
    monkeypatch.setattr(rotary, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False))
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.rope", SimpleNamespace(rotary_embedding=None))
    embedding = rotary.RotaryEmbedding(head, head, 8, 10000, True, torch.bfloat16)
    assert embedding.cos_sin_cache.dtype == torch.float32
    assert finish_hooks.can_rotate(bare(LlamaAttention, rotary_emb=embedding, kv_size=2 * head)) == joined


def decoder_layer(kind, **changes):
    norms = {"input_layernorm": RMSNorm(8), "post_attention_layernorm": RMSNorm(8)}
    return bare(kind, **{**norms, **changes})


class OtherModel(LlamaModel):
    """Of which it is not known where it takes its layers' outputs."""


@pytest.fixture
def ranks(monkeypatch):
    ranks = SimpleNamespace(tp_size=1)
    monkeypatch.setattr(finish_hooks, "get_parallel", lambda: ranks)
    return ranks


@pytest.mark.parametrize(("layer", "model"), [(LlamaDecoderLayer, LlamaModel), (Qwen2DecoderLayer, Qwen2Model)])
def test_norms_of_known_models_on_one_rank_are_joined(ranks, layer, model):
    model = bare(model, norm=RMSNorm(8))
    assert finish_hooks.can_normalize(decoder_layer(layer), model)
    ranks.tp_size = 2
    assert not finish_hooks.can_normalize(decoder_layer(layer), model), "a rank's output is a part of a sum"


def test_norms_of_other_models_are_left_to_sglang(ranks):
    class OtherLayer(LlamaDecoderLayer):
        """A forward of its own."""

    class OtherNorm(RMSNorm):
        """Another sum."""

    layer, model = decoder_layer(LlamaDecoderLayer), bare(LlamaModel, norm=RMSNorm(8))
    assert finish_hooks.can_normalize(layer, model)
    assert not finish_hooks.can_normalize(decoder_layer(OtherLayer), model)
    assert not finish_hooks.can_normalize(layer, bare(OtherModel, norm=RMSNorm(8)))
    for norm in (
        OtherNorm(8),
        RMSNorm(8, var_hidden_size=4),
        RMSNorm(8, cast_x_before_out_mul=True),
        RMSNorm(8, fp32_residual=True),
    ):
        assert not finish_hooks.can_normalize(layer, bare(LlamaModel, norm=norm))
        assert not finish_hooks.can_normalize(decoder_layer(LlamaDecoderLayer, input_layernorm=norm), model)


@pytest.mark.parametrize("kind", [LlamaMLP, Qwen2MLP])
def test_activations_of_known_layers_are_joined(kind):
    plain = {"activation_quant": SimpleNamespace(enabled=False), "dual_gemm": SimpleNamespace(mode=None)}
    assert finish_hooks.can_activate(bare(kind, act_fn=SiluAndMul(), **plain))
    for fused in ({"activation_quant": SimpleNamespace(enabled=True)}, {"dual_gemm": SimpleNamespace(mode="unquant")}):
        assert not finish_hooks.can_activate(bare(kind, act_fn=SiluAndMul(), **{**plain, **fused}))
    assert not finish_hooks.can_activate(bare(kind, act_fn=torch.nn.SiLU(), **plain))


def test_without_the_plugin_in_use_the_hooks_only_call_the_original(monkeypatch):
    """They stand in every process that has the package, whatever its model; an operand may be anything there."""
    monkeypatch.setattr(backend_hooks, "_current", None)
    operands = tuple(object() for _ in range(4))

    def original(*given, **named):
        return given, named

    assert finish_hooks.activate(original, *operands[:2]) == (operands[:2], {})
    assert finish_hooks.rotate(original, *operands, offsets=1) == (operands, {"offsets": 1})
    assert finish_hooks.normalize(original, *operands, quant_linear=2) == (operands, {"quant_linear": 2})


def test_a_start_is_refused_if_one_of_the_operations_is_not_hooked():
    """The self-check names every hook that did not take."""
    assert {target for target, _, _ in finish_hooks.HOOKS} <= {target for target, _, _ in plugin.all_hooks()}
