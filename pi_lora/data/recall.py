"""`builtin:recall`: synthetic documents that state facts, continue with other text, and ask for the facts later.

They teach what the passkey test measures, retrieving a token from far back, in many forms *other* than the passkey
prompt: prose, code, tables, registers and verbatim repetition. Every question is answered by the text before it.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

LISTS = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
# The forms are pairs of a statement and the question for it.
NAMES, THINGS, WORDS, FORMS, SUBJECTS, PREDICATES = yaml.safe_load(LISTS).values()
DIGITS = "0123456789"
LETTERS_AND_DIGITS = "0123456789abcdef"

# The number of tokens of a text.
TokenCounter = Callable[[str], int]


def value(rng: random.Random) -> str:
    """Draw a value that cannot be guessed: mostly five digits, sometimes fewer or more, letters or words."""
    kind = rng.random()
    if kind < 0.6:
        return "".join(rng.choices(DIGITS, k=5))
    if kind < 0.8:
        number = rng.randint(1, 8)
        return "".join(rng.choices(DIGITS, k=number))
    if kind < 0.9:
        number = rng.randint(1, 3)
        return " ".join(rng.choices(WORDS, k=number))
    number = rng.randint(3, 6)
    return "".join(rng.choices(LETTERS_AND_DIGITS, k=number))


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
    fillers = {"refrain": lambda: refrain, "sentences": lambda: sentences(rng, 3)}
    if lines:
        numbers = itertools.count(rng.randrange(len(lines)) + 1)
        fillers["lines"] = lambda: lines[next(numbers) % len(lines)]
    return fillers[kind]


@dataclass
class Page:
    """Lines of text within a budget of tokens."""

    tokens_left: int
    count: TokenCounter
    lines: list[str] = field(default_factory=list)

    def add(self, text: str, reserve: int = 0) -> bool:
        """Add a line if that leaves `reserve` tokens, and return whether it did."""
        cost = self.count(text + "\n")
        if cost > self.tokens_left - reserve:
            return False
        self.tokens_left -= cost
        self.lines.append(text)
        return True


@dataclass
class Facts:
    """The facts of a page, stated and asked for in one form. They are known by their question: two with the same
    question could not be told apart.
    """

    rng: random.Random
    page: Page
    statement: str
    question: str
    known: dict[str, dict[str, str]] = field(default_factory=dict)

    def state(self, reserve: int) -> bool:
        """State a new fact if that leaves `reserve` tokens. Return whether there was room for it."""
        name = self.rng.choice(NAMES)
        thing = self.rng.choice(THINGS)
        fact = {"name": name, "thing": thing, "value": value(self.rng)}
        question = self.question.format(name=name, thing=thing, value="")
        if question in self.known:
            return True
        has_room = self.page.add(self.statement.format(**fact), reserve)
        if has_room:
            self.known[question] = fact
        return has_room

    def ask(self, among: int, reserve: int = 0) -> bool:
        """Ask for one of the first `among` facts if that leaves `reserve` tokens. Return whether there was room."""
        oldest = list(self.known.values())[:among]
        fact = self.rng.choice(oldest)
        return self.page.add(self.question.format(**fact), reserve)


def facts_document(rng: random.Random, budget: int, count: TokenCounter, lines: Sequence[str]) -> str:
    """State facts in one form, ask for some along the way, and fill the last part of `budget` with questions."""
    page = Page(budget, count)
    next_line = filler(rng, lines)
    facts = Facts(rng, page, *rng.choice(FORMS))
    closing = int(budget * rng.uniform(0.03, 0.3))
    for _ in range(rng.choice((0, 0, 1, 2))):
        page.add(next_line(), closing)
    most_facts = max(1, min(12, budget // 40))
    for _ in range(rng.randint(1, most_facts)):
        facts.state(closing)
    has_room = bool(facts.known)
    while has_room:
        has_room = page.add(next_line(), closing)
        if has_room and rng.random() < 0.4:
            states_fact = rng.random() < 0.3
            has_room = facts.state(closing) if states_fact else facts.ask(len(facts.known), closing)
    # Half of the time only the oldest facts, so that long distances are as frequent as short ones.
    among = rng.choice((2, len(facts.known)))
    while facts.known and facts.ask(among):
        pass
    return "\n".join(page.lines)


def copy_document(rng: random.Random, budget: int, count: TokenCounter, lines: Sequence[str]) -> str:
    """Write a line of random words or digits, and repeat it verbatim: many times at once, or after other text."""
    pool = rng.choice((WORDS, DIGITS, WORDS + NAMES, LETTERS_AND_DIGITS))
    joint = " "
    if len(pool) <= 20:
        joint = rng.choice(("", " ", ", "))
    apart = rng.random() < 0.6
    share = 16 if apart else 3
    size = rng.randint(6, max(8, budget // share))
    text = joint.join(rng.choices(pool, k=size))
    while count(text) > budget * 0.45:
        size = size * 3 // 4
        text = joint.join(rng.choices(pool, k=size))
    page = Page(budget, count)
    next_line = filler(rng, lines)
    page.add(text)
    if apart:
        reserve = count(text + "\n")
        while page.add(next_line(), reserve):
            pass
    while page.add(text):
        pass
    return "\n".join(page.lines)


def recall_document(rng: random.Random, budget: int, count: TokenCounter, lines: Sequence[str] = ()) -> str:
    """Write a document of at most `budget` tokens as `count` measures them, with `lines` of real text between facts."""
    if rng.random() < 0.3:
        return copy_document(rng, budget, count, lines)
    return facts_document(rng, budget, count, lines)
