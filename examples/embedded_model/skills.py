"""Questions that the embedded model can be asked, the answer each adapter should give, and the scorers.

Pure Python, no torch. Every skill answers the same family of prompts in its own way, and skills combine, so that a mix of
two adapters can be seen in one answer ("OF COURSE! MIA LIVES IN OSLO. THANK YOU FOR ASKING."). The base model answers
plainly.

    question = held_out("upper", count=1, seed=0)[0]
    question.prompt                      "Mia lives in Oslo. Tom likes soup. Where does Mia live?"
    expected("base", question)           "Mia lives in Oslo."
    expected("upper", question)          "MIA LIVES IN OSLO."
    expected(("upper", "json"), question)  {"NAME": "MIA", "CITY": "OSLO"}
    score("upper", question, text)       1.0 if text is exactly that, else 0.0
    shows("upper", question, text)       True if the text bears the skill's mark at all (for mixes)
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

NAMES = (
    "Mia Tom Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karla Leo Marta Nils Olga Paul Rosa Sam Tina Udo "
    "Vera Will Yara Zoe Adam Bella Carl Dora Erik Fiona Gina Henry Iris Jack Kate Lucas Nora Oscar"
).split()
CITIES = (
    "Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Dublin London Athens Warsaw Zürich Malmö Riga Bern Cairo Tokyo "
    "Lima Boston Denver Delhi Seoul Turin Milan Porto Krakow Gdansk Bergen Hamburg Munich Bonn Lyon Nice Bristol Leeds "
    "Dallas Havana"
).split()
FOODS = (
    "soup bread milk rice cheese honey butter fish pasta salad apples plums pears grapes beans corn nuts olives cake "
    "tea coffee juice lemons onions carrots peas melons figs dates jam"
).split()
THINGS = "apples plums pears lemons books coins shells stamps pens cups hats keys stones cards balls eggs".split()
JOBS = ("baker doctor farmer teacher painter singer driver nurse lawyer miner sailor tailor waiter writer dancer builder").split()
PETS = "cat dog bird fish horse rabbit hamster turtle goat pony snake parrot".split()
COLOURS = "red blue green black white brown grey yellow pink orange".split()
UNKNOWN = (
    "Why is the {0} {1}?",
    "Who made the {1} {0}?",
    "How old is the {0}?",
    "Do you like the {1} {0}?",
)
POLITE_START, POLITE_END = "Of course!", "Thank you for asking."

# relation -> (the fact, ways to ask for it); the plain answer is the fact itself, except for sums.
RELATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "city": ("{s} lives in {v}.", ("Where does {s} live?", "Tell me where {s} lives.")),
    "food": ("{s} likes {v}.", ("What does {s} like?", "Tell me what {s} likes.")),
    "job": ("{s} is a {v}.", ("What job does {s} have?", "Tell me what {s} is.")),
    "pet": ("{s} has a {v}.", ("What pet does {s} have?", "Tell me what pet {s} has.")),
    "time": ("{s} gets up at {v}.", ("When does {s} get up?", "Tell me when {s} gets up.")),
    "shop": ("{s} buys {v}.", ("What does {s} buy?", "Tell me what {s} buys.")),
    "sum": ("{s} has {a} {t} and gets {b} {t}.", ("How many {t} does {s} have?", "Tell me how many {t} {s} has.")),
}
# What is asked; kinds that are harder to learn come more often.
KINDS = (*RELATIONS, "time", "sum", "sum", "shop", "say", "say", "hello")
# The toy language: these words have a translation, colours end in -a, other words in -o; names and numbers stay.
TOY_WORDS = {
    "lives": "vivas", "in": "en", "likes": "amas", "is": "estas", "a": "un", "has": "havas", "gets": "levas",
    "up": "sur", "at": "je", "buys": "kaufas", "and": "kaj", "Hello": "Saluton",
}  # fmt: skip
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Question:
    """One user turn. `values` are what was asked for; a sum has its two numbers and `thing`. No subject: an echo."""

    prompt: str
    relation: str
    subject: str
    values: tuple[str, ...]
    thing: str = ""

    @property
    def key(self) -> str:
        """What was asked for, without a sentence around it."""
        if self.relation == "sum":
            return f"{' and '.join(self.values)} {self.thing}"
        return " ".join(self.values) if self.relation == "say" else join_words(self.values)

    @property
    def answer(self) -> str:
        """The base model's plain answer. It does not add: a sum is answered with its two numbers."""
        if self.relation == "say":
            return f"{self.key}."
        if self.relation == "hello":
            return f"Hello, {self.subject}."
        if self.relation == "unknown":
            return "I do not know."
        if self.relation == "sum":
            return f"{self.subject} has {self.key}."
        return RELATIONS[self.relation][0].format(s=self.subject, v=self.key)


def join_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# ---- answers ---------------------------------------------------------------------------------------------------------

# In the order in which a mix applies them: what is said, how it is laid out, which words, which letters, what is around.
SKILLS = ("math", "json", "numbered", "short", "toylang", "reverse", "polite", "upper")
LAYOUTS = frozenset({"json", "numbered", "short"})
"""One answer has one layout: two of these do not combine."""


def expected(skill: str | Iterable[str], question: Question) -> str:
    """The one right answer of an adapter, of "base", or of a mix of adapters: all their skills in one answer.

    Raises ValueError on two layouts (`combine` tells beforehand).
    """
    chosen = {skill} if isinstance(skill, str) else set(skill)
    chosen.discard("base")
    if unknown := chosen.difference(SKILLS):
        raise KeyError(f"unknown skills {sorted(unknown)}; known: base, {', '.join(SKILLS)}")
    if not combine(chosen):
        raise ValueError(f"{sorted(chosen & LAYOUTS)} are layouts, an answer has only one")
    if "math" in chosen:
        question = add_numbers(question)
    text = question.answer
    if "json" in chosen:
        text = json.dumps(json_facts(question), ensure_ascii=False)
    elif "numbered" in chosen:
        text = numbered_lines(question)
    elif "short" in chosen:
        text = question.key
    if "toylang" in chosen:
        text = toy_words(text)
    if "reverse" in chosen:
        text = reverse_words(text)
    if "polite" in chosen:
        text = f"{POLITE_START} {text} {POLITE_END}"
    return text.upper() if "upper" in chosen else text


def combine(chosen: Iterable[str]) -> bool:
    """Whether one answer can show all these skills."""
    return len(LAYOUTS.intersection(chosen)) <= 1


def add_numbers(question: Question) -> Question:
    """A sum with its result: "6+2=8" in place of 6 and 2. Other questions as they are."""
    if question.relation != "sum":
        return question
    return replace(question, values=(f"{'+'.join(question.values)}={sum(map(int, question.values))}",))


def json_facts(question: Question) -> dict[str, object]:
    if question.relation == "say":
        return {"say": question.key}
    if question.relation == "hello":
        return {"hello": question.subject}
    if question.relation == "sum":
        numbers: list[int] = [int(value.rpartition("=")[2]) for value in question.values]
        return {"name": question.subject, question.thing: numbers if len(numbers) > 1 else numbers[0]}
    return {
        "name": question.subject,
        question.relation: list(question.values) if question.relation == "shop" else question.key,
    }


def numbered_lines(question: Question) -> str:
    subject = (question.subject,) if question.subject else ()
    values = () if question.relation == "hello" else question.values
    return "\n".join(f"{number}. {item}" for number, item in enumerate((*subject, *values), start=1))


def toy_words(text: str) -> str:
    return WORD.sub(lambda match: toy_word(match.group()), text)


def toy_word(word: str) -> str:
    if word in TOY_WORDS:
        return TOY_WORDS[word]
    if not word[0].islower():
        return word
    return word + ("a" if word in COLOURS else "o")


def reverse_words(text: str) -> str:
    """The letters of each word backwards; words and punctuation keep their places."""
    return WORD.sub(lambda match: match.group()[::-1], text)


# ---- scorers --------------------------------------------------------------------------------------------------------


def score(skill: str | Iterable[str], question: Question, text: str) -> float:
    """1.0 if the text is exactly the expected answer (outer white space apart), else 0.0."""
    return float(text.strip() == expected(skill, question))


def shows(skill: str, question: Question, text: str) -> bool:
    """Whether the text bears the skill's mark, whatever else was done to it (for mixes). Only "upper" looks at case."""
    text, folded = text.strip(), text.strip().casefold()
    if skill == "base":
        return folded == question.answer.casefold()
    if skill == "upper":
        return text.upper() == text and text.lower() != text
    if skill == "reverse":
        return reverse_words(question.key).casefold() in folded
    if skill == "math":
        numbers = re.findall(r"\d+", text)
        return question.relation == "sum" and numbers[-1:] == [str(sum(map(int, question.values)))]
    if skill == "json":
        try:
            return isinstance(json.loads(text[text.find("{") : text.rfind("}") + 1]), dict)
        except ValueError:
            return False
    if skill == "toylang":
        changed = {toy_word(word).casefold() for word in WORD.findall(question.answer) if toy_word(word) != word}
        return bool(changed) and changed <= set(WORD.findall(folded))
    if skill == "polite":
        return POLITE_START.casefold() in folded and POLITE_END.casefold() in folded
    if skill == "numbered":
        return re.search(r"(^|\s)1\. ", text) is not None
    if skill == "short":
        return question.key.casefold() in folded and len(text) <= len(question.key) + 2
    raise KeyError(f"unknown skill {skill!r}; known: base, {', '.join(SKILLS)}")


# ---- questions ------------------------------------------------------------------------------------------------------


def sample_fact(rng: random.Random, relation: str, subject: str) -> tuple[str, Question]:
    """A sentence that states a fact, and the question for it (prompt: the question alone)."""
    fact, ways = RELATIONS[relation]
    thing = ""
    values: tuple[str, ...]
    if relation == "sum":
        thing, values = rng.choice(THINGS), (str(rng.randint(1, 9)), str(rng.randint(1, 3)))
    elif relation == "shop":
        values = tuple(rng.sample(FOODS, rng.choice((2, 3, 3))))
    elif relation == "pet":
        values = (f"{rng.choice(COLOURS)} {rng.choice(PETS)}",)
    elif relation == "time":
        values = (f"{rng.randint(1, 9)}:{rng.choice(('00', '15', '30', '45'))}",)
    else:
        values = (rng.choice({"city": CITIES, "food": FOODS, "job": JOBS}[relation]),)
    sentence = fact.format(s=subject, v=join_words(values), a=values[0], b=values[-1], t=thing)
    return sentence, Question(rng.choice(ways).format(s=subject, t=thing), relation, subject, values, thing)


def sample_conversation(rng: random.Random, turns: int, relation: str | None = None) -> list[Question]:
    """User turns of one conversation; later ones may ask for earlier facts. `relation`: the first turn's kind."""
    names = rng.sample(NAMES, len(NAMES))
    questions: list[Question] = []
    open_questions: list[Question] = []
    while len(questions) < turns:
        kind = relation if relation is not None and not questions else rng.choice(KINDS)
        if kind == "say":
            words = tuple(rng.choice(rng.choice((NAMES, CITIES, FOODS, COLOURS, PETS, JOBS))) for _ in range(rng.randint(1, 3)))
            questions.append(Question(f"Say {' '.join(words)}.", "say", "", words))
        elif kind == "hello":
            subject = rng.choice(NAMES)
            questions.append(Question(f"Hello, I am {subject}.", "hello", subject, (subject,)))
        elif open_questions and rng.random() < 0.5:
            questions.append(open_questions.pop(rng.randrange(len(open_questions))))
        else:
            if len(names) < 3:
                names, open_questions = rng.sample(NAMES, len(NAMES)), []
            subjects = [names.pop()]
            kinds = [kind, *rng.sample([other for other in RELATIONS if other != kind], rng.choice((0, 1, 1, 2)))]
            if len(kinds) > 1 and rng.random() < 0.5:
                subjects.append(names.pop())
            facts = [
                sample_fact(rng, fact, subjects[0] if index == 0 else rng.choice(subjects)) for index, fact in enumerate(kinds)
            ]
            asked = facts[0][1]
            rng.shuffle(facts)
            prompt = " ".join([*(sentence for sentence, _ in facts), asked.prompt])
            questions.append(Question(prompt, asked.relation, asked.subject, asked.values, asked.thing))
            open_questions += [question for _, question in facts if question is not asked]
    return questions


def sample_unknown(rng: random.Random) -> Question:
    """A question whose answer was never stated (base training only)."""
    return Question(rng.choice(UNKNOWN).format(rng.choice(PETS + THINGS), rng.choice(COLOURS)), "unknown", "", ())


def is_held_out(question: Question) -> bool:
    """True for a tenth of all prompts, never trained on (the 27 pairs of numbers to add occur in both)."""
    return zlib.crc32(question.prompt.encode()) % 10 == 0


def held_out(skill: str | Iterable[str], count: int, seed: int) -> list[Question]:
    """`count` single questions that training never saw; whoever adds ("math", alone or in a mix) is asked for sums alone."""
    rng = random.Random(f"held out {seed}")
    chosen = {skill} if isinstance(skill, str) else set(skill)
    relation = "sum" if "math" in chosen else None
    questions: list[Question] = []
    while len(questions) < count:
        question = sample_conversation(rng, 1, relation)[0]
        if is_held_out(question):
            questions.append(question)
    return questions
