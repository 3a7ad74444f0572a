"""The advisor: a process beside the scheduler that turns reports into plans.

Started by ``client`` as ``python -m sglang_lora_tree.scheduling.advisor``; it imports neither SGLang nor torch. It may be
killed, stopped or fed with garbage at any moment: the scheduler goes on without it and starts another.
"""

from __future__ import annotations

import argparse
import logging
import os
import time

import zmq

from sglang_lora_tree.config import Settings, parse_settings
from sglang_lora_tree.scheduling.mirror import Mirror
from sglang_lora_tree.scheduling.planner import Planner
from sglang_lora_tree.scheduling.protocol import MAX_BYTES, Report, Resync, parse_report

logger = logging.getLogger(__name__)

VISIT_WINDOW = 300.0
"""Seconds after which a request counts 1/e in usage probabilities."""
_RESYNC_SECONDS = 1.0  # between two wishes to hear all of it again
_BATCH = 64  # reports taken in before the next plan at the latest


class Advisor:
    """Reports in, plans out.

    Args:
        settings: of ``--lora-tree``.
        epoch: number of this process; reports meant for another are dropped.
    """

    def __init__(self, settings: Settings, epoch: int) -> None:
        self._epoch = epoch
        self._mirror = Mirror(VISIT_WINDOW)
        self._planner = Planner(settings, epoch)
        self._is_current = False
        self._next_resync = 0.0
        self.num_dropped = 0

    def take(self, data: bytes) -> None:
        """Take a message in; garbage is counted and dropped."""
        try:
            report = parse_report(data)
            if report.epoch == self._epoch:
                self._take(report)
        except ValueError as error:
            self.num_dropped += 1
            logger.warning("advisor: a message was dropped: %s", error)

    def _take(self, report: Report) -> None:
        agrees = self._mirror.apply(report)
        self._is_current = agrees if not report.is_reset else True

    def replies(self, now: float) -> list[bytes]:
        """What to send at this moment: a plan if anything is known, and a wish if something is missing."""
        replies = []
        if not self._is_current and now >= self._next_resync:
            self._next_resync = now + _RESYNC_SECONDS
            replies.append(Resync(self._epoch).to_bytes())
        if self._mirror.load is not None:
            replies.append(self._planner.plan(self._mirror).to_bytes())
        return replies


def run(reports: str, plans: str, settings: Settings, epoch: int, parent: int) -> None:
    """Serve until the parent process is gone.

    Args:
        reports: address to read from.
        plans: address to write to.
        settings: of ``--lora-tree``.
        epoch: number of this process.
        parent: process id of the scheduler.
    """
    context = zmq.Context()
    source, sink = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    source.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    sink.setsockopt(zmq.SNDHWM, 4)
    sink.setsockopt(zmq.LINGER, 0)
    source.connect(reports)
    sink.connect(plans)
    advisor = Advisor(settings, epoch)
    period = settings.plan_milliseconds / 1e3
    next_plan = 0.0
    while os.getppid() == parent:
        if source.poll(max(1, int(1e3 * (next_plan - time.monotonic())))):
            for _ in range(_BATCH):
                try:
                    advisor.take(source.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
        now = time.monotonic()
        if now >= next_plan:
            next_plan = now + period
            for reply in advisor.replies(now):
                try:
                    sink.send(reply, zmq.NOBLOCK)
                except zmq.Again:
                    break  # the loop is busy: it will want a newer one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--reports", "--plans", "--settings"):
        parser.add_argument(name, required=True)
    for name in ("--epoch", "--parent"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    settings = parse_settings(arguments.settings)
    assert settings is not None
    run(arguments.reports, arguments.plans, settings, arguments.epoch, arguments.parent)


if __name__ == "__main__":
    main()
