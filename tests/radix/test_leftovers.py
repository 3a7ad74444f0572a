"""What a killed process left is removed; what a living one uses is not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_lora_tree.radix import leftovers
from sglang_lora_tree.radix.leftovers import make_locked_file, mark_in_use, remove_all_leftovers, remove_leftovers
from sglang_lora_tree.radix.store import AdapterStore

_KILLED = """
import os, pathlib, sys
from sglang_lora_tree.radix.leftovers import mark_in_use
lock = mark_in_use(pathlib.Path(sys.argv[1]))
os.kill(os.getpid(), 9)
"""


def test_a_folder_goes_when_its_process_was_killed_and_stays_while_it_lives(tmp_path: Path) -> None:
    for name in ("dead", "alive", "unknown"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(b"weights")
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "dead" / "in_use")])
    assert (tmp_path / "dead" / "in_use").exists()
    with mark_in_use(tmp_path / "alive" / "in_use"):
        remove_leftovers(tmp_path, "*/in_use")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "unknown"]


def test_a_file_that_lies_alone_goes_alone(tmp_path: Path) -> None:
    (tmp_path / "rows-1").write_bytes(b"rows")
    (tmp_path / "other").write_bytes(b"other")
    remove_leftovers(tmp_path, "rows-*")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_file_is_never_removed_between_its_making_and_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server may start, and look for leftovers, at any moment."""
    lock, moments = fcntl.flock, iter([True, True])

    def start_another(handle: int, kind: int) -> None:
        if kind == fcntl.LOCK_EX and next(moments, False):
            remove_leftovers(tmp_path, "rows-*")
        lock(handle, kind)

    monkeypatch.setattr(fcntl, "flock", start_another)
    handle, path = make_locked_file("rows-", str(tmp_path))
    remove_leftovers(tmp_path, "rows-*")
    assert [str(found) for found in tmp_path.iterdir()] == [path], "removed while it was used, or left behind"
    os.close(handle)
    remove_leftovers(tmp_path, "rows-*")
    assert not list(tmp_path.iterdir())


def test_all_that_killed_processes_left_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a server whose scheduler was killed; a server beside it keeps what it uses."""
    monkeypatch.setattr(leftovers, "scratch_folder", lambda: str(tmp_path / "memory"))
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    for name in ("memory", "temporary", "spools"):
        (tmp_path / name).mkdir()
    stores = [AdapterStore(str(tmp_path / "spools")), AdapterStore(str(tmp_path / "temporary"))]
    folders = [Path(store.spool("id1", {"w": torch.ones(2)}, {})) for store in stores]
    handle, rows = make_locked_file("lora-tree-rows-", str(tmp_path / "memory"))
    remove_all_leftovers(str(tmp_path / "spools"))
    assert all(folder.is_dir() for folder in folders) and Path(rows).exists(), "in use"
    os.close(handle)
    for store in stores:
        assert store._lock is not None
        store._lock.close()
    remove_all_leftovers(str(tmp_path / "spools"))
    assert not any(folder.exists() for folder in folders) and not Path(rows).exists()


def test_two_servers_share_a_spool_folder(tmp_path: Path) -> None:
    one, two = AdapterStore(str(tmp_path)), AdapterStore(str(tmp_path))
    first = one.spool("id1", {"w": torch.ones(2)}, {})
    second = two.spool("id1", {"w": torch.ones(2)}, {})
    assert Path(first).is_dir() and Path(second).is_dir()
