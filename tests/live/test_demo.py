"""``make demo``, from its first line to its last: what a new user sees is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import EMBEDDED

CALL = re.compile(r"^ *(\d+)  (\S.{20}) +(\d+) +(\d+) +[\d,]+ ms   (.+)$", re.MULTILINE)


@pytest.mark.timeout(480)  # about 40 s on an idle machine
def test_demo(tmp_path: Path) -> None:
    """Twelve calls or more; whoever comes back finds history KV; something is on the GPU and something in host memory only;
    a picture; invalid KV 0; no process left."""
    command = [sys.executable, str(EMBEDDED.parent / "demo.py"), "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=460, stdin=subprocess.DEVNULL)
    out = result.stdout
    assert result.returncode == 0 and not result.stderr, out + result.stderr
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
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in (tmp_path / "server.log").read_text(errors="replace")
