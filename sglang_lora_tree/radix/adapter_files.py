"""Reading adapters from disk: what is asked (outline, rows), and who does it.

:class:`LocalFiles` reads in the calling thread. :class:`RemoteFiles` asks child processes (``reader_process``): reading an
adapter is hundreds of small calls into torch, each of which gives the interpreter's lock away and waits for it again, and a
scheduler loop that never sleeps makes every wait 5 ms long (seconds per adapter). A child shares no lock; rows come
back through a file in memory, in one piece.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from sglang_lora_tree.adapters.adapter import load_adapter
from sglang_lora_tree.adapters.base_shape import BaseShape
from sglang_lora_tree.radix.layout import Outline, Packer, PoolShape, Shard
from sglang_lora_tree.radix.leftovers import ROWS_PREFIX, make_locked_file, scratch_folder


class AdapterFiles(Protocol):
    """How adapters are read."""

    def outline(self, path: str, name: str, base: BaseShape) -> Outline:
        """Validate a folder. ValueError (AdapterError) says what is wrong with it."""
        ...

    def rows(
        self, paths: Sequence[str], name: str, digest: str, packer: Packer, dtype: torch.dtype
    ) -> tuple[torch.Tensor, int]:
        """An adapter's rows (2L * n, W) from the first folder that still holds it, and the bytes of its tensors.

        Raises:
            ValueError: no folder holds these bytes any more.
        """
        ...

    def close(self) -> None:
        """Let go of processes."""
        ...


class LocalFiles:
    """Reads in this process."""

    def outline(self, path: str, name: str, base: BaseShape) -> Outline:
        return Outline.of(load_adapter(path, base, name=name), base.num_layers)

    def rows(
        self, paths: Sequence[str], name: str, digest: str, packer: Packer, dtype: torch.dtype
    ) -> tuple[torch.Tensor, int]:
        problems = []
        for path in paths:
            try:
                adapter = load_adapter(path, packer.base, name=name)
            except (OSError, ValueError) as error:
                problems.append(f"{path}: {error}")
                continue
            if adapter.digest == digest:
                return packer.pack(adapter, dtype), adapter.num_bytes
            problems.append(f"{path}: the files hold other weights now than when it was registered")
        raise ValueError(
            f"adapter {name} cannot be read any more: {'; '.join(problems)}; put the files back, "
            "or unload the adapter and load it again"
        )

    def close(self) -> None:
        pass


class RemoteFiles:
    """Reads in up to ``count`` child processes, started when first needed; calls from several threads share them."""

    def __init__(self, count: int) -> None:
        self._idle: queue.Queue[subprocess.Popen[str] | None] = queue.Queue()
        self._all: list[subprocess.Popen[str]] = []
        for _ in range(count):
            self._idle.put(None)

    def start(self) -> None:
        """Start the children now, so that the first reader does not wait for them to import torch."""
        for _ in range(self._idle.qsize()):
            self._idle.put(self._idle.get() or self._start())

    def outline(self, path: str, name: str, base: BaseShape) -> Outline:
        reply = self._ask({"ask": "outline", "path": path, "name": name, "base": dataclasses.asdict(base)})
        return Outline(
            reply["digest"], np.array(reply["rank"], dtype=np.int32), np.array(reply["scaling"], dtype=np.float32)
        )

    def rows(
        self, paths: Sequence[str], name: str, digest: str, packer: Packer, dtype: torch.dtype
    ) -> tuple[torch.Tensor, int]:
        handle, file = make_locked_file(ROWS_PREFIX, scratch_folder())
        try:
            reply = self._ask(
                {
                    "ask": "rows",
                    "paths": list(paths),
                    "name": name,
                    "digest": digest,
                    "base": dataclasses.asdict(packer.base),
                    "pool": dataclasses.asdict(packer.pool),
                    "shard": dataclasses.asdict(packer.shard),
                    "dtype": str(dtype).removeprefix("torch."),
                    "file": file,
                }
            )
            shape = reply["shape"]
            rows = torch.from_file(file, shared=False, size=shape[0] * shape[1], dtype=dtype).view(shape)
            return rows, reply["bytes"]
        finally:
            os.close(handle)
            os.unlink(file)  # the mapping keeps the bytes until the rows are dropped

    def close(self) -> None:
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._idle.get()
        try:
            if process is None or process.poll() is not None:
                process = self._start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError as error:
            line = ""
            process = None
            raise ValueError(f"the process that reads adapters ended while it read {question['name']}: {error}") from error
        finally:
            self._idle.put(process)
        if not line:
            raise ValueError(f"the process that reads adapters ended while it read {question['name']}; try again")
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_lora_tree.radix.reader_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._all.append(process)
        return process


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What a child says to one question of :class:`RemoteFiles` (the other side of the pipe)."""
    files = LocalFiles()
    base = BaseShape(**{**question["base"], "widths": {k: tuple(v) for k, v in question["base"]["widths"].items()}})
    if question["ask"] == "outline":
        outline = files.outline(question["path"], question["name"], base)
        return {"digest": outline.digest, "rank": outline.rank.tolist(), "scaling": outline.scaling.tolist()}
    packer = Packer(base, PoolShape(**question["pool"]), Shard(**question["shard"]))
    dtype = getattr(torch, question["dtype"])
    rows, num_bytes = files.rows(question["paths"], question["name"], question["digest"], packer, dtype)
    rows.view(torch.uint8).numpy().tofile(question["file"])
    return {"shape": list(rows.shape), "bytes": num_bytes}
