"""Who may take slots from copies under way: the last running request and an admitted prompt, nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sglang_lora_tree.scheduling import scheduler_hooks
from sglang_lora_tree.scheduling.scheduler_hooks import check_decode_slots, prepare_for_extend


class Cache:
    def __init__(self) -> None:
        self.is_last_resort = False

    @contextmanager
    def last_resort(self) -> Iterator[None]:
        self.is_last_resort = True
        yield
        self.is_last_resort = False


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache()
    monkeypatch.setattr(scheduler_hooks.STATE, "manager", SimpleNamespace(residency=SimpleNamespace(cache=cache)))
    return cache


@pytest.mark.parametrize(
    ("running", "selected", "is_last"),
    [(1, None, True), (2, None, False), (3, [1], True), (3, [0, 2], False), (0, None, False), (1, [], False)],
)
def test_only_the_last_running_request(cache: Cache, running: int, selected: list[int] | None, is_last: bool) -> None:
    """SGLang asks for all, then for fewer and fewer while it retracts, and aborts the last one."""
    seen = []

    def check(batch: object, selected_indices: list[int] | None) -> bool:
        seen.append((cache.is_last_resort, selected_indices))
        return True

    assert check_decode_slots(check, SimpleNamespace(reqs=list(range(running))), selected_indices=selected)
    assert seen == [(is_last, selected)] and not cache.is_last_resort


def test_an_admitted_prompt(cache: Cache) -> None:
    seen = []
    prepare_for_extend(lambda batch: seen.append(cache.is_last_resort), SimpleNamespace())
    assert seen == [True]


def test_without_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_hooks.STATE, "manager", None)
    assert check_decode_slots(lambda batch, selected: "as it was", SimpleNamespace(reqs=[1])) == "as it was"
