"""`builtin:common_words` and `builtin:entities`: synthetic documents with questions that need all of the text before.

Words are scattered over real text and counted, or the states of people and things change from place to place. The
forms are not those of RULER's tasks (`cwe`, `fwe`, `vt`), which measure the same abilities.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from pi_lora.data.recall import WORDS, Page, TokenCounter, text_lines

LISTS = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
SYLLABLES, MARKS, WORD_QUESTIONS, STORIES = yaml.safe_load(LISTS).values()
# Words are compared if one has this many times the count of the other: a smaller difference takes an exact count.
CLEAR_RATIO = 1.2
# The most tokens of the questions about words.
QUESTION_TOKENS = 400


def common_words_document(rng: random.Random, budget: int, count: TokenCounter, lines: Sequence[str]) -> str:
    """Write a document of at most `budget` tokens: `lines` of real text with words at random places, some often and
    some rarely, and questions about their counts.
    """
    number = rng.randint(3, max(3, min(20, budget // 50)))
    marks = MARKS
    words = ["".join(rng.choices(SYLLABLES, k=3)) for _ in range(number)]
    if rng.random() < 0.5:
        # Real text has these words too: the mark tells them apart.
        marks = MARKS[1:]
        words = rng.sample(WORDS, number)
    mark, kind = rng.choice(marks)
    marked = {mark.format(word): word for word in words}
    weights = _weights(rng, len(marked))
    most_in_line = rng.choice((1, 2, 4, 12))
    page = Page(budget, count)
    next_line = text_lines(rng, lines)
    closing = min(budget // 3, QUESTION_TOKENS)
    has_room = True
    while has_room:
        pieces = next_line().split(" ")
        in_line = rng.randint(0, most_in_line)
        for word in rng.choices(list(marked), weights, k=in_line):
            pieces.insert(rng.randint(0, len(pieces)), word)
        has_room = page.add(" ".join(pieces), closing)
    # Counted in the text, which may have a marked word of its own.
    pattern = "|".join(map(re.escape, marked))
    found = re.findall(pattern, "\n".join(page.lines))
    ranking = Counter(marked[word] for word in found).most_common()
    counts = [occurrences for _, occurrences in ranking]
    clear = [i for i in range(1, len(counts)) if counts[i - 1] >= CLEAR_RATIO * counts[i]]
    for form in rng.sample(WORD_QUESTIONS, len(WORD_QUESTIONS) if clear else 0):
        page.add(_word_question(rng, form, kind, ranking, number=rng.choice(clear)))
    return "\n".join(page.lines)


def _weights(rng: random.Random, number: int) -> list[float]:
    """Draw the relative frequencies of words: Zipf's law, or some words ten times as frequent as the others."""
    if rng.random() < 0.5:
        exponent = rng.uniform(0.5, 2)
        return [rank**-exponent for rank in range(1, number + 1)]
    frequent = rng.randint(1, number - 1)
    return [10.0 if rank <= frequent else 1.0 for rank in range(1, number + 1)]


def _word_question(rng: random.Random, form: str, kind: str, ranking: list[tuple[str, int]], number: int) -> str:
    """Ask for the `number` most frequent words, for the count of the rarest word, or which of two words occurs more
    often. Words with equal counts are in the order of the text.
    """
    words = [word for word, _ in ranking]
    rarest, times = ranking[-1]
    more = rng.choice(words[:number])
    fewer = rng.choice(words[number:])
    first, second = rng.sample((more, fewer), 2)
    return form.format(
        kind=kind,
        number=number,
        top=", ".join(words[:number]),
        rarest=rarest,
        times=times,
        more=more,
        fewer=fewer,
        first=first,
        second=second,
    )


def entities_document(rng: random.Random, budget: int, count: TokenCounter, lines: Sequence[str]) -> str:
    """Write a document of at most `budget` tokens: `lines` of real text with sentences in which people or things change
    their state, and questions for the last states.
    """
    story = rng.choice(STORIES)
    most_names = max(2, min(len(story["names"]), budget // 50))
    names = rng.sample(story["names"], rng.randint(2, most_names))
    values = rng.sample(story["values"], rng.randint(2, len(story["values"])))
    changes_per_line = rng.choice((0.02, 0.1, 0.4))
    joint = rng.choice(("\n", " "))
    page = Page(budget, count)
    next_line = text_lines(rng, lines)
    closing = min(budget // 3, 25 * len(names))
    # The last states, in the order of the changes.
    states: dict[str, str] = {}
    has_room = True
    while has_room:
        text = next_line()
        if states and rng.random() > changes_per_line:
            has_room = page.add(text, closing)
            continue
        name = rng.choice(names)
        others = [other for other in states if other != name]
        other = ""
        value = rng.choice(values)
        forms = story["changes"]
        if others and rng.random() < 0.3:
            other = rng.choice(others)
            value = states[other]
            forms = story["follows"]
        change = rng.choice(forms).format(name=name, value=value, other=other)
        has_room = page.add(text + joint + change, closing)
        if has_room:
            states.pop(name, None)
            states[name] = value
    for name in rng.sample(list(states), len(states)):
        value = states[name]
        alike = [other for other in states if states[other] == value]
        question = rng.choice(story["questions"])
        page.add(question.format(name=name, value=value, number=len(alike), names=", ".join(alike)))
    return "\n".join(page.lines)
