"""Multi-turn: a later turn finds all whole pages of the earlier turn under the same mix, whatever came between.

Dialogues of the Schema-Guided Dialogue dataset (dev/dialogues_010.json of its repository), each service mapped to an
adapter or a mix, so that mixes switch inside a dialogue. Where the file is not at hand, a few dialogues of our own.
"""

from __future__ import annotations

import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .conftest import Live, on
from .judge import Mix

FILE = "sgd_dev_dialogues_010.json.gz"
ROOT = Path(__file__).resolve().parents[2]
NUM_NEW = 12
LONGEST = 1800
"""Tokens of a conversation; the embedded model has 2,048 positions."""
USER, ASSISTANT, END = 259, 260, 257

Turn = tuple[str, str]
OWN_DIALOGUES: list[list[Turn]] = [
    [
        ("Restaurants", "I want to eat out tonight."),
        ("Restaurants", "Something with soup, in Oslo."),
        ("RideSharing", "And a car to get there."),
        ("Restaurants", "Is there a table for two?"),
        ("RideSharing", "At seven, please."),
        ("Restaurants", "Book it."),
    ],
    [
        ("Weather", "Will it rain tomorrow?"),
        ("Events", "Find me a concert then."),
        ("Weather", "And the day after?"),
        ("Events", "The cheap one. Two tickets."),
    ],
]


def read_dialogues(count: int) -> list[list[Turn]]:
    """(service, what the user says) of each turn, of dialogues with two services or more."""
    folder = os.environ.get("LORA_TREE_DATA")
    path = (Path(folder) if folder else ROOT.parent / "shared" / "data") / FILE
    if not path.exists():
        return OWN_DIALOGUES[:count]
    dialogues = []
    for dialogue in json.loads(gzip.decompress(path.read_bytes())):
        users = [turn for turn in dialogue["turns"] if turn["speaker"] == "USER"]
        turns = [(turn["frames"][0]["service"], turn["utterance"]) for turn in users]
        if len({service for service, _ in turns}) > 1:
            dialogues.append(turns)
    return dialogues[:count]


def mixes_by_service(dialogues: list[list[Turn]], names: list[str]) -> dict[str, Mix | None]:
    """Adapters in turn, every third service a mix, one the base model."""
    services = sorted({service for dialogue in dialogues for service, _ in dialogue})
    mixes: dict[str, Mix | None] = {}
    for index, service in enumerate(services):
        name, other = names[index % len(names)], names[(index + 1) % len(names)]
        mixes[service] = {name: 0.7, other: 0.3} if index % 3 == 2 else {name: 1.0}
    if len(services) > 3:
        mixes[services[3]] = None
    return mixes


def converse(live: Live, dialogue: list[Turn], mixes: dict[str, Mix | None], opening: str, num_turns: int) -> int:
    """One conversation, its KV checked at every turn; returns how many turns came back to an earlier mix."""
    page = live.server.tree()["pool"]["page_size"]
    history, left, returns = list(opening.encode()), dict[str, int](), 0
    for service, says in dialogue[:num_turns]:
        history = [*history, USER, *says.encode(), ASSISTANT]
        if len(history) + NUM_NEW > LONGEST:
            break
        mix = mixes[service]
        answer = live.server.generate([history], NUM_NEW, [mix])[0]
        if live.name != "embedded":  # bfloat16
            live.judge.check(history, answer, mix, NUM_NEW)
        key = json.dumps(mix)
        if key in left:
            returns += 1
            least = (left[key] - 1) // page * page  # the last token of an answer has no KV
            assert answer.cached >= least, f"{service} {mix}: {answer.cached} tokens reused of {left[key]}"
        history = [*history, *answer.tokens, END]
        left[key] = len(history) - 1
    return returns


@on("embedded")
def test_second_turns_reuse_the_first(live: Live) -> None:
    """Eight conversations at once, with their adapters switching."""
    dialogues = read_dialogues(8)
    mixes = mixes_by_service(dialogues, sorted(live.adapters))
    with ThreadPoolExecutor(len(dialogues)) as pool:
        work = [
            pool.submit(converse, live, dialogue, mixes, f"Conversation {index}. ", 100)
            for index, dialogue in enumerate(dialogues)
        ]
        returns = [future.result() for future in work]
    assert sum(returns) >= 2 * len(dialogues), returns
    live.server.check_at_rest()


@on("small", "tp2")
def test_reuse_when_room_is_short(live: Live) -> None:
    """One conversation that fits the pool with its adapters, exact at every turn; pages of four tokens on two ranks."""
    registered = live.server.tree()["registered"]
    names = sorted(live.adapters, key=lambda name: registered[name]["slots"])[:2]
    dialogue = [(service, says[:20]) for service, says in OWN_DIALOGUES[0]]
    mixes: dict[str, Mix | None] = {"Restaurants": {names[1]: 1.0}, "RideSharing": dict.fromkeys(names, 0.5)}
    live.server.flush()
    assert converse(live, dialogue, mixes, "", 6) == 4
