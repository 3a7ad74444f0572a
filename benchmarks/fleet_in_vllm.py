"""Whether vLLM's own loader understands compressed folders: every module's delta weight beside PEFT's. On a CPU.

    python -m venv VLLM && VLLM/bin/pip install vllm peft        # an environment of its own: vLLM is no dependency
    VLLM/bin/python -m benchmarks.fleet_in_vllm --base MODEL FOLDER...

Reads each folder as a vLLM worker does (PEFTHelper with its checks, then LoRAModel), packs q, k, v and gate, up as its
manager does, and compares scaling B A with what PEFT computes from the same folder on the base model, in float32. It needs
no GPU, which also means that none of vLLM's kernels runs. Says the largest error of each folder, and exits with 1 if one is
above 1e-5 of a module's largest entry. Imports nothing of this package, so that it runs where only vLLM is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path

import peft
import torch
import transformers
from vllm.config import LoRAConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper

PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What Llama's packed_modules_mapping says in vLLM."""
TOLERANCE = 1e-5
RANKS = (8, 16, 32, 64, 128, 256)
"""What vLLM's --max-lora-rank may be."""


def load_in_peft(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Module name -> delta weight (d_out, d_in)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, str(folder))
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in adapted.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def load_in_vllm(folder: Path) -> tuple[dict[str, torch.Tensor], set[int], int]:
    """Module name -> delta weight; the ranks that vLLM found; the --max-lora-rank that the folder needs."""
    helper = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=None)
    largest = next(rank for rank in RANKS if rank >= helper.r)
    helper.validate_legal(LoRAConfig(max_lora_rank=largest))
    expected = {name for group in PACKED for name in group} | {"o_proj", "down_proj"}
    # "cpu" alone would pin memory, which needs a GPU.
    model = LoRAModel.from_local_checkpoint(str(folder), expected, helper, lora_model_id=1, device="cpu:0", dtype=torch.float32)
    ranks = {lora.lora_a.shape[0] for lora in model.loras.values()}
    found = {}
    for name in sorted(model.loras):
        parent, _, module = name.rpartition(".")
        group = next((group for group in PACKED if module in group), None)
        if group is None:
            lora = model.loras[name].optimize()  # the scaling goes into B
            found[name] = lora.lora_b @ lora.lora_a
        elif module == group[0]:
            names = [f"{parent}.{one}" for one in group]
            packed = PackedLoRALayerWeights.pack([model.loras[one] for one in names])
            found |= {one: b @ a for one, a, b in zip(names, packed.lora_a, packed.lora_b, strict=True)}
    return found, ranks, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="compressed adapters (PEFT folders)")
    parser.add_argument("--base", type=Path, required=True, help="the base model's folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"vLLM {importlib.metadata.version('vllm')}, PEFT {importlib.metadata.version('peft')}")
    wrong = []
    for folder in arguments.folders:
        wanted = load_in_peft(arguments.base, folder)
        found, ranks, largest = load_in_vllm(folder)
        assert found.keys() == wanted.keys(), f"{folder}: vLLM and PEFT differ in {sorted(found.keys() ^ wanted.keys())}"
        worst = max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted)
        print(f"{folder}: {len(found)} modules, ranks {min(ranks)} to {max(ranks)}, --max-lora-rank {largest}: error {worst:.1e}")
        if not worst <= TOLERANCE:  # NaN too
            wrong.append(str(folder))
    if wrong:
        raise SystemExit(f"vLLM computes other weights than PEFT: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
