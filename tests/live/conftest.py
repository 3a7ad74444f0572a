"""The servers that tests ask, one at a time: a test names its servers by ``@on("small", "tp2")`` and gets ``live``.

pytest groups tests by the parameter of a session fixture, so each configuration starts once, when the first test wants
it, and ends before the next one starts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ALL_LINEAR, make_adapters, make_llama

from benchmarks.server import LAUNCH, SERVE

from .judge import Judge
from .server import Server

EMBEDDED = Path(__file__).resolve().parents[2] / "examples" / "embedded_model"
WIDE = {f"wide{index}": {"r": 14, "lora_alpha": 7, "target_modules": ALL_LINEAR} for index in range(5)}
"""Large ones: a small pool holds two of them, and few tokens beside."""
TINY = {f"tiny{index}": {"r": 2, "lora_alpha": 4, "target_modules": ALL_LINEAR} for index in range(40)}
"""Together more than the host memory of a small server holds."""
PATIENCE = 16
"""Passes after which the oldest waiting request of the small server holds others back."""


@dataclass(frozen=True)
class Configuration:
    """How a server is started."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    embedded: bool = False
    command: tuple[str, ...] = LAUNCH


_TESTED = {"verify_invariants": True, "patience_passes": PATIENCE, "join_operations": True}
_SMALL = ("--skip-tokenizer-init", "--dtype", "float32", "--chunked-prefill-size", "32", "--lora-tree")
CONFIGURATIONS = {
    # A pool far too small, loads held back with NaN in their rows, SGLang's leak check at every step.
    "small": Configuration(
        (*_SMALL, json.dumps({**_TESTED, "delay_loads": 5}), "--max-total-tokens", "600", "--enable-metrics"),
        {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"},
    ),
    # Such a pool on two ranks that compare their trees and decisions (adapters are larger where K and V are narrower), and
    # loads come in with the batch that needs them.
    "tp2": Configuration(
        (*_SMALL, json.dumps(_TESTED), "--max-total-tokens", "900", "--tp", "2", "--page-size", "4"),
        {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"},
    ),
    # As a user starts it, with the other of SGLang's two commands.
    "embedded": Configuration(("--lora-tree", "--enable-metrics"), embedded=True, command=SERVE),
    # The same, exact.
    "float32": Configuration(("--lora-tree", "--dtype", "float32"), embedded=True),
    # And where little fits.
    "embedded_small": Configuration(
        ("--dtype", "float32", "--chunked-prefill-size", "32", "--lora-tree", json.dumps(_TESTED), "--max-total-tokens", "1200"),
        embedded=True,
    ),
}


@dataclass
class Live:
    """A running server, and what it serves."""

    name: str
    server: Server
    judge: Judge
    adapters: dict[str, Path]
    vocab: int

    @property
    def pool_size(self) -> int:
        return int(self.server.tree()["pool"]["gpu_size"])


def on(*names: str) -> pytest.MarkDecorator:
    """The test runs on each of these servers, as ``live``."""
    return pytest.mark.parametrize("live", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def five(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters that differ in every way."""
    return make_adapters(llama, tmp_path_factory.mktemp("five"))


@pytest.fixture(scope="session")
def others(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wide and tiny ones, not registered at start."""
    return make_adapters(llama, tmp_path_factory.mktemp("others"), {**WIDE, **TINY}, seed=2)


@pytest.fixture(scope="session")
def small_judge(llama: Path, five: dict[str, Path], others: dict[str, Path]) -> Judge:
    return Judge(llama, {**five, **others})


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A copy of the embedded model and its adapters, so that nobody trains them meanwhile."""
    folder = tmp_path_factory.mktemp("embedded")
    for part in ("model", "adapters"):
        shutil.copytree(EMBEDDED / part, folder / part)
    return folder / "model", {path.name: path for path in sorted((folder / "adapters").iterdir())}


@pytest.fixture(scope="session")
def embedded_judge(embedded: tuple[Path, dict[str, Path]]) -> Judge:
    torch.set_num_threads(1)
    return Judge(*embedded)


@pytest.fixture(scope="session")
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if torch.cuda.is_available():
        pytest.skip("these servers are those of the CPU platform (a GPU is tests/live/test_gpu.py's)")
    configuration = CONFIGURATIONS[request.param]
    if configuration.embedded:
        model, adapters = request.getfixturevalue("embedded")
        judge, vocab = "embedded_judge", 256
    else:
        model, adapters = request.getfixturevalue("llama"), request.getfixturevalue("five")
        judge, vocab = "small_judge", 320
    paths = [f"{name}={path}" for name, path in adapters.items()]
    arguments = ["--model-path", str(model), *configuration.arguments, "--lora-paths", *paths]
    environment = {"OMP_NUM_THREADS": "1", **configuration.environment}
    log = tmp_path_factory.mktemp(request.param) / "server.log"
    if folder := os.environ.get("LORA_TREE_LOGS"):
        log = Path(folder) / f"{request.param}.log"
    server = Server(log, arguments, environment, configuration.command)
    try:
        # The judge is made while the server starts.
        judged = request.getfixturevalue(judge)
        server.wait()
        yield Live(request.param, server, judged, adapters, vocab)
    finally:
        server.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """A failed test shows the end of its server's log."""
    report = yield
    live = getattr(item, "funcargs", {}).get("live")
    if report.when == "call" and report.failed and isinstance(live, Live):
        report.sections.append((f"log of the server {live.name}", live.server.tail(6000)))
    return report
