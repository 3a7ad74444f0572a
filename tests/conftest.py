"""What all tests share: one thread each for torch, and runs in the background (see ``background``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from background import Background, runs_of
from hypothesis import HealthCheck, settings

BACKGROUND = pytest.StashKey[Background]()
LIVE = Path(__file__).parent / "live"

settings.register_profile("beside other work", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("beside other work")  # servers start meanwhile: how long an example takes says nothing
torch.set_num_threads(1)  # matrices are small: a second thread mostly waits, most of all where other processes compute


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "background(run): the test waits for this run, which begins before it")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for runs come after those beside which the runs go on, and before those that ask a server."""

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("background") is not None:
            return 1
        return 2 if LIVE in item.path.parents else 0

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    background = session.config.stash[BACKGROUND] = Background()
    try:
        # A GPU has memory for one at a time.
        if not (session.config.option.collectonly or torch.cuda.is_available()):
            background.begin(runs_of(session.items))
        return (yield)
    finally:
        background.close()


@pytest.fixture(scope="session")
def background(pytestconfig: pytest.Config) -> Background:
    return pytestconfig.stash[BACKGROUND]
