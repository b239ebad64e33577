"""Documents of counted words and of changing states: within a budget, answered by their own text, unlike RULER's."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

from pi_lora.data.aggregation import MARKS, STORIES, SYLLABLES, WORD_QUESTIONS, common_words_document, entities_document
from pi_lora.data.packing import SYNTHETIC_DOCUMENTS, lines_of
from pi_lora.data.sources import find_table
from pi_lora.recipe.schema import COMMON_WORDS, ENTITIES, SYNTHETIC, Source

NOVEL = Path(__file__).with_name("texts") / "through_the_postern_gate.txt"
LINES = list(lines_of(find_table(Source(name=str(NOVEL)))))


def words(text: str) -> int:
    return len(text.split())


def pattern_of(form: str) -> str:
    """Return a pattern of the lines that have a form, with any values."""
    pattern = re.sub(r"\\{[^{}]+\\}", ".+", re.escape(form))
    return f"^{pattern}$"


@given(st.integers(0, 10**6), st.integers(30, 1000), st.sampled_from([COMMON_WORDS, ENTITIES]))
def test_documents_fit_their_budget_and_follow_from_the_seed(seed: int, budget: int, name: str) -> None:
    write, _ = SYNTHETIC_DOCUMENTS[name]
    document = write(random.Random(seed), budget, words, LINES)
    assert words(document) <= budget
    assert document == write(random.Random(seed), budget, words, LINES)


def test_the_most_frequent_words_are_those_that_the_text_has_most_often() -> None:
    asked = Counter[str]()
    made_up = rf"\b(?:{'|'.join(SYLLABLES)}){{3}}\b"
    questions = "|".join(map(pattern_of, WORD_QUESTIONS))
    pattern = re.compile(r"^Leaderboard of the (.+), places 1 to (\d+): (.+)$", re.MULTILINE)
    for seed in range(150):
        document = common_words_document(random.Random(seed), 1200, words, LINES)
        for kind, number, top in pattern.findall(document):
            [mark] = [mark for mark, name in MARKS if name == kind]
            # The words in the questions do not count.
            text = document[: re.search(questions, document, re.MULTILINE).start()]
            before, after = map(re.escape, mark.split("{}"))
            found = Counter(re.findall(f"{before}({made_up if mark == '{}' else '[a-z]+'}){after}", text))
            assert [word for word, _ in found.most_common(int(number))] == top.split(", ")
            asked[kind] += 1
    assert len(asked) == len(MARKS)


def test_counts_are_those_of_the_text() -> None:
    asked = 0
    for seed in range(100):
        document = common_words_document(random.Random(seed), 1200, words, LINES)
        for question in re.finditer(r"How many times does (\w+) turn up among the tags\? (\d+) times", document):
            word, times = question.groups()
            assert document.count(f"<{word}>") == int(times)
            asked += 1
    assert asked > 3


def changes_in(text: str, story: dict[str, list[str]]) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and other of every change, read back from the text."""
    fields = {
        "name": f"(?P<name>{'|'.join(story['names'])})",
        "value": f"(?P<value>{'|'.join(story['values'])})",
        "other": f"(?P<other>{'|'.join(story['names'])})",
    }
    found = {}
    for form in story["changes"] + story["follows"]:
        pattern = re.escape(form)
        for field, group in fields.items():
            pattern = pattern.replace(re.escape(f"{{{field}}}"), group)
        for match in re.finditer(pattern + "$", text, re.MULTILINE):
            found[match.start()] = match.groupdict()
    for start in sorted(found):
        groups = found[start]
        yield groups["name"], groups.get("value", ""), groups.get("other", "")


@pytest.mark.parametrize("story", STORIES, ids=["places", "owners", "colors", "machines"])
def test_questions_for_last_states_follow_from_the_changes_before(
    story: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi_lora.data.aggregation.STORIES", [story])
    asked = Counter[str]()
    followed = 0
    for seed in range(60):
        document = entities_document(random.Random(seed), 1500, words, LINES)
        states: dict[str, str] = {}
        for name, value, other in changes_in(document, story):
            followed += bool(other)
            states.pop(name, None)
            states[name] = value or states[other]
        for form in story["questions"]:
            answers = set()
            for name, value in states.items():
                alike = [other for other in states if states[other] == value]
                answers.add(form.format(name=name, value=value, number=len(alike), names=", ".join(alike)))
            questions = re.findall(pattern_of(form), document, re.MULTILINE)
            assert answers.issuperset(questions)
            asked[form] += len(questions)
    assert followed > 50
    assert min(asked[form] for form in story["questions"]) > 20


def test_synthetic_documents_never_contain_a_prompt_of_ruler() -> None:
    rng = random.Random(0)
    documents = [SYNTHETIC_DOCUMENTS[name][0](rng, 600, words, LINES) for name in SYNTHETIC for _ in range(200)]
    text = "\n".join(documents)
    for template in (cwe_utils.TEMPLATE, fwe_utils.TEMPLATE, vt_utils.TEMPLATE):
        template_words = template.replace("{context}", " ").split()
        for start in range(len(template_words) - 4):
            assert " ".join(template_words[start : start + 5]) not in text
    assert "VAR " not in text
