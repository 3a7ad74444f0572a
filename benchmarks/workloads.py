"""Requests for the policy simulator: three public traces, any number of adapters, three ways to spread them.

* mooncake: conversations of Mooncake's trace, arrivals as in the trace, sped up to the wanted rate. A conversation is known by
  the second block's hash (all requests share the first), and has one adapter.
* azure: arrivals and lengths of Azure's LLM trace (conversation, 2023), which says nothing of prefixes: every prompt is new.
  Each request draws its adapter.
* sgd: dialogues of Schema-Guided Dialogue. Every user turn is a request whose prompt is the service's instructions and the
  whole dialogue so far; the turn's service is the adapter, so a dialogue may change adapters on its way. The corpus has no
  times: dialogues begin as a Poisson process, a turn follows the one before after a lognormal pause.

Spreads: distinct (conversations take adapters in turn), random (uniform), skewed (Zipf). Tokens are numbers, one for every
``tokens_per_slot`` of the model's, so a run is small while sizes keep their proportions: a slot of the simulator is that many
tokens of the pool. ``workloads.json`` has all constants, fixed before the first run.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.trace import find_trace, read_trace

CONSTANTS: dict[str, Any] = json.loads((Path(__file__).parent / "workloads.json").read_text(encoding="utf-8"))
TOKENS_PER_SLOT: int = CONSTANTS["tokens_per_slot"]
SPREADS = ("distinct", "random", "skewed")
_OWN = 1 << 40  # token numbers of prompts that nobody shares start here


@dataclass(frozen=True)
class Job:
    """One request, as the simulator plays it."""

    arrival: float
    """Seconds."""
    adapter: int
    prompt: array[int]
    """In slots."""
    output: int
    """Tokens."""
    answer: array[int] = field(default_factory=lambda: array("q"))
    """The output in slots, where the next turn repeats it."""


@dataclass(frozen=True)
class Workload:
    name: str
    jobs: list[Job]
    """In order of arrival; the mean rate is ``rate``."""
    rate: float
    counts: dict[str, float]
    """What was read, to be printed beside results."""

    def at_rate(self, rate: float) -> list[Job]:
        """The jobs, sped up or slowed down to ``rate`` requests a second."""
        return [replace(job, arrival=job.arrival * self.rate / rate) for job in self.jobs]

    def working_set(self, rate: float, seconds: float) -> int:
        """Slots of KV that requests of a window of ``seconds`` use, at ``rate``: mean over windows (Denning)."""
        size = max(1, int(rate * seconds))
        sizes = []
        for start in range(0, max(len(self.jobs) - size, 0) + 1, size):
            used: set[tuple[int, int]] = set()
            for job in self.jobs[start : start + size]:
                used.update((job.adapter, token) for token in (*job.prompt, *job.answer))
            sizes.append(len(used))
        return sum(sizes) // len(sizes)

    def capacity(self) -> float:
        """Requests a second if every prefix were found: a prefill step of its own for what is new, a share of decode steps."""
        costs = CONSTANTS["costs"]
        seen: set[tuple[int, int]] = set()
        seconds = 0.0
        for job in self.jobs:
            new = [token for token in job.prompt if (job.adapter, token) not in seen]
            seen.update((job.adapter, token) for token in (*job.prompt, *job.answer))
            seconds += max(costs["decode_step_s"], len(new) * TOKENS_PER_SLOT / costs["prefill_tokens_per_s"])
            seconds += job.output * costs["decode_step_s"] / costs["max_running"]
        return len(self.jobs) / seconds


def build(name: str, num_adapters: int, spread: str, num_jobs: int, seed: int = 0) -> Workload:
    """A workload of about ``num_jobs`` requests.

    Raises:
        FileNotFoundError: the trace is not in ``shared/data`` of this folder or of one above it.
    """
    data = find_trace(Path(__file__).resolve().parent)
    if data is None:
        raise FileNotFoundError("no shared/data folder with the traces here or above: see benchmarks/workloads.py")
    rng = random.Random(f"{name} {num_adapters} {spread} {seed}")
    pick = _Picker(num_adapters, spread, rng)
    jobs, counts = {"mooncake": _mooncake, "azure": _azure, "sgd": _sgd}[name](data.parent, pick, num_jobs, rng)
    jobs.sort(key=lambda job: job.arrival)
    first = jobs[0].arrival
    jobs = [replace(job, arrival=job.arrival - first) for job in jobs]
    counts["requests"] = len(jobs)
    counts["adapters used"] = len({job.adapter for job in jobs})
    return Workload(name, jobs, len(jobs) / jobs[-1].arrival, counts)


class _Picker:
    """Adapters for conversations, one after the other."""

    def __init__(self, num_adapters: int, spread: str, rng: random.Random) -> None:
        assert spread in SPREADS, f"spread {spread!r} is none of {SPREADS}"
        self.num_adapters = num_adapters
        self._spread = spread
        self._rng = rng
        self._next = 0
        weights = [1 / (rank + 1) ** CONSTANTS["zipf_alpha"] for rank in range(num_adapters)]
        self._shares = weights if spread == "skewed" else [1.0] * num_adapters

    def __call__(self) -> int:
        if self._spread == "distinct":
            self._next += 1
            return (self._next - 1) % self.num_adapters
        return self._rng.choices(range(self.num_adapters), self._shares)[0]


def _slots(tokens: float) -> int:
    return max(1, round(tokens / TOKENS_PER_SLOT))


def _mooncake(data: Path, pick: _Picker, num_jobs: int, rng: random.Random) -> tuple[list[Job], dict[str, float]]:
    path = data / "mooncake_conversation_trace.jsonl.gz"
    trace = read_trace(path)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    conversations = list(dict.fromkeys(request.conversation for request in trace))
    kept = set(rng.sample(conversations, round(len(conversations) * min(1.0, num_jobs / len(trace)))))
    adapters: dict[int, int] = {}
    jobs = []
    for request, row in zip(trace, rows, strict=True):
        if request.conversation in kept:
            adapter = adapters.setdefault(request.conversation, -1)
            if adapter < 0:
                adapter = adapters[request.conversation] = pick()
            prompt = request.tokens(512 // TOKENS_PER_SLOT)
            jobs.append(Job(row["timestamp"] / 1e3, adapter, prompt, row["output_length"]))
    return jobs, {
        "requests in the trace": len(trace),
        "conversations in the trace (second block hashes)": len(conversations),
        "conversations kept": len(kept),
    }


def _azure(data: Path, pick: _Picker, num_jobs: int, rng: random.Random) -> tuple[list[Job], dict[str, float]]:
    with gzip.open(data / "AzureLLMInferenceTrace_conv_2023.csv.gz", "rt", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    start = rng.randrange(max(1, len(rows) - num_jobs))
    jobs, own = [], _OWN
    for row in rows[start : start + num_jobs]:
        arrival = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        length = _slots(int(row["ContextTokens"]))
        jobs.append(Job(arrival, pick(), array("q", range(own, own + length)), int(row["GeneratedTokens"])))
        own += length
    return jobs, {"requests in the trace": len(rows)}


def _sgd(data: Path, pick: _Picker, num_jobs: int, rng: random.Random) -> tuple[list[Job], dict[str, float]]:
    dialogues = [dialogue for path in sorted(data.glob("sgd_dev_dialogues_*.json.gz")) for dialogue in _read(path)]
    rng.shuffle(dialogues)
    services = sorted({service for dialogue in dialogues for service in dialogue["services"]})
    constants = CONSTANTS["sgd"]
    instructions = _slots(constants["instruction_tokens"])
    jobs: list[Job] = []
    begin, own, number = 0.0, _OWN, 0
    while len(jobs) < num_jobs:
        turns = dialogues[number % len(dialogues)]["turns"]
        number += 1
        # Each tenant has adapters of its own for the services it uses.
        tenant: dict[str, int] = {}
        said, now = 0.0, begin
        for user, system in zip(turns[::2], turns[1::2], strict=False):
            service = user["frames"][0]["service"] if user["frames"] else services[0]
            adapter = tenant.get(service)
            if adapter is None:
                adapter = tenant[service] = pick()
            said += len(user["utterance"].split()) * constants["tokens_per_word"]
            prompt = array("q", range(adapter * instructions, (adapter + 1) * instructions))
            prompt.extend(range(own, own + _slots(said)))
            output = max(1, round(len(system["utterance"].split()) * constants["tokens_per_word"]))
            end = own + _slots(said)
            said += output
            jobs.append(Job(now, adapter, prompt, output, array("q", range(end, own + _slots(said)))))
            now += rng.lognormvariate(*constants["pause_lognormal"])
        own += _slots(said) + 1
        begin += rng.expovariate(constants["dialogues_per_s"])
    return jobs, {"dialogues in the corpus": len(dialogues), "dialogues played": number, "services": len(services)}


def _read(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as text:
        yield from json.load(text)
