"""What is measured, and how to run it: ``python -m benchmarks.<name>`` from the repository's root.

In: a machine (and public traces, where a benchmark names one). Out: ``results/<topic>_<hardware>.json``, lists of records
as ``results.py`` writes them, each beside the baseline measured in the same run.

On a GPU: ``gpu_suite`` (most of these in one command); ``acceptance_gpu`` (exactness), ``kernels`` (a server against the base
model and SGLang's backends), ``kernel_world`` (what LoRA adds to a decode step), ``kernel_alone`` (against ``mix_operators``),
``swap_in``, ``tune_kernels``; of compression ``fleet`` (time, against ``fleet_baselines``), ``fleet_serving``, ``fleet_quality``
(scores; on a CPU too), ``fleet_in_vllm`` (on a CPU).
On a CPU: ``tree`` (over ``tree_systems``, on ``trace``), ``scheduler`` (the loop's cost); simulated: ``policies`` (``simulator``,
``advice``, ``workloads``, ``oracle``, ``policies_report``), ``queue_orders``.
Shared: ``results``, ``server``, ``llama8b`` (model and adapters), ``standalone_cache`` (the tree without a server).
"""
