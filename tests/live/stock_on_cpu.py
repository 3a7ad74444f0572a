"""`python -m sglang.launch_server` without --lora-tree, for LoRA on the CPU platform (platforms/cpu_hooks.py).

SGLang's own LoRA backend for torch asks for pinned memory always, which torch refuses without a GPU. The platform answers
for what the server of this package uses of it; here `torch.zeros` is answered, too. Nothing else is changed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from sglang_lora_tree.platforms import cpu_hooks


def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(*args, **kwargs)


# Not below: the scheduler's process imports this file and runs nothing of it.
cpu_hooks._TorchWithoutPinning.zeros = staticmethod(zeros)  # type: ignore[attr-defined]

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
