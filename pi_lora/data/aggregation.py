"""`builtin:common_words` and `builtin:entities`: synthetic documents with questions that need all of the text before.

Words are scattered over real text and counted, or people and things change their states. The forms are not those of
RULER's tasks (`cwe`, `fwe`, `vt`), which measure the same abilities.
"""

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pi_lora.data.recall import Page, TokenCounter, text_lines

KINDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# The last tokens of a document, for questions.
QUESTION_TOKENS = 400


def aggregation_document(
    kinds: Sequence[Any], rng: random.Random, budget: int, count: TokenCounter, lines: Sequence[str]
) -> str:
    """Write a document of at most `budget` tokens: `lines` of real text, and between them events, some names often and
    some rarely. The questions at the end are for the last state of a name, for all in a state, and for the numbers of
    events. Names with as many events are ranked by the first of them.
    """
    all_names, values, changes, follows, questions = rng.choice(kinds)
    names = rng.sample(all_names, rng.randint(3, 20))
    weights = rng.choices((1, 3, 10), k=len(names))
    # After each line come events / (1 - events) events on average.
    events = rng.choice((0.02, 0.2, 0.8))
    joint = rng.choice(("\n", " "))
    page = Page(budget, count)
    next_line = text_lines(rng, lines)
    tally = Counter[str]()
    states: dict[str, str] = {}
    while page.add(next_line(), reserve=min(budget // 3, QUESTION_TOKENS)):
        while rng.random() < events:
            name, other = rng.choices(names, weights, k=2)
            value = rng.choice(values)
            form = rng.choice(changes)
            if other in states and other != name and rng.random() < 0.3:
                value = states[other]
                form = rng.choice(follows)
            if page.add(form.format(name=name, value=value, other=other)):
                states[name] = value
                tally[name] += 1
    ranking = tally.most_common()
    # Between the frequent names and the others is a gap: an exact count is not needed.
    top = [name for name, times in ranking if 2 * times > ranking[0][1]]
    for name, value in states.items():
        alike = [other for other in states if states[other] == value]
        other = rng.choice(names)
        question = rng.choice(questions).format(
            name=name,
            value=value,
            number=len(alike),
            names=", ".join(alike),
            times=tally[name],
            rank=len(top),
            top=", ".join(top),
            other=other,
            answer="Yes" if tally[name] > tally[other] else "No",
        )
        page.add("\n" + question)
    return joint.join(page.lines)


common_words_document = partial(aggregation_document, KINDS["common_words"])
entities_document = partial(aggregation_document, KINDS["entities"])
