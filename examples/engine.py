"""Mixes without a server: ``sgl.Engine(lora_tree=...)`` in this process, one batch with a different mix per prompt.

    python examples/engine.py
    python examples/engine.py --model-path MODEL --lora math=FOLDER json=FOLDER
"""

import argparse
from pathlib import Path

import sglang

FOLDER = Path(__file__).parent / "embedded_model"
QUESTION = "<|user|>Ivan has 12 pears and gets 30 pears. How many pears does Ivan have?<|assistant|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default=str(FOLDER / "model"))
    parser.add_argument(
        "--lora", nargs="+", default=[f"{name}={FOLDER / 'adapters' / name}" for name in ("math", "json")]
    )
    parser.add_argument("--prompt", default=QUESTION)
    arguments = parser.parse_args()
    engine = sglang.Engine(
        model_path=arguments.model_path,
        lora_tree=True,  # or settings: a dict, JSON text or the path of a YAML file
        lora_paths=arguments.lora,
        log_level="error",
    )
    first, second = (entry.partition("=")[0] for entry in arguments.lora[:2])
    mixes = [None, first, f"{first}:0.7,{second}:0.3", {first: 0.7, second: 0.3}, [{"name": second, "scale": 0.5}]]
    outputs = engine.generate(
        [arguments.prompt] * len(mixes), {"temperature": 0.0, "max_new_tokens": 48}, lora_path=mixes
    )
    for mix, output in zip(mixes, outputs, strict=True):
        print(f"{mix or 'base'!s:36} {output['text']!r}")
    engine.shutdown()


if __name__ == "__main__":  # Engine starts processes that import this file again
    main()
