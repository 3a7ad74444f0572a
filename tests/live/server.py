"""A real server process for tests, asked over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from benchmarks.server import LAUNCH, ServerProcess

REQUEST_SECONDS = 300
QUICK_STOP = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""Else SGLang takes the end of its scheduler for a crash, and waits five seconds before it looks for one to examine."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer of /generate."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    """Tokens of the prompt that history KV served."""
    prompt_length: int
    finish: dict[str, Any]
    request_id: str

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> Answer:
        meta = item["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        return cls(
            tuple(item["output_ids"]),
            tuple(pair[0] for pair in pairs),
            meta["cached_tokens"],
            meta["prompt_tokens"],
            meta["finish_reason"],
            meta["id"],
        )


class Server(ServerProcess):
    """A server that starts at once, unless told not to; see :class:`benchmarks.server.ServerProcess`."""

    def __init__(
        self,
        log: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = LAUNCH,
        starts: bool = True,
    ) -> None:
        super().__init__(arguments, log, {**QUICK_STOP, **(environment or {})}, command)
        if starts:
            self.start()

    # ---- Requests ----

    def get(self, path: str, **options: Any) -> requests.Response:
        return requests.get(self.url + path, timeout=REQUEST_SECONDS, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        """JSON as Python writes it, so NaN too."""
        return requests.post(
            self.url + path,
            data=json.dumps({} if body is None else body),
            headers={"Content-Type": "application/json"},
            **{"timeout": REQUEST_SECONDS, **options},
        )

    def generate(self, prompts: Any, num_new: int, mixes: Any = None, **fields: Any) -> list[Answer]:
        """Greedy answers with logprobs; one batch.

        Args:
            prompts: lists of token ids.
            num_new: tokens per answer, exactly.
            mixes: None, one mix for all (not a list), or a list with one per prompt.
        """
        response = self.post("/generate", generate_body(prompts, num_new, mixes, **fields))
        assert response.status_code == 200, f"{response.status_code} {response.text[:2000]}"
        return [Answer.of(item) for item in response.json()]

    def refuse(self, prompts: Any, num_new: int, mixes: Any = None, status: int = 400, **fields: Any) -> str:
        """A request that must be refused: its message."""
        response = self.post("/generate", generate_body(prompts, num_new, mixes, **fields))
        assert response.status_code == status, f"{response.status_code} {response.text[:2000]}"
        return response.text

    def load(self, name: str, folder: Path, **fields: Any) -> requests.Response:
        return self.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), **fields})

    def unload(self, name: str) -> requests.Response:
        return self.post("/unload_lora_adapter", {"lora_name": name})

    # ---- What must hold when nothing runs ----

    def check_at_rest(self) -> None:
        """Invariants 1 and 2 and nothing left held, once the last request is through."""
        assert self.process.poll() is None, f"the server ended:\n{self.tail(6000)}"
        wait_until(lambda: self.tree()["pool"]["slots"]["gpu"]["running_kv"] == 0, 30, self.tree)
        tree = self.tree()
        pool = tree["pool"]
        for tier in ("gpu", "host"):
            slots = pool["slots"][tier]
            assert all(count >= 0 for count in slots.values()), f"{tier}: {slots}"
            assert sum(slots.values()) == pool[f"{tier}_size"], f"{tier}: {slots} of {pool}"
        assert tree["invalid_kv"] == 0, tree


def generate_body(prompts: Any, num_new: int, mixes: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True},
        "return_logprob": True,
        **({} if mixes is None else {"lora": mixes}),
        **fields,
    }


def wait_until(condition: Any, seconds: float, problem: Any) -> None:
    """Poll a condition; AssertionError with ``problem`` (text, or a function that makes it) when time is up."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, problem() if callable(problem) else problem
        time.sleep(0.1)
