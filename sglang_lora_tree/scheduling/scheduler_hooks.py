"""SGLang's scheduler, told about adapters that live in the pool.

Hooks (all do nothing while ``--lora-tree`` is off), on ``sglang.srt.managers``:

* ``schedule_batch.Req.__init__`` (AFTER): the request's KV is filed under its adapter's or mix's identity.
* ``scheduler.Scheduler.__init__`` (AFTER): the self-check; this process serves nothing if a hook did not take.
* ``scheduler.Scheduler.init_req_max_new_tokens`` (AFTER): limits on length count the slots of the adapters.
* ``scheduler.Scheduler.get_next_batch_to_run`` (BEFORE): outcomes of reader threads are applied, at one point of the loop.
* ``scheduler.Scheduler._get_new_batch_prefill_raw`` (AROUND) and ``can_schedule_lora_req`` (AROUND): admission.
* ``schedule_policy.PrefillAdder.__init__`` (AFTER): what this pass has promised already.
* ``schedule_batch.ScheduleBatch.check_decode_mem`` and ``prepare_for_extend`` (AROUND): who would be aborted, or stop the
  server, for want of slots gets those that copies under way lock.
* ``scheduler.Scheduler.load_lora_adapter``, ``load_lora_adapter_from_tensors``, ``unload_lora_adapter`` (AROUND): no file is
  read in the loop; the answer is sent when a thread has read it.
* ``scheduler.Scheduler.is_fully_idle`` (AROUND): not idle while an adapter is being read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, CacheAwarePolicy
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.composite.demand import WeightedDemand
from sglang_lora_tree.composite.manager_hooks import TreeLoRAManager
from sglang_lora_tree.composite.request_hooks import UNLOAD_FOR_GOOD
from sglang_lora_tree.radix.identity import BASE_IDENTITY, namespace_key
from sglang_lora_tree.radix.residency import Demand, Residency, Verdict
from sglang_lora_tree.scheduling.orders import MAX_WAITS
from sglang_lora_tree.scheduling.waiting_queue import WINDOW, WaitingQueue, make_queue

if TYPE_CHECKING:
    from sglang_lora_tree.scheduling.plan_hooks import Plans

logger = logging.getLogger(__name__)


class SchedulerState:
    """What the hooks keep between calls: one per scheduler process."""

    def __init__(self) -> None:
        self.manager: TreeLoRAManager | None = None
        self.adder: Any = None
        """SGLang's PrefillAdder of the pass under way."""
        self.queue: WaitingQueue | None = None
        self.plans: Plans | None = None
        self.most_adapters: int | None = None
        """In one batch, where ``queue_order`` is clusters."""
        self.num_left = 0
        """Length of the queue after the last pass..."""
        self.admitted: list[Req] = []
        """... and whom it has admitted, until the next one counts them."""
        self.begin(False)

    def begin(self, will_look: bool) -> None:
        """A pass begins."""
        self.will_look = will_look
        """It is expected to look at the queue."""
        self.is_split = False
        """It sees the window of the queue only..."""
        self.num_window = 0
        """... with so many requests."""
        self.is_ordered = False
        """It has ordered the queue, and told ``Residency.begin_pass`` so."""
        self.num_looked_at = 0
        """Requests that it has looked at..."""
        self.num_waits = 0
        """... and found waiting for adapters..."""
        self.ready: list[Req] = []
        """... or with their adapters there..."""
        self.failed: list[tuple[Req, str]] = []
        """... or that can not be served."""
        self.running_members: set[str] = set()
        """Adapters of the running batch and of what the pass has admitted..."""
        self.num_running_loras = -1
        """... as of when SGLang's set of ``lora_id`` had this size."""

    @property
    def residency(self) -> Residency | None:
        return None if self.manager is None else self.manager.residency


STATE = SchedulerState()
_READY, _FAILED, _FCFS = Verdict.READY, Verdict.FAILED, CacheAgnosticPolicy.FCFS  # looking them up by their class is slow
id_of = attrgetter("rid")


def attach(scheduler: Any) -> None:
    """Take over a scheduler that SGLang has just built.

    Raises:
        RuntimeError: its LoRA manager is not ours.
    """
    manager = scheduler.tp_worker.model_runner.lora_manager
    if not isinstance(manager, TreeLoRAManager) or manager.residency is None:
        raise RuntimeError(f"--lora-tree: the LoRA manager is a {type(manager).__name__} that no tree is attached to")
    STATE.manager = manager
    STATE.queue = make_queue(manager.settings)
    if manager.settings.queue_order == "clusters":
        STATE.most_adapters = min(manager.settings.cluster_adapters, scheduler.max_loras_per_batch)


def demand_of(req: Req) -> WeightedDemand | None:
    """What a request needs; None for the base model."""
    assert STATE.manager is not None
    return STATE.manager.resolver.resolve(req.lora_id)


def members_of(lora_id: str | None) -> tuple[str, ...]:
    """Identities of the adapters behind a ``lora_id``; none for the base model."""
    assert STATE.manager is not None
    weighted = STATE.manager.resolver.resolve(lora_id)
    return () if weighted is None else weighted.demand.members


# ---- Requests as they come ----


def file_under_identity(result: None, req: Req, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Req.__init__``: replace the key that SGLang makes (extra_key + lora_id) by one with length-prefixed fields."""
    if STATE.manager is None:
        return
    extra_key = req.extra_key
    if req.lora_id is not None:
        assert extra_key is not None and extra_key.endswith(req.lora_id), f"unexpected key {extra_key!r}"
        extra_key = extra_key[: -len(req.lora_id)] or None
    try:
        weighted = demand_of(req)
    except (KeyError, ValueError) as error:
        # The tokenizer process waits for requests before it unloads, so this is a client that makes up ids.
        req.lora_id = None
        weighted = None
        is_unknown = isinstance(error, KeyError)
        req.lora_tree_error = f"the request's adapters are not loaded: {error.args[0]}" if is_unknown else str(error)
    if weighted is None:
        req.lora_id = None
    req.extra_key = namespace_key(BASE_IDENTITY if weighted is None else weighted.demand.identity, extra_key)
    if STATE.queue is not None:
        demand = None if weighted is None else weighted.demand
        members = () if demand is None else demand.members
        req.lora_tree_ticket = STATE.queue.take_ticket(members, len(req.origin_input_ids), demand)


def limit_length(result: None, scheduler: Any, req: Req) -> None:
    """AFTER ``Scheduler.init_req_max_new_tokens``: prompt, output and adapters share one pool."""
    if STATE.manager is None:
        return
    residency, weighted = STATE.residency, demand_of(req)
    assert residency is not None, "a request before the tree is attached"
    demand = None if weighted is None else weighted.demand
    length = len(req.origin_input_ids)
    error = getattr(req, "lora_tree_error", None) or residency.find_misfit(demand, length)
    if error is not None:
        _refuse(req, error)
    elif residency.reserved_slots(demand):
        room, params = residency.room_for_output(demand, length), req.sampling_params
        params.max_new_tokens = room if params.max_new_tokens is None else min(params.max_new_tokens, room)


def _refuse(req: Req, message: str) -> None:
    req.set_finish_with_abort(message, status_code=HTTPStatus.BAD_REQUEST)
    _make_base(req)


def _make_base(req: Req) -> None:
    """SGLang runs whoever is to be aborted for one token more: the base model can do that, whatever is on the GPU."""
    req.lora_id = req.lora_tree_ticket.demand = None
    req.extra_key = namespace_key(BASE_IDENTITY, "refused")


# ---- Once per loop step ----


def poll(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Scheduler.get_next_batch_to_run``."""
    manager = STATE.manager
    if manager is not None and manager.residency is not None:
        manager.residency.poll(lambda: _live_needs(scheduler))


def _live_needs(scheduler: Any) -> Iterator[tuple[Demand | None, int]]:
    """What every request that is not finished needs, and the most tokens that it may ever have."""
    reqs = {*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue, *scheduler.collect_inflight_reqs()}
    if scheduler.chunked_req is not None:
        reqs.add(scheduler.chunked_req)
    for req in reqs:
        if not req.finished():
            weighted = demand_of(req)
            length = len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0)
            yield None if weighted is None else weighted.demand, length


# ---- Slots for running requests ----


def check_decode_slots(original: Callable[..., bool], batch: Any, selected_indices: list[int] | None = None) -> bool:
    """AROUND ``ScheduleBatch.check_decode_mem``: SGLang retracts the others first, and aborts the last that finds no slot."""
    residency = STATE.residency
    if residency is None or len(batch.reqs if selected_indices is None else selected_indices) != 1:
        return original(batch, selected_indices)
    with residency.cache.last_resort():
        return original(batch, selected_indices)


def prepare_for_extend(original: Callable[..., None], batch: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND ``ScheduleBatch.prepare_for_extend``: an admitted prompt that finds no slots would stop the server."""
    if STATE.residency is None:
        return original(batch, *args, **kwargs)
    with STATE.residency.cache.last_resort():
        return original(batch, *args, **kwargs)


def stay_awake(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """AROUND ``Scheduler.is_fully_idle``."""
    idle = original(scheduler, *args, **kwargs)
    return idle and not (STATE.residency is not None and STATE.residency.is_busy)


# ---- Admission ----


def remember_adder(result: None, adder: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``PrefillAdder.__init__``."""
    STATE.adder = adder


def run_pass(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``Scheduler._get_new_batch_prefill_raw``: one pass over the waiting queue."""
    state = STATE
    manager, queue = state.manager, state.queue
    if manager is None or queue is None or manager.residency is None:
        return original(scheduler, *args, **kwargs)
    residency = manager.residency
    if state.admitted:
        _count_admitted(residency)
    will_look = _will_look(scheduler, *args, **kwargs)
    if will_look or state.will_look or state.is_ordered:  # else the pass before has left nothing behind
        state.begin(will_look)
    result = _walk_queue(original, queue, scheduler, *args, **kwargs) if will_look else original(scheduler, *args, **kwargs)
    batch = result[0]
    if state.is_ordered or batch is not None:
        _note_outcome(residency, queue, scheduler, [] if batch is None else list(batch.reqs))
    elif will_look or len(scheduler.waiting_queue) < state.num_left:
        # What requests hold that are gone ends all the same. Only those that a pass has looked at hold anything.
        waiting = scheduler.waiting_queue
        residency.begin_pass(map(id_of, waiting[:WINDOW] if may_split(scheduler.policy, waiting) else list(waiting)))
    state.num_left = len(scheduler.waiting_queue)
    if batch is None and residency.cache.has_queued_loads:
        residency.end_pass(batch_formed=False)
    if manager.settings.verify_invariants:
        residency.core.check_invariants()
        residency.cache.check_ranks_agree()
    return result


def _will_look(
    scheduler: Any, prefill_delayer_single_pass: Any = None, running_batch: Any = None, *args: Any, **kwargs: Any
) -> bool:
    """Whether SGLang will look at the queue; in most steps of a loaded server it sees at once that the batch is full.

    Should it look all the same, it sees the whole queue, which costs time and nothing else.
    """
    return (
        running_batch is None
        or not running_batch.batch_is_full
        or scheduler.chunked_req is not None
        or running_batch.is_empty()
        or scheduler.policy.enable_priority_scheduling
    )


def _walk_queue(original: Callable[..., Any], queue: WaitingQueue, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's own pass, over the window of the queue or, where SGLang orders all of it, over all."""
    if not may_split(scheduler.policy, scheduler.waiting_queue):
        return original(scheduler, *args, **kwargs)
    rest = scheduler.waiting_queue
    STATE.is_split = True
    scheduler.waiting_queue = queue.split(rest)
    STATE.num_window = len(scheduler.waiting_queue)
    result = original(scheduler, *args, **kwargs)
    scheduler.waiting_queue = queue.join(scheduler.waiting_queue, rest)
    return result


def _note_outcome(residency: Residency, queue: WaitingQueue, scheduler: Any, admitted: list[Req]) -> None:
    """Tell everybody who was not admitted for want of room, and keep who was."""
    state = STATE
    state.admitted = admitted
    if admitted and state.plans is not None and state.plans.reporter is not None:
        state.plans.reporter.note_admitted(admitted)
    rejected = [req for req in state.ready if req not in admitted] if len(state.ready) > len(admitted) else ()
    for req in rejected:
        residency.note_rejected(req.rid, not admitted and scheduler.running_batch.is_empty())
    if state.is_split:
        queue.note_pass(state.num_looked_at >= state.num_window, bool(rejected))
    elif state.is_ordered:
        queue.note_unsplit()
    if state.failed:
        _abort_failed(scheduler)
    state.adder = None


def _count_admitted(residency: Residency) -> None:
    """What the pass before has admitted runs by now; a pass that admits has enough to do, and most have nothing."""
    for req in STATE.admitted:
        residency.note_admitted(req.rid, req.lora_tree_ticket.demand)
    STATE.admitted = []


def may_split(policy: Any, queue: list[Req]) -> bool:
    """Whether a pass may look at a part of the queue only: where SGLang itself would take it as it comes."""
    if policy.enable_priority_scheduling:
        return False
    if policy.policy is _FCFS:
        return True
    return len(queue) > WINDOW and policy.policy in (CacheAwarePolicy.LPM, CacheAwarePolicy.HRRN)


def can_schedule(original: Callable[..., bool], scheduler: Any, req: Req, running_loras: set[str | None]) -> bool:
    """AROUND ``Scheduler.can_schedule_lora_req``: are the request's adapters on the GPU, or on their way?"""
    state = STATE
    manager = state.manager
    if manager is None or manager.residency is None:
        return original(scheduler, req, running_loras)
    residency = manager.residency
    state.num_looked_at += 1
    if scheduler.lora_drainer and not scheduler.lora_drainer.can_schedule(req):
        return False
    if req.to_finish is not None:  # refused by us or by SGLang, or aborted and retracted: it only has to pass through
        _make_base(req)
        return True
    demand = req.lora_tree_ticket.demand
    if demand is not None:
        if state.num_waits >= MAX_WAITS and not all(map(residency.resident.__contains__, demand.members)):
            return False
        if req.lora_id not in running_loras:
            limit = state.most_adapters or scheduler.max_loras_per_batch
            # What runs is on the GPU, so where that is not too much, what runs is not.
            if residency.num_resident + len(demand.members) > limit and _too_many_adapters(limit, demand, running_loras):
                return False
    adder = state.adder
    alone = not adder.can_run_list and not scheduler.running_batch.reqs
    verdict = residency.admit(req.rid, demand, int(adder.rem_total_tokens), alone)
    if verdict is _READY:
        state.ready.append(req)
        return True
    if verdict is _FAILED:
        state.failed.append((req, str(residency.failure_of(req.rid, demand))))
    else:
        state.num_waits += 1
    return False


def _too_many_adapters(limit: int, demand: Demand, running_loras: set[str | None]) -> bool:
    """--max-loras-per-batch counts different adapters, members of mixes included; a request alone always may run."""
    if len(running_loras) != STATE.num_running_loras:  # it only grows while a pass lasts
        STATE.num_running_loras = len(running_loras)
        STATE.running_members = {member for lora_id in running_loras for member in members_of(lora_id)}
    running = STATE.running_members
    return bool(running) and len(running) + len(set(demand.members) - running) > limit


def _abort_failed(scheduler: Any) -> None:
    """Answer the requests whose adapters cannot be had; nobody else notices."""
    failed = {id(req) for req, _ in STATE.failed}
    scheduler.waiting_queue = [req for req in scheduler.waiting_queue if id(req) not in failed]
    for req, message in STATE.failed:
        logger.error("request %s refused: %s", req.rid, message)
        prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
        scheduler.output_streamer.stream_output([req], req.return_logprob)
    STATE.failed = []


# ---- Loading and unloading ----


def _reply(scheduler: Any, recv_req: Any) -> Callable[[LoRAUpdateOutput], None]:
    return lambda output: scheduler.send_control_output(output, recv_req)


def load(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND ``Scheduler.load_lora_adapter``: answered later (None: nothing to send now)."""
    if STATE.manager is None:
        return original(scheduler, recv_req)
    STATE.manager.begin_load(recv_req.to_ref(), _reply(scheduler, recv_req))
    return None


def load_from_tensors(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND ``Scheduler.load_lora_adapter_from_tensors``: answered later."""
    manager = STATE.manager
    if manager is None:
        return original(scheduler, recv_req)
    reply = _reply(scheduler, recv_req)
    if recv_req.load_format == "flattened_bucket" or recv_req.added_tokens_config:
        what = "load_format flattened_bucket" if recv_req.load_format else "added_tokens_config"
        reply(LoRAUpdateOutput(success=False, error_message=f"{what} is not served with --lora-tree: send named tensors"))
        return None
    try:
        tensors = scheduler.tp_worker.deserialize_own_rank(recv_req.serialized_named_tensors)
        named = dict(tensors)
        if not all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in named.items()):
            raise TypeError("these are no named tensors")
    except Exception as error:  # bytes from a client
        reply(LoRAUpdateOutput(success=False, error_message=f"the serialized tensors cannot be read: {error}"))
        return None
    manager.begin_load_from_tensors(recv_req.to_ref(), named, recv_req.config_dict, reply)
    return None


def unload(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND ``Scheduler.unload_lora_adapter``."""
    if STATE.manager is None:
        return original(scheduler, recv_req)
    return STATE.manager.unload(recv_req.to_ref(), for_good=recv_req.rid == UNLOAD_FOR_GOOD)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.managers.schedule_batch.Req.__init__", file_under_identity, HookType.AFTER),
    (f"{_SCHEDULER}.init_req_max_new_tokens", limit_length, HookType.AFTER),
    (f"{_SCHEDULER}.get_next_batch_to_run", poll, HookType.BEFORE),
    (f"{_SCHEDULER}.is_fully_idle", stay_awake, HookType.AROUND),
    ("sglang.srt.managers.schedule_policy.PrefillAdder.__init__", remember_adder, HookType.AFTER),
    ("sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem", check_decode_slots, HookType.AROUND),
    ("sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend", prepare_for_extend, HookType.AROUND),
    (f"{_SCHEDULER}._get_new_batch_prefill_raw", run_pass, HookType.AROUND),
    (f"{_SCHEDULER}.can_schedule_lora_req", can_schedule, HookType.AROUND),
    (f"{_SCHEDULER}.load_lora_adapter", load, HookType.AROUND),
    (f"{_SCHEDULER}.load_lora_adapter_from_tensors", load_from_tensors, HookType.AROUND),
    (f"{_SCHEDULER}.unload_lora_adapter", unload, HookType.AROUND),
]
