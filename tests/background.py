"""Runs that only have to end begin before the tests that judge them, one after another, on the core that other tests leave idle.

A test is marked by ``@in_background(run)`` and asks ``background.result(run)``. ``conftest`` puts such tests after those
that ask no server and before those that do, so nothing runs beside a server's tests.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Run = Callable[[Path], T]
"""Waits for processes and says what came of them; gets an empty folder of its own, and touches nothing that tests touch."""
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = dict(os.environ)
"""As it was before any test changed it."""


def in_background(run: Run[Any]) -> pytest.MarkDecorator:
    """The test, or every test of a module, waits for this run."""
    return pytest.mark.background.with_args(run)  # called with a function alone, a mark takes it for the test


def runs_of(items: Iterable[pytest.Item]) -> list[Run[Any]]:
    """Each once, in the order of the tests; none of tests that are skipped."""
    wanted = (item for item in items if not any(mark.args and mark.args[0] for mark in item.iter_markers("skipif")))
    return list(dict.fromkeys(mark.args[0] for item in wanted for mark in item.iter_markers("background")))


def run_command(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None, standard_input: str = ""
) -> subprocess.CompletedProcess[str]:
    """What a command prints that is run in the checkout.

    Raises:
        subprocess.TimeoutExpired: after so many seconds.
    """
    environment = {**ENVIRONMENT, **(environment or {})}
    return subprocess.run(
        command, input=standard_input, capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=environment
    )


class Background:
    """Begins runs in a thread."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="background-")
        self._worker = ThreadPoolExecutor(1)
        self._begun: dict[Run[Any], Future[Any]] = {}

    def begin(self, runs: Sequence[Run[Any]]) -> None:
        """The last first: tests ask for the first one first, and run it themselves, until both meet."""
        for run in reversed(runs):
            self._begun[run] = self._worker.submit(self._run, run)

    def result(self, run: Run[T]) -> T:
        """What the run returned or raised; a run that has not begun takes place here."""
        future: Future[T] | None = self._begun.get(run)
        return self._run(run) if future is None or future.cancel() else future.result()

    def close(self) -> None:
        """Begin nothing more, and wait for what runs."""
        self._worker.shutdown(cancel_futures=True)
        self._folder.cleanup()

    def _run(self, run: Run[T]) -> T:
        return run(Path(tempfile.mkdtemp(dir=self._folder.name)))
