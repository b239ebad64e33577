"""`builtin:recall`: synthetic documents that state facts, continue with other text, and ask for the facts later.

They teach what the passkey test measures, retrieving a token from far back, in many forms *other* than the passkey
prompt: prose, code, tables, registers and verbatim repetition. Every question is answered by the text before it.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

LISTS = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
# The forms are pairs of a statement and the question for it.
NAMES, THINGS, WORDS, FORMS, SUBJECTS, PREDICATES = yaml.safe_load(LISTS).values()
DIGITS = "0123456789"
LETTERS_AND_DIGITS = "0123456789abcdef"

Counter = Callable[[str], int]


def value(rng: random.Random) -> str:
    """Draw a value that cannot be guessed: mostly five digits, sometimes fewer or more, letters or words."""
    kind = rng.random()
    if 0.8 <= kind < 0.9:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))
    if kind >= 0.9:
        return "".join(rng.choices(LETTERS_AND_DIGITS, k=rng.randint(3, 6)))
    number = 5 if kind < 0.6 else rng.randint(1, 8)
    return "".join(rng.choices(DIGITS, k=number))


def sentences(rng: random.Random, number: int) -> str:
    """Draw sentences that state no fact."""
    drawn = [f"{rng.choice(SUBJECTS)} {rng.choice(PREDICATES)}." for _ in range(number)]
    return " ".join(drawn)


def filler(rng: random.Random, lines: Sequence[str]) -> Callable[[], str]:
    """Draw the kind of filler text between facts, and return a function that gives the next line of filler. The
    kinds are one refrain, new sentences, and real text (`lines`).
    """
    kinds = ["refrain", "sentences"]
    if lines:
        kinds = ["refrain", "refrain", "sentences", "lines", "lines"]
    kind = rng.choice(kinds)
    refrain = sentences(rng, rng.randint(2, 6))
    first = rng.randrange(len(lines)) + 1 if lines else 0
    numbers = itertools.count(first)
    if kind == "refrain":
        return lambda: refrain
    if kind == "sentences":
        return lambda: sentences(rng, 3)
    return lambda: lines[next(numbers) % len(lines)]


class Page:
    """Lines of text within a budget of tokens."""

    def __init__(self, budget: int, count: Counter) -> None:
        self.left = budget
        self.count = count
        self.lines: list[str] = []

    def say(self, text: str, reserve: int = 0) -> bool:
        """Add a line if that leaves `reserve` tokens, and return whether it did."""
        cost = self.count(text + "\n")
        if cost > self.left - reserve:
            return False
        self.left -= cost
        self.lines.append(text)
        return True


def facts_document(rng: random.Random, budget: int, count: Counter, lines: Sequence[str]) -> str:
    """State facts in one form, ask for some along the way, and fill the last part of `budget` with questions."""
    page = Page(budget, count)
    next_line = filler(rng, lines)
    statement, question = rng.choice(FORMS)
    known: list[dict[str, str]] = []

    def is_known(name: str, thing: str) -> bool:
        # Where a form leaves the name out, facts differ by the thing alone.
        same_thing = [fact for fact in known if fact["thing"] == thing]
        return any(fact["name"] == name or "{name}" not in statement for fact in same_thing)

    def state_fact() -> bool:
        name = rng.choice(NAMES)
        thing = rng.choice(THINGS)
        fact = {"name": name, "thing": thing, "value": value(rng)}
        if is_known(name, thing):
            return True
        if not page.say(statement.format(**fact), closing):
            return False
        known.append(fact)
        return True

    def ask(among: int, reserve: int = 0) -> bool:
        fact = rng.choice(known[:among])
        return page.say(question.format(**fact), reserve)

    closing = int(budget * rng.uniform(0.03, 0.3))
    for _ in range(rng.choice((0, 0, 1, 2))):
        page.say(next_line(), closing)
    most_facts = max(1, min(12, budget // 40))
    for _ in range(rng.randint(1, most_facts)):
        state_fact()
    has_room = bool(known)
    while has_room:
        has_room = page.say(next_line(), closing)
        if has_room and rng.random() < 0.4:
            has_room = state_fact() if rng.random() < 0.3 else ask(len(known), closing)
    # Half of the time only the oldest facts, so that long distances are as frequent as short ones.
    among = rng.choice((2, len(known)))
    while known and ask(among):
        pass
    return "\n".join(page.lines)


def copy_document(rng: random.Random, budget: int, count: Counter, lines: Sequence[str]) -> str:
    """Write a line of random words or digits, and repeat it verbatim: many times at once, or after other text."""
    pool = rng.choice((WORDS, DIGITS, WORDS + NAMES, LETTERS_AND_DIGITS))
    joint = " " if len(pool) > 20 else rng.choice(("", " ", ", "))
    apart = rng.random() < 0.6
    share = 16 if apart else 3
    size = rng.randint(6, max(8, budget // share))
    text = joint.join(rng.choices(pool, k=size))
    while count(text) > budget * 0.45:
        size = size * 3 // 4
        text = joint.join(rng.choices(pool, k=size))
    page = Page(budget, count)
    next_line = filler(rng, lines)
    page.say(text)
    if apart:
        reserve = count(text + "\n")
        while page.say(next_line(), reserve):
            pass
    while page.say(text):
        pass
    return "\n".join(page.lines)


def recall_document(rng: random.Random, budget: int, count: Counter, lines: Sequence[str] = ()) -> str:
    """Write a document of at most `budget` tokens as `count` measures them, with `lines` of real text between facts."""
    if rng.random() < 0.3:
        return copy_document(rng, budget, count, lines)
    return facts_document(rng, budget, count, lines)
