"""Everything that only a GPU can show, in the order of its worth, in one command with a limit of time.

    python -m benchmarks.gpu_suite [--only NAME ...] [--seconds 1700] [--out FOLDER] [--dry-run]

Every part is a process of its own with its own limit (and what is left of the whole one); one that fails or is cut costs the
others nothing. Parts write their results as they go; after each, ``suite.json`` in the folder says how all have ended, and
NAME.log there has what a part printed. A part whose limit the rest of the time does not reach for at least a third is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5")


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        command: with OUT for the folder of results.
        seconds: its limit.
        needs: a program without which it is skipped.
        environment: added to this process's.
    """

    name: str
    command: Sequence[str]
    seconds: int
    needs: str = PYTHON
    environment: tuple[tuple[str, str], ...] = ()


def benchmark(module: str, *arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-m", f"benchmarks.{module}", *arguments, "--out", "OUT")


def tests(*files: str) -> tuple[str, ...]:
    return (*PYTEST, *(f"tests/{file}" for file in files))


PARTS = (
    Part("kernel_tests", tests(*(f"kernels/test_{name}.py" for name in ("gpu", "triton", "jacobi", "tsqr"))), 240),
    Part("demo", (PYTHON, "examples/demo.py", "--out", "OUT/demo", "--", "--attention-backend", "triton"), 150),
    Part("acceptance", benchmark("acceptance_gpu", "--phases", "graphs", "bf16"), 200),
    Part("prefill_graphs", benchmark("acceptance_gpu", "--phases", "prefill_graphs"), 300),
    Part("decode_added", benchmark("kernel_world"), 100),
    Part("kernels", benchmark("kernels"), 420),
    Part(
        "sanitizer",
        ("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all", *tests("kernels/test_gpu.py"),
         "-k", "real_shapes and dtype0 or prefill_graph and qkv and 64"),  # the others take minutes under it
        150,
        needs="compute-sanitizer",
        environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),  # so that every tensor has bounds of its own
    ),
    Part("fleet_serving", benchmark("fleet_serving"), 300),
    Part("live_tests", tests("live/test_gpu.py"), 400),
    Part("tune_kernels", benchmark("tune_kernels", "--tokens", "32", "8192"), 240),
)  # fmt: skip
"""live_tests measures once more what acceptance does, and the eager server: late."""


def run(part: Part, out: Path, seconds: float) -> dict[str, object]:
    """Run a part to its end or its limit; every process that it has started ends with it."""
    folder = out / part.name
    folder.mkdir(parents=True, exist_ok=True)
    command = [word.replace("OUT", str(folder)) for word in part.command]
    start = time.monotonic()
    with (out / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **dict(part.environment)},
            preexec_fn=hear_interrupts,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        stop(process)
    outcome = "cut" if code is None else "passed" if code == 0 else f"failed ({code})"
    return {"part": part.name, "outcome": outcome, "seconds": round(time.monotonic() - start)}


def hear_interrupts() -> None:
    """In a part, before it starts: a shell's background jobs ignore SIGINT, and so would all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part: it may stop its servers itself first; they have process groups of their own."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    for kind, patience in ((signal.SIGINT, 30), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, kind)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    for child in started:
        if child.is_running():  # false if another process has its number by now
            child.kill()


def suite(parts: Sequence[Part], out: Path, seconds: float) -> list[dict[str, object]]:
    """All parts, one after the other, within `seconds`."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    rows: list[dict[str, object]] = []
    for part in parts:
        left = end - time.monotonic()
        missing = shutil.which(part.needs) is None
        if missing or left < part.seconds / 3:
            rows.append({"part": part.name, "outcome": f"no {part.needs}" if missing else "no time", "seconds": 0})
        else:
            try:
                rows.append(run(part, out, min(part.seconds, left)))
            except OSError as error:
                rows.append({"part": part.name, "outcome": f"failed ({error})", "seconds": 0})
        (out / "suite.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, object]) -> str:
    return f"{row['part']!s:<16}{row['seconds']!s:>6} s  {row['outcome']}"


def main() -> None:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=1700)
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run")
    arguments = parser.parse_args()
    parts = [part for part in PARTS if part.name in arguments.only]
    if arguments.dry_run:
        for part in parts:
            print(f"{part.name} ({part.seconds} s): {' '.join(part.command)}")
        return
    rows = suite(parts, arguments.out.resolve(), arguments.seconds)
    print("\n".join(["", *map(line, rows)]))


if __name__ == "__main__":
    main()
