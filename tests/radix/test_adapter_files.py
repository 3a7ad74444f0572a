"""Reading adapters in a child process gives what reading them here gives, and its end is an error, not a hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_lora_tree.radix.adapter_files import LocalFiles, RemoteFiles
from sglang_lora_tree.radix.layout import Packer, PoolShape

from .tree import BASE, write_adapter


@pytest.fixture(scope="module")
def remote() -> Iterator[RemoteFiles]:
    files = RemoteFiles(1)
    yield files
    files.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "one", seed=3)


def test_child_and_parent_read_the_same(remote: RemoteFiles, folder: Path) -> None:
    packer = Packer(BASE, PoolShape(2, 8, 1))
    here, there = LocalFiles().outline(str(folder), "one", BASE), remote.outline(str(folder), "one", BASE)
    assert here.digest == there.digest
    assert (here.rank == there.rank).all() and (here.scaling == there.scaling).all()
    for dtype in (torch.float32, torch.bfloat16):
        rows, num_bytes = LocalFiles().rows([str(folder)], "one", here.digest, packer, dtype)
        remote_rows, remote_bytes = remote.rows([str(folder)], "one", here.digest, packer, dtype)
        assert torch.equal(rows, remote_rows) and num_bytes == remote_bytes


def test_refusals_cross_the_pipe(remote: RemoteFiles, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        remote.outline(str(tmp_path), "empty", BASE)
    with pytest.raises(ValueError, match="other weights now"):
        remote.rows([str(folder)], "one", "0" * 64, Packer(BASE, PoolShape(2, 8, 1)), torch.float32)


def test_a_killed_child_fails_one_question_and_is_replaced(folder: Path) -> None:
    files = RemoteFiles(1)
    digest = files.outline(str(folder), "one", BASE).digest
    os.kill(files._all[0].pid, signal.SIGKILL)
    files._all[0].wait()
    assert files.outline(str(folder), "one", BASE).digest == digest
    assert len(files._all) == 2
    files.close()
