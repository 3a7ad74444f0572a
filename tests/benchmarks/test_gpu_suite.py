"""The suite for a GPU goes on whatever a part does, keeps to its time, and leaves no process behind."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.gpu_suite import PARTS, PYTHON, ROOT, Part, suite


def test_dry_run_lists_what_there_is():
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--dry-run", "--only", "kernels", "demo"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(shown) == 2 and shown[0].startswith("demo (") and "benchmarks.kernels --out OUT" in shown[1]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_names_what_exists(part):
    for word in part.command:
        if word.startswith(("tests/", "examples/")):
            assert (ROOT / word).exists()
        elif word.startswith("benchmarks."):
            assert importlib.util.find_spec(word), word


def test_a_part_that_fails_or_hangs_costs_the_others_nothing(tmp_path):
    hang = f"import subprocess, time; subprocess.Popen(['{PYTHON}', '-c', 'import time; time.sleep(61)'], start_new_session=True)"
    hang += "; time.sleep(60)"
    parts = [
        Part("bad", (PYTHON, "-c", "raise SystemExit(3)"), 30),
        Part("absent", ("no-such-program",), 30, needs="no-such-program"),
        Part("hangs", (PYTHON, "-c", hang), 2),
        Part("good", (PYTHON, "-c", "import sys; open(sys.argv[1] + '/made', 'w').write('x'); print('said')", "OUT"), 30),
        Part("late", (PYTHON, "-c", ""), 3000),
    ]
    start = time.monotonic()
    rows = suite(parts, tmp_path, 60)
    assert [row["outcome"] for row in rows] == ["failed (3)", "no no-such-program", "cut", "passed", "no time"]
    assert json.loads((tmp_path / "suite.json").read_text()) == rows
    assert (tmp_path / "good" / "made").exists() and (tmp_path / "good.log").read_text() == "said\n"
    assert time.monotonic() - start < 30
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not any("time.sleep(61)" in command for command in commands)


def test_parts_without_times_run_side_by_side_and_first(tmp_path):
    """Each of two waits for the other's file; the one that measures time finds both there."""
    wait = "import pathlib, sys, time; here = pathlib.Path(sys.argv[1]).parent; (here / sys.argv[2]).touch()\n"
    wait += "while not (here / sys.argv[3]).exists(): time.sleep(0.05)"
    parts = [
        Part("timed", (PYTHON, "-c", "import os, sys; assert os.path.exists(sys.argv[1] + '/../1')", "OUT"), 30),
        Part("one", (PYTHON, "-c", wait, "OUT", "1", "2"), 30, timed=False),
        Part("two", (PYTHON, "-c", wait, "OUT", "2", "1"), 30, timed=False),
    ]
    assert [(row["part"], row["outcome"]) for row in suite(parts, tmp_path, 60)] == [
        ("one", "passed"), ("two", "passed"), ("timed", "passed"),
    ]  # fmt: skip
