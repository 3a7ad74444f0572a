"""``make demo``, from its first line to its last: what a new user sees is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from background import Background, in_background, run_command

from .conftest import EMBEDDED

CALL = re.compile(r"^ *(\d+)  (\S.{20}) +(\d+) +(\d+) +[\d,]+ ms   (.+)$", re.MULTILINE)


def run_demo(folder: Path) -> tuple[subprocess.CompletedProcess[str], bytes, str]:
    """Its output, the picture, the server's log."""
    result = run_command([sys.executable, str(EMBEDDED.parent / "demo.py"), "--out", str(folder)], 460)
    log = (folder / "server.log").read_text(errors="replace")
    assert result.returncode == 0, result.stdout + result.stderr
    return result, (folder / "tree.png").read_bytes(), log


@pytest.mark.timeout(480)  # about 40 s on an idle machine
@in_background(run_demo)
def test_demo(background: Background) -> None:
    """Twelve calls or more; whoever comes back finds history KV; something is on the GPU and something in host memory only;
    a picture; invalid KV 0; no process left."""
    result, picture, log = background.result(run_demo)
    out = result.stdout
    assert not result.stderr, out + result.stderr
    calls = CALL.findall(out)
    assert len(calls) >= 12 and [int(call[0]) for call in calls] == list(range(1, len(calls) + 1)), out
    seen: set[str] = set()
    found_again = 0
    for _, adapters, prompt, cached, answer in calls:
        assert int(cached) < int(prompt) and answer != "(nothing)", out
        assert adapters in seen or int(cached) == 0, f"{adapters.strip()} found KV that is not its own\n{out}"
        found_again += adapters in seen and int(cached) > 0
        seen.add(adapters)
    assert found_again >= 8 and "0.7 math + 0.3 json" in {name.strip() for name in seen}, out
    for part in ("virtual root", "adapter math", "├─ mix ", "math:0.7", "json:0.3", "KV ", "[GPU+host]", "[host]"):
        assert part in out, f"{part} is not shown\n{out}"
    assert out.endswith("invalid KV: 0\n"), out
    assert picture.startswith(b"\x89PNG")
    assert "Traceback" not in log
