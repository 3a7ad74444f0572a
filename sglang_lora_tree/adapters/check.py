"""`sglang-lora-tree check FOLDER [--base MODEL] [--json]`: the server's verdict on an adapter, offline."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sglang_lora_tree.adapters.adapter import Adapter, load_adapter
from sglang_lora_tree.adapters.base_shape import MODULES, BaseShape
from sglang_lora_tree.adapters.error import AdapterError

EXIT_OK, EXIT_REFUSED, EXIT_USAGE = 0, 1, 2


def count_slots(adapter: Adapter, base: BaseShape) -> int:
    """Token slots the adapter takes, before rounding to pages.

    A slot holds one K and one V row of kv_width elements per layer; A takes rank rows of d_in, B rank rows of d_out,
    each cut into chunks of kv_width, all packed densely.
    """
    rows = sum(
        module.rank * (_ceil_div(module.a.shape[1], base.kv_width) + _ceil_div(module.b.shape[0], base.kv_width))
        for module in adapter.modules.values()
    )
    return _ceil_div(rows, 2 * base.num_layers)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def describe(adapter: Adapter, base: BaseShape | None) -> dict[str, Any]:
    """What `check` says about a good adapter, as JSON values. slots is None if the base is not known."""
    layers = {layer for layer, _ in adapter.modules}
    counts = Counter(module for _, module in adapter.modules)
    return {
        "ok": True,
        "name": adapter.name,
        "digest": adapter.digest,
        "ranks": list(adapter.ranks),
        "modules": {module: counts[module] for module in MODULES if counts[module]},
        "layers": len(layers),
        "scalings": sorted({module.scaling for module in adapter.modules.values()}),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in adapter.dtypes],
        "bytes": adapter.num_bytes,
        "base": base.architecture if base else None,
        "slots": count_slots(adapter, base) if base else None,
    }


def run_check(argv: Sequence[str]) -> int:
    """Runs the subcommand with the arguments after `check`. Returns 0: ok, 1: refused, 2: wrong usage."""
    parser = argparse.ArgumentParser(
        prog="sglang-lora-tree check",
        description="Checks whether a PEFT LoRA folder can be served exactly. Exit code 0: yes, 1: no, 2: wrong usage.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the adapter: adapter_config.json and its tensors")
    parser.add_argument("--base", metavar="MODEL", help="folder of the base model: also checks shapes, counts slots")
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed the usage or the help
        return EXIT_USAGE if stop.code else EXIT_OK
    try:
        base = BaseShape.from_folder(arguments.base) if arguments.base is not None else None
        verdict = describe(load_adapter(arguments.folder, base), base)
    except AdapterError as error:
        if arguments.json:
            fields = {"file": error.file, "field": error.field, "cause": error.cause, "cure": error.cure}
            print(json.dumps({"ok": False, **fields, "message": str(error)}))
        else:
            print(f"refused: {error}", file=sys.stderr)
        return EXIT_REFUSED
    print(json.dumps(verdict) if arguments.json else _text(verdict))
    return EXIT_OK


def _text(verdict: dict[str, Any]) -> str:
    slots = verdict["slots"] if verdict["base"] else "unknown without --base"
    modules = " ".join(verdict["modules"])
    lines = {
        "base": verdict["base"] or "not checked (--base MODEL)",
        "ranks": " ".join(map(str, verdict["ranks"])),
        "modules": f"{modules} ({sum(verdict['modules'].values())} in {verdict['layers']} layers)",
        "scalings": " ".join(f"{scaling:g}" for scaling in verdict["scalings"]),
        "dtype": " ".join(verdict["dtypes"]),
        "bytes": verdict["bytes"],
        "slots": slots,
        "digest": verdict["digest"],
    }
    return "\n".join([f"ok: {verdict['name']}"] + [f"  {key:<9}{value}" for key, value in lines.items()])
