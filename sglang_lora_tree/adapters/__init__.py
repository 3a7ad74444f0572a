"""Adapters: from a PEFT folder to validated tensors. The bottom room: it knows nothing of SGLang.

In:  a PEFT LoRA folder (adapter_config.json, adapter_model.safetensors or .bin), or tensors and a config in memory;
     the shape of the base model (base_shape.py).
Out: an Adapter (adapter.py): per (layer, module) the tensors A and B, the effective rank and the scaling, and a digest
     that names the same bytes wherever they lie. Or an AdapterError (error.py) with the file, the field, the cause and
     the cure: what cannot be served exactly is refused here, never served approximately.

error.py       AdapterError
base_shape.py  MODULES, BaseShape: what the base model offers to adapt
config.py      AdapterConfig: what adapter_config.json says, every field of PEFT's LoraConfig decided
names.py       tensor names -> (layer, module)
tensors.py     adapter_model.safetensors / .bin -> CPU tensors
adapter.py     load_adapter, adapter_from_tensors: all of the above together
check.py       `sglang-lora-tree check`: the same verdict offline
"""
