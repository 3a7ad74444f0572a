"""A server without a model: the real tree, cache and policies, and costs that were measured on an H200.

What is real: ``LoraTreeCache`` over ``LoraTreeCore``, SGLang's allocators and HiCache with both pools (one plane of one
number a slot), locks, backups, loads and evictions. What is not: time. Steps of the model, copies between the pools and reads
from disk take what ``workloads.json`` says, and are over at once as far as the tree is concerned.

The loop is SGLang's in its defaults: requests in order of arrival, one prefill batch before any decode step, at most
``max_running`` requests. A request whose adapter is not there has it fetched and lets those behind it pass; one that finds no
room for its tokens does not. KV is loaded from host memory while the prefill runs; an adapter is used when its whole load is
done. There is one link for loads, and ``disk_readers`` reads run at a time.

When a pass takes place, and from when on a copy may write (``LOOPS``):

* synchronous, the default: a pass stands between two steps, nothing is queued on the GPU, and a copy starts when it is asked
  for. So it is in SGLang without overlap scheduling.
* fenced: SGLang's overlap scheduling. The pass that forms a step takes place while the step before it runs, and knows what
  had come and was done when that began. Copies start at its end: the stream of loads waits for what is queued on the
  forward stream, because a slot that has just come free may still be written there.
* unfenced: the same, but copies start as they are asked for. Not safe; only to see what the fence costs.
* by_layer: as fenced, but a request whose adapter is in host memory is admitted at once, and its prefill ends no earlier
  than the adapter's copy. With ``late_slots`` a pass brings in no more than that for its batch: requests whose adapters
  are beyond it wait for the next pass, which asks for their copies.
* by_batch: likewise, but the prefill begins when the copy is done: one wait before the whole pass.

Without ``swap_in_below`` nothing comes to the GPU before a request asks for it; with it ``benchmarks.advice`` brings nodes in
while less than that share of the pool is in use.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from benchmarks.advice import Advice
from benchmarks.standalone_cache import build_cache
from benchmarks.workloads import CONSTANTS, TOKENS_PER_SLOT, Job
from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.eval import EvalParameters, low_lora
from sglang_lora_tree.radix.identity import adapter_identity, namespace_key
from sglang_lora_tree.radix.policies import POLICIES, RetentionPolicy, RetentionState
from sglang_lora_tree.scheduling.orders import Waiting
from sglang_lora_tree.scheduling.waiting_queue import Ticket

COSTS = CONSTANTS["costs"]
BYTES_PER_SLOT = CONSTANTS["bytes_per_token"] * TOKENS_PER_SLOT
ADAPTER_SLOTS = CONSTANTS["adapter_tokens"] // TOKENS_PER_SLOT
LOOPS = ("synchronous", "fenced", "unfenced", "by_layer", "by_batch")
_IDLE_STEP = 1e-4  # seconds of a loop step in which nothing runs
_LOOK_AHEAD = 32  # waiting requests that a pass looks at


@dataclass
class Outcome:
    """What one run measured, over the requests after the warm-up."""

    ttft: list[float] = field(default_factory=list)
    """Seconds, in order of admission."""
    prompt_slots: int = 0
    gpu_hit_slots: int = 0
    host_hit_slots: int = 0
    adapter_uses: int = 0
    adapter_gpu_hits: int = 0
    adapter_host_hits: int = 0
    """Requests whose adapter was in host memory only, when a pass first looked at them."""
    adapter_reads: int = 0
    swap_ins: int = 0
    """Nodes that came in unasked, in the whole run..."""
    swap_ins_used: int = 0
    """... and those of them that a request used within the grace time."""
    has_room: list[bool] = field(default_factory=list)
    """At each plan: whether less than ``swap_in_below`` of the pool was in use."""
    loaded_bytes: int = 0
    near_low_lora: list[bool] = field(default_factory=list)
    """At each plan: whether there were Low_lora adapters on the GPU, within 5 %."""
    above_low_lora: list[bool] = field(default_factory=list)
    """At each plan: whether there were more."""

    @property
    def mean_ttft(self) -> float:
        return float(np.mean(self.ttft))

    @property
    def kv_hit_rate(self) -> float:
        """Prompt tokens not computed again."""
        return (self.gpu_hit_slots + self.host_hit_slots) / max(self.prompt_slots, 1)

    @property
    def gpu_kv_hit_rate(self) -> float:
        return self.gpu_hit_slots / max(self.prompt_slots, 1)

    @property
    def adapter_hit_rate(self) -> float:
        return self.adapter_gpu_hits / max(self.adapter_uses, 1)


@dataclass(eq=False)
class _Request:
    job: Job
    number: int
    identity: str
    key: str | None
    end: int = 0
    unlock: Callable[[], None] = lambda: None
    hold: Callable[[], None] | None = None
    slots: Any = None
    protected: int = 0
    remaining: int = 0
    seen: bool = False
    lora_tree_ticket: Ticket = field(init=False)

    def __post_init__(self) -> None:
        waiting = Waiting(self.number, self.job.arrival, (self.identity,), len(self.job.prompt))
        self.lora_tree_ticket = Ticket(waiting)


class Simulator:
    """One server, one run.

    Args:
        policy: a name in ``POLICIES`` or one of SGLang's, or what makes a policy.
        pool_slots, host_slots: sizes of both pools.
        parameters: changes to the plans' parameters (tau, lora_term, ...), which are those of ``Settings``.
        plan_period: seconds between plans; None: there are none.
        look_ahead: whether a request touches what it will use when it arrives, and not only when it is admitted.
        loop: one of ``LOOPS``.
        late_slots: with loop by_layer, how many slots of adapters may come in with one batch; the first adapter may in any
            case. None: any number.
        swap_in_below: as in ``Settings``; None: nothing comes in unasked.
    """

    def __init__(
        self,
        policy: str | Callable[[RetentionState], RetentionPolicy],
        pool_slots: int,
        host_slots: int,
        num_adapters: int,
        parameters: dict[str, Any] | None = None,
        plan_period: float | None = CONSTANTS["plan_period_s"],
        look_ahead: bool = False,
        loop: str = "synchronous",
        late_slots: int | None = None,
        swap_in_below: float | None = None,
    ) -> None:
        assert loop in LOOPS, f"loop {loop!r} is none of {LOOPS}"
        assert late_slots is None or loop == "by_layer", f"loop {loop!r} brings no adapters in with a batch"
        stock = policy if isinstance(policy, str) and policy not in POLICIES else "lru"
        self.cache = build_cache(pool_slots, host_slots, eviction_policy=stock)
        self.core = self.cache.tree_core
        self.state = RetentionState(bytes_per_slot=BYTES_PER_SLOT, pool_slots=pool_slots)
        make = policy if callable(policy) else POLICIES.get(policy)
        if make is not None:
            self.core.set_policy(make(self.state), self.state)
        else:
            self.core.retention = self.state
        self.identities = [adapter_identity(f"{number:064x}") for number in range(num_adapters)]
        self._parameters = parameters or {}
        self._plan_period = plan_period
        self._look_ahead = look_ahead
        self._loop = loop
        self._late_slots = late_slots
        self._slots_of_pass = 0
        """Of adapters whose copies this pass has asked for."""
        self._next_plan = 0.0
        self._visits = np.zeros(num_adapters)
        self._visited_at = 0.0
        self._batches: deque[tuple[float, int]] = deque()
        self._numbers = {identity: number for number, identity in enumerate(self.identities)}
        self.now = 0.0
        """When the step begins that the pass forms."""
        self._pass_at = 0.0
        """When that pass takes place; earlier under overlap scheduling."""
        self._link_free = 0.0
        self._disks = [0.0] * COSTS["disk_readers"]
        self._ready: dict[str, float] = {}
        """Identity -> when its last load is done."""
        self._reading: dict[str, tuple[float, Any]] = {}
        self._kv_ready: dict[str, float] = {}
        """Identity -> when the last KV of it that comes in unasked is there; requests for it wait until then."""
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.outcome = Outcome()
        self._warm = 0
        self._advice: Advice | None = None
        if swap_in_below is not None:
            self.cache.is_load_path_idle = lambda: self._link_free <= self.now  # type: ignore[method-assign]
            settings = Settings(swap_in_below=swap_in_below, prefetch=False)
            self._advice = Advice(self.cache, settings, self._busy, self._note_copy)

    # ---- The loop ----

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Play all jobs; they must be in order of arrival."""
        self._warm = int(len(jobs) * CONSTANTS["warm_up_share"])
        arrivals = deque(
            _Request(job, number, self.identities[job.adapter], namespace_key(self.identities[job.adapter], None))
            for number, job in enumerate(jobs)
        )
        while arrivals or self.waiting or self.running:
            while arrivals and arrivals[0].job.arrival <= self._pass_at:
                self.waiting.append(arrivals.popleft())
                if self._advice is not None:
                    self._advice.note_queued(self.waiting[-1])
                if self._look_ahead:
                    self._touch(self.waiting[-1])
            self._take_in_reads()
            self._plan()
            if self._advice is not None:
                self._advice.step(self.now)
            admitted, load_bytes = self._admit()
            if admitted:
                self._prefill(admitted, load_bytes)
            elif self.running:
                self._decode(arrivals[0].job.arrival if arrivals else float("inf"))
            else:
                self._wait(arrivals[0].job.arrival if arrivals else float("inf"))
        if self._advice is not None:
            counters = self._advice.counters
            self.outcome.swap_ins, self.outcome.swap_ins_used = counters.proactive_swap_ins, counters.used
        return self.outcome

    def _admit(self) -> tuple[list[_Request], int]:
        admitted: list[_Request] = []
        load_bytes = new_slots = self._slots_of_pass = 0
        for request in list(self.waiting)[:_LOOK_AHEAD]:
            if len(self.running) + len(admitted) >= COSTS["max_running"]:
                break
            if not self._bring(request):
                continue
            loaded = self._lock(request)
            if loaded is None:
                break  # no room for its tokens
            load_bytes += loaded
            admitted.append(request)
            new_slots += len(request.job.prompt) - request.protected
            if new_slots * TOKENS_PER_SLOT >= 8192:
                break
        for request in admitted:
            self.waiting.remove(request)
        if self._advice is not None:
            self._advice.note_admitted(admitted)
        return admitted, load_bytes

    def _bring(self, request: _Request) -> bool:
        """Whether the request's adapter can be used now; if not, it is on its way."""
        identity = request.identity
        if self._kv_ready.get(identity, 0.0) > self._pass_at:
            return False
        lora_node = self.core.lora_nodes.get(identity)
        resident = lora_node is not None and lora_node.is_resident
        if not request.seen:
            request.seen = True
            if request.number >= self._warm:
                self.outcome.adapter_uses += 1
                self.outcome.adapter_gpu_hits += resident
                self.outcome.adapter_host_hits += lora_node is not None and not resident
        if lora_node is None:
            if identity not in self._reading:
                slots = self.cache.allocate_host(ADAPTER_SLOTS)
                if slots is not None:
                    begin = max(heapq.heappop(self._disks), self._pass_at)
                    done = begin + ADAPTER_SLOTS * BYTES_PER_SLOT / COSTS["disk_bytes_per_s"]
                    heapq.heappush(self._disks, done)
                    self._reading[identity] = (done, slots)
                    self.outcome.adapter_reads += request.number >= self._warm
            return False
        if not resident:
            if self._is_beyond(ADAPTER_SLOTS) or not self.cache.start_swap_in(lora_node):
                return False
            self._slots_of_pass += ADAPTER_SLOTS
            self._finish_loads()
            self._link_free = max(self._link_free, self._first_write) + self._load(ADAPTER_SLOTS)
            self._ready[identity] = self._link_free
        if request.hold is None:
            request.hold = self.cache.hold(lora_node)
        return self._loop in ("by_layer", "by_batch") or self._ready[identity] <= self._pass_at

    def _is_beyond(self, slots: int) -> bool:
        """Whether ``slots`` more are too many to come in with this pass's batch."""
        late = self._slots_of_pass
        return self._late_slots is not None and late > 0 and late + slots > self._late_slots

    @property
    def _first_write(self) -> float:
        """From when on a copy that this pass asks for may write."""
        return self._pass_at if self._loop == "unfenced" else self.now

    def _touch(self, request: _Request) -> None:
        self.cache.match_prefix(MatchPrefixParams(key=RadixKey(request.job.prompt[:-1], request.key)))

    def _lock(self, request: _Request) -> int | None:
        """Match, load and allocate; returns bytes to load, None if there is no room."""
        cache, prompt = self.cache, request.job.prompt
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:-1], request.key)))
        node = match.last_device_node
        request.unlock = self._locked(node)
        output = -(-request.job.output // TOKENS_PER_SLOT)
        needed = len(prompt) - match.device_prefix_len + output
        if needed > cache.num_free_slots + cache.evictable_size():
            request.unlock()
            return None
        loaded = 0
        if match.host_hit_length and cache.load_back(match.best_match_node):
            self._finish_loads()
            loaded = match.host_hit_length
            request.unlock()
            node = match.best_match_node
            request.unlock = self._locked(node)
        kept = cache.path_device_indices(node)
        request.end, request.protected = node, len(kept)
        new = cache.allocate_device(len(prompt) - len(kept) + output)
        assert new is not None, "an admitted request finds no slots"
        request.slots = torch.cat([kept, new])
        if request.number >= self._warm:
            self.outcome.prompt_slots += len(prompt)
            self.outcome.gpu_hit_slots += match.device_prefix_len
            self.outcome.host_hit_slots += loaded
            self._count_load(loaded)
        return loaded * BYTES_PER_SLOT

    def _prefill(self, admitted: list[_Request], load_bytes: int) -> None:
        new = sum(len(request.job.prompt) - request.protected for request in admitted) * TOKENS_PER_SLOT
        compute = max(COSTS["decode_step_s"], new / COSTS["prefill_tokens_per_s"])
        loaded = max(self.now, *(self._ready[request.identity] for request in admitted))
        begin = loaded if self._loop == "by_batch" else self.now
        if load_bytes:
            loaded = max(self._link_free, self._first_write) + load_bytes / COSTS["host_to_device_bytes_per_s"]
            self._link_free = loaded
        self._advance(max(begin + compute, loaded), last_step_began=self.now)
        for request in admitted:
            if request.number >= self._warm:
                self.outcome.ttft.append(self.now - request.job.arrival)
            lora_node = self.core.lora_nodes[request.identity]
            self.core.note_visit(lora_node)
            self._visits[request.job.adapter] += 1
            self._insert(request, request.job.prompt, 0)
            assert request.hold is not None
            request.hold()
            request.remaining = request.job.output - 1
            self.running.append(request)
        self._finish_done()
        self._batches.append((self.now, len(self.running)))

    def _decode(self, next_arrival: float) -> None:
        step = COSTS["decode_step_s"]
        steps = max(1, min(request.remaining for request in self.running))
        until = min(next_arrival, self._next_event(), self._next_swap_in())
        if until < self.now + steps * step:
            steps = max(1, int((until - self.now) / step) + 1)
        end = self.now + steps * step
        self._advance(end, last_step_began=end - step)
        for request in self.running:
            request.remaining -= steps
        self._finish_done()
        self._batches.append((self.now, len(self.running)))

    def _wait(self, next_arrival: float) -> None:
        until = min(next_arrival, self._next_event())
        if until == float("inf"):
            raise AssertionError(f"{len(self.waiting)} requests wait for nothing: the pools are too small for this workload")
        until = min(until, self._next_swap_in())
        self.now = self._pass_at = max(until, self.now)

    def _advance(self, end: float, last_step_began: float) -> None:
        """Steps go by; the next one begins at ``end``."""
        self.now = end
        self._pass_at = end if self._loop == "synchronous" else last_step_began

    def _next_event(self) -> float:
        """When the next adapter is there, for somebody who waits."""
        times = [done for done, _ in self._reading.values()]
        times += [self._ready[request.identity] for request in self.waiting if request.hold is not None]
        times += [self._kv_ready.get(request.identity, 0.0) for request in self.waiting]
        return min((time for time in times if time > self._pass_at), default=float("inf"))

    def _next_swap_in(self) -> float:
        """When the loop has something to bring in unasked, or looks whether it has."""
        if self._advice is None or not (self._advice.has_more or self._advice.has_room):
            return float("inf")
        return max(self._link_free, self.now + _IDLE_STEP) if self._advice.has_more else self._next_plan

    def _busy(self) -> list[str]:
        return [request.identity for request in self.running]

    def _note_copy(self, node_id: int) -> None:
        """A node comes in unasked."""
        self._finish_loads()
        node = self.core.node_by_id(node_id)
        self._link_free = max(self._link_free, self._first_write) + self._load(len(node.key))
        lora_node, owner = self.core.find(node_id), self.core.lora_node_of(node)
        assert owner is not None, "every request of the simulator has an adapter"
        ready = self._kv_ready if lora_node is None else self._ready
        ready[owner.identity] = self._link_free

    def _finish_done(self) -> None:
        for request in [request for request in self.running if request.remaining <= 0]:
            self.running.remove(request)
            tokens = request.job.prompt
            if len(request.job.answer):
                tokens = tokens + request.job.answer
                self._insert(request, tokens, len(request.job.prompt))
            self.cache.token_to_kv_pool_allocator.free(request.slots[len(tokens) :])
            request.unlock()
        self.cache.check_hicache_events()

    def _take_in_reads(self) -> None:
        for identity in [identity for identity, (done, _) in self._reading.items() if done <= self._pass_at]:
            self.core.add_adapter(identity, self._reading.pop(identity)[1])

    # ---- The tree ----

    def _insert(self, request: _Request, tokens: array[int], inserted: int) -> None:
        """Give the tree the KV of ``tokens``; the request goes on from the node they end at."""
        cache = self.cache
        result = cache.insert(
            InsertParams(
                key=RadixKey(tokens, request.key),
                value=request.slots[: len(tokens)].clone(),
                prev_prefix_len=request.protected,
                inserted_len=inserted,
            )
        )
        old, request.unlock = request.unlock, self._locked(result.last_device_node)
        old()
        path = cache.path_device_indices(result.last_device_node)
        request.slots = torch.cat([path, request.slots[len(tokens) :]])
        request.end, request.protected = result.last_device_node, len(tokens)

    def _locked(self, node: int) -> Callable[[], None]:
        receipt = self.cache.inc_lock_ref(node).to_dec_params()
        return lambda: (self.cache.dec_lock_ref(node, receipt), None)[1]

    def _finish_loads(self) -> None:
        self.cache.submit_loads()
        self.cache.check_hicache_events()

    def _load(self, slots: int) -> float:
        self._count_load(slots)
        return slots * BYTES_PER_SLOT / COSTS["host_to_device_bytes_per_s"]

    def _count_load(self, slots: int) -> None:
        self.outcome.loaded_bytes += slots * BYTES_PER_SLOT

    # ---- The advisor ----

    def _plan(self) -> None:
        if self._plan_period is None or self.now < self._next_plan:
            return
        self._next_plan = self.now + self._plan_period
        while self._batches and self._batches[0][0] < self.now - CONSTANTS["batch_window_s"]:
            self._batches.popleft()
        batch = float(np.mean([size for _, size in self._batches])) if self._batches else 1.0
        changes = {
            "host_to_device_bytes_per_s": COSTS["host_to_device_bytes_per_s"],
            "disk_bytes_per_s": COSTS["disk_bytes_per_s"],
            "prefill_tokens_per_s": COSTS["prefill_tokens_per_s"] / TOKENS_PER_SLOT,  # the tree's tokens are slots
            **self._parameters,
        }
        window = changes.get("visit_window", EvalParameters.visit_window)
        self._visits *= np.exp((self._visited_at - self.now) / window)
        self._visited_at = self.now
        shares = self._visits / max(self._visits.sum(), 1e-9)
        wanted = low_lora(shares, batch)
        self.core.set_eval_parameters(EvalParameters(now=self.now, low_lora=wanted, **changes))
        if wanted:
            share = self.state.resident_adapters / wanted
            self.outcome.near_low_lora.append(abs(share - 1) <= 0.05)
            self.outcome.above_low_lora.append(share > 1.05)
        if self._advice is not None:
            self.outcome.has_room.append(self._advice.has_room)
            self._advice.plan(self.now, self.waiting, len(self.running))
