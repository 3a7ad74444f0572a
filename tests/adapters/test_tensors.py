"""Files of tensors: read whole into memory of their own, or refused with the file's name."""

import json
import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang_lora_tree.adapters.error import AdapterError
from sglang_lora_tree.adapters.tensors import (
    BIN_NAME,
    SAFETENSORS_NAME,
    find_tensor_file,
    list_names,
    own_tensors,
    read_tensors,
)

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, 3, dtype=torch.bfloat16)}


def write(folder: Path, name: str, tensors: Any = None) -> Path:
    tensors = TENSORS if tensors is None else tensors
    file = folder / name
    if name == SAFETENSORS_NAME:
        safetensors.torch.save_file(tensors, file)
    else:
        torch.save(tensors, file)
    return file


def read(folder: Path) -> dict[str, torch.Tensor]:
    file = find_tensor_file(folder)
    list_names(file)
    return read_tensors(file)


def assert_unreadable(folder: Path, name: str) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        read(folder)
    assert caught.value.file == str(folder / name)
    assert caught.value.cause in str(caught.value) and caught.value.cure in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", [SAFETENSORS_NAME, BIN_NAME])
def test_round_trip(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, name)
    tensors = read(tmp_path)
    os.truncate(file, 0)  # the tensors must not hang on the file
    assert tensors.keys() == TENSORS.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == TENSORS[key].dtype and torch.equal(tensor, TENSORS[key])
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def test_safetensors_is_preferred_as_by_peft(tmp_path: Path) -> None:
    write(tmp_path, BIN_NAME, {"from_bin": torch.ones(1)})
    write(tmp_path, SAFETENSORS_NAME)
    assert read(tmp_path).keys() == TENSORS.keys()


def test_neither_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / SAFETENSORS_NAME).symlink_to("nowhere")
    with pytest.raises(AdapterError) as caught:
        find_tensor_file(tmp_path)
    assert SAFETENSORS_NAME in str(caught.value) and BIN_NAME in str(caught.value)


@pytest.mark.parametrize("name", [SAFETENSORS_NAME, BIN_NAME])
def test_truncated_at_any_length(name: str, tmp_path: Path) -> None:
    data = write(tmp_path, name).read_bytes()
    lengths = {0, 1, 7, 8, 9, 20, *range(0, len(data), max(1, len(data) // 40)), len(data) - 9, len(data) - 1}
    for length in sorted(lengths):
        (tmp_path / name).write_bytes(data[:length])
        assert "truncated" in assert_unreadable(tmp_path, name).cause


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"not a file of tensors, but long enough to hold a header length",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b"PK\x03\x04" + bytes(100),
        bytes(100),
        struct.pack("<Q", 2**62) + b"{}",
        safetensors_bytes([]),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
        safetensors_bytes({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, bytes(4)),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 4]}}, bytes(4)),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(5)),
    ],
)
@pytest.mark.parametrize("name", [SAFETENSORS_NAME, BIN_NAME])
def test_foreign_file(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert_unreadable(tmp_path, name)


def test_each_format_under_the_other_name(tmp_path: Path) -> None:
    write(tmp_path, BIN_NAME).rename(tmp_path / SAFETENSORS_NAME)
    assert_unreadable(tmp_path, SAFETENSORS_NAME)
    write(tmp_path, SAFETENSORS_NAME).rename(tmp_path / BIN_NAME)
    assert_unreadable(tmp_path, BIN_NAME)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch exploded",)


def test_bin_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, BIN_NAME, {"a": Bomb()})
    assert_unreadable(tmp_path, BIN_NAME)
    (tmp_path / BIN_NAME).write_bytes(pickle.dumps(Bomb()))
    assert_unreadable(tmp_path, BIN_NAME)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("content", [[torch.ones(2)], torch.ones(2), 3, None, {1: torch.ones(2)}])
def test_bin_that_is_no_dict_of_names(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / BIN_NAME)
    assert_unreadable(tmp_path, BIN_NAME)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"q_proj": torch.ones(2)}, "is a dict, not a tensor"),
        (3, "is a int, not a tensor"),
        (None, "is a NoneType, not a tensor"),
        (torch.ones(2, 2).to_sparse(), "not a dense tensor"),
        (torch.ones(2, 2, device="meta"), "not a dense tensor"),
        (torch.ones(1).expand(2**40), "without the data for it"),
    ],
)
def test_value_that_is_no_plain_tensor(value: object, words: str) -> None:
    with pytest.raises(AdapterError) as caught:
        own_tensors({"the_name": value}, "the_file")
    for part in "the_file", "the_name", words:
        assert part in str(caught.value)


def test_views_are_copied_and_owners_are_not(tmp_path: Path) -> None:
    storage = torch.arange(10_000.0)
    views = {"view": storage[:4], "strided": storage[:6].reshape(2, 3).T, "whole": storage}
    owned = own_tensors(views, "")
    for name, tensor in owned.items():
        assert torch.equal(tensor, views[name])
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    assert owned["whole"].data_ptr() == storage.data_ptr()

    write(tmp_path, BIN_NAME, OrderedDict(a=storage[:4], b=torch.nn.Parameter(torch.ones(2))))
    read_back = read(tmp_path)
    assert read_back["a"].untyped_storage().nbytes() == 16
    assert not read_back["b"].requires_grad


def test_symlinks_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    write(blobs, SAFETENSORS_NAME).rename(blobs / "0123")
    (folder / SAFETENSORS_NAME).symlink_to("../blobs/0123")
    assert read(folder).keys() == TENSORS.keys()
