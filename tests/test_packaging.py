"""What `pip install .` installs is what the checkout runs, data files too."""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGED = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "kernels", "sglang_lora_tree")
BUILD = "import sys; from setuptools import build_meta as b; print(b.build_sdist('.')); print(b.build_wheel('.'))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the source archive and the wheel of a copy with a tuned GPU are."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("build") / "project"
    copy.mkdir()
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    (copy / "kernels" / "configs").mkdir(exist_ok=True)
    (copy / "kernels" / "configs" / "some-gpu.json").write_text("[]")
    result = subprocess.run([sys.executable, "-P", "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return copy


@pytest.fixture(scope="module")
def built(folder: Path) -> tuple[set[str], set[str]]:
    """Names in the source archive and in the wheel."""
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        return source, set(archive.namelist())


def test_every_module_is_installed(built: tuple[set[str], set[str]]) -> None:
    """Also those of kernels/, which the package reaches through a link."""
    wanted = {f"sglang_lora_tree/kernels/{file.name}" for file in (ROOT / "kernels").glob("*.py")}
    wanted |= {file.relative_to(ROOT).as_posix() for file in (ROOT / "sglang_lora_tree").rglob("*.py")}
    for names in built:
        assert not wanted - names


def test_tuned_kernel_configs_are_installed(built: tuple[set[str], set[str]]) -> None:
    for names in built:
        assert "sglang_lora_tree/kernels/configs/some-gpu.json" in names


def test_sglang_finds_the_plugin_and_the_shell_the_command(folder: Path) -> None:
    """The wheel's entry points are those of pyproject.toml, and each names something that is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"console_scripts": project["scripts"], **project["entry-points"]}
    assert set(wanted) == {"console_scripts", "sglang.srt.plugins", "sglang.srt.platforms"}
    points = ConfigParser()
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        points.read_string(archive.read(name).decode())
    assert {section: dict(points[section]) for section in points.sections()} == wanted
    for group in wanted.values():
        assert all(callable(pkgutil.resolve_name(target)) for target in group.values())
