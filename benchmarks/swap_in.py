"""Swap-in rate: 8 adapters from host memory to the GPU in one load operation, beside a plain pinned copy of as many bytes.

    python -m benchmarks.swap_in [--out FOLDER] [--small]

No server and no model; the parts are the server's: SGLang's KV pool, pinned host pool and HiCache controller with
``--lora-tree``'s defaults, the tree, and residency, which is asked for a mix of all adapters as admission asks it. Llama-3-8B's
shape, adapters of rank 16 on all linear layers (84 MB each), a pool of 40,000 slots, four times as many in host memory. Each
round evicts all adapters and brings them in again. The time is SGLang's own: from the operation's start event to its finish
event on the load stream, as the counters ``load_bytes`` and ``load_seconds`` have it. After the first round every row is
compared with the adapter's (the pool was full of NaN before).

Besides the default (page 1, copy kernels reading host memory over the bus): page 64; the ``direct`` backend, which copies runs
of slots with the copy engine; and copy kernels with more thread blocks than SGLang's two. Needs one GPU with 12 GB, and 48 GB
of RAM. ``--small``, a tiny shape, shows that it runs, on a CPU too. Results: ``swap_in_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host import mha

from benchmarks import llama8b, results
from benchmarks.standalone_cache import build_cache
from sglang_lora_tree.adapters.adapter import Adapter, AdapterModule
from sglang_lora_tree.adapters.base_shape import BaseShape
from sglang_lora_tree.config import Settings
from sglang_lora_tree.kernels.table import AdapterTable
from sglang_lora_tree.radix.identity import mix_identity
from sglang_lora_tree.radix.layout import Outline, Packer
from sglang_lora_tree.radix.residency import Demand, Residency, Verdict
from sglang_lora_tree.radix.store import AdapterStore, Registration

NUM_ADAPTERS = 8
ROUNDS = 9
LIMIT = "ratio >= 0.8"
REQUEST = "a request for all adapters"
_COPY_KERNELS = ("jit_transfer_hicache_one_layer", "transfer_kv_per_layer")  # as SGLang's host pool knows them


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    config: dict[str, Any]
    """Of the base model, as Hugging Face writes it."""
    rank: int
    pool_slots: int
    host_slots: int
    dtype: torch.dtype


LLAMA_8B = Scale(llama8b.CONFIG, rank=16, pool_slots=40_000, host_slots=160_000, dtype=torch.bfloat16)
SMALL = Scale(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
    },
    rank=4,
    pool_slots=1_024,
    host_slots=2_048,
    dtype=torch.bfloat16,
)


@dataclass(frozen=True)
class Variant:
    """One way to copy."""

    page_size: int = 1
    backend: str = "kernel"
    blocks: int | None = None
    """Thread blocks of a copy kernel; None: SGLang's number."""

    @property
    def name(self) -> str:
        parts = [f"{NUM_ADAPTERS}_adapters"]
        if self.page_size > 1:
            parts.append(f"page_{self.page_size}")
        if self.backend != "kernel":
            parts.append(self.backend)
        if self.blocks is not None:
            parts.append(f"{self.blocks}_blocks")
        return "/".join(parts)


GPU_VARIANTS = (
    Variant(),
    Variant(backend="direct"),
    Variant(blocks=4),
    Variant(blocks=8),
    Variant(page_size=64),
    Variant(page_size=64, backend="direct"),
)
CPU_VARIANTS = (Variant(backend="direct"), Variant(page_size=64, backend="direct"))


def make_adapter(base: BaseShape, rank: int, dtype: torch.dtype, seed: int) -> Adapter:
    """Random weights on every linear layer."""
    random = torch.Generator().manual_seed(seed)
    modules = {
        (layer, name): AdapterModule(
            torch.randn(rank, d_in, generator=random).to(dtype), torch.randn(d_out, rank, generator=random).to(dtype), 1.0
        )
        for layer in range(base.num_layers)
        for name, (d_in, d_out) in base.widths.items()
    }
    return Adapter(f"adapter {seed}", f"{seed:064x}", modules)


class Process:
    """One scheduler process's pools, tree and residency, with adapters in host memory and none on the GPU."""

    def __init__(self, scale: Scale, adapters: list[Adapter], page_size: int, device: str) -> None:
        base = BaseShape.from_hf_config(scale.config)
        self.cache = build_cache(
            scale.pool_slots,
            scale.host_slots,
            num_layers=base.num_layers,
            num_kv_heads=base.num_kv_heads,
            head_dim=base.head_dim,
            dtype=scale.dtype,
            page_size=page_size,
            device=device,
        )
        self.packer = Packer(base, self.cache.pool_shape)
        self.adapters = adapters
        self.device = device
        settings = Settings(disk_readers=0)
        store = AdapterStore()
        table = AdapterTable(settings.max_resident_adapters, scale.pool_slots, base.num_layers, settings.max_rank, device)
        self.residency = Residency(self.cache, store, self.packer, table, settings)
        identities = []
        for adapter in adapters:
            outline = Outline.of(adapter, base.num_layers)
            self.residency.check_fits(outline, adapter.name)
            stored = store.add(Registration(adapter.name, adapter.name, ""), outline)
            self.residency.note_registered(stored)
            rows = self.packer.pack(adapter, scale.dtype)
            slots = self.cache.allocate_host(len(rows) // self.packer.pool.num_planes)
            assert slots is not None, "the host pool is too small for all adapters"
            self.packer.scatter(rows, *self.cache.host_rows(), slots)
            self.cache.tree_core.add_adapter(stored.identity, slots)
            identities.append(stored.identity)
        mix = mix_identity((adapter.digest, 1 / len(adapters)) for adapter in adapters)
        self.demand = Demand(mix, tuple(identities))
        for buffer in (*self.cache.pool.k_buffer, *self.cache.pool.v_buffer):
            buffer.fill_(torch.nan)

    def bring(self) -> tuple[float, int, float]:
        """Swap every adapter in, in one operation.

        Returns:
            Seconds of the copy, bytes, and seconds that the scheduler loop spent on starting it.
        """
        cache, residency = self.cache, self.residency
        controller = cache.cache_controller
        moved, timed = cache.load_bytes, cache.moved_in.seconds
        room = cache.num_free_slots + cache.evictable_size()
        self._synchronize()
        start = time.perf_counter()
        residency.begin_pass([REQUEST])
        verdict = residency.admit(REQUEST, self.demand, room, alone=True)
        residency.end_pass(batch_formed=False)
        started = time.perf_counter() - start
        assert verdict is Verdict.WAIT, f"adapters that were evicted are {verdict}"
        loads = controller.ack_load_queue
        assert len(loads) == 1 and len(loads[0].node_ids) == len(self.adapters), f"not one operation: {loads}"
        has_clock = loads[0].timing_enabled and self.device != "cpu"
        self._synchronize()
        cache.check_hicache_events()
        assert not loads, "a copy that is over is still in the queue"
        seconds = cache.moved_in.seconds - timed if has_clock else started
        return seconds, cache.load_bytes - moved, started

    def evict(self) -> None:
        """Push every adapter out, as the eviction of its leaf does; its host copy stays."""
        self.residency.begin_pass([])  # the request is gone, and with it what it holds
        for identity in self.demand.members:
            self.cache.evict_adapter(self.cache.tree_core.lora_nodes[identity])
        assert self.residency.num_resident == 0

    def check(self) -> None:
        """Every row of every adapter is in its place on the device, to the bit."""
        pool = self.cache.pool
        for identity, adapter in zip(self.demand.members, self.adapters, strict=True):
            slots = self.cache.tree_core.lora_nodes[identity].device_slots
            assert slots is not None
            rows = self.packer.pack(adapter, pool.dtype).view(pool.layer_num, 2, len(slots), self.packer.pool.width)
            for layer, (keys, values) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True)):
                found = torch.stack([keys[slots].flatten(1), values[slots].flatten(1)]).cpu()
                assert torch.equal(found, rows[layer]), f"{adapter.name}: wrong rows in layer {layer}"

    def close(self) -> None:
        self.residency.reader.drain()
        self.cache.host_pool.destroy()

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


@contextmanager
def copying(process: Process, variant: Variant) -> Iterator[None]:
    """Have HiCache copy as ``variant`` says."""
    controller = process.cache.cache_controller
    engine = controller.l2_transfer_engine
    before, kernels = controller.io_backend, {name: getattr(mha, name) for name in _COPY_KERNELS if hasattr(mha, name)}
    controller.io_backend = engine.io_backend = variant.backend
    if variant.blocks is not None:
        for name, kernel in kernels.items():
            setattr(mha, name, functools.partial(kernel, block_quota=variant.blocks))
    try:
        yield
    finally:
        controller.io_backend = engine.io_backend = before
        for name, kernel in kernels.items():
            setattr(mha, name, kernel)


def measure(process: Process, variant: Variant, rounds: int, limit: str | None) -> dict[str, Any]:
    """The record of one way to copy."""
    with copying(process, variant):
        process.bring()  # kernels are compiled; and the rows are what they should be
        process.check()
        process.evict()
        runs = []
        for _ in range(rounds):
            runs.append(process.bring())
            process.evict()
    seconds, num_bytes, started = (statistics.median(run[field] for run in runs) for field in range(3))
    copy = copy_rate(int(num_bytes), process.device)
    rates = sorted(moved / lasted / 1e9 for lasted, moved, _ in runs)
    note = (
        f"one load operation of {num_bytes / 1e6:.0f} MB, start event to finish event; {rounds} rounds, slowest {rates[0]:.3g}, "
        f"fastest {rates[-1]:.3g}; the scheduler loop was busy for {started * 1e3:.3g} ms"
    )
    baseline = ("pinned host-to-device copy of as many bytes", copy)
    rate = num_bytes / seconds / 1e9
    return results.record(f"swap_in_rate/{variant.name}", rate, "GB/s", baseline=baseline, limit=limit, note=note)


def copy_rate(num_bytes: int, device: str) -> float:
    """GB/s of one plain copy from pinned host memory, median of 9."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(12):
        times.append(_time_of(lambda: target.copy_(source, non_blocking=True), device))
    return num_bytes / statistics.median(times[3:]) / 1e9


def _time_of(copy: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        copy()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    copy()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--small", action="store_true", help="a tiny shape, on whatever is there, to see that it runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = options.device
    if device == "cpu" and not options.small:
        parser.error("a CPU has nothing to measure here; --small shows that it runs")
    scale = SMALL if options.small else LLAMA_8B
    machine = "small" if options.small else results.gpu()
    base = BaseShape.from_hf_config(scale.config)
    adapters = [make_adapter(base, scale.rank, scale.dtype, seed) for seed in range(NUM_ADAPTERS)]
    report = results.Report("swap_in", machine, options.out)
    process: Process | None = None
    for variant in CPU_VARIANTS if device == "cpu" else GPU_VARIANTS:
        if process is None or process.cache.page_size != variant.page_size:
            if process is not None:
                process.close()
                del process
            process = Process(scale, adapters, variant.page_size, device)
        begin = time.monotonic()
        # The limit is for what the server does unless told otherwise.
        limit = LIMIT if variant == Variant() and not options.small else None
        report.add(measure(process, variant, options.rounds, limit))
        print(f"{variant.name}: {time.monotonic() - begin:.0f} s", flush=True)
    if process is not None:
        process.close()
    return report.records


if __name__ == "__main__":
    main()
