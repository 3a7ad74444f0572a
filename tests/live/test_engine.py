"""``sgl.Engine(lora_tree=...)`` in a process of its own, as a user runs it: the example, and the sample of the README."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from background import Background, in_background, run_command

from .conftest import EMBEDDED

ROOT = EMBEDDED.parents[1]
SECONDS = 280


def run(script: Path) -> str:
    """What a script prints, started in the folder of the checkout."""
    result = run_command([sys.executable, str(script)], SECONDS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def run_example(folder: Path) -> str:
    return run(ROOT / "examples" / "engine.py")


def run_sample(folder: Path) -> str:
    samples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (sample,) = (sample for sample in samples if "sglang.Engine" in sample)
    script = folder / "sample.py"  # a file: the processes that an engine starts import it again
    script.write_text(sample)
    return run(script)


@pytest.mark.timeout(SECONDS + 20)  # about 40 s on an idle machine
@in_background(run_example)
def test_the_example(background: Background) -> None:
    """A mix per prompt of one batch: each answers as itself, and two ways to write one mix are one mix."""
    out = background.result(run_example)
    lines = re.findall(r"^(base|math|math:0\.7,json:0\.3|\{.*?\}|\[.*?\]) +(['\"].*['\"])$", out, re.MULTILINE)
    assert len(lines) == 5, out
    base, math, text, mapping, listed = (answer for _, answer in lines)
    assert lines[0][0] == "base" and len({base, math, text}) == 3, out
    assert "=" in math and text == mapping and '{"name": "I' in text, out
    assert listed != base, out


@pytest.mark.timeout(SECONDS + 20)
@in_background(run_sample)
def test_the_sample_of_the_readme(background: Background) -> None:
    assert '{"name": "Tom", "plums":' in background.result(run_sample)
