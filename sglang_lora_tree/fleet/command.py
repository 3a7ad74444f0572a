"""`sglang-lora-tree compress ADAPTER... --budget 1/12 --out DIR`: a fleet of adapters, smaller."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_lora_tree.adapters.base_shape import BaseShape
from sglang_lora_tree.adapters.error import AdapterError
from sglang_lora_tree.fleet import report
from sglang_lora_tree.fleet.budget import BudgetError, parse_fraction
from sglang_lora_tree.fleet.compress import (
    DTYPES,
    POLICIES,
    SCOPES,
    CompressionError,
    Settings,
    finish,
    survey_fleet,
    write_fleet,
)

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def run_compress(argv: Sequence[str]) -> int:
    """Runs the subcommand with the arguments after `compress`. Returns 0: done, 1: failed (why is on stderr), 2: usage."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the usage or the help
        return EXIT_USAGE if stop.code else EXIT_OK
    try:
        return _run(options)
    except report.EvaluationError as error:
        print(f"sglang-lora-tree compress: {error}", file=sys.stderr)
        print("the adapters are written: repeat the command with a scorer that works, or without --eval", file=sys.stderr)
        return EXIT_FAILED
    except (AdapterError, BudgetError, CompressionError, ValueError, OSError) as error:
        print(f"sglang-lora-tree compress: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted: repeat the command to go on from here", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-lora-tree compress",
        description="Writes smaller PEFT adapters: of each module only the directions that matter most. A run that was cut "
        "short goes on when it is repeated. Energy kept is no guarantee of quality: look at scores (--eval) before use.",
    )
    parser.add_argument("adapters", nargs="+", type=Path, metavar="ADAPTER", help="PEFT folders (plain files are skipped)")
    parser.add_argument("--budget", required=True, metavar="SHARE", help="of the parameters to keep: 1/12, 0.25")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the results")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="the same share of every module's rank (uniform), or the same number of parameters where they keep most energy "
        "(default: spectral)",
    )
    parser.add_argument("--scope", choices=SCOPES, default=SCOPES[0], help="what spectral spends one budget on")
    parser.add_argument("--rank-floor", type=int, default=1, metavar="N", help="smallest rank of a module (default: 1)")
    parser.add_argument(
        "--max-energy-loss", type=float, metavar="SHARE", help="an adapter that would lose more gets more than the budget"
    )
    parser.add_argument("--keep-adapters", nargs="+", default=[], metavar="NAME", help="copy these as they are")
    parser.add_argument("--base", metavar="MODEL", help="folder of the base model: checks shapes, counts slots")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the result (default: that of each adapter)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    parser.add_argument("--padded", action="store_true", help="one rank per adapter, with zeros: for stock SGLang")
    parser.add_argument("--eval", metavar="COMMAND", help="scores folders: run as COMMAND FOLDER..., prints JSON")
    parser.add_argument("--dry-run", action="store_true", help="write only the budget curve, as a table and a PNG")
    parser.add_argument("--png", type=Path, metavar="FILE", help="of --dry-run (default: DIR-budget.png)")
    return parser


def _run(options: argparse.Namespace) -> int:
    folders = [folder for folder in options.adapters if not folder.is_file()]
    skipped = len(options.adapters) - len(folders)
    if skipped:
        print(f"skipped: {skipped} of the given paths, which are plain files", file=sys.stderr)
    if options.rank_floor < 1:
        raise CompressionError(f"--rank-floor {options.rank_floor}: the smallest rank is 1")
    if options.max_energy_loss is not None and not 0 <= options.max_energy_loss < 1:
        raise CompressionError(f"--max-energy-loss {options.max_energy_loss}: a share from 0 to below 1, such as 0.1")
    settings = Settings(
        budget=parse_fraction(options.budget),
        policy=options.policy,
        scope=options.scope,
        floor=options.rank_floor,
        max_energy_loss=options.max_energy_loss,
        keep=tuple(options.keep_adapters),
        padded=options.padded,
        dtype=options.dtype,
    )
    base = BaseShape.from_folder(options.base) if options.base is not None else None
    device = _device(options.device)
    if options.dry_run:
        return _dry_run(folders, options, settings, base, device)

    command = shlex.split(options.eval) if options.eval else []
    outcomes = write_fleet(folders, options.out, settings, base, device)
    found = report.describe(outcomes, settings, base)
    report.write_report(found, options.out)  # before scoring, which may fail
    if command:
        originals = {outcome.survey.name: outcome.survey.folder for outcome in outcomes}
        before = report.run_evaluation(command, originals)
        after = report.run_evaluation(command, {name: options.out / name for name in originals})
        report.add_scores(found, before, after)
        report.write_report(found, options.out)
    finish(options.out)  # until here the command can be repeated
    print(report.report_text(found))
    print(f"written: {options.out}, {options.out / report.REPORT}")
    return EXIT_OK


def _dry_run(
    folders: list[Path], options: argparse.Namespace, settings: Settings, base: BaseShape | None, device: str
) -> int:
    png = options.png or options.out.with_name(f"{options.out.name}-budget.png")
    if png.exists():  # said before the work, which may take long
        raise CompressionError(f"{png} is there already: choose another --png, nothing is overwritten")
    rows = report.budget_curve(survey_fleet(folders, base, device, settings.keep), settings, base)
    print(report.curve_text(rows))
    try:
        report.draw_curve(rows, png)
    except ImportError as error:
        print(f"no picture: matplotlib cannot be imported ({error}): pip install matplotlib", file=sys.stderr)
        return EXIT_OK
    print(f"picture: {png}")
    return EXIT_OK


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise CompressionError(f"--device {name}: torch sees no GPU here; use --device cpu")
    return name
