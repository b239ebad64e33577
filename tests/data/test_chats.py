"""Chats as training data: every token's label by template, whole in sequences, and mixed with text."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from small_tokenizers import made
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pi_lora.data.batches import collate, training_data
from pi_lora.data.chats import NO_CHATS_WARNING, ChatTemplate, messages_of
from pi_lora.data.examples import data_problems
from pi_lora.data.tokens import Labelled
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Training

ROLES = ("system", "user", "assistant")
TEMPLATES = Path(__file__).parent / "templates"
MARKERS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
]
QUESTIONS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": " It is 4.\n"},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "2 + 3 = 5"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = [*QUESTIONS[:3], {"role": "assistant", "content": "<think>\n2 + 3\n</think>\n\nFive."}]
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n"
# A chat by template: its text in pieces, each with whether the assistant wrote it.
REFERENCES: dict[str, tuple[str, list[dict[str, str]], list[tuple[str, bool]]]] = {
    "chatml": (
        "chatml",
        [SYSTEM, *QUESTIONS],
        [
            ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n", False),
            ("<|im_start|>assistant\n", False),
            (" It is 4.\n<|im_end|>\n", True),
            ("<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n", False),
            ("2 + 3 = 5<|im_end|>\n", True),
        ],
    ),
    "chatml with marks": (
        "chatml_marked",
        QUESTIONS[2:],
        [
            ("<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n", False),
            ("2 + 3 = 5<|im_end|>\n", True),
        ],
    ),
    "llama 3": (
        "llama3",
        [SYSTEM, *QUESTIONS],
        [
            (f"<s>{LLAMA.format('system')}Be brief.<|eot_id|>", False),
            (f"{LLAMA.format('user')}What is 2 + 2?<|eot_id|>{LLAMA.format('assistant')}", False),
            ("It is 4.<|eot_id|>", True),
            (f"{LLAMA.format('user')}And 3?<|eot_id|>{LLAMA.format('assistant')}", False),
            ("2 + 3 = 5<|eot_id|>", True),
        ],
    ),
    "mistral": (
        "mistral",
        QUESTIONS,
        [
            ("<s>[INST] What is 2 + 2?[/INST]", False),
            (" It is 4.</s>", True),
            ("[INST] And 3?[/INST]", False),
            (" 2 + 3 = 5</s>", True),
        ],
    ),
    "gemma": (
        "gemma",
        QUESTIONS,
        [
            ("<s><start_of_turn>user\nWhat is 2 + 2?<end_of_turn>\n<start_of_turn>model\n", False),
            ("It is 4.<end_of_turn>\n", True),
            ("<start_of_turn>user\nAnd 3?<end_of_turn>\n<start_of_turn>model\n", False),
            ("2 + 3 = 5<end_of_turn>\n", True),
        ],
    ),
    "qwen 3": (
        "qwen3",
        QUESTIONS,
        [
            ("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n", False),
            (" It is 4.\n<|im_end|>\n", True),
            ("<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n", False),
            ("<think>\n\n</think>\n\n2 + 3 = 5<|im_end|>\n", True),
        ],
    ),
    "qwen 3, thinking": (
        "qwen3",
        [*THOUGHT, *QUESTIONS[2:], *THOUGHT[2:]],
        [
            ("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n", False),
            (" It is 4.\n<|im_end|>\n", True),
            ("<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n", False),
            ("Five.<|im_end|>\n", True),
            ("<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n", False),
            ("2 + 3 = 5<|im_end|>\n", True),
            ("<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n", False),
            ("<think>\n2 + 3\n</think>\n\nFive.<|im_end|>\n", True),
        ],
    ),
}


def make_tokenizer(template: str | None) -> Any:
    own = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": MARKERS}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made("cl100k"), **own)
    if template:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer("chatml")


def data_of(*sources: Any, **keys: Any) -> Data:
    return Data.model_validate({"source": list(sources), **keys})


def write_chats(file: Path, chats: list[list[dict[str, str]]], column: str = "messages") -> dict[str, str]:
    file.write_text("".join(json.dumps({column: chat}) + "\n" for chat in chats))
    return {"name": str(file), "column": column}


def question(number: int, words: int = 4) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Question {number}?"},
        {"role": "assistant", "content": f"answer {number}" + " word" * words},
    ]


@pytest.mark.parametrize("name", REFERENCES)
def test_labels_equal_a_plain_reference(name: str) -> None:
    template, messages, pieces = REFERENCES[name]
    tokenizer = make_tokenizer(template)
    chat = ChatTemplate(tokenizer).encode(messages, 10_000)
    ids, loss_mask = [], []
    for text, by_assistant in pieces:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += own
        loss_mask += [by_assistant] * len(own)
    assert chat == Labelled(ids, loss_mask)
    everything = ChatTemplate(tokenizer, train_on_all=True).encode(messages, 10_000)
    assert everything == Labelled(ids, [True] * len(ids))


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("chatml", question(1, words=400), "chats of over 100 tokens"),
        ("chatml", QUESTIONS[:1], "chats without a turn of the assistant"),
        ("chatml", [{"role": "user", "content": "<|im_end|>"}, QUESTIONS[1]], "special tokens in a message"),
        ("chatml", [{"role": "user", "content": 3}, QUESTIONS[1]], r"refuses \(can only concatenate str"),
        ("gemma", [SYSTEM, *QUESTIONS], r"refuses \(no turns of the system\)"),
        # This template puts the system message into the last turn of the user, if that is the last turn of all.
        ("mistral", [SYSTEM, *QUESTIONS], "earlier turns change with later ones"),
        ("chatml", [], "refuses"),
    ],
)
def test_an_unusable_chat_is_left_out_with_the_reason(
    template: str, messages: list[dict[str, Any]], reason: str
) -> None:
    left_out = ChatTemplate(make_tokenizer(template)).encode(messages, 100)
    assert isinstance(left_out, str)
    assert re.search(reason, left_out)


def test_sharegpt_turns_become_messages() -> None:
    theirs = [{"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": role} for role in ROLES]
    assert messages_of("x:1", theirs) == [{"role": role, "content": role} for role in ROLES]
    with pytest.raises(DataError, match=r"^x:1: holds a message without role and content; write \{role"):
        messages_of("x:1", [{"text": "a"}])


def test_chats_are_packed_without_cuts_and_padded(tmp_path: Path, tokenizer: Any) -> None:
    chats = [question(number, words=number % 17) for number in range(60)] + [question(99, words=500)]
    source = write_chats(tmp_path / "chats.jsonl", chats)
    found = training_data(data_of(source), Training(steps=16, global_batch_size=1), tokenizer, 64, 128)
    # BOS takes a token, as the template writes none.
    assert found.messages[1:] == ["chats of over 127 tokens left out: 1"]
    seen = []
    for row in found.rows:
        assert len(row["input_ids"]) == 128
        before, *texts = tokenizer.decode(row["input_ids"]).split("</s>")[0].split("<|im_start|>user\n")
        assert before == "<s>"
        assert all(each.endswith("<|im_end|>\n") for each in texts)
        seen += [each.partition("?")[0] for each in texts]
        loss_mask = tokenizer.decode(row["input_ids"][row["loss_mask"]])
        assert (loss_mask.count("answer"), loss_mask.count("</s>")) == (len(texts), 0)
    assert len(seen) == len(set(seen)) > 30


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_other_columns_of_a_row_with_a_chat_are_left_alone(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    rows = [{"id": number, "messages": question(number), "source": "web"} for number in range(40)]
    file = tmp_path / f"chats.{suffix}"
    if suffix == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Dataset.from_list(rows).to_parquet(file)
    data = data_of({"name": str(file), "column": "messages"})
    found = training_data(data, Training(steps=2, global_batch_size=1), tokenizer, 64, 128)
    assert len(found.rows) == 2


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_packed_chats_begin_with_one_bos(tmp_path: Path, template: str) -> None:
    tokenizer = make_tokenizer(template)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    source = write_chats(tmp_path / "chats.jsonl", [question(number) for number in range(60)])
    found = training_data(data_of(source), Training(steps=6, global_batch_size=1), tokenizer, 64, 128)
    for row in found.rows:
        first, second, *_ = row["input_ids"].tolist()
        assert first == bos != second
        assert not row["loss_mask"][0]


@pytest.mark.parametrize("positions", ["contiguous", "pose"])
def test_short_chats_stay_short_in_a_mixture_with_text_and_long_chats(
    tmp_path: Path, tokenizer: Any, positions: str
) -> None:
    (tmp_path / "book.txt").write_text("The cat sees the house, and then it sleeps.\n" * 4000)
    chats = write_chats(tmp_path / "chats.jsonl", [question(number, words=number % 17) for number in range(900)])
    sources = [{"name": str(tmp_path / "book.txt"), "weight": 3}, chats]
    data = data_of(*sources, keep_short=0.25, positions=positions)
    training = Training(steps=50, global_batch_size=4)
    prepared = training_data(data, training, tokenizer, 64, 256)
    length, start = 64 if positions == "pose" else 256, tokenizer.convert_tokens_to_ids("<|im_start|>")
    kinds = Counter[str]()
    for row in prepared.rows:
        batch = collate([row])
        ids, labels, mask = (batch[name] for name in ("input_ids", "labels", "attention_mask"))
        is_short = ids.shape != (1, length)
        kinds["short" if is_short else "text" if (labels != -100).all() else "chats"] += 1
        assert ids.numel() <= length
        assert (labels[mask == 0] == -100).all()
        assert not is_short or (ids[:, 0] == start).all()
        if positions == "pose":
            # From 0, one by one, if a chat is short; else they reach over the window.
            own = batch["position_ids"]
            assert torch.equal(own, torch.arange(ids.shape[1]) * mask) if is_short else own[0, -1] >= length - 1
    assert kinds["short"] / 200 == pytest.approx(0.25, abs=0.08)
    assert kinds["text"] / 200 == pytest.approx(0.75 * 0.75, abs=0.1)
    assert kinds["chats"]


def test_a_chat_model_tuned_without_chats_gets_a_warning(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "book.txt").write_text("The cat sees the house.\n" * 200)
    training = Training(steps=1, global_batch_size=1)
    data = data_of(str(tmp_path / "book.txt"))
    assert NO_CHATS_WARNING in training_data(data, training, tokenizer, 64, 128).messages
    assert NO_CHATS_WARNING not in training_data(data, training, make_tokenizer(None), 64, 128).messages
    with pytest.raises(DataError, match=r"^data.source: the tokenizer of the model has no chat template"):
        training_data(data_of(write_chats(tmp_path / "x.jsonl", [])), training, make_tokenizer(None), 64, 128)


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        (
            {"chat": QUESTIONS},
            "chat",
            "has no text in column chat; choose text, or chats named messages or conversations",
        ),
        ({"messages": "Hello"}, "messages", "has no list of messages in column messages"),
        ({"text": "Hello"}, "messages", "in column messages; .* from its columns: text"),
    ],
)
def test_a_wrong_column_is_refused_with_a_suggestion(
    tmp_path: Path, row: dict[str, Any], column: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [problem] = data_problems(data_of({"name": str(tmp_path / "rows.jsonl"), "column": column}))
    assert re.search(message, problem)
