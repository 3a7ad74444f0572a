"""Seeing the tree. It reads the other rooms and decides nothing.

In: a scheduler's ``Residency``. Out: ``GET /lora_tree`` and a summary in ``/server_info`` (``snapshot``, ``audit``),
metrics under ``/metrics`` (``metrics``), and, from a snapshot on any machine, text and a picture (``view``, ``text``,
``picture``). ``state_hooks`` (scheduler process) and ``http_hooks`` (API process) bind it to SGLang.
"""
