"""The documents name what is there: files, settings and their defaults."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sglang_lora_tree.config import Settings

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
FOLDERS = ("benchmarks", "docs", "examples", "kernels", "scripts", "sglang_lora_tree", "tests")
WORDS = {"on": True, "off": False}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert not [link for link in links if not (document.parent / link).exists()]
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./]+)`", text)
    assert not [path for path in paths if not (ROOT / path).exists()]
    modules = re.findall(r"python -m (benchmarks\.\w+|examples(?:\.\w+)+)", text)
    assert not [module for module in modules if not (ROOT / f"{module.replace('.', '/')}.py").exists()]


def test_settings_of_the_readme_have_these_defaults() -> None:
    """Names in the table's first column, their defaults in the second, in the same order where both are lists."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| setting | default |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 5
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    for names, shown, _ in rows:
        fields = re.findall(r"`(\w+)`", names)
        assert set(fields) <= set(defaults), names
        values = shown.split(", ")
        for name, value in zip(fields, values * len(fields) if len(values) == 1 else values, strict=False):
            default = defaults[name]
            if default is None or name == "delay_loads":  # in words, or off by another value
                continue
            wanted = WORDS[value] if value in WORDS else type(default)(value)
            assert wanted == default, f"{name}: {value} in README.md, {default} in config.py"
