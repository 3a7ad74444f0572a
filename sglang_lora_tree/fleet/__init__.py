"""Fleet: compress many adapters after training, offline. Above adapters and kernels; nothing of the server is in here.

In:  PEFT folders, a budget (a share of the parameters) and a policy.
Out: smaller PEFT folders whose modules keep their best directions (the exact truncated SVD of each B A), what each lost,
     and the budget curve. The server takes them as any adapter; their slots shrink with their ranks.

    from fractions import Fraction
    from pathlib import Path
    from sglang_lora_tree.fleet.compress import Settings, compress
    outcomes = compress([Path("adapters/math")], Path("fleet"), Settings(budget=Fraction(1, 12)))

factorisation.py  sigma and small factors of every module, batched (kernels/tsqr.py on a GPU); truncate
budget.py         ranks per module: uniform (LoRAForge-U), spectral (LoRAForge-S)
survey.py         what is kept of an adapter between looking at it and writing it
compress.py       the whole fleet, one adapter in memory at a time, resumable
export.py         the retained-rank contract: a PEFT folder with rank_pattern, alpha_pattern and effective ranks
report.py         what it costs: budget curve, energy, error, scores
jd_full.py        JD-Full (shared bases), to compare with
command.py        `sglang-lora-tree compress`
"""
