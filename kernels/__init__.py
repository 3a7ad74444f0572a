"""LoRA adapters, and weighted mixes of them, multiplied straight out of a pool of KV slots.

In: a pool of slot rows (`PoolView`), where each adapter lies in it (`AdapterTable`), a batch of requests that each mix
some adapters (`Pairs`), activations x, and the base model's output y.
Out: y with sum_j w_j s_j B_j A_j x added for every token (`add_lora`), in float32 with one rounding at the end. A token
gets the same bits whatever the other tokens use, in every batch that one config of dispatch.py serves (on the CPU: up to the
matmul's last bits).

Triton runs on a GPU (and under its interpreter), plain torch on a CPU. Everything the kernels read is updated in place,
so CUDA graphs stay valid. `lora.shrink` and `lora.expand` are the two halves of `add_lora`, for tensor parallelism.

pool.py, table.py, pairs.py   what the kernels read: slots, adapters, the batch; staging.py copies it to the device
lora.py                       the interface: checks operands, chooses Triton or plain torch
shrink.py, locate.py          z = w s x A^T, and where B's rows lie: one launch
expand.py                     y += z B; for many tokens also what the model does next to gate and up or to q and k
finish.py                     for few tokens: what the model does next to y (norm, rotation, silu), with z B added on the way
rotation.py                   where a batch's tokens stand
rows.py                       what the Triton kernels share
dispatch.py                   tiles and warps by the number of tokens, per GPU
reference.py                  the same in plain torch: the oracle, and the path on a CPU

For sglang_lora_tree/fleet alone: tall_batch.py (many tall matrices), tsqr.py (their Gram matrices, and Q times a small matrix),
jacobi.py (batched SVD), tsqr_reference.py (both in plain torch).

Example
-------
Three adapters of rank 2, 3 and 1 on one layer's o_proj (module 3) of a model 8 wide, in a pool of 50 slots of width 4;
a request of two tokens mixes all three beside one that uses none.

>>> import torch
>>> from sglang_lora_tree.kernels import AdapterTable, Pairs, PoolView, add_lora
>>> _ = torch.manual_seed(0)
>>> layers, modules, width, d, o_proj = 1, 7, 4, 8, 3
>>> pool = PoolView.from_planes([torch.zeros(50, width) for _ in range(2 * layers)])  # K0, V0
>>> table = AdapterTable(capacity=4, slot_capacity=50, num_layers=layers, max_rank=8, device="cpu")
>>> free_slots = torch.randperm(50)  # any order, anywhere in the pool
>>> dense = torch.zeros(d, d)
>>> for index, (rank, scaling, weight) in enumerate([(2, 0.5, 0.7), (3, 2.0, 0.5), (1, 1.0, -0.3)]):
...     a, b = torch.randn(rank, d), torch.randn(d, rank)
...     dense += weight * scaling * b @ a
...     rows = torch.cat([a.reshape(-1, width), b.T.reshape(-1, width)])  # A's chunks, then those of B transposed
...     n = -(-len(rows) // (2 * layers))
...     slots, free_slots = free_slots[:n], free_slots[n:]
...     for i, row in enumerate(rows):
...         pool.planes[i // n][slots[i % n]] = row
...     entry = torch.zeros(layers, modules)
...     entry[0, o_proj] = 1
...     table.write(index, slots, row_start=(entry - 1).int(), rank=(entry * rank).int(), scaling=entry * scaling)
>>> table.flush()
>>> pairs = Pairs.allocate(table, max_bs=2, max_tokens=16, max_members=3)
>>> pairs.update(seg_lens=[2, 1], members=[[(0, 0.7), (1, 0.5), (2, -0.3)], []])
>>> x, y = torch.randn(3, d), torch.zeros(3, d)
>>> add_lora(y, x, table, pool, pairs, layer=0, modules=(o_proj,), output_offsets=(0,), output_widths=(d,))
>>> torch.testing.assert_close(y[:2], x[:2] @ dense.T)
>>> y[2].tolist() == [0.0] * d
True
"""

from sglang_lora_tree.kernels.lora import add_lora
from sglang_lora_tree.kernels.pairs import Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.table import AdapterTable

__all__ = ["AdapterTable", "Pairs", "PoolView", "add_lora"]
