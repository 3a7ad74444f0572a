"""What is measured, and how to run it: ``python -m benchmarks.<name>`` from the repository's root.

In: a machine (and public traces, where a benchmark names one). Out: ``results/<topic>_<hardware>.json``, lists of records
as ``results.py`` writes them, each beside the baseline measured in the same run.
"""
