"""From the advisor's picture to a plan: what needs a wide view or a clock, and what the loop therefore does not work out.

* Low_lora and the parameters of Eval (ELORA, Eq. 3), costs from measured rates;
* candidates: the requests of a long queue that LAG would take next, beyond those the loop looks at anyway;
* prefetch: adapters that the queue will need, in the order of admission (S-LoRA, section 5.2; Chameleon);
* swap-in: the topmost host nodes of highest Eval, while the pool has room below a threshold (ELORA, section VI-C).
"""

from __future__ import annotations

import numpy as np

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.eval import EvalParameters, eval_scores, low_lora
from sglang_lora_tree.scheduling.mirror import Mirror
from sglang_lora_tree.scheduling.orders import Situation, make_order
from sglang_lora_tree.scheduling.protocol import Plan
from sglang_lora_tree.scheduling.waiting_queue import SMALL_WINDOW, WINDOW

NUM_CANDIDATES = WINDOW // 2
"""The other half of the window goes by age; likewise while it is small."""
NUM_PREFETCH = 32
NUM_SWAP_IN = 16
_MIN_BYTES = 1 << 24  # copied or read before a rate is believed


class Planner:
    """Makes the plans of one advisor.

    Args:
        settings: of ``--lora-tree``.
        epoch: number of this advisor process.
    """

    def __init__(self, settings: Settings, epoch: int) -> None:
        self._settings = settings
        self._epoch = epoch
        self._number = 0
        self._order = make_order(settings)

    def plan(self, mirror: Mirror) -> Plan:
        """The plan for what is known now; the mirror must have taken in a report."""
        self._number += 1
        parameters = self.parameters(mirror)
        candidates, needed = self._look_at_queue(mirror)
        usage = mirror.usage
        return Plan(
            self._epoch,
            self._number,
            parameters,
            candidates,
            needed,
            self._choose_swap_in(mirror, parameters),
            min(sum(share for name, share in usage.items() if mirror.is_resident(name)), 1.0),
        )

    def parameters(self, mirror: Mirror) -> EvalParameters:
        """What Eval is to take; the loop reads no single usage probability, so the plan carries none."""
        load, defaults = mirror.load, EvalParameters()
        assert load is not None, "no report yet"
        probabilities = np.fromiter(mirror.usage.values(), np.float64)
        return EvalParameters(
            version=self._number,
            now=mirror.now,
            tau=self._settings.eval_tau_seconds,
            lora_term=self._settings.eval_lora_term,
            visit_window=self._settings.eval_visit_window_seconds,
            low_lora=low_lora(probabilities, mirror.batch_size) if len(probabilities) else 0.0,
            host_to_device_bytes_per_s=_rate(load.load_bytes, load.load_seconds, defaults.host_to_device_bytes_per_s),
            disk_bytes_per_s=_rate(load.read_bytes, load.read_seconds, defaults.disk_bytes_per_s),
        )

    def _look_at_queue(self, mirror: Mirror) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Candidates beyond the oldest requests, and the absent adapters of all in the order of admission."""
        waiting = mirror.waiting()
        situation = Situation(mirror.now, frozenset(), mirror.resident())
        order = self._order.arrange(waiting, situation)
        candidates: tuple[int, ...] = ()
        if len(waiting) > SMALL_WINDOW:
            looked_at = SMALL_WINDOW // 2
            beyond = (waiting[position].arrival for position in order if position >= looked_at)
            candidates = tuple(arrival for _, arrival in zip(range(NUM_CANDIDATES), beyond, strict=False))
        needed: dict[str, None] = {}
        for position in order:
            for member in waiting[position].members:
                if not mirror.is_resident(member):
                    needed[member] = None
            if len(needed) >= NUM_PREFETCH:
                break
        return candidates, tuple(needed)[:NUM_PREFETCH]

    def _choose_swap_in(self, mirror: Mirror, parameters: EvalParameters) -> tuple[int, ...]:
        load = mirror.load
        assert load is not None
        room = load.free_slots - (1.0 - self._settings.swap_in_below) * load.pool_slots
        places = mirror.swap_in_candidates() if room > 0 else np.empty(0, np.int64)
        if len(places) == 0:
            return ()
        scores = eval_scores(mirror.statistics(places), parameters, swap_in=True)
        best = np.arange(len(scores))
        if len(scores) > 4 * NUM_SWAP_IN:  # sorting all of them would take as long as Eval
            best = np.sort(np.argpartition(-scores, 4 * NUM_SWAP_IN)[: 4 * NUM_SWAP_IN])
        best = best[np.argsort(-scores[best], kind="stable")]
        chosen: list[int] = []
        for place in places[best[np.isfinite(scores[best])]]:
            if mirror.slots[place] <= room and len(chosen) < NUM_SWAP_IN:
                room -= mirror.slots[place]
                chosen.append(int(mirror.node_id[place]))
        return tuple(chosen)


def _rate(num_bytes: float, seconds: float, default: float) -> float:
    return num_bytes / seconds if num_bytes >= _MIN_BYTES and seconds > 0 else default
