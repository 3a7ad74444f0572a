"""What only a GPU can show and changes with the code, in the order of its worth, in one command with a limit of time.

    python -m benchmarks.gpu_suite [--only NAME ...] [--seconds 1700] [--out FOLDER] [--dry-run]

Every part is a process of its own with its own limit (and what is left of the whole one); one that fails or is cut costs the
others nothing. Those whose results are no times go first, side by side (16 cores or more); then the others, one by one. Parts
write their results as they go; after each, ``suite.json`` in the folder says how all have ended, and NAME.log there has what a
part printed. A part whose limit the rest of the time does not reach for at least a third is skipped.

Not in it, by commands of their own: kernel_alone and swap_in (parts of what kernels and acceptance show), fleet and
fleet_quality (compression).
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
        timed: it measures time, and nothing may run beside it.
        needs: a program without which it is skipped.
        environment: added to this process's.
    """

    name: str
    command: Sequence[str]
    seconds: int
    timed: bool = True
    needs: str = PYTHON
    environment: tuple[tuple[str, str], ...] = ()


def benchmark(module: str, *arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-m", f"benchmarks.{module}", *arguments, "--out", "OUT")


def tests(*files: str) -> tuple[str, ...]:
    return (*PYTEST, *(f"tests/{file}" for file in files))


SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all", *tests("kernels/test_gpu.py"))

PARTS = (
    Part("kernel_tests", tests(*(f"kernels/test_{name}.py" for name in ("gpu", "triton", "jacobi", "tsqr"))), 280, timed=False),
    Part("demo", (PYTHON, "examples/demo.py", "--out", "OUT/demo", "--", "--attention-backend", "triton"), 280, timed=False),
    Part("acceptance", benchmark("acceptance_gpu", "--phases", "graphs", "bf16"), 280, timed=False),
    Part("prefill_graphs", benchmark("acceptance_gpu", "--phases", "prefill_graphs"), 300, timed=False),
    Part("joined_graphs", benchmark("acceptance_gpu", "--phases", "joined_graphs"), 280, timed=False),
    Part("late_loads", benchmark("acceptance_gpu", "--phases", "late_loads", "late_loads_graphs"), 400, timed=False),
    Part("loads", benchmark("acceptance_gpu", "--phases", "loads", "bf16_served"), 280, timed=False),
    Part(
        "sanitizer",  # the other tests take minutes under it
        (*SANITIZER, "-k", "real_shapes and dtype0"),
        300,
        timed=False,
        needs=SANITIZER[0],
        environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),  # so that every tensor has bounds of its own
    ),
    # With that variable every new tensor is a cudaMalloc, which the capture of a graph forbids.
    Part("sanitizer_graph", (*SANITIZER, "-k", "prefill_graph and qkv and 64"), 300, timed=False, needs=SANITIZER[0]),
    Part("decode_added", benchmark("kernel_world"), 100),
    Part("kernels", benchmark("kernels"), 450),
    Part("fleet_serving", benchmark("fleet_serving"), 340),
    Part("live_tests", tests("live/test_gpu.py"), 400),
    Part("tune_kernels", benchmark("tune_kernels", "--tokens", "32", "8192"), 240),
)  # fmt: skip
"""live_tests measures once more what acceptance does, and the eager server: late."""


def start(part: Part, out: Path) -> subprocess.Popen[bytes]:
    """Begin a part; its results go to a folder of its name."""
    folder = out / part.name
    folder.mkdir(parents=True, exist_ok=True)
    command = [word.replace("OUT", str(folder)) for word in part.command]
    with (out / f"{part.name}.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **dict(part.environment)},
            preexec_fn=hear_interrupts,
        )  # fmt: skip


def finish(part: Part, process: subprocess.Popen[bytes], began: float, seconds: float) -> dict[str, object]:
    """Wait until a part ends, or until `seconds` after `began`; every process that it has started ends with it."""
    try:
        code: int | None = process.wait(max(0.0, began + seconds - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
    stop(process)
    outcome = "cut" if code is None else "passed" if code == 0 else f"failed ({code})"
    return {"part": part.name, "outcome": outcome, "seconds": round(time.monotonic() - began)}


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
    """All parts within `seconds`: first those that may run side by side, then one after the other."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    rows: list[dict[str, object]] = []

    def note(row: dict[str, object]) -> None:
        rows.append(row)
        (out / "suite.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(line(row), flush=True)

    beside = [part for part in parts if not part.timed]
    for group in ([beside] if beside else []) + [[part] for part in parts if part.timed]:
        running = []
        for part in group:
            left = end - time.monotonic()
            missing = shutil.which(part.needs) is None
            if missing or left < part.seconds / 3:
                note({"part": part.name, "outcome": f"no {part.needs}" if missing else "no time", "seconds": 0})
                continue
            try:
                running.append((part, start(part, out), time.monotonic(), min(part.seconds, left)))
            except OSError as error:
                note({"part": part.name, "outcome": f"failed ({error})", "seconds": 0})
        for job in running:
            note(finish(*job))
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
