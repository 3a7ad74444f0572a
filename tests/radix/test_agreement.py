"""Two ranks that see the same requests decide the same, although every Python process orders sets of strings its own way."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from background import ENVIRONMENT, Background, in_background

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.cache_hooks import install_policy
from sglang_lora_tree.radix.eval import EvalParameters
from sglang_lora_tree.radix.policies import POLICIES

from .loop import Loop
from .tree import Tree, write_adapter

STEPS = 300
CHOSEN = [name for name in POLICIES if not name.startswith("eval_without_")]
"""The others are eval with a term less."""
TESTS = Path(__file__).parents[1]


def live_one_life(folder: Path, policy: str) -> list[int]:
    """Requests for adapters, mixes and the base model in a pool too small for them; the fingerprint after every step."""
    chance, prints = random.Random(policy), []
    with Tree(pool_slots=70, host_slots=150, settings=Settings(patience_passes=4)) as tree:
        install_policy(tree.cache, Settings(retention_policy=policy), "lru")
        for name in "abcd":
            tree.load(name, folder / name)
        loop = Loop(tree)
        for step in range(STEPS):
            if step % 10 == 0:
                tree.core.set_eval_parameters(EvalParameters(), float(step))
            if len(loop.waiting) < 4:
                members = chance.sample("abcd", chance.choice([0, 1, 1, 2, 3]))
                tokens = [chance.randrange(2) for _ in range(chance.randint(1, 8))]
                loop.submit(str(step), dict.fromkeys(members, 0.5), tokens, chance.randint(1, 6))
            tree.finish_reads()
            loop.step()
            prints.append(tree.core.fingerprint())
        assert len(loop.finished) > STEPS / 10
    return prints


def live_twice(folder: Path) -> list[list[str]]:
    """What two ranks print, each with an order of its own."""
    for seed, name in enumerate("abcd"):
        write_adapter(folder / name, seed=seed)
    ranks = []
    for seed in (1, 2):
        environment = {**ENVIRONMENT, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
        command = [sys.executable, "-m", "radix.test_agreement", str(folder)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    return printed


@in_background(live_twice)
def test_ranks_agree_at_every_step_under_every_policy(background: Background) -> None:
    """What nodes are worth is compared too: ranks that have learned different things part company only later."""
    first, second = background.result(live_twice)
    assert len(first) == len(CHOSEN) * STEPS
    parted = next((line for line, (left, right) in enumerate(zip(first, second, strict=True)) if left != right), None)
    if parted is not None:
        pytest.fail(f"policy {CHOSEN[parted // STEPS]}: the ranks parted at step {parted % STEPS}")


if __name__ == "__main__":
    for name in CHOSEN:
        for step_print in live_one_life(Path(sys.argv[1]), name):
            print(step_print)
