"""The console command ``sglang-lora-tree``: ``check`` and ``compress`` adapters, see the ``tree`` of a running server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
TIMEOUT_SECONDS = 30


class CommandError(Exception):
    """What the user asked for cannot be done; says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 it failed (the reason is on stderr), 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["check"]:  # has a parser of its own
        from sglang_lora_tree.adapters.check import run_check

        return run_check(arguments[1:])
    if arguments[:1] == ["compress"]:
        from sglang_lora_tree.fleet.command import run_compress

        return run_compress(arguments[1:])
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has printed the usage or the help
        return EXIT_USAGE if stop.code else EXIT_OK
    try:
        code = show_tree(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except CommandError as error:
        print(f"sglang-lora-tree: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-lora-tree", description="Look at adapters and at running servers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("check", help="check whether an adapter can be served exactly", add_help=False)
    commands.add_parser("compress", help="make a fleet of adapters smaller", add_help=False)
    tree = commands.add_parser(
        "tree",
        help="show the tree of a running server",
        description="Shows what a server with --lora-tree has: what is on the GPU, in host memory, on disk",
    )
    tree.add_argument("url", metavar="URL", help="of the server: http://127.0.0.1:30000")
    tree.add_argument("--png", metavar="FILE", help="also draw the tree into this file")
    tree.add_argument("--json", action="store_true", help="print what GET /lora_tree answers")
    tree.add_argument("--all", action="store_true", help="list every node instead of summing up long lists")
    tree.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SGLANG_API_KEY"),
        help="if the server has one (default: the environment variable SGLANG_API_KEY)",
    )
    return parser


def show_tree(options: argparse.Namespace) -> int:
    """Print the tree of the server, and draw it if asked to.

    Raises:
        CommandError: no server there, not one with a tree, or the picture cannot be written.
    """
    from sglang_lora_tree.observability.text import render_text

    snapshot = fetch_tree(options.url, options.api_key)
    try:
        text = json.dumps(snapshot) + "\n" if options.json else render_text(snapshot, options.all)
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(
            f"{options.url} answers /lora_tree in a form that this version does not know ({error!r}): use the same "
            "version of sglang-lora-tree here as on the server"
        ) from error
    sys.stdout.write(text)
    if options.png:
        from sglang_lora_tree.observability.picture import draw_png

        try:
            draw_png(snapshot, options.png)
        except (OSError, ValueError) as error:
            raise CommandError(f"the picture {options.png} cannot be written: {error}") from error
        print(f"picture: {options.png}", file=sys.stderr)
    return EXIT_OK


def fetch_tree(url: str, api_key: str | None = None) -> dict[str, Any]:
    """What ``GET /lora_tree`` of a server answers.

    Raises:
        CommandError: see there.
    """
    import requests

    base = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = requests.get(f"{base.rstrip('/')}/lora_tree", headers=headers, timeout=TIMEOUT_SECONDS)
    except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, requests.exceptions.MissingSchema):
        raise CommandError(f"{url} is not a URL: give one like http://127.0.0.1:30000") from None
    except requests.exceptions.Timeout:
        raise CommandError(f"{url} did not answer within {TIMEOUT_SECONDS} seconds: is it still starting?") from None
    except requests.exceptions.RequestException as error:
        raise CommandError(f"nothing answers at {url}: is the server running there? ({_cause(error)})") from None
    if answer.status_code in (401, 403):
        raise CommandError(f"{url} wants its API key: give it with --api-key, or in SGLANG_API_KEY")
    if answer.status_code == 404:
        raise CommandError(f"{url} has no /lora_tree: start it with --lora-tree (pip install sglang-lora-tree)")
    if answer.status_code != 200:
        raise CommandError(f"{url}/lora_tree answers {answer.status_code}: {answer.text[:200]}")
    try:
        snapshot = answer.json()
    except ValueError:
        snapshot = None
    if not isinstance(snapshot, dict) or "nodes" not in snapshot:
        raise CommandError(f"{url}/lora_tree answers something else than a tree: is it an SGLang server?")
    return snapshot


def _cause(error: BaseException) -> str:
    """The innermost reason of a chain of exceptions: requests wraps what matters three times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
