"""The tree under SGLang's ``/metrics``, made by the scheduler process in the multiprocess mode that SGLang has set up.

Metrics with a fixed set of labels are plain ``prometheus_client`` objects. Those whose labels come and go with adapters
would never leave a multiprocess file again, so :class:`ChangingGauges` writes a small file of its own, anew each time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_lora_tree.observability.audit import InvalidKvAudit
from sglang_lora_tree.observability.snapshot import count_adapters, count_slots, list_adapters
from sglang_lora_tree.radix.residency import Residency

PREFIX = "sglang:lora_tree_"
MAX_ADAPTER_LABELS = 200
"""Adapters that have a series of their own, and names in one label of ``vllm:lora_requests_info``, at most."""
TIER_VALUES = {"gpu": 2, "loading": 1, "host": 1, "disk": 0}
PLAN_COUNTERS = {
    "applied": ("plans", "Plans of the advisor that took effect."),
    "near_low_lora": ("plans_near_low_lora", "Of these, those that found adapters on the GPU within 5 % of Low_lora."),
    "fallbacks": ("plan_fallbacks", "How often plans stopped coming, so that the queue went as it came and leaves by LRU."),
    "deaths": ("advisor_deaths", "Advisor processes that ended; another one starts."),
    "garbage": ("advisor_garbage", "Messages to the scheduler that were no plan."),
    "reports": ("advisor_reports", "Reports sent to the advisor."),
    "dropped_reports": ("advisor_dropped_reports", "Reports not sent because the advisor was slow or gone."),
    "reads_ahead": ("reads_ahead", "Adapters read from disk before a pass looked at a request for them."),
    "swap_ins_ahead": ("swap_ins_ahead", "Adapters copied to the GPU likewise."),
    "proactive_swap_ins": ("proactive_swap_ins", "Nodes copied to the GPU for their Eval, while there was room."),
    "used": ("swap_ins_ahead_used", "Of all nodes copied ahead, those that a request used within the grace time."),
    "thrash": ("swap_ins_ahead_thrash", "Of all nodes copied ahead, those that were swapped out unused within the grace time."),
    "candidates_found": ("plan_candidates", "Requests that a pass looked at because a plan named them."),
    "refused": ("refused_late", "Requests refused because their first token would have come too late."),
}
"""What a plan's summary calls it -> name and meaning of the series."""
PLAN_GAUGES = {
    "is_fallback": ("fallback", "1 while no plans come."),
    "low_lora": ("low_lora", "Adapters that a batch is expected to need (ELORA, Eq. 3)."),
    "hit_probability": ("hit_probability", "Share of requests whose adapters are on the GPU, by how often they are asked for."),
}
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class PromptTokens:
    """Prompt tokens of first attempts (a retracted request finds its own KV again: not counted)."""

    kv_hit_tokens: int = 0
    """Served from history KV."""
    kv_host_hit_tokens: int = 0
    """Of these, the ones that came back from host memory."""
    kv_miss_tokens: int = 0
    """Computed."""


class ChangingGauges:
    """Gauges whose label values change: what is set last is all that ``/metrics`` shows.

    Args:
        folder: ``PROMETHEUS_MULTIPROC_DIR``, where SGLang's /metrics collects ``<type>_<mode>_<id>.db``.
    """

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / f"gauge_mostrecent_loratree{os.getpid()}.db"

    def write(self, series: Iterable[tuple[str, str, Mapping[str, Any], float]]) -> None:
        """Replace all series by these: (metric, what it means, labels, value)."""
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        now = time.time()
        draft = self._file.with_suffix(".draft")  # the collector looks for *.db
        draft.unlink(missing_ok=True)
        values = MmapedDict(str(draft))
        for name, help_text, labels, value in series:
            # Text, as prometheus_client makes of labels itself: anything else would break /metrics as a whole.
            texts = [str(text) for text in labels.values()]
            values.write_value(mmap_key(name, name, list(labels), texts, help_text), value, now)
        values.close()
        draft.replace(self._file)


class TreeMetrics:
    """All series of one scheduler process.

    Args:
        residency: what to report on.
        labels: SGLang's own labels (model_name, tp_rank, ...).
    """

    def __init__(self, residency: Residency, labels: Mapping[str, Any]) -> None:
        # prometheus_client must not be imported before SGLang has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter, Gauge, Histogram

        self._residency = residency
        self._labels = dict(labels)
        self._audit = InvalidKvAudit(residency.core)
        self._seen: dict[tuple[str, ...], float] = {}
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self._changing = None if folder is None else ChangingGauges(folder)

        def gauge(name: str, text: str, *names: str) -> Any:
            return Gauge(PREFIX + name, text, [*labels, *names], multiprocess_mode="mostrecent")

        def counter(name: str, text: str, *names: str) -> Any:
            return Counter(PREFIX + name, text, [*labels, *names])

        self.slots = gauge("slots", "Token slots of each pool by what they hold.", "tier", "kind")
        self.adapters = gauge("adapters", "Registered adapters by where their weights are.", "tier")
        self.invalid_kv = gauge("invalid_kv_tokens", "Tokens of KV on the GPU whose adapter is not there (always 0).")
        self.adapter_hits = counter("adapter_hits_total", "Adapters that a request found on the GPU.")
        self.adapter_misses = counter("adapter_misses_total", "Adapters that a request had to wait for.")
        self.kv_hits = counter("kv_hit_tokens_total", "Prompt tokens served from history KV, by where it was.", "tier")
        self.kv_misses = counter("kv_miss_tokens_total", "Prompt tokens that were computed.")
        self.swap_ins = counter("swap_ins_total", "Adapters copied from host memory to the GPU.")
        self.swap_outs = counter("swap_outs_total", "Adapters dropped from the GPU (their host copy stays).")
        self.swapped_tokens = counter("swapped_kv_tokens_total", "Tokens of KV copied to the GPU or dropped there.", "direction")
        self.swapped_bytes = counter(
            "swapped_bytes_total", "Slots copied from host memory to the GPU or dropped there, in bytes.", "direction", "kind"
        )
        self.swap_seconds = counter(
            "swap_seconds_total",
            "In: time of the copies, from start to finish event, where the device keeps time. Out: time of the scheduler's loop. "
            "Adapters and KV that go together share it by their slots.",
            "direction",
            "kind",
        )
        self.disk_reads = counter("disk_reads_total", "Adapters read from their folders on first use.")
        self.failed_disk_reads = counter("failed_disk_reads_total", "Adapters whose files could not be read any more.")
        self.disk_read_bytes = counter("disk_read_bytes_total", "Bytes of tensors read from adapters' folders.")
        self.disk_read_seconds = counter("disk_read_seconds_total", "Time spent reading adapters, summed over threads.")
        self.plan_counters = {name: counter(f"{label}_total", text) for name, (label, text) in PLAN_COUNTERS.items()}
        self.plan_gauges = {name: gauge(label, text) for name, (label, text) in PLAN_GAUGES.items()}
        self.cold_start = Histogram(
            PREFIX + "cold_start_seconds",
            "From a request's first look at an absent adapter to its admission.",
            list(labels),
            buckets=SECONDS_BUCKETS,
        ).labels(**self._labels)
        residency.on_cold_start = self.cold_start.observe

    def publish(
        self,
        tokens: PromptTokens,
        max_loras: int,
        running_names: Iterable[str],
        waiting_names: Iterable[str],
        plans: Mapping[str, Any] | None = None,
    ) -> None:
        """Bring every series up to date.

        Args:
            tokens: totals since start.
            max_loras: adapters that one batch may hold.
            running_names: adapters of running requests, members of mixes each by itself.
            waiting_names: of waiting requests.
            plans: how the advisor's plans are doing (``scheduling.plan_hooks.Plans.summary``).
        """
        residency = self._residency
        counters, slot_bytes = residency.counters, int(residency.cache.host_pool.size_per_token)
        for tier, kinds in count_slots(residency).items():
            for kind, slots in kinds.items():
                self.slots.labels(**self._labels, tier=tier, kind=kind).set(slots)
        for tier, number in count_adapters(residency).items():
            self.adapters.labels(**self._labels, tier=tier).set(number)
        self.invalid_kv.labels(**self._labels).set(self._audit.step())
        self._advance(self.adapter_hits, counters.adapter_hits)
        self._advance(self.adapter_misses, counters.adapter_misses)
        self._advance(self.kv_hits, tokens.kv_hit_tokens - tokens.kv_host_hit_tokens, tier="gpu")
        self._advance(self.kv_hits, tokens.kv_host_hit_tokens, tier="host")
        self._advance(self.kv_misses, tokens.kv_miss_tokens)
        self._advance(self.swap_ins, counters.swap_ins)
        self._advance(self.swap_outs, counters.swap_outs)
        for direction, moves in (("in", residency.cache.moved_in), ("out", residency.cache.moved_out)):
            kv_slots = moves.slots - moves.adapter_slots
            self._advance(self.swapped_tokens, kv_slots, direction=direction)
            self._advance(self.swapped_bytes, moves.adapter_slots * slot_bytes, direction=direction, kind="adapter")
            self._advance(self.swapped_bytes, kv_slots * slot_bytes, direction=direction, kind="kv")
            self._advance(self.swap_seconds, moves.adapter_seconds, direction=direction, kind="adapter")
            self._advance(self.swap_seconds, moves.seconds - moves.adapter_seconds, direction=direction, kind="kv")
        self._advance(self.disk_reads, counters.reads)
        self._advance(self.failed_disk_reads, counters.failed_reads)
        self._advance(self.disk_read_bytes, counters.read_bytes)
        self._advance(self.disk_read_seconds, counters.read_seconds)
        for name, advanced in self.plan_counters.items():
            self._advance(advanced, (plans or {}).get(name, 0))
        for name, shown in self.plan_gauges.items():
            shown.labels(**self._labels).set(float((plans or {}).get(name) or 0))
        if self._changing is not None:
            self._changing.write(self._series(max_loras, running_names, waiting_names))

    def _advance(self, counter: Any, total: float, **labels: str) -> None:
        key = (counter._name, *labels.values())
        counter.labels(**self._labels, **labels).inc(max(total - self._seen.get(key, 0), 0))
        self._seen[key] = total

    def _series(
        self, max_loras: int, running_names: Iterable[str], waiting_names: Iterable[str]
    ) -> Iterable[tuple[str, str, Mapping[str, Any], float]]:
        text = "Where an adapter's weights are: 2 on the GPU, 1 in host memory, 0 on disk."
        adapters = sorted(list_adapters(self._residency).items(), key=lambda item: -TIER_VALUES[item[1]["tier"]])
        for name, adapter in adapters[:MAX_ADAPTER_LABELS]:
            yield PREFIX + "adapter_tier", text, {**self._labels, "adapter": name}, TIER_VALUES[adapter["tier"]]
        yield (
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests, as vLLM reports them to routers; the value is the time.",
            {
                "max_lora": str(max_loras),
                "running_lora_adapters": _join(running_names),
                "waiting_lora_adapters": _join(waiting_names),
            },
            time.time(),
        )


def _join(names: Iterable[str]) -> str:
    return ",".join(sorted(set(names))[:MAX_ADAPTER_LABELS])
