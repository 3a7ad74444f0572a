"""Names come and go; what they refer to is known by its bytes, and a file is there to read it from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sglang_lora_tree.adapters.adapter import adapter_from_tensors, load_adapter
from sglang_lora_tree.radix.layout import Outline
from sglang_lora_tree.radix.store import AdapterStore, Registration

from .tree import BASE, write_adapter


def outline(digest: str) -> Outline:
    return Outline(digest, np.ones((2, 7), np.int32), np.ones((2, 7), np.float32))


def test_names_of_the_same_bytes_are_one_adapter() -> None:
    store = AdapterStore()
    one = store.add(Registration("id1", "math", "/one"), outline("d"))
    two = store.add(Registration("id2", "maths", "/two", pinned=True), outline("d"))
    assert one is two and len(store) == 1 and list(store) == [one]
    assert store.by_id("id1") is store.by_id("id2") is store.get(one.identity)
    assert one.name == "math" and one.paths == ["/two", "/one"] and one.is_pinned
    assert store.remove("id2") is one
    assert not one.is_pinned and one.paths == ["/one"] and store.get(one.identity) is one
    store.remove("id1")
    assert len(store) == 0 and store.get(one.identity) is None and store.by_id("id1") is None
    assert one.name == "(unregistered)" and one.paths == []


def test_an_unknown_id_is_none() -> None:
    store = AdapterStore()
    assert store.remove("nobody") is None
    assert store.by_id("nobody") is None and store.registration("nobody") is None


def test_a_name_may_come_back_with_other_bytes() -> None:
    store = AdapterStore()
    one = store.add(Registration("id1", "math", "/one"), outline("d"))
    store.remove("id1")
    two = store.add(Registration("id2", "math", "/one"), outline("e"))
    assert one.identity != two.identity and store.registration("id2").name == "math"


def test_an_id_is_registered_once() -> None:
    store = AdapterStore()
    store.add(Registration("id1", "math", "/one"), outline("d"))
    with pytest.raises(AssertionError, match="id1"):
        store.add(Registration("id1", "json", "/two"), outline("e"))


def test_an_adapter_that_came_as_tensors_can_be_read_from_a_file_until_it_is_unloaded(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source", seed=3)
    tensors = load_file(source / "adapter_model.safetensors")
    # A view that is not contiguous, as other processes may send.
    name = next(name for name in tensors if name.endswith("q_proj.lora_B.weight"))
    tensors[name] = tensors[name].t().contiguous().t()
    config = json.loads((source / "adapter_config.json").read_text())
    store = AdapterStore(spool_dir=str(tmp_path))
    path = store.spool("id1", tensors, config)
    adapter = load_adapter(path, BASE)
    assert adapter.digest == adapter_from_tensors(tensors, config, BASE).digest == load_adapter(source, BASE).digest
    store.add(Registration("id1", "sent", path), outline(adapter.digest))
    store.add(Registration("id2", "file", str(source)), outline(adapter.digest))
    store.remove("id2")
    store.forget_spooled("file")
    assert source.is_dir(), "a user's folder is never touched"
    store.remove("id1")
    assert store.spooled("sent") == path and load_adapter(path, BASE).digest == adapter.digest, "an evicted one may come back"
    store.add(Registration("id3", "sent", path), outline(adapter.digest))
    store.remove("id3")
    store.forget_spooled("sent")
    assert not Path(path).exists()
    with pytest.raises(ValueError, match=r"sent came as tensors.*send them again"):
        store.spooled("sent")


def test_a_name_that_means_something_else_does_not_keep_its_old_tensors(tmp_path: Path) -> None:
    store = AdapterStore(spool_dir=str(tmp_path))
    first, second = (store.spool(lora_id, {"x": torch.ones(2)}, {}) for lora_id in ("id1", "id2"))
    store.add(Registration("id1", "sent", first), outline("d"))
    store.remove("id1")
    store.add(Registration("id2", "sent", second), outline("e"))
    assert not Path(first).exists() and store.spooled("sent") == second
    store.remove("id2")
    store.add(Registration("id3", "sent", str(tmp_path)), outline("f"))
    assert not Path(second).exists() and tmp_path.is_dir()


def test_tensors_are_spooled_byte_for_byte(tmp_path: Path) -> None:
    store = AdapterStore(spool_dir=str(tmp_path))
    tensors = {"x": torch.randn(3, 5).to(torch.bfloat16), "y": torch.arange(4)}
    path = store.spool("id", tensors, {"r": 1})
    again = load_file(Path(path) / "adapter_model.safetensors")
    assert all(torch.equal(again[key], value) and again[key].dtype == value.dtype for key, value in tensors.items())


def test_a_config_that_is_not_json_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = AdapterStore(str(tmp_path))
    with pytest.raises(ValueError, match="config is not JSON"):
        store.spool("id1", {"w": torch.ones(2)}, {"target_modules": {"q_proj"}})  # as PEFT's to_dict gives it
    assert not list(tmp_path.rglob("*.safetensors"))


def test_tensors_that_cannot_be_written_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_disk(tensors: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("sglang_lora_tree.radix.store.save_file", fill_disk)
    with pytest.raises(OSError, match="no space"):
        AdapterStore(str(tmp_path)).spool("id1", {"w": torch.ones(2)}, {})
    assert not list(tmp_path.rglob("*.safetensors"))
