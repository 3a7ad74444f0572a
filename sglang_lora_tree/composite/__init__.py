"""Mixes: weighted sets of adapters, from what a user writes to what the kernels multiply with.

In: a request's ``lora_path``, ``lora``, ``merged_adapters`` or ``model``. Out of the API process: ``Req.lora_id``, one
self-describing string of member ids and float32 weights (``lora_id.py``). In the scheduler process that string
becomes, by ``demand.py``, what the tree must hold and a batch of pairs (token, adapter, weight) for the LoRA backend.

The grammar is ``mix.py``, a request's several forms are brought together in ``request_body.py``, and the files named
``*_hooks.py`` bind both to SGLang.
"""
