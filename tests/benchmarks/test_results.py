"""Records say what they must, and their limits are judged as written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import results


def test_record_names_everything_a_reader_needs() -> None:
    entry = results.record("evict/100", 2.0, "ms", baseline=("default", 4.0), limit="ratio <= 1.0", note="CPU time")
    assert set(entry) == {
        "metric", "value", "unit", "baseline", "ratio", "limit", "met", "command", "hardware", "versions", "date", "note",
    }  # fmt: skip
    assert entry["baseline"] == {"name": "default", "value": 4.0}
    assert entry["ratio"] == 0.5 and entry["met"] is True
    assert entry["versions"]["python"] and entry["hardware"]


@pytest.mark.parametrize(
    ("limit", "value", "met"),
    [
        ("value <= 0.5", 0.5, True),
        ("value <= 0.5", 0.51, False),
        ("value >= 0.8", 0.79, False),
        ("ratio >= 2", 8.0, True),
        ("ratio <= 1", 8.0, False),
        (None, 8.0, None),
    ],
)
def test_limit_is_judged(limit: str | None, value: float, met: bool | None) -> None:
    assert results.record("m", value, "ms", baseline=("b", 4.0), limit=limit)["met"] is met


def test_limit_that_cannot_be_judged_is_an_error() -> None:
    with pytest.raises(ValueError, match="none was given"):
        results.record("m", 1.0, "ms", limit="ratio <= 1.0")
    with pytest.raises(ValueError, match="at most 3"):
        results.record("m", 1.0, "ms", limit="at most 3")


def test_written_file_is_a_list_of_records_with_unique_metrics(tmp_path: Path) -> None:
    entry = results.record("m", 1.23456, "ms")
    path = results.write("topic", "cpu", [entry], tmp_path)
    assert path.name == "topic_cpu.json"
    assert json.loads(path.read_text())[0]["value"] == 1.235
    with pytest.raises(AssertionError, match="twice"):
        results.write("topic", "cpu", [entry, entry], tmp_path)


def test_committed_results_are_records() -> None:
    wanted = set(results.record("m", 1.0, "ms"))
    for path in results.RESULTS.glob("*.json"):
        for entry in json.loads(path.read_text()):
            missing = wanted - set(entry)
            assert not missing, f"{path.name}: {entry.get('metric')} lacks {sorted(missing)}"


def test_command_has_no_paths_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", str(Path.cwd() / "data" / "x.gz"), "/elsewhere/y.gz", "--calls", "3"])
    assert results.command().endswith(" data/x.gz y.gz --calls 3")


def test_a_part_measured_by_itself_leaves_the_others_in_the_file(tmp_path):
    results.write("topic", "cpu", [results.record("a", 1, "s"), results.record("b", 1, "s")], tmp_path)
    path = results.merge("topic", "cpu", [results.record("b", 2, "s"), results.record("c", 3, "s")], tmp_path)
    assert [(entry["metric"], entry["value"]) for entry in json.loads(path.read_text())] == [("a", 1), ("b", 2), ("c", 3)]
