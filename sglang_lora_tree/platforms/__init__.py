"""The CPU reference platform: the real SGLang server on a machine without an accelerator.

In: an SGLang process that finds no hardware of its own. Out: a platform on which it runs, for laptops, demos and CI.

``cpu`` decides whether it is wanted, ``cpu_platform`` is SGLang's platform class, ``cpu_hooks`` replaces what SGLang and HiCache
assume of CUDA.
"""
