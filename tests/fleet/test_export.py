"""What is written loads in PEFT and in our own loader with the same answers, and says its ranks."""

from __future__ import annotations

import json
import warnings

import pytest
import safetensors.torch
import torch

from sglang_lora_tree.adapters.adapter import load_adapter
from sglang_lora_tree.fleet.export import read_effective_ranks, write_adapter
from sglang_lora_tree.fleet.factorisation import factorise, truncate

from .conftest import BASE, HF_CONFIG, deltas


def smaller(folder, rank_of):
    original = load_adapter(folder, BASE)
    ranks = {place: rank_of(*place) for place in original.modules}
    return original, truncate(original, factorise(original), ranks)


def uneven(layer: int, module: str) -> int:
    return 1 + (layer + len(module)) % 5


CONFIGS = (
    {},
    {"use_rslora": True, "lora_alpha": -7},
    {"alpha_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 40}},
    {"target_modules": ".*_proj", "init_lora_weights": "gaussian"},
)


def logits(folder) -> torch.Tensor:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**HF_CONFIG)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of missing or unexpected keys
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        adapted = peft.PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        return adapted(torch.arange(20)[None] % 64).logits


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_full_rank_gives_the_same_logits_in_peft(save, tmp_path, config, padded):
    folder = save("one", **config)
    original, full = smaller(folder, lambda layer, module: 8)
    write_adapter(folder, tmp_path / "out", full, padded=padded)
    torch.testing.assert_close(logits(tmp_path / "out"), logits(folder), rtol=1e-4, atol=1e-4)
    loaded = load_adapter(tmp_path / "out", BASE)
    for place, delta in deltas(original).items():
        torch.testing.assert_close(deltas(loaded)[place], delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_uneven_ranks_in_peft_and_in_our_loader(save, tmp_path, config):
    """rank_pattern and alpha_pattern are read alike by both: scaling 1 in every module, padded or not."""
    folder = save("one", **config)
    _, cut = smaller(folder, uneven)
    write_adapter(folder, tmp_path / "dense", cut)
    write_adapter(folder, tmp_path / "padded", cut, padded=True)
    loaded = load_adapter(tmp_path / "dense", BASE)
    assert {place: module.rank for place, module in loaded.modules.items()} == {
        place: uneven(*place) for place in loaded.modules
    }
    assert {module.scaling for module in loaded.modules.values()} == {1.0}
    assert load_adapter(tmp_path / "padded", BASE).digest == loaded.digest, "padding takes room in the pool"
    for place, delta in deltas(cut).items():
        torch.testing.assert_close(deltas(loaded)[place], delta, rtol=0, atol=0)
    torch.testing.assert_close(logits(tmp_path / "dense"), logits(tmp_path / "padded"), rtol=1e-4, atol=1e-4)


def test_one_scaling_suits_tools_that_read_no_patterns(save, tmp_path):
    """vLLM and stock SGLang take alpha / r of the config for every module; it is 1, and r is the largest rank."""
    folder = save("one", use_rslora=True)
    _, cut = smaller(folder, uneven)
    for padded in (False, True):
        write_adapter(folder, tmp_path / str(padded), cut, padded=padded)
        config = json.loads((tmp_path / str(padded) / "adapter_config.json").read_text())
        assert config["r"] == config["lora_alpha"] == 5 and not config["use_rslora"]
        tensors = safetensors.torch.load_file(tmp_path / str(padded) / "adapter_model.safetensors")
        ranks = {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name}
        assert ranks == ({5} if padded else {1, 2, 3, 4, 5})


@pytest.mark.parametrize("padded", [False, True])
def test_effective_ranks_are_in_the_file(save, tmp_path, padded):
    folder = save("one")
    _, cut = smaller(folder, uneven)
    write_adapter(folder, tmp_path / "out", cut, padded=padded)
    ranks = read_effective_ranks(tmp_path / "out")
    assert ranks is not None and len(ranks) == 21
    assert ranks["model.layers.2.mlp.up_proj"] == uneven(2, "up_proj")
    assert read_effective_ranks(folder) is None


def test_prefixes_are_ordered(save, tmp_path):
    """The first k directions of what is written at 5 are what is written at k: a reader may cut them off."""
    folder = save("one")
    _, five = smaller(folder, lambda layer, module: 5)
    _, two = smaller(folder, lambda layer, module: 2)
    for place, module in two.modules.items():
        torch.testing.assert_close(five.modules[place].a[:2], module.a, rtol=0, atol=1e-6)
        torch.testing.assert_close(five.modules[place].b[:, :2], module.b, rtol=0, atol=1e-6)


def test_small_files_come_along_and_nothing_is_overwritten(save, tmp_path):
    folder = save("one")
    (folder / "added_tokens.json").write_text("{}")
    (folder / "optimizer.pt").write_text("x")
    _, cut = smaller(folder, uneven)
    write_adapter(folder, tmp_path / "out", cut)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "added_tokens.json",
    ]
    with pytest.raises(FileExistsError, match="is there already"):
        write_adapter(folder, tmp_path / "out", cut)


def test_a_bin_file_and_a_bare_model_s_names(save, tmp_path):
    """The names PEFT would match are kept: a decoder without `model.` stays one."""
    folder = save("one")
    file = folder / "adapter_model.safetensors"
    tensors = {name.replace(".model.model.", ".model."): value for name, value in safetensors.torch.load_file(file).items()}
    file.unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    original, full = smaller(folder, lambda layer, module: 8)
    write_adapter(folder, tmp_path / "out", full)
    names = safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert set(names) == set(tensors)
    for place, delta in deltas(original).items():
        torch.testing.assert_close(deltas(load_adapter(tmp_path / "out", BASE))[place], delta, rtol=1e-5, atol=1e-5)
