"""Settings of ``--lora-tree``: every way to write them, and how they travel to child processes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_lora_tree.config import ENVIRONMENT_VARIABLE, Settings, current_settings, parse_settings, publish_settings

CHOSEN = Settings(max_members=3, theta_seconds=0.5, queue_order="fcfs", spool_dir="/spool", fairness=True)
JSON = json.dumps({"max_members": 3, "theta_seconds": 0.5, "queue_order": "fcfs", "spool_dir": "/spool", "fairness": True})
YAML = """\
# what a mix may be
max_members: 3
theta_seconds: 0.5
queue_order: fcfs
spool_dir: /spool
fairness: true
"""


@pytest.mark.parametrize(("name", "text"), [("settings.json", JSON), ("settings.yaml", YAML)])
def test_a_file(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert parse_settings(str(file)) == CHOSEN


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("# nothing yet\n")
    assert parse_settings(str(file)) == Settings()


@pytest.mark.parametrize("value", [JSON, f"  {JSON}", json.loads(JSON), CHOSEN], ids=["text", "spaces", "dict", "settings"])
def test_text_and_objects(value: Any) -> None:
    assert parse_settings(value) == CHOSEN


def test_on_and_off() -> None:
    assert parse_settings(True) == parse_settings("") == parse_settings("{}") == Settings()
    assert parse_settings(None) is parse_settings(False) is None


def test_they_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "0")
    assert current_settings() is None
    publish_settings(CHOSEN)
    assert current_settings() == CHOSEN
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1")
    assert current_settings() == Settings()
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert current_settings() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_members", 0),
        ("max_rank", 1.5),
        ("plan_milliseconds", True),
        ("theta_seconds", -1),
        ("ttft_slo_seconds", "soon"),
        ("grace_seconds", float("nan")),
        ("eval_tau_seconds", 0),
        ("eval_visit_window_seconds", float("inf")),
        ("retention_policy", "newest"),
        ("eval_lora_term", "on"),
        ("queue_order", "lifo"),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^--lora-tree: {name} = .*: give "):
        parse_settings({name: value})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Settings) if isinstance(field.default, bool)])
def test_a_switch_is_true_or_false(name: str) -> None:
    """The text "no" would be taken for true."""
    with pytest.raises(ValueError, match=f"{name} = 'no': give true or false"):
        parse_settings({name: "no"})
    assert getattr(parse_settings({name: False}), name) is False
