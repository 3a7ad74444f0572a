"""Runs that tests wait for: begun once and before, never at import, and here if nobody has begun them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from background import Background, in_background, run_command, runs_of


@pytest.fixture
def begun() -> Iterator[Background]:
    background = Background()
    yield background
    background.close()


def test_a_mark_runs_nothing() -> None:
    """A run begun at import would begin in the processes that runs start, too, and so on."""
    called = []

    @in_background(called.append)
    def test() -> None:
        called.append("the test")

    assert not called and test.pytestmark[0].args == (called.append,)  # type: ignore[attr-defined]


def test_runs_of_tests_that_are_not_skipped_begin_once() -> None:
    def one(folder: Path) -> None: ...

    def other(folder: Path) -> None: ...

    def item(*marks: Any) -> Any:
        return SimpleNamespace(iter_markers=lambda name: [mark.mark for mark in marks if mark.name == name])

    skipped = pytest.mark.skipif(True, reason="no GPU")
    kept = pytest.mark.skipif(False, reason="a GPU")
    items = [item(in_background(one), skipped), item(), item(in_background(other), kept), item(in_background(one))]
    assert runs_of([*items, *items]) == [other, one]


def test_a_run_is_in_a_thread_and_has_a_folder_of_its_own(begun: Background) -> None:
    def one(folder: Path) -> tuple[int, Path, list[Path]]:
        return threading.get_ident(), folder, list(folder.iterdir())

    begun.begin([one])
    begun._worker.submit(int).result()  # the run is over
    thread, folder, found = begun.result(one)
    assert thread != threading.get_ident() and not found
    other_thread, other_folder, _ = Background().result(one)
    assert other_thread == threading.get_ident() and other_folder != folder


def test_a_run_that_has_not_begun_takes_place_here(begun: Background) -> None:
    over, threads = threading.Event(), []

    def first(folder: Path) -> None:
        threads.append(threading.get_ident())

    def last(folder: Path) -> bool:
        return over.wait(60)

    begun.begin([first, last])
    begun.result(first)
    assert threads == [threading.get_ident()], "it waits for a run that tests ask for later"
    over.set()
    assert begun.result(last)


def test_what_a_run_raises_the_test_raises(begun: Background) -> None:
    def fail(folder: Path) -> None:
        raise ValueError("no such thing")

    begun.begin([fail])
    begun._worker.submit(int).result()
    with pytest.raises(ValueError, match="no such thing"):
        begun.result(fail)


def test_commands_do_not_see_what_tests_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHANGED_BY_A_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    run = run_command(["sh", "-c", 'echo "$CHANGED_BY_A_TEST $GIVEN"; pwd'], 60, {"GIVEN": "given"})
    assert run.stdout.splitlines() == [" given", str(Path(__file__).resolve().parents[1])]
    assert os.environ["CHANGED_BY_A_TEST"] == "yes"
