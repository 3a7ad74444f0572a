"""`sglang-lora-tree compress`: what it prints and writes, and messages that say what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sglang_lora_tree.adapters.adapter import load_adapter
from sglang_lora_tree.cli import main
from sglang_lora_tree.fleet import command as command_module
from sglang_lora_tree.fleet import report as report_module

from .conftest import BASE, HF_CONFIG

EMBEDDED = Path(__file__).resolve().parents[2] / "examples" / "embedded_model"
SCORER = """
import json, sys
from pathlib import Path
print(json.dumps({"scores": {f: Path(f, "adapter_model.safetensors").stat().st_size / 1e6 for f in sys.argv[1:]}}))
"""


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main(["compress", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    return folder


def test_writes_adapters_and_a_report(run, save, tmp_path, model):
    folders = [save("one"), save("two", seed=1, decay=0.9)]
    code, out, err = run(*folders, "--budget", "1/4", "--out", tmp_path / "fleet", "--base", model)
    assert (code, err) == (0, "")
    report = json.loads((tmp_path / "fleet" / "report.json").read_text())
    for name in ("one", "two"):
        adapter = load_adapter(tmp_path / "fleet" / name, BASE)
        entry = report["adapters"][name]
        assert entry["parameters"][1] == sum(m.a.numel() + m.b.numel() for m in adapter.modules.values())
        assert entry["slots"][1] < entry["slots"][0] / 3
        assert name in out and f"{entry['energy']:.4f}" in out
    assert report["adapters"]["two"]["energy"] < report["adapters"]["one"]["energy"]
    assert "two: layer" in out, "the worst modules are the flat adapter's"


def test_dry_run_writes_a_table_and_a_picture_only(run, save, tmp_path, model):
    code, out, err = run(save("one"), "--budget", "1/5", "--out", tmp_path / "fleet", "--base", model, "--dry-run")
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("1/5")] == [
        ["1/5", "spectral"],
        ["1/5", "uniform"],
    ]
    assert (tmp_path / "fleet-budget.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "fleet").exists()


@pytest.mark.parametrize("named", [False, True])
def test_dry_run_overwrites_no_picture(run, save, tmp_path, monkeypatch, named):
    """And says so before it looks at adapters, which may take long."""
    png = tmp_path / ("mine.png" if named else "fleet-budget.png")
    png.write_text("precious")
    monkeypatch.setattr(command_module, "survey_fleet", lambda *_: pytest.fail("adapters were looked at"))
    options = ("--png", png) if named else ()
    code, out, err = run(save("one"), "--budget", "1/5", "--out", tmp_path / "fleet", "--dry-run", *options)
    assert (code, out) == (1, "") and f"{png} is there already: choose another --png" in err
    assert png.read_text() == "precious"


def test_scores_before_and_after(run, save, tmp_path):
    scorer = tmp_path / "scorer.py"
    scorer.write_text(SCORER)
    options = ("--budget", "1/2", "--out", tmp_path / "fleet", "--eval", f"{sys.executable} {scorer}")
    code, out, _ = run(save("one"), *options)
    assert code == 0 and "score" in out
    before, after = json.loads((tmp_path / "fleet" / "report.json").read_text())["adapters"]["one"]["score"]
    assert 0 < after < before


@pytest.mark.parametrize("cut", ["describe", "first score", "second score", "scored report"])
def test_goes_on_when_it_was_cut_after_the_adapters(run, save, tmp_path, monkeypatch, cut):
    """Ctrl-C in the scorer, or a crash around it: the repeat writes no adapter again and ends as without a cut."""
    folder, scorer = save("one"), tmp_path / "scorer.py"
    scorer.write_text(SCORER)
    options = ("--budget", "1/2", "--eval", f"{sys.executable} {scorer}")
    assert run(folder, *options, "--out", tmp_path / "whole")[0] == 0
    calls, out = [], tmp_path / "fleet"
    target = {"describe": "describe", "scored report": "write_report"}.get(cut, "run_evaluation")
    original = getattr(report_module, target)

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == (2 if cut in ("second score", "scored report") else 1):
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(report_module, target, interrupted)
    code, _, err = run(folder, *options, "--out", out)
    assert code == 1 and "repeat the command to go on from here" in err
    monkeypatch.undo()
    written = (out / "one" / "adapter_model.safetensors").stat().st_mtime_ns
    code, text, err = run(folder, *options, "--out", out)
    assert (code, err) == (0, "") and "score" in text
    assert (out / "one" / "adapter_model.safetensors").stat().st_mtime_ns == written
    assert (out / "report.json").read_text() == (tmp_path / "whole" / "report.json").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["one", "report.json"]
    code, _, err = run(folder, *options, "--out", out)
    assert code == 1 and "not empty: choose another --out" in err


@pytest.mark.parametrize("command", ["false", "echo hello", "no-such-program"])
def test_a_scorer_that_fails_is_named_and_the_adapters_stay(run, save, tmp_path, command):
    options = ("--budget", "1/2", "--out", tmp_path / "fleet")
    folder = save("one")
    code, _, err = run(folder, *options, "--eval", command)
    assert code == 1 and command in err and "repeat the command" in err
    assert (tmp_path / "fleet" / "report.json").exists() and load_adapter(tmp_path / "fleet" / "one")
    assert run(folder, *options)[0] == 0, "the run can be finished without scores"


def test_scores_of_the_embedded_model(run, tmp_path):
    """With its own scorer, on two of its adapters: at full rank they answer as they did."""
    names = ("polite", "short")
    scorer = f"{sys.executable} {EMBEDDED / 'evaluate.py'} --count 2 --adapters"
    code, _, err = run(
        *(EMBEDDED / "adapters" / name for name in names), "--budget", "1", "--out", tmp_path / "fleet",
        "--base", EMBEDDED / "model", "--dtype", "float32", "--eval", scorer,
    )  # fmt: skip
    assert (code, err) == (0, "")
    report = json.loads((tmp_path / "fleet" / "report.json").read_text())
    scores = {name: entry["score"] for name, entry in report["adapters"].items()}
    assert set(scores) == set(names) and all(before == after for before, after in scores.values()), scores
    assert sum(before for before, _ in scores.values()) > 0, "adapters that answer nothing show nothing"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--budget", "12"), "share of the parameters"),
        (("--budget", "1/2", "--rank-floor", "0"), "the smallest rank is 1"),
        (("--budget", "1/2", "--max-energy-loss", "1"), "a share from 0 to below 1"),
        (("--budget", "1/12", "--rank-floor", "4", "--keep-adapters", "nobody"), "not among the adapters: nobody"),
        (("--budget", "1/2", "--device", "cuda"), "torch sees no GPU here"),
        (("--budget", "1/2", "--base", "nowhere"), "nowhere"),
    ],
)
def test_wrong_options(run, save, tmp_path, arguments, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = run(save("one"), "--out", tmp_path / "fleet", *arguments)
    assert (code, out) == (1, "") and message in err


def test_plain_files_are_skipped_and_broken_adapters_named(run, save, tmp_path):
    folder = save("one")
    scores = tmp_path / "scores.json"
    scores.write_text("{}")
    code, _, err = run(folder, scores, "--budget", "1/2", "--out", tmp_path / "fleet")
    assert code == 0 and "skipped: 1 of the given paths" in err
    (folder / "adapter_model.safetensors").unlink()
    code, _, err = run(folder, "--budget", "1/2", "--out", tmp_path / "other")
    assert code == 1 and "adapter_model.safetensors" in err and "Cure" in err


def test_usage(run):
    assert run()[0] == 2
    assert run("--help")[0] == 0
