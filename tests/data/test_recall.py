"""Recall documents: within a budget, answerable by their own text, and unlike the passkey prompt."""

import random

from hypothesis import given
from hypothesis import strategies as st

from pi_lora.data.recall import FORMS, recall_document
from pi_lora.data.sources import STDLIB, find_table
from pi_lora.evaluation.passkey import FILLER, STATEMENT
from pi_lora.recipe.data import Source


def words(text: str) -> int:
    return len(text.split())


@given(st.integers(0, 10**6), st.integers(30, 400))
def test_recall_documents_fit_their_budget_and_follow_from_the_seed(seed: int, budget: int) -> None:
    document = recall_document(random.Random(seed), budget, words)
    assert words(document) <= budget
    assert document == recall_document(random.Random(seed), budget, words)


def test_recall_questions_are_answered_by_the_text_before() -> None:
    asked = 0
    for seed in range(200):
        lines = recall_document(random.Random(seed), 300, words).splitlines()
        for index, line in enumerate(lines):
            if line.startswith("print("):
                name, value = line.removeprefix("print(").split(")  # ")
                assert f"{name} = {value}" in lines[:index]
                asked += 1
    assert asked > 50


def test_recall_documents_never_contain_the_passkey_prompt() -> None:
    filler = [
        line for each in find_table(Source(name=STDLIB)).documents() for line in each.text.splitlines() if line.strip()
    ]
    rng = random.Random(0)
    text = "\n".join(recall_document(rng, 300, words, filler) for _ in range(300))
    assert "pass key" not in text
    assert FILLER[:20] not in text
    assert STATEMENT not in {form for each in FORMS for form in each}
