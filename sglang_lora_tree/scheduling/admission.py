"""Admission control: a request whose first token would come too late is refused while its sender can still go elsewhere.

S-LoRA, appendix B. In: requests as they come, wait and start, and the clock that the ranks share. Out: which of them are
refused, and when to come back. A request is refused on arrival when the queue before it cannot be worked off in time, and
later when it has waited too long after all; while more come than can be served, the newest go first (:class:`LatestFirst`
over the queue's order), because the oldest are the ones that are late already.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from sglang_lora_tree.scheduling.orders import Lcfs, QueueOrder, Situation, Waiting

WINDOW_SECONDS = 5.0
"""Over which rates are taken."""
_LEAST_TOKENS = 256  # served before a rate is believed


class AdmissionControl:
    """Estimates the time to the first token.

    Args:
        slo_seconds: the most that it may take.
    """

    def __init__(self, slo_seconds: float) -> None:
        self._slo = slo_seconds
        self._served: deque[tuple[float, float, int]] = deque()
        """Start, end and prompt tokens of the batches of the last seconds."""
        self._arrived: deque[float] = deque()
        self._started: deque[float] = deque()
        self._busy_since: float | None = None
        self._rate = 0.0
        self.refused = 0
        self.sweep = 0, 0
        """Where going through the queue has come to: how many requests, and the tokens of those that stay."""

    def note_arrived(self, now: float) -> None:
        self._arrived.append(now)

    def note_started(self, requests: int, prompt_tokens: int, now: float, is_queue_empty: bool) -> None:
        """A batch of prompts was formed."""
        self._started.extend([now] * requests)
        if self._busy_since is not None and now > self._busy_since:
            self._served.append((self._busy_since, now, prompt_tokens))
        self._busy_since = None if is_queue_empty else now
        self._update(now)

    def _update(self, now: float) -> None:
        start = now - WINDOW_SECONDS
        while self._served and self._served[0][1] < start:
            self._served.popleft()
        for times in (self._arrived, self._started):
            while times and times[0] < start:
                times.popleft()
        tokens = sum(entry[2] for entry in self._served)
        seconds = sum(end - begin for begin, end, _ in self._served)
        if tokens >= _LEAST_TOKENS and seconds > 0:
            self._rate = tokens / seconds

    @property
    def is_overloaded(self) -> bool:
        """More requests came in the last seconds than were started (R1 > R2)."""
        return len(self._arrived) > len(self._started) + 1

    def retry_after(self, tokens_before: int, waiting: Waiting, now: float) -> int | None:
        """Whether a request is to be refused: whole seconds until it might be served in time; None: let it wait.

        Args:
            tokens_before: prompt tokens of requests that are served before it.
            waiting: the request.
            now: seconds.
        """
        if self._rate == 0.0:
            late = now - waiting.arrived_at
        else:
            late = now - waiting.arrived_at + (tokens_before + waiting.length) / self._rate
        if late <= self._slo:
            return None
        self.refused += 1
        return max(1, math.ceil(late - self._slo))


class LatestFirst(QueueOrder):
    """The queue's order, or the latest first while there is more than can be served.

    Args:
        order: of the queue otherwise.
        control: knows whether there is.
    """

    def __init__(self, order: QueueOrder, control: AdmissionControl) -> None:
        self._order = order
        self._latest = Lcfs()
        self._control = control
        self.needs_running = order.needs_running

    def right_until(self, waiting: Sequence[Waiting], situation: Situation) -> float:
        return -math.inf  # overload comes and goes

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        return (self._latest if self._control.is_overloaded else self._order).arrange(waiting, situation)
