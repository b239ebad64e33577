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
DIGITS, LETTERS_AND_DIGITS = "0123456789", "0123456789abcdef"

Counter = Callable[[str], int]


def value(rng: random.Random) -> str:
    """Draw a value that cannot be guessed: mostly five digits, sometimes fewer or more, letters or words."""
    kind = rng.random()
    if 0.8 <= kind < 0.9:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))
    if kind >= 0.9:
        return "".join(rng.choices(LETTERS_AND_DIGITS, k=rng.randint(3, 6)))
    return "".join(rng.choices(DIGITS, k=5 if kind < 0.6 else rng.randint(1, 8)))


def sentences(rng: random.Random, number: int) -> str:
    """Draw sentences of no importance."""
    return " ".join(f"{rng.choice(SUBJECTS)} {rng.choice(PREDICATES)}." for _ in range(number))


def filler(rng: random.Random, lines: Sequence[str]) -> Callable[[], str]:
    """Draw what stands between facts: a function of its next line; one refrain, ever new sentences, or real text."""
    kind = rng.choice("refrain refrain sentences lines lines".split() if lines else ["refrain", "sentences"])
    refrain = sentences(rng, rng.randint(2, 6))
    following = itertools.count(rng.randrange(len(lines)) + 1 if lines else 0)
    if kind == "refrain":
        return lambda: refrain
    if kind == "sentences":
        return lambda: sentences(rng, 3)
    return lambda: lines[next(following) % len(lines)]


class Page:
    """Lines of text within a budget of tokens."""

    def __init__(self, budget: int, count: Counter) -> None:
        self.left, self.count = budget, count
        self.lines: list[str] = []

    def say(self, text: str, reserve: int = 0) -> bool:
        """Add a line if that leaves `reserve` tokens, and return whether it did."""
        cost = self.count(text + "\n")
        if fits := cost <= self.left - reserve:
            self.left -= cost
            self.lines.append(text)
        return fits


def facts_document(rng: random.Random, budget: int, count: Counter, lines: Sequence[str]) -> str:
    """State facts in one form, ask for some along the way, and fill the last part of `budget` with questions."""
    page, more, (state, ask) = Page(budget, count), filler(rng, lines), rng.choice(FORMS)
    known: list[dict[str, str]] = []

    def new_fact() -> bool:
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        fact = {"name": name, "thing": thing, "value": value(rng)}
        # Where a form leaves a name out, the thing alone must tell its facts apart.
        if any(thing == old["thing"] and (name == old["name"] or "{name}" not in state) for old in known):
            return True
        if said := page.say(state.format(**fact), closing):
            known.append(fact)
        return said

    def question(among: int, reserve: int = 0) -> bool:
        return page.say(ask.format(**rng.choice(known[:among])), reserve)

    closing = int(budget * rng.uniform(0.03, 0.3))
    for _ in range(rng.choice((0, 0, 1, 2))):
        page.say(more(), closing)
    for _ in range(rng.randint(1, max(1, min(12, budget // 40)))):
        new_fact()
    going = bool(known)
    while going:
        going = page.say(more(), closing)
        if going and rng.random() < 0.4:
            going = new_fact() if rng.random() < 0.3 else question(len(known), closing)
    # Half of the time only the oldest facts, so that long distances are as frequent as short ones.
    among = rng.choice((2, len(known)))
    while known and question(among):
        pass
    return "\n".join(page.lines)


def copy_document(rng: random.Random, budget: int, count: Counter, lines: Sequence[str]) -> str:
    """Write a line of random words or digits, and repeat it verbatim: many times at once, or after other text."""
    pool = rng.choice((WORDS, DIGITS, WORDS + NAMES, LETTERS_AND_DIGITS))
    joint = " " if len(pool) > 20 else rng.choice(("", " ", ", "))
    apart = rng.random() < 0.6
    size = rng.randint(6, max(8, budget // (16 if apart else 3)))
    while count(text := joint.join(rng.choices(pool, k=size))) > budget * 0.45:
        size = size * 3 // 4
    page, more = Page(budget, count), filler(rng, lines)
    page.say(text)
    if apart:
        while page.say(more(), reserve=count(text + "\n")):
            pass
    while page.say(text):
        pass
    return "\n".join(page.lines)


def recall_document(rng: random.Random, budget: int, count: Counter, lines: Sequence[str] = ()) -> str:
    """Write a document of at most `budget` tokens as `count` measures them, with `lines` of real text between facts."""
    return (copy_document if rng.random() < 0.3 else facts_document)(rng, budget, count, lines)
