"""Starting: what cannot be served exactly is refused before anything is served, and without the flag nothing changes.

The arguments are resolved in one process of its own (hooks stay out of this one), which prints what came of each.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from background import Background, in_background, run_command

from benchmarks.server import LAUNCH, free_port
from sglang_lora_tree.options import ENVIRONMENT, RULES, SERVED, UNSERVED
from sglang_lora_tree.refusals import find_refusals, find_replaced, find_unserved

from .conftest import EMBEDDED

MODEL = str(EMBEDDED / "model")
REFUSED: list[tuple[list[str], str]] = [
    (["--pp-size", "2"], "all layers"),
    (["--dp-size", "2"], "router"),
    (["--disaggregation-mode", "prefill"], "adapter slots for KV"),
    (["--kv-cache-dtype", "fp8_e5m2"], "16 or 32 bits"),
    (["--hicache-write-policy", "write_back"], "host parent"),
    (["--hicache-storage-backend", "file"], "storage backend"),
    (["--tokenizer-worker-num", "2"], "tokenizer"),
    (["--enable-torch-compile"], "bypass"),
    (["--enable-streaming-session"], "sessions"),
    (["--cpu-offload-gb", "1"], "offloaded"),
    (["--kv-events-config", '{"publisher": "null"}'], "events"),
    (["--model-impl", "transformers"], "LoRA wrappers"),
    # These SGLang refuses itself, in words about flags that nobody gave.
    (["--disable-radix-cache"], "prefix tree"),
    (["--enable-lora-overlap-loading"], "HiCache loads adapters"),
    (["--enable-two-batch-overlap"], "batch's tables"),
    (["--enable-dp-attention", "--tp", "2"], "different adapters"),
    (["--speculative-algorithm", "EAGLE"], "draft model"),
    (["--use-ray"], "Ray"),
    (["--nnodes", "2"], "one machine"),
    (["--quantization", "fp8"], "not quantized"),
    (["--attention-backend", "dsa"], "plain attention"),
    (["--enable-mixed-chunk"], "share a batch"),
    # Options of which only the default is served.
    (["--moe-runner-backend", "triton"], "experts"),
    (["--speculative-num-steps", "3"], "speculative decoding"),
    (["--forward-hooks", "[]"], "layers are wrapped"),
    (["--cuda-graph-config", '{"decode": {"backend": "disabled"}}'], "--cuda-graph-bs-*"),
]
"""Arguments beside --lora-tree, and what the refusal says."""
REPLACED: list[tuple[dict[str, str], str]] = [
    ({"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER=1: the Rust server"),
    ({"SGLANG_RUST_SERVER": "True"}, "SGLANG_RUST_SERVER=True"),
    ({"SGLANG_GRPC_PORT": "30123"}, "--grpc-port 30123"),
    ({"SGLANG_USE_HND_KVCACHE": "true"}, "contiguous"),
    ({"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}, "another size"),
]
"""The environment of --lora-tree, and what the refusal says."""
COMMON = [
    "--host", "0.0.0.0", "--port", "31000", "--api-key", "k", "--served-model-name", "tiny", "--log-level", "warning",
    "--log-requests", "--enable-metrics", "--tokenizer-mode", "slow", "--trust-remote-code", "--context-length", "1024",
    "--chat-template", "llama-2", "--tool-call-parser", "llama3", "--reasoning-parser", "deepseek-r1", "--dtype", "float32",
    "--mem-fraction-static", "0.5", "--max-running-requests", "8", "--max-total-tokens", "2000", "--chunked-prefill-size", "64",
    "--max-prefill-tokens", "512", "--schedule-policy", "lpm", "--page-size", "4", "--hicache-ratio", "3",
    "--radix-eviction-policy", "lfu", "--cuda-graph-max-bs-decode", "16", "--cuda-graph-backend-prefill", "disabled",
    "--watchdog-timeout", "60", "--random-seed", "1", "--stream-interval", "2", "--attention-backend", "torch_native",
    "--max-loras-per-batch", "4", "--grammar-backend", "none", "--tp", "2",
]  # fmt: skip
"""What users give most often."""
WRONG_SETTINGS: list[tuple[str, str]] = [
    ('{"max_member": 3}', "unknown settings max_member"),
    ('{"max_rank": 0}', "max_rank = 0"),
    ("nowhere.yaml", "nowhere.yaml"),
    ("[1]", "[1]"),
    ('{"max_rank": ', "neither JSON nor YAML"),
]

RESOLVE = """
import contextlib, io, json, os, sys

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, prepare_server_args

def resolve(arguments, environment=()):
    os.environ.pop("SGLANG_LORA_TREE", None)
    os.environ.update(environment)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            config = prepare_server_args(arguments)
            config.resolve_once()
            config.check_server_args()
            return config, None
    except SystemExit:
        return None, errors.getvalue()
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"
    finally:
        for name in environment:
            os.environ.pop(name, None)

def plain(config):
    skipped = ("port", "nccl_port", "random_seed")
    view = resolving_view(config)
    return {name: repr(getattr(view, name)) for name in config.__struct_fields__ if name not in skipped}

cases, stock_arguments, tree_arguments, common_arguments = json.load(sys.stdin)
stock = plain(resolve(stock_arguments)[0])
without_plugin = resolve(tree_arguments)[1]
load_plugins()
installed = plain(resolve(stock_arguments)[0])
outcomes = [resolve(*case)[1] for case in cases]
served = plain(resolve(tree_arguments)[0])
common = resolve(common_arguments)[1]
target = "sglang.srt.managers.scheduler.Scheduler.can_schedule_lora_req"
HookRegistry._patched.discard(target)
missing = resolve(tree_arguments)[1]
print("RESULT" + json.dumps({
    "outcomes": outcomes,
    "changed": {name: [stock[name], installed[name]] for name in stock if stock[name] != installed[name]},
    "without_plugin": without_plugin,
    "served": served,
    "common": common,
    "fields": list(ServerArgs.__struct_fields__),
    "missing": missing,
}))
"""


def resolve_all(folder: Path) -> dict[str, Any]:
    """What came of all arguments of this file."""
    quantized = folder / "model"
    shutil.copytree(MODEL, quantized)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (quantized / "config.json").write_text(json.dumps(config))
    tree = ["--model-path", MODEL, "--lora-tree"]
    cases: list[tuple[list[str], dict[str, str]]] = [([*tree, *arguments], {}) for arguments, _ in REFUSED]
    cases += [(["--model-path", MODEL, "--lora-tree", settings], {}) for settings, _ in WRONG_SETTINGS]
    cases += [(tree, environment) for environment, _ in REPLACED]
    cases.append((["--model-path", str(quantized), "--lora-tree"], {}))
    asked = json.dumps([cases, ["--model-path", MODEL], tree, [*tree, *COMMON]])
    result = run_command([sys.executable, "-c", RESOLVE], 300, {"OMP_NUM_THREADS": "1"}, asked)
    line = next((line for line in result.stdout.splitlines() if line.startswith("RESULT")), None)
    assert line is not None, result.stdout[-4000:] + result.stderr[-4000:]
    return json.loads(line.removeprefix("RESULT"))


pytestmark = in_background(resolve_all)


@pytest.fixture(scope="module")
def resolved(background: Background) -> dict[str, Any]:
    return background.result(resolve_all)


def test_every_option_is_decided(resolved: dict[str, Any]) -> None:
    """A new SGLang may bring one: served, served with some values, or only at its default. No option is in two tables."""
    decided = [*(name for name, _, _ in RULES), *SERVED, *UNSERVED]
    assert sorted(decided) == sorted(resolved["fields"])


def test_an_option_that_nobody_has_decided_is_refused() -> None:
    """With its name, its value and the cure; what is served passes."""
    assert find_unserved({"host": "0.0.0.0", "tp_size": 2}) == []
    (refusal,) = find_unserved({"new_cache": "fast"})
    assert refusal.startswith("--new-cache fast: ") and "does not know" in refusal and refusal.endswith("leave it out")


def test_options_left_at_their_defaults_say_why() -> None:
    for name, reason in UNSERVED.items():
        (refusal,) = find_unserved({name: "something else"})
        assert "--" + name.replace("_", "-") in refusal and "something else" in refusal and reason in refusal


@pytest.mark.parametrize(("name", "values", "reason"), ENVIRONMENT, ids=[rule[0] for rule in ENVIRONMENT])
def test_every_variable_refuses_and_says_why(name: str, values: tuple[str, ...] | None, reason: str) -> None:
    for value in values or ("anything",):
        (refusal,) = find_replaced({name: value.upper()})
        assert f"{name}={value.upper()}: {reason}" in refusal and "unset it" in refusal
    assert find_replaced({name: ""}) == []
    assert values is None or find_replaced({name: "0"}) == find_replaced({name: "false"}) == []


@pytest.mark.parametrize(("name", "served", "reason"), RULES, ids=[rule[0] for rule in RULES])
def test_every_rule_refuses_and_says_why(name: str, served: tuple[Any, ...], reason: str) -> None:
    """Each rule names the flag, its value, the reason and what is served; served values pass."""
    refusals = find_refusals(SimpleNamespace(**{name: "something else"}))
    assert len(refusals) == 1
    assert "--" + name.replace("_", "-") in refusals[0] and "something else" in refusals[0] and reason in refusals[0]
    assert str(served[0]) in refusals[0]
    for value in served:
        assert find_refusals(SimpleNamespace(**{name: value})) == []


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[arguments[0] for arguments, _ in REFUSED])
def test_arguments_are_refused(resolved: dict[str, Any], index: int) -> None:
    """Real arguments, through SGLang's own parsing and resolution."""
    arguments, says = REFUSED[index]
    outcome = resolved["outcomes"][index]
    assert outcome is not None, f"{arguments} starts"
    assert "--lora-tree refuses to start" in outcome and arguments[0] in outcome and says in outcome, outcome


@pytest.mark.parametrize("index", range(len(WRONG_SETTINGS)))
def test_wrong_settings_are_refused(resolved: dict[str, Any], index: int) -> None:
    """A setting that is unknown, out of range or unreadable stops the start, with its name."""
    outcome = resolved["outcomes"][len(REFUSED) + index]
    assert outcome is not None and WRONG_SETTINGS[index][1] in outcome, outcome


@pytest.mark.parametrize("index", range(len(REPLACED)), ids=["=".join(*environment.items()) for environment, _ in REPLACED])
def test_an_environment_that_replaces_what_we_build_on_is_refused(resolved: dict[str, Any], index: int) -> None:
    """The Rust server above all: no hook of the API process would see a request."""
    outcome = resolved["outcomes"][len(REFUSED) + len(WRONG_SETTINGS) + index]
    assert outcome is not None and "--lora-tree refuses to start" in outcome and REPLACED[index][1] in outcome, outcome


def test_a_quantized_model_is_refused(resolved: dict[str, Any]) -> None:
    """Nobody gave --quantization: the model's own configuration says it."""
    outcome = resolved["outcomes"][-1]
    assert outcome is not None and "--quantization fp8" in outcome and "not quantized" in outcome, outcome


def test_common_options_are_served(resolved: dict[str, Any]) -> None:
    assert resolved["common"] is None, resolved["common"]


def test_the_flag_implies_what_it_needs(resolved: dict[str, Any]) -> None:
    """--lora-tree alone is enough."""
    served = resolved["served"]
    assert served["enable_lora"] == served["enable_hierarchical_cache"] == "True"
    assert served["lora_backend"] == served["radix_cache_backend"] == "'lora_tree'"
    assert served["max_loras_per_batch"] == "256"


def test_without_the_flag_nothing_changes(resolved: dict[str, Any]) -> None:
    """The installed plugin leaves every resolved argument of SGLang as it is."""
    assert resolved["changed"] == {}


def test_a_hook_that_did_not_take_stops_the_start(resolved: dict[str, Any]) -> None:
    """The self-check names the hook."""
    assert "did not take" in resolved["missing"] and "can_schedule_lora_req" in resolved["missing"]


def test_without_the_plugin_the_flag_is_unknown(resolved: dict[str, Any]) -> None:
    """Where the plugin is not loaded (SGLANG_PLUGINS leaves it out), nothing is served in silence."""
    assert "--lora-tree" in resolved["without_plugin"]


def start_with_unreadable_adapter(folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The adapter, and what came of the start."""
    broken = folder / "broken"
    broken.mkdir()
    config = json.loads((EMBEDDED / "adapters" / "math" / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    (broken / "adapter_model.safetensors").write_bytes(b"not safetensors")
    arguments = ["--port", str(free_port()), "--model-path", MODEL, "--lora-tree", "--lora-paths", f"bad={broken}"]
    return broken, run_command([sys.executable, *LAUNCH, *arguments], 300)


@in_background(start_with_unreadable_adapter)
def test_an_unreadable_adapter_stops_the_start(background: Background) -> None:
    """--lora-paths with a folder that cannot be served: the server does not start, and says which and what to do."""
    broken, start = background.result(start_with_unreadable_adapter)
    said = start.stdout + start.stderr
    assert start.returncode != 0
    assert f"--lora-paths bad={broken}" in said and "use_dora" in said and "merge" in said, said[-6000:]
