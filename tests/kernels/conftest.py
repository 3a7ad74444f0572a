"""Where the Triton tests run.

Triton decides at import whether `@triton.jit` compiles or interprets, for its own library too, so one process cannot
do both, and TRITON_INTERPRET=1 must not leak into tests that start servers. So test_triton.py is collected only where
its kernels can run: on a GPU, or in the process that test_interpreter.py starts with TRITON_INTERPRET=1.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED or torch.cuda.is_available() else ["test_triton.py"]
if INTERPRETED:
    collect_ignore += ["test_interpreter.py", "test_gpu.py"]
