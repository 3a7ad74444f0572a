"""A child of the scheduler that reads adapters: one question a line on standard input, one answer a line on standard output.

It ends when its standard input does, so it never outlives the scheduler. See ``adapter_files``.
"""

from __future__ import annotations

import json
import os
import sys

from sglang_lora_tree.radix.adapter_files import answer


def main() -> None:
    # Libraries may print; only answers belong on the pipe.
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            reply = answer(question)
        except Exception as error:  # whatever a file can make a parser do, the scheduler gets a sentence
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            reply = {"error": text}
        pipe.write(json.dumps(reply) + "\n")
        pipe.flush()


if __name__ == "__main__":
    main()
