import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_lora.data.recall import FORMS, recall_document
from pi_lora.data.sources import RECALL, STDLIB, evaluation_documents, split_of, standard_library
from pi_lora.errors import DataError
from pi_lora.evaluation.passkey import FILLER, STATEMENT


def words(text: str) -> int:
    return len(text.split())


def test_splits_are_disjoint_and_cover_the_library() -> None:
    train, *others = (
        {each.name for each in standard_library(split).documents()} for split in ("train", "validation", "test")
    )
    held_out = set.union(*others)
    assert not train & held_out
    assert not set.intersection(*others)
    assert "argparse.py" in train | held_out
    assert not [name for name in train | held_out if "site-packages" in name or "/test/" in name]
    assert len(train) > 300
    assert {document.name for document in evaluation_documents(STDLIB, "validation")} == others[0]
    with pytest.raises(DataError, match=r"^builtin:recall: is for training"):
        evaluation_documents(RECALL)
    assert 0.05 < len(held_out) / len(train | held_out) < 0.2


def test_the_split_depends_on_the_name_alone() -> None:
    share = sum(split_of(f"module_{i}.py") != "train" for i in range(5000)) / 5000
    assert share == pytest.approx(0.1, abs=0.02)
    # The demo's settings were chosen by these, and by none of those.
    assert {split_of(f"{name}.py") for name in ("bz2", "calendar", "chunk")} == {"validation"}
    assert {split_of(f"{name}.py") for name in ("enum", "html/parser", "json/encoder")} == {"test"}


@given(st.integers(0, 10**6), st.integers(30, 400))
def test_recall_documents_fit_their_budget(seed: int, budget: int) -> None:
    assert words(recall_document(random.Random(seed), budget, words)) <= budget


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


def test_tuning_documents_never_show_the_passkey_prompt() -> None:
    filler = [line for each in standard_library().documents() for line in each.text.splitlines() if line.strip()]
    rng = random.Random(0)
    text = "\n".join(recall_document(rng, 300, words, filler) for _ in range(300))
    assert "pass key" not in text
    assert FILLER[:20] not in text
    assert STATEMENT not in {form for each in FORMS for form in each}
