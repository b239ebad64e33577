"""Documents of counted words and of changing states: within a budget, answered by their own text, unlike RULER's."""

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

from pi_lora.data.aggregation import KINDS, aggregation_document
from pi_lora.data.packing import WRITERS, lines_of
from pi_lora.data.sources import find_table
from pi_lora.recipe.data import SYNTHETIC, Source

NOVEL = Path(__file__).with_name("texts") / "through_the_postern_gate.txt"
LINES = list(lines_of(find_table(Source(name=str(NOVEL)))))
NAMED = [(f"{name}-{number}", kind) for name, kinds in KINDS.items() for number, kind in enumerate(kinds)]


def words(text: str) -> int:
    return len(text.split())


@given(st.integers(0, 10**6), st.integers(10, 1000), st.sampled_from(SYNTHETIC))
def test_documents_fit_their_budget_and_follow_from_the_seed(seed: int, budget: int, name: str) -> None:
    document = WRITERS[name](random.Random(seed), budget, words, LINES)
    assert words(document) <= budget
    assert document == WRITERS[name](random.Random(seed), budget, words, LINES)


def pattern_of(form: str, **fields: str) -> str:
    """Return a pattern of the texts that have a form, with groups for some fields and any value for others."""
    pattern = re.escape(form)
    for field, group in fields.items():
        pattern = pattern.replace(rf"\{{{field}\}}", f"(?P<{field}>{group})", 1).replace(rf"\{{{field}\}}", group)
    return re.sub(r"\\\{[^{}]+\\\}", ".+", pattern)


def events_in(text: str, kind: list[Any]) -> list[dict[str, str]]:
    """Return name, value and other of the events in the order of the text."""
    names, values, changes, follows, _ = kind
    fields = {"name": "|".join(names), "value": "|".join(values), "other": "|".join(names)}
    found = {}
    for form in changes + follows:
        for match in re.finditer(rf"(?<!\w){pattern_of(form, **fields)}(?!\w)", text):
            found[match.end()] = match.groupdict()
    return [found[end] for end in sorted(found)]


@pytest.mark.parametrize("kind", [kind for _, kind in NAMED], ids=[name for name, _ in NAMED])
def test_questions_are_answered_by_the_events_in_the_text(kind: list[Any]) -> None:
    questions = kind[4]
    any_question = "|".join(f"^{pattern_of(form)} ?$" for form in questions)
    asked = Counter[str]()
    for seed in range(560):
        # In the smallest documents an event may have no room.
        budget = 1500 if seed < 60 else 40 + seed % 100
        document = aggregation_document([kind], random.Random(seed), budget, words, LINES)
        first = re.search(any_question, document, re.MULTILINE)
        text = document[: first.start() if first else None]
        tally = Counter[str]()
        states: dict[str, str] = {}
        for event in events_in(text, kind):
            value = event.get("value") or states.get(event.get("other") or "", "")
            states[event["name"]] = value
            tally[event["name"]] += 1
        ranking = [name for name, _ in tally.most_common()]
        top = [name for name in ranking if tally[name] > max(tally.values()) / 2]
        answers = {
            form.format(
                name=name,
                value=value,
                names=", ".join(other for other in states if states[other] == value),
                number=list(states.values()).count(value),
                times=tally[name],
                rank=len(top),
                top=", ".join(top),
                other=other,
                answer="Yes" if tally[name] > tally[other] else "No",
            ): form
            for form in questions
            for name, value in states.items()
            for other in kind[0]
        }
        for question in re.finditer(any_question, document, re.MULTILINE):
            assert question[0].strip() in answers
            asked[answers[question[0].strip()]] += 1
    assert min(asked[form] for form in questions) > 10


def test_some_names_occur_often_and_others_rarely() -> None:
    kind = KINDS["common_words"][1]
    gaps = 0
    for seed in range(60):
        document = aggregation_document([kind], random.Random(seed), 4000, words, LINES)
        tally = Counter(event["name"] for event in events_in(document, kind))
        gaps += bool(tally) and max(tally.values()) >= 5 * min(tally.values())
    assert gaps > 30


def test_synthetic_documents_never_contain_a_prompt_of_ruler() -> None:
    rng = random.Random(0)
    documents = [WRITERS[name](rng, 600, words, LINES) for name in SYNTHETIC for _ in range(200)]
    text = "\n".join(documents)
    for template in (cwe_utils.TEMPLATE, fwe_utils.TEMPLATE, vt_utils.TEMPLATE):
        template_words = template.replace("{context}", " ").split()
        for start in range(len(template_words) - 4):
            assert " ".join(template_words[start : start + 5]) not in text
    assert "VAR " not in text
