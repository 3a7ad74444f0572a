"""Which adapters are registered, under which names, and where their files are.

In: SGLang's adapter ids with the outlines of validated adapters. Out: digests by id, and a file to read a digest from.
Several names may hold the same bytes; the tree knows them as one adapter.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save_file

from sglang_lora_tree.radix.identity import adapter_identity
from sglang_lora_tree.radix.layout import Outline
from sglang_lora_tree.radix.leftovers import FOLDER_PREFIX, LOCK, mark_in_use, remove_leftovers


@dataclass(frozen=True)
class Registration:
    """One name for an adapter (SGLang's LoRARef)."""

    lora_id: str
    name: str
    path: str
    pinned: bool = False


@dataclass
class StoredAdapter:
    """One digest and every name that refers to it."""

    outline: Outline
    registrations: dict[str, Registration] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        return adapter_identity(self.outline.digest)

    @property
    def is_pinned(self) -> bool:
        return any(registration.pinned for registration in self.registrations.values())

    @property
    def name(self) -> str:
        """A name for messages and pictures: the oldest that is left."""
        return next((registration.name for registration in self.registrations.values()), "(unregistered)")

    @property
    def paths(self) -> list[str]:
        """Folders that hold these bytes, the latest registered first."""
        return [registration.path for registration in reversed(self.registrations.values())]


class AdapterStore:
    """All registered adapters of one process."""

    def __init__(self, spool_dir: str | None = None) -> None:
        self._by_identity: dict[str, StoredAdapter] = {}
        self._identity_by_id: dict[str, str] = {}
        self._spool_dir = spool_dir
        self._spool: Path | None = None
        self._making_spool = threading.Lock()  # readers are threads
        self._lock: IO[bytes] | None = None
        """Open as long as the folder is in use."""
        self._spooled: dict[str, str] = {}
        """Names of adapters that came as tensors, with their folders: kept while a name is evicted and may come back."""

    def add(self, registration: Registration, outline: Outline) -> StoredAdapter:
        assert registration.lora_id not in self._identity_by_id, f"adapter id {registration.lora_id} registered twice"
        identity = adapter_identity(outline.digest)
        stored = self._by_identity.setdefault(identity, StoredAdapter(outline))
        stored.registrations[registration.lora_id] = registration
        self._identity_by_id[registration.lora_id] = identity
        if self._spooled.get(registration.name) != registration.path:
            self.forget_spooled(registration.name)  # the name means something else now
        if self._is_spooled(registration.path):
            self._spooled[registration.name] = registration.path
        return stored

    def remove(self, lora_id: str) -> StoredAdapter | None:
        """Take a name away; returns its adapter, which may have other names left. Spooled files stay."""
        identity = self._identity_by_id.pop(lora_id, None)
        if identity is None:
            return None
        stored = self._by_identity[identity]
        del stored.registrations[lora_id]
        if not stored.registrations:
            del self._by_identity[identity]
        return stored

    def get(self, identity: str) -> StoredAdapter | None:
        return self._by_identity.get(identity)

    def by_id(self, lora_id: str) -> StoredAdapter | None:
        identity = self._identity_by_id.get(lora_id)
        return None if identity is None else self._by_identity[identity]

    def registration(self, lora_id: str) -> Registration | None:
        stored = self.by_id(lora_id)
        return None if stored is None else stored.registrations[lora_id]

    def __iter__(self) -> Iterator[StoredAdapter]:
        return iter(self._by_identity.values())

    def __len__(self) -> int:
        return len(self._by_identity)

    def spool(self, lora_id: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
        """Keep an adapter that came as tensors as a folder, so that host memory may forget it; returns the folder.

        Raises:
            ValueError: the config is not JSON.
        """
        try:
            text = json.dumps(dict(config))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the adapter's config is not JSON ({error}): send what adapter_config.json would hold") from error
        folder = self._make_spool() / lora_id
        folder.mkdir()
        try:
            owned = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
            save_file(owned, folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(text)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # a disk that is full would stay full
            raise
        return str(folder)

    def _make_spool(self) -> Path:
        with self._making_spool:
            if self._spool is None:
                # A scheduler is usually killed, and runs nothing at its exit.
                remove_leftovers(Path(self._spool_dir or tempfile.gettempdir()), f"{FOLDER_PREFIX}*/{LOCK}")
                spool = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=self._spool_dir))
                self._lock = mark_in_use(spool / LOCK)
                atexit.register(shutil.rmtree, spool, ignore_errors=True)
                self._spool = spool
            return self._spool

    def spooled(self, name: str) -> str:
        """The folder of an adapter that came as tensors; ValueError if it is gone."""
        if name not in self._spooled:
            raise ValueError(f"adapter {name} came as tensors, which are not kept any more: send them again")
        return self._spooled[name]

    def forget_spooled(self, name: str) -> None:
        """A name is gone for good, or means something else: remove what was spooled for it."""
        path = self._spooled.pop(name, None)
        if path is not None:
            self.discard_spooled(path)

    def discard_spooled(self, path: str) -> None:
        """Remove a folder that :meth:`spool` made; any other is left alone."""
        if self._is_spooled(path):
            shutil.rmtree(path, ignore_errors=True)

    def _is_spooled(self, path: str) -> bool:
        return self._spool is not None and Path(path).parent == self._spool
