"""Work on files, beside the scheduler loop, finished at the same step on every rank.

A job runs in a thread; its outcome is applied in the loop. When a job is done differs between ranks (disks do), so an
outcome is applied only once every rank has it, in the order of submission: the ranks take the smallest state of each job,
as HiCache does with its copies. What a job found can differ too (a folder that is written to meanwhile, nodes with disks of their
own): where it matters the ranks compare, and fail together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from sglang_lora_tree.radix.agreement import find_same

logger = logging.getLogger(__name__)

_PENDING, _FAILED, _DONE = 0, 1, 2


@dataclass
class Job:
    """A piece of work and what to do with its outcome (in the scheduler loop): a value, or an error's text."""

    future: Future[Any]
    on_done: Callable[[Any], None]
    on_failed: Callable[[str], None]
    fingerprint: Callable[[Any], int] | None = None
    """Of a value that all ranks must find alike, 63 bits."""

    @property
    def state(self) -> int:
        if not self.future.done():
            return _PENDING
        return _DONE if self.future.exception() is None else _FAILED


class DiskReader:
    """Runs jobs in threads and hands their outcomes to the scheduler loop.

    Args:
        num_threads: how many jobs at once.
        agree: takes the states of all jobs, int64 (jobs,), to their minimum over the ranks; must be called by every rank
            at the same step with the same number of jobs (it is: jobs come from broadcast requests only).
    """

    def __init__(self, num_threads: int, agree: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="lora-tree-disk")
        self._agree = agree
        self.jobs: list[Job] = []
        """Not finished on every rank yet, or not looked at since, the oldest first."""

    def submit(
        self,
        work: Callable[[], Any],
        on_done: Callable[[Any], None],
        on_failed: Callable[[str], None],
        fingerprint: Callable[[Any], int] | None = None,
    ) -> None:
        """Start ``work`` in a thread; one of the callbacks runs in a later :meth:`poll`.

        Args:
            fingerprint: of the value, 63 bits; the job fails on every rank if ranks found different ones. None: not compared.
        """
        self.jobs.append(Job(self._executor.submit(work), on_done, on_failed, fingerprint))

    @property
    def num_pending(self) -> int:
        return len(self.jobs)

    def poll(self) -> None:
        """Apply what is finished on every rank; never waits for a job."""
        if not self.jobs:
            return
        states = self._agree(torch.tensor([job.state for job in self.jobs], dtype=torch.int64)).tolist()
        finished = [(job, state) for job, state in zip(self.jobs, states, strict=True) if state != _PENDING]
        self.jobs = [job for job, state in zip(self.jobs, states, strict=True) if state == _PENDING]
        differing = self._find_differing([job for job, state in finished if state == _DONE and job.fingerprint])
        for job, state in finished:
            error = job.future.exception()
            if id(job) in differing:
                job.on_failed("ranks read different files: give every node the same ones, and load again when they are written")
            elif state == _DONE and error is None:
                job.on_done(job.future.result())
            else:
                if error is not None and not isinstance(error, ValueError):
                    logger.error("reading an adapter failed", exc_info=error)
                job.on_failed(str(error) if error is not None else "another rank could not read the adapter's files")

    def _find_differing(self, done: list[Job]) -> set[int]:
        """Ids of the jobs whose values are not the same on every rank. The same jobs are asked about on every rank."""
        if not done:
            return set()
        prints = [job.fingerprint(job.future.result()) for job in done if job.fingerprint]
        return {id(job) for job, is_same in zip(done, find_same(prints, self._agree), strict=True) if not is_same}

    def drain(self) -> None:
        """Wait for the threads and forget all outcomes (a flush, when the server is idle)."""
        for job in self.jobs:
            job.future.exception()
        self.jobs = []
