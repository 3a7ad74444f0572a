"""Whole folders: what is loaded is exactly what PEFT computes with, all else is refused, and digests identify."""

import gc
import json
import os
import pickle
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from peft.tuners.lora import LoraLayer

from sglang_lora_tree.adapters.adapter import Adapter, adapter_from_tensors, load_adapter
from sglang_lora_tree.adapters.base_shape import MODULES, BaseShape
from sglang_lora_tree.adapters.error import AdapterError

MakeModel = Callable[[], transformers.LlamaForCausalLM]
Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model.model."


def peft_deltas(folder: Path, model: torch.nn.Module) -> dict[tuple[int, str], torch.Tensor]:
    """dW of every module, from PEFT's own loading of the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="Found missing adapter keys")
        loaded = peft.PeftModel.from_pretrained(model, folder)
    deltas = {}
    for name, module in loaded.named_modules():
        if isinstance(module, LoraLayer):
            _, _, rest = name.partition("layers.")
            layer, _, path = rest.partition(".")
            deltas[int(layer), path.rpartition(".")[2]] = module.get_delta_weight("default").detach()
    return deltas


def assert_equals_peft(adapter: Adapter, folder: Path, model: torch.nn.Module) -> None:
    deltas = peft_deltas(folder, model)
    assert adapter.modules.keys() == deltas.keys()
    for place, module in adapter.modules.items():
        ours = module.b.float() @ module.a.float() * module.scaling
        assert torch.equal(ours, deltas[place]), place


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fewer modules": {"target_modules": ["v_proj", "down_proj"]},
    "paths and suffixes": {"target_modules": ["model.layers.1.mlp.up_proj", "self_attn.q_proj"]},
    "regular expression": {"target_modules": r".*layers\.[02]\..*(q|o|gate)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "excluded": {"exclude_modules": ["k_proj", "layers.1.mlp.up_proj"]},
    "excluded by regular expression": {"target_modules": "all-linear", "exclude_modules": r".*\.mlp\..*"},
    "one layer": {"layers_to_transform": 2},
    "some layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "no such layers are named": {"layers_to_transform": [1, 77]},
    "rank 1": {"r": 1},
    "rank above the width": {"r": 100},
    "rslora": {"r": 6, "use_rslora": True},
    "rank_pattern": {"rank_pattern": {"^model.layers.0.mlp.up_proj": 3, r"layers\.1\..*": 7, "q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 1, r"layers\.2\..*": -5, "mlp.down_proj": 0.25}},
    "both patterns, rslora": {"rank_pattern": {"o_proj": 9}, "alpha_pattern": {".*proj": 3}, "use_rslora": True},
    "negative alpha": {"lora_alpha": -3},
    "alpha 0": {"lora_alpha": 0},
    "fractional alpha": {"lora_alpha": 0.1},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "dropout": {"lora_dropout": 0.5},
    "bin": {"safe": False},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16 bin": {"dtype": torch.bfloat16, "safe": False},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "eva": {"init_lora_weights": "eva", "eva_config": peft.EvaConfig()},
    "weight tying": {"ensure_weight_tying": True},
    "no task": {"task_type": None},
    "unmatched names": {"target_modules": ["q_proj", "c_attn", "experts"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_peft(
    variant: str, tmp_path: Path, base: BaseShape, make_model: MakeModel, save_adapter: Callable[..., Path]
) -> None:
    folder = save_adapter(tmp_path / "adapter", **VARIANTS[variant])
    adapter = load_adapter(folder, base)
    assert_equals_peft(adapter, folder, make_model())
    assert list(adapter.modules) == sorted(adapter.modules, key=lambda place: (place[0], MODULES.index(place[1])))
    assert adapter.name == "adapter" and load_adapter(folder).digest == adapter.digest
    for module in adapter.modules.values():
        for tensor in module.a, module.b:
            assert tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.requires_grad
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a view: keeps other memory alive"
            assert tensor.dtype == VARIANTS[variant].get("dtype", torch.float32)


def test_all_linear_and_short_layer_lists_survive_in_the_file(
    tmp_path: Path, base: BaseShape, make_model: MakeModel, plain_folder: Path, plain_config: dict[str, Any]
) -> None:
    """PEFT resolves "all-linear" before it saves; other writers do not."""
    shutil.copytree(plain_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**plain_config, "target_modules": "All-Linear"}))
    assert_equals_peft(load_adapter(tmp_path, base), tmp_path, make_model())


def test_adapter_of_a_bare_llama_model(tmp_path: Path, base: BaseShape, make_model: MakeModel) -> None:
    """Trained without the lm_head: names lack `model.`, and PEFT matches the patterns without it too."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"^layers.1.self_attn.q_proj": 2})
    model = peft.get_peft_model(make_model().model, config)
    model.save_pretrained(tmp_path)
    adapter = load_adapter(tmp_path, base)
    assert [module.rank for module in adapter.modules.values()] == [4, 2, 4]
    assert_equals_peft(adapter, tmp_path, make_model().model)


def test_converted_pissa_is_plain_lora(tmp_path: Path, base: BaseShape, make_model: MakeModel) -> None:
    config = peft.LoraConfig(init_lora_weights="pissa", r=4, lora_alpha=6, target_modules=["q_proj", "up_proj"])
    model = peft.get_peft_model(make_model(), config)
    config.init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1
    config.init_lora_weights = "pissa"
    model.save_pretrained(tmp_path / "raw")
    with pytest.raises(AdapterError, match="path_initial_model_for_weight_conversion"):
        load_adapter(tmp_path / "raw", base)
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    adapter = load_adapter(tmp_path / "converted", base)
    assert adapter.ranks == (8,)
    assert_equals_peft(adapter, tmp_path / "converted", make_model())


def test_of_overlapping_patterns_the_first_in_the_file_wins(
    tmp_path: Path, base: BaseShape, make_model: MakeModel, save_adapter: Callable[..., Path]
) -> None:
    """PEFT sorts the patterns as it saves, and reads them in that order: so do we, whatever the order in training."""
    alphas = {"q_proj": 3, r"layers\.1\..*": 5}
    folder = save_adapter(tmp_path / "alphas", alpha_pattern=alphas)
    adapter = load_adapter(folder, base)
    assert adapter.modules[1, "q_proj"].scaling == 5 / 4 and adapter.modules[0, "q_proj"].scaling == 3 / 4
    assert_equals_peft(adapter, folder, make_model())

    with pytest.raises(AdapterError, match=r"layers.1.self_attn.q_proj.lora_A.weight has rank 3, not 5"):
        load_adapter(save_adapter(tmp_path / "ranks", rank_pattern=alphas), base)  # PEFT cannot load it either


# --- refusals


def load(folder: Path) -> Tensors:
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


@pytest.fixture
def tensors(plain_folder: Path) -> Tensors:
    return load(plain_folder)


def refusal(tensors: Tensors, config: dict[str, Any], base: BaseShape | None, **extra: Any) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        adapter_from_tensors(tensors, config, base, "the_name", **extra)
    error = caught.value
    for part in "the_name", error.file, error.field, error.cause, error.cure:
        assert part and part in str(error)
    return error


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "tensor names"),
        ({"target_modules": ["q_proj", "lm_head"]}, "tensor names"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_bdlora": peft.tuners.lora.config.BdLoraConfig(target_modules_bd_a=["q_proj"])}, "use_bdlora"),
        ({"kasa_config": peft.tuners.lora.config.KasaConfig()}, "kasa_config"),
        ({"velora_config": peft.tuners.lora.config.VeloraConfig(num_groups=2)}, "velora_config"),
        ({"monteclora_config": peft.tuners.lora.config.MontecloraConfig()}, "monteclora_config"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
    ],
)
def test_what_peft_saves_but_plain_lora_is_not(
    fields: dict[str, Any], field: str, tmp_path: Path, base: BaseShape, save_adapter: Callable[..., Path]
) -> None:
    if "target_modules" not in fields:
        fields = {**fields, "target_modules": ["q_proj"]}
    folder = save_adapter(tmp_path / "adapter", **fields)
    for shape in base, None:
        with pytest.raises(AdapterError) as caught:
            load_adapter(folder, shape)
        error = caught.value
        assert error.field == field and error.file.startswith(str(folder))
        for part in error.file, error.field, error.cause, error.cure:
            assert part in str(error)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "model.embed_tokens", ".*"])
def test_embedding_targets_without_tensors(
    target: str, tensors: Tensors, plain_config: dict[str, Any], base: BaseShape
) -> None:
    plain_config["target_modules"] = target if target == ".*" else [*MODULES, target]
    error = refusal(tensors, plain_config, base)
    assert error.field == "target_modules" and "embeddings or lm_head" in error.cause


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"target_modules": ["q_proj"]}, "target_modules", "but are not targeted: model.layers.0.self_attn.k_proj"),
        ({"exclude_modules": ["up_proj"]}, "target_modules, exclude_modules", "not targeted: model.layers.0.mlp.up"),
        ({"layers_to_transform": [0, 1]}, "target_modules, layers_to_transform", "not targeted: model.layers.2"),
        ({"target_modules": r"layers\..*"}, "target_modules", "not targeted: model.layers.0.self_attn.q_proj"),
    ],
)
@pytest.mark.parametrize("known_base", [True, False])
def test_tensors_that_the_config_excludes(
    known_base: bool,
    changes: dict[str, Any],
    field: str,
    words: str,
    tensors: Tensors,
    plain_config: dict[str, Any],
    base: BaseShape,
) -> None:
    error = refusal(tensors, {**plain_config, **changes}, base if known_base else None)
    assert error.field == field and words in error.cause


def test_targets_without_tensors(tensors: Tensors, plain_config: dict[str, Any], base: BaseShape) -> None:
    gone = {name for name in tensors if "layers.1.mlp.up_proj" in name or "layers.2.self_attn.q_proj" in name}
    for shape in base, None:
        error = refusal({name: t for name, t in tensors.items() if name not in gone}, plain_config, shape)
        assert error.field == "target_modules"
        assert "have no tensors" in error.cause
        assert error.cause.endswith("model.layers.1.mlp.up_proj, model.layers.2.self_attn.q_proj")
    top_gone = {name: t for name, t in tensors.items() if ".layers.2." not in name}
    assert "model.layers.2.mlp.down_proj" in refusal(top_gone, plain_config, base).cause
    adapter_from_tensors(top_gone, plain_config, None)  # for all we know, the base has two layers


def test_shapes_that_do_not_fit_the_base(tensors: Tensors, plain_config: dict[str, Any], base: BaseShape) -> None:
    a, b = f"{PREFIX}layers.0.mlp.up_proj.lora_A.weight", f"{PREFIX}layers.2.self_attn.v_proj.lora_B.weight"
    tensors[a], tensors[b] = torch.ones(4, 33), torch.ones(12, 4)
    error = refusal(tensors, plain_config, base)
    assert error.field == "shape"
    assert f"{a} is (4, 33), should be (4, 32)" in error.cause and f"{b} is (12, 4), should be (24, 4)" in error.cause


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((4, 32), (48, 3)), ((0, 32), (48, 0)), ((4,), (48, 4)), ((4, 32, 1), (48, 4)), ((), (48, 4)), ((4, 0), (48, 4))],
)
@pytest.mark.parametrize("known_base", [True, False])
def test_shapes_that_are_no_pair_of_matrices(
    known_base: bool,
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    tensors: Tensors,
    plain_config: dict[str, Any],
    base: BaseShape,
) -> None:
    tensors[f"{PREFIX}layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(a_shape)
    tensors[f"{PREFIX}layers.0.self_attn.q_proj.lora_B.weight"] = torch.ones(b_shape)
    assert refusal(tensors, plain_config, base if known_base else None).field == "shape"


def test_layers_beyond_the_base(tensors: Tensors, plain_config: dict[str, Any], base: BaseShape) -> None:
    for half in "AB":
        name = f"{PREFIX}layers.3.self_attn.q_proj.lora_{half}.weight"
        tensors[name] = tensors[name.replace("layers.3", "layers.2")]
    error = refusal(tensors, plain_config, base)
    assert "layers that the base model lacks (it has 3)" in error.cause and "layers.3.self_attn.q_proj" in error.cause


@pytest.mark.parametrize("changes", [{"r": 5}, {"r": 10**9}, {"rank_pattern": {"up_proj": 3}}])
def test_rank_that_the_config_does_not_say(
    changes: dict[str, Any], tensors: Tensors, plain_config: dict[str, Any], base: BaseShape
) -> None:
    error = refusal(tensors, {**plain_config, **changes}, base)
    assert error.field == "r, rank_pattern" and "up_proj.lora_A.weight has rank 4, not" in error.cause


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_dtype(dtype: torch.dtype, tensors: Tensors, plain_config: dict[str, Any], base: BaseShape) -> None:
    name = f"{PREFIX}layers.1.mlp.gate_proj.lora_B.weight"
    tensors[name] = tensors[name].to(dtype)
    error = refusal(tensors, plain_config, base)
    assert error.field == "dtype" and f"{name} ({dtype})" in error.cause


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_infinity(
    value: float, dtype: torch.dtype, tensors: Tensors, plain_config: dict[str, Any], base: BaseShape
) -> None:
    name = f"{PREFIX}layers.1.mlp.gate_proj.lora_B.weight"
    tensors[name] = tensors[name].to(dtype)
    tensors[name][-1, -1] = value
    error = refusal(tensors, plain_config, base)
    assert error.field == "values" and name in error.cause


def test_added_tokens(tmp_path: Path, plain_folder: Path, base: BaseShape) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "adapter")
    (folder / "added_tokens.json").write_text('{"<pad>": 63}')
    load_adapter(folder, base)  # the base has it: tokenizers write the file whether or not anything was added
    (folder / "added_tokens.json").write_text('{"<pad>": 63, "<new>": 64}')
    with pytest.raises(AdapterError, match=r"added_tokens.json: added tokens: .*'<new>': 64.*Cure: "):
        load_adapter(folder, base)
    for content in "[", "[]", '{"a": "b"}':
        (folder / "added_tokens.json").write_text(content)
        with pytest.raises(AdapterError, match=r"added_tokens\.json"):
            load_adapter(folder, base)


def test_missing_things_are_named(tmp_path: Path, plain_folder: Path) -> None:
    with pytest.raises(AdapterError, match="nowhere: the folder: is no folder"):
        load_adapter(tmp_path / "nowhere")
    for path in "", "x" * 5000, "a\0b":
        with pytest.raises(AdapterError, match="is no folder"):
            load_adapter(path)
    with pytest.raises(AdapterError, match="is no folder"):
        load_adapter(plain_folder / "adapter_config.json")
    with pytest.raises(AdapterError, match=r"adapter_config.json: the file: is missing"):
        load_adapter(tmp_path)
    shutil.copy(plain_folder / "adapter_config.json", tmp_path)
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors: the file: is missing, and so is"):
        load_adapter(tmp_path)


def test_pipes_do_not_block(tmp_path: Path, plain_folder: Path) -> None:
    for name in "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "added_tokens.json":
        folder = shutil.copytree(plain_folder, tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        if name in ("adapter_config.json", "adapter_model.safetensors"):
            with pytest.raises(AdapterError, match="is missing"):
                load_adapter(folder)
        else:
            load_adapter(folder)


def test_names_follow_the_path_as_given(tmp_path: Path, plain_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math").symlink_to(plain_folder)  # as a download's snapshot: the target's name means nothing
    monkeypatch.chdir(tmp_path / "math")
    for path in tmp_path / "math", f"{tmp_path}/math/":
        assert load_adapter(path).name == "math"
    assert load_adapter(".").name == os.path.basename(os.getcwd())


def test_errors_cross_process_borders() -> None:
    error = AdapterError("file", "field", "cause", "cure")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, AdapterError) and str(again) == str(error) == "file: field: cause. Cure: cure."


# --- digest


def digest(tensors: Tensors, config: dict[str, Any], name: str = "x") -> str:
    return adapter_from_tensors(tensors, config, None, name).digest


def test_digest_ignores_name_path_format_order_prefix_and_labels(
    tmp_path: Path, plain_folder: Path, tensors: Tensors, plain_config: dict[str, Any]
) -> None:
    expected = load_adapter(plain_folder).digest
    assert len(expected) == 64 and int(expected, 16)
    moved = shutil.copytree(plain_folder, tmp_path / "数学 adapter, new: 1")
    (moved / "optimizer.pt").write_bytes(b"not ours to read")
    assert load_adapter(moved).digest == load_adapter(moved, name="other").digest == expected
    (moved / "adapter_model.safetensors").unlink()
    torch.save(tensors, moved / "adapter_model.bin")
    assert load_adapter(moved).digest == expected

    assert digest(dict(reversed(tensors.items())), plain_config, "y") == expected
    for prefix, infix in ("model.", ""), ("model.", ".default"), (PREFIX, ".math"):
        renamed = {n.replace(PREFIX, prefix).replace(".weight", f"{infix}.weight"): t for n, t in tensors.items()}
        assert digest(renamed, plain_config) == expected
    bare = {n.replace(PREFIX, "base_model.model."): t for n, t in tensors.items()}
    assert digest(bare, plain_config) == expected

    plain_config |= {"base_model_name_or_path": "other", "lora_dropout": 0.3, "task_type": None, "peft_version": "9"}
    plain_config |= {"r": 8, "lora_alpha": 12, "rank_pattern": {"proj|.*": 4}, "alpha_pattern": {".*": 6}}
    assert digest(tensors, plain_config) == expected  # another way to write the same scaling


@pytest.mark.parametrize(
    "changes", [{"lora_alpha": 6.0000001}, {"use_rslora": True}, {"alpha_pattern": {"1.mlp.up_proj": 7}}]
)
def test_digest_changes_with_the_scaling(
    changes: dict[str, Any], tensors: Tensors, plain_config: dict[str, Any]
) -> None:
    assert digest(tensors, {**plain_config, **changes}) != digest(tensors, plain_config)


def test_digest_changes_with_any_tensor(tensors: Tensors, plain_config: dict[str, Any]) -> None:
    seen = {digest(tensors, plain_config)}
    for name in tensors:
        flipped = tensors[name].clone()
        flipped.view(torch.uint8)[0, 0] ^= 1  # the last bit of one value
        seen.add(digest({**tensors, name: flipped}, plain_config))
    assert len(seen) == 1 + len(tensors)


def test_digest_tells_dtypes_layers_and_modules_apart(tensors: Tensors, plain_config: dict[str, Any]) -> None:
    half = {name: tensor.half() for name, tensor in tensors.items()}
    same_values = {name: tensor.float() for name, tensor in half.items()}
    assert digest(half, plain_config) != digest(same_values, plain_config)

    config = {**plain_config, "target_modules": ["q_proj", "o_proj"]}
    a, b = torch.ones(4, 32), torch.ones(32, 4)
    places = ["0.self_attn.q_proj", "1.self_attn.q_proj", "0.self_attn.o_proj"]
    digests = set()
    for place in places:
        one = {f"model.layers.{place}.lora_A.weight": a, f"model.layers.{place}.lora_B.weight": b}
        digests.add(digest(one, {**config, "target_modules": [f"model.layers.{place}"]}))
    assert len(digests) == len(places)


# --- memory


def test_tensors_of_the_caller_are_taken_over_not_copied(tensors: Tensors, plain_config: dict[str, Any]) -> None:
    adapter = adapter_from_tensors(tensors, plain_config)
    pointers = {tensor.data_ptr() for tensor in tensors.values()}
    assert {t.data_ptr() for module in adapter.modules.values() for t in (module.a, module.b)} == pointers


@pytest.mark.parametrize("safe", [True, False])
def test_one_copy_stays(safe: bool, tmp_path: Path, plain_config: dict[str, Any]) -> None:
    """All memory of the tensors is the adapter's own, and goes with it."""

    def live_bytes() -> int:
        gc.collect()
        storages = {}
        for thing in gc.get_objects():
            if type(thing) is torch.Tensor and thing.layout == torch.strided and not thing.is_meta:
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        return sum(storages.values())

    a, b = "model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_B.weight"
    big = {a: torch.ones(4, 100_000), b: torch.ones(100_000, 4)}
    if safe:
        safetensors.torch.save_file(big, tmp_path / "adapter_model.safetensors")
    else:
        torch.save(big, tmp_path / "adapter_model.bin")
    del big
    (tmp_path / "adapter_config.json").write_text(json.dumps({**plain_config, "target_modules": ["q_proj"]}))
    before = live_bytes()
    adapter = load_adapter(tmp_path)
    assert live_bytes() - before == adapter.num_bytes == 3_200_000
    del adapter
    assert live_bytes() == before


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_regular_expression_that_never_ends_is_refused(
    field: str, plain_folder: Path, base: BaseShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nested repetitions can take years on a path of 40 letters; nobody waits for them, and the timer is gone after."""
    monkeypatch.setattr("sglang_lora_tree.adapters.config.MATCHING_SECONDS", 0.2)
    hostile = r"(([a-z.0-9_]+)+)+!"
    shutil.copytree(plain_folder, tmp_path / "hostile")
    file = tmp_path / "hostile" / "adapter_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, field: hostile if field.endswith("modules") else {hostile: 4}}))
    with pytest.raises(AdapterError, match=r"regular expressions takes longer than 0\.2 s"):
        load_adapter(tmp_path / "hostile", base)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    load_adapter(plain_folder, base)


def test_padding_to_one_rank_is_left_out(save_adapter, tmp_path, base):
    """Last directions of zeros, as a compressed adapter padded to one rank has: the same adapter as without them."""
    folder = save_adapter(tmp_path / "padded", r=4, lora_alpha=4)
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_%s.weight"
    tensors[name % "A"][2:] = 0
    tensors[name % "B"][:, 2:] = 0
    tensors[name % "A"][0] = tensors[name % "B"][:, 0] = 0  # not at the end: no padding
    safetensors.torch.save_file(tensors, file)
    adapter = load_adapter(folder, base)
    module = adapter.modules[1, "up_proj"]
    assert module.rank == 2 and module.b.is_contiguous() and module.scaling == 1.0
    torch.testing.assert_close(module.b @ module.a, tensors[name % "B"] @ tensors[name % "A"], rtol=0, atol=0)
    assert {other.rank for place, other in adapter.modules.items() if place != (1, "up_proj")} == {4}
