"""Very many LoRA adapters, and weighted mixes of them, from one SGLang server.

Adapters and KV cache live in one pool (SGLang's token slots) and one tree. Start the server with
``python -m sglang.launch_server --model-path MODEL --lora-tree``; SGLang finds this package through its entry points.
"""

__version__ = "0.1.0"
