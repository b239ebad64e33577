"""Chats as training data: every token's label by template, whole in sequences, and mixed with text."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from conftest import refused
from pi_lora.data.batches import collate, training_data
from pi_lora.data.chats import NO_CHATS_WARNING, ChatTemplate, messages_of
from pi_lora.data.checks import data_problems
from pi_lora.data.sources import Table, find_table
from pi_lora.data.tokens import Labelled
from pi_lora.errors import DataError
from pi_lora.models.tokenizer import end_of_turn
from pi_lora.recipe.data import Data, Source
from pi_lora.recipe.schema import Training
from small_tokenizers import made

ROLES = ("system", "user", "assistant")
TEMPLATES = Path(__file__).parent / "templates"
MARKERS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
    *("<|user|>", "<|assistant|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
]
QUESTIONS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": " It is 4.\n"},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "2 + 3 = 5"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = [*QUESTIONS[:3], {"role": "assistant", "content": "<think>\n2 + 3\n</think>\n\nFive."}]
REASONED = [*QUESTIONS[:3], {"role": "assistant", "content": "Five.", "reasoning_content": "2 + 3"}]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Tide?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "tide", "arguments": {}}}]},
    {"role": "tool", "content": "5 feet"},
    {"role": "assistant", "content": "It is 5."},
]
GPT_OSS = [*QUESTIONS[2:], QUESTIONS[2], {"role": "assistant", "content": "Five.", "thinking": "2 + 3"}]
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
    "chatml, an answer first": (
        "chatml",
        QUESTIONS[1:],
        [
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
    "qwen 3.5": (
        "qwen3_5",
        REASONED,
        [
            ("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n", False),
            ("It is 4.<|im_end|>\n", True),
            ("<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n<think>\n", False),
            ("2 + 3\n</think>\n\nFive.<|im_end|>\n", True),
        ],
    ),
    "qwen 3.5, calls": (
        "qwen3_5",
        [*CALLS, *REASONED[2:]],
        [
            ("<|im_start|>user\nTide?<|im_end|>\n<|im_start|>assistant\n", False),
            ("<tool_call>tide</tool_call><|im_end|>\n", True),
            ("<|im_start|>tool\n5 feet<|im_end|>\n<|im_start|>assistant\n", False),
            ("It is 5.<|im_end|>\n", True),
            ("<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n<think>\n", False),
            ("2 + 3\n</think>\n\nFive.<|im_end|>\n", True),
        ],
    ),
    "glm": (
        "glm",
        [*REASONED, *REASONED[2:]],
        [
            ("<|user|>\nWhat is 2 + 2?<|assistant|>", False),
            ("<think></think>\nIt is 4.<|user|>", True),
            ("\nAnd 3?<|assistant|>", False),
            ("<think></think>\nFive.<|user|>", True),
            ("\nAnd 3?<|assistant|>", False),
            ("<think>2 + 3</think>\nFive.", True),
        ],
    ),
    "gpt-oss": (
        "gptoss",
        [*GPT_OSS, *GPT_OSS[2:]],
        [
            ("<|start|>user<|message|>And 3?<|end|><|start|>assistant", False),
            ("<|channel|>final<|message|>2 + 3 = 5<|end|>", True),
            ("<|start|>user<|message|>And 3?<|end|><|start|>assistant", False),
            ("<|channel|>final<|message|>Five.<|end|>", True),
            ("<|start|>user<|message|>And 3?<|end|><|start|>assistant", False),
            ("<|channel|>analysis<|message|>2 + 3<|end|>", True),
            ("<|start|>assistant<|channel|>final<|message|>Five.<|return|>", True),
        ],
    ),
    "gpt-oss, white space after an answer": (
        "gptoss",
        QUESTIONS,
        [
            ("<|start|>user<|message|>What is 2 + 2?<|end|><|start|>assistant", False),
            ("<|channel|>final<|message|> It is 4.\n<|end|>", True),
            ("<|start|>user<|message|>And 3?<|end|><|start|>assistant", False),
            ("<|channel|>final<|message|>2 + 3 = 5<|return|>", True),
        ],
    ),
    "phi 3": (
        "phi3",
        QUESTIONS,
        [
            ("<|user|>\nWhat is 2 + 2?<|end|>\n<|assistant|>\n", False),
            ("It is 4.<|end|>", True),
            ("\n<|user|>\nAnd 3?<|end|>\n<|assistant|>\n", False),
            ("2 + 3 = 5<|end|>\n</s>", True),
        ],
    ),
    "a template of parts alone": (
        "parts",
        [SYSTEM, *QUESTIONS],
        [
            ("System: Be brief.<|end|>\nUser: What is 2 + 2?<|end|>\nAssistant: ", False),
            (" It is 4.\n<|end|>\n", True),
            ("User: And 3?<|end|>\nAssistant: ", False),
            ("2 + 3 = 5<|end|>\n", True),
        ],
    ),
}


def make_tokenizer(template: str | None) -> Any:
    own = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": MARKERS}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made("cl100k"), **own)
    if template:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


ENDS = {
    **{"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "phi3": "<|end|>"},
    # The token of the next role; one for the last turn alone; contents in parts.
    **{"glm": "<|user|>", "gptoss": "<|return|>", "parts": "<|end|>"},
}


@pytest.mark.parametrize("template", [*ENDS, None])
def test_the_token_that_ends_a_turn_is_found(template: str | None) -> None:
    tokenizer = make_tokenizer(template)
    end = end_of_turn(tokenizer)
    assert (end and tokenizer.convert_ids_to_tokens(end)) == ENDS.get(template or "")


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


def encoded(
    tokenizer: Any, messages: list[Any], longest: int, row: dict[str, Any], *, train_on_all: bool = False
) -> Labelled | str:
    """A chat with the other columns of its row, or the reason why the chat is left out."""
    counts = Counter[str]()
    rows = [("", {**row, "messages": messages})]
    table = Table(Source(name="x", column="messages"), read=lambda columns, seed: iter(rows), identity={})
    chats = list(ChatTemplate(tokenizer, longest, train_on_all=train_on_all).rows(table, counts))
    if chats:
        [chat] = chats
        return chat
    [reason] = counts
    return reason.removesuffix(" left out")


@pytest.mark.parametrize("name", REFERENCES)
def test_labels_equal_a_plain_reference(name: str) -> None:
    template, messages, pieces = REFERENCES[name]
    tokenizer = make_tokenizer(template)
    ids, loss_mask = [], []
    for text, by_assistant in pieces:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += own
        loss_mask += [by_assistant] * len(own)
    assert encoded(tokenizer, messages, len(ids), {}) == Labelled(ids, loss_mask)
    everything = encoded(tokenizer, messages, len(ids), {}, train_on_all=True)
    assert everything == Labelled(ids, [True] * len(ids))


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("chatml", question(1, words=400), "over 100 tokens"),
        ("chatml", QUESTIONS[:1], "without a turn of the assistant"),
        ("chatml", [{"role": "user", "content": "<|im_end|>"}, QUESTIONS[1]], "special tokens"),
        ("chatml", [{"role": "user", "content": 3}, QUESTIONS[1]], "'int' object"),
        ("gemma", [SYSTEM, *QUESTIONS], "no turns of the system"),
        # This template puts the system message into the last turn of the user, if that is the last turn of all.
        ("mistral", [SYSTEM, *QUESTIONS], "turns of the system, unknown"),
        ("chatml", [], "refuses"),
    ],
)
def test_an_unusable_chat_is_left_out_with_the_reason(
    template: str, messages: list[dict[str, Any]], reason: str
) -> None:
    chat = encoded(make_tokenizer(template), messages, 100, {})
    assert isinstance(chat, str)
    assert reason in chat


def test_a_template_that_rewrites_earlier_turns_is_named_as_the_reason() -> None:
    """Where a turn begins cannot be told from a chat that ends with it."""
    template = "{% for m in messages %}[{{ m.role }} of {{ messages | length }}]{{ m.content }}{% endfor %}"
    assert "refuses (earlier turns change" in left_out(QUESTIONS, {}, template)


def test_a_turn_is_learned_if_the_last_turn_alone_ends_with_a_line_break() -> None:
    end = "{{ '\n' if loop.last and m.role == 'assistant' else ' ' }}"
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}" + end + "{% endfor %}"
    assert learned(QUESTIONS, {}, template)[1] == "[assistant]It is 4.|[assistant]2 + 3 = 5\n"


@pytest.mark.parametrize(
    ("before", "answer", "own"),
    [(": ", "self", " self[end]"), (": ", "self is", " self is[end]"), ("]\n", "\nHello", "\n\nHello[end]")],
)
def test_an_answer_is_learned_whole_where_its_first_token_begins_in_the_prompt(
    before: str, answer: str, own: str
) -> None:
    template = "{% for m in messages %}{{ m.role + before + m.content }}[end]{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant' + before }}{% endif %}"
    messages = [QUESTIONS[0], {"role": "assistant", "content": answer}]
    assert learned(messages, {"chat_template_kwargs": {"before": before}}, template)[1] == own


TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "P1"}}}
KNOWS_TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ (c.function or c).name }} {{ (c.function or c).arguments | tojson }}>"
    "{% endfor %}[end]\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALLING = [
    {"role": "user", "content": "Tide?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "tide", "content": "5 feet"},
    {"role": "assistant", "content": "It is 5."},
]


def under(template: str) -> Any:
    """A tokenizer with a chat template, a special token that no setting names, as most of Llama 3, and a plain one."""
    tokenizer = make_tokenizer(None)
    tokenizer.add_tokens([AddedToken("<|unnamed|>", special=True), AddedToken("feet")])
    tokenizer.chat_template = template
    return tokenizer


def left_out(messages: list[Any], row: dict[str, Any], template: str) -> str:
    """The reason why a chat is left out."""
    reason = encoded(under(template), messages, 1000, row)
    assert isinstance(reason, str)
    return reason


def learned(messages: list[Any], row: dict[str, Any], template: str = KNOWS_TOOLS) -> tuple[str, str]:
    """The rendered chat and its learned part, each `|` before a turn."""
    tokenizer = under(template)
    chat = encoded(tokenizer, messages, 1000, row)
    assert isinstance(chat, Labelled), chat
    own = "".join(tokenizer.decode([i]) if mask else "|" for i, mask in zip(chat.ids, chat.loss_mask, strict=True))
    return tokenizer.decode(chat.ids), re.sub(r"\|+", "|", own).strip("|")


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]], ids=["list", "text", "texts"])
@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"name": "tide", "arguments": {"port": "P1"}},
        {"function": {"name": "tide", "arguments": '{"port": "P1"}'}},
        # As Arrow gives a call beside one with another argument.
        {"function": {"name": "tide", "arguments": {"port": "P1", "hour": None}}, "id": None},
    ],
    ids=["TRL", "flat", "OpenAI", "Arrow"],
)
def test_tools_and_calls_are_rendered_by_the_template(call: dict[str, Any], tools: Any) -> None:
    messages = [CALLING[0], {**CALLING[1], "tool_calls": [call]}, *CALLING[2:]]
    text, own = learned(messages, {"tools": tools})
    assert text == json.dumps([TOOL]) + (
        '\n[user]Tide?[end]\n[assistant]<tide {"port": "P1"}>[end]\n[tool]5 feet[end]\n[assistant]It is 5.[end]\n'
    )
    assert own == '<tide {"port": "P1"}>[end]\n|It is 5.[end]\n'


@pytest.mark.parametrize("calls", [json.dumps([CALL]), [json.dumps(CALL)]], ids=["all", "each"])
def test_calls_may_be_json_strings(calls: Any) -> None:
    messages = [CALLING[0], {**CALLING[1], "tool_calls": calls}, *CALLING[2:]]
    assert learned(messages, {"tools": [TOOL]}) == learned(CALLING, {"tools": [TOOL]})


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "null"}])
def test_a_call_may_have_no_arguments(arguments: dict[str, Any]) -> None:
    call = {"function": {"name": "tide", **arguments}}
    messages = [CALLING[0], {**CALLING[1], "tool_calls": [call]}, *CALLING[2:]]
    assert learned(messages, {"tools": [TOOL]})[1] == "<tide {}>[end]\n|It is 5.[end]\n"


def test_an_empty_list_of_calls_is_kept_from_the_template() -> None:
    refusal = "{% for m in messages if m.tool_calls is defined %}{{ raise_exception('no calls') }}{% endfor %}"
    _, own = learned([QUESTIONS[2], {**QUESTIONS[3], "tool_calls": []}], {}, refusal + KNOWS_TOOLS)
    assert own == "2 + 3 = 5[end]\n"


@pytest.mark.parametrize("content", [{"Höhe": 5}, 5, [{"feet": 5}], ["a type", 5]])
def test_the_result_of_a_tool_that_is_no_text_is_written_as_json(content: Any) -> None:
    messages = [*CALLING[:2], {"role": "tool", "content": content}, CALLING[3]]
    text, _ = learned(messages, {"tools": [TOOL]})
    assert f"[tool]{json.dumps(content, ensure_ascii=False)}[end]" in text


@pytest.mark.parametrize("many", [False, True])
def test_turns_of_llama_factory_that_are_calls_are_learned(many: bool) -> None:
    function = CALL["function"]
    call = json.dumps([function, function] if many else function)
    theirs = [{"from": "human", "value": "Tide?"}, {"from": "function_call", "value": call}]
    theirs += [{"from": "observation", "value": "5 feet"}, {"from": "gpt", "value": "It is 5."}]
    template = KNOWS_TOOLS.replace("(c.function or c)", "c.function")
    text, own = learned(theirs, {"tools": json.dumps([TOOL])}, template)
    assert "[tool]5 feet[end]" in text
    assert own == '<tide {"port": "P1"}>' * (1 + many) + "[end]\n|It is 5.[end]\n"
    assert "tool_calls, unknown" in left_out(theirs, {}, PLAIN)


@pytest.mark.parametrize("tools", [None, [], "[]", " ", "null"])
def test_no_tools_need_no_template_that_knows_them(tools: Any) -> None:
    assert learned(QUESTIONS[2:], {"tools": tools}, PLAIN)[0] == "[user]And 3?[end][assistant]2 + 3 = 5[end]"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_optional_columns_of_a_chat_reach_the_template(tmp_path: Path, name: str) -> None:
    rows = [{"messages": CALLING, "tools": [TOOL], "n": 1}, {"messages": CALLING[:1] + CALLING[3:], "n": 2}]
    file = tmp_path / name
    if name == "rows.parquet":
        pq.write_table(pa.Table.from_pylist(json.loads(json.dumps(rows).replace('"properties": {}', '"n": 1'))), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = KNOWS_TOOLS
    counts = Counter[str]()
    table = find_table(Source(name=str(file), column="messages"))
    first, second = (tokenizer.decode(chat.ids) for chat in ChatTemplate(tokenizer, 1000).rows(table, counts))
    assert not any("left out" in label for label in counts)
    assert first.startswith('[{"')
    assert '<tide {"port": "P1"}>' in first
    assert second == "[user]Tide?[end]\n[assistant]It is 5.[end]\n"


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
OPTION = "{% set thinking = enable_thinking %}"
TWO_ROLES = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
DROPS_THOUGHTS = PLAIN.replace("m.content", "m.content if m.role == 'user' else m.content.split('</think>')[-1]")
THINKS = {"role": "assistant", "reasoning_content": "2 + 2", "content": "4"}
THINKS_INLINE = {"role": "assistant", "content": "<think>2 + 2, for this reason.</think>4 for this reason."}
ABOUT_THOUGHTS = {"role": "user", "content": "What is </think>?"}
OLD_CALL = {"role": "assistant", "content": None, "function_call": {"name": "tide", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "lamp.png"}}


@pytest.mark.parametrize(
    ("messages", "row", "template", "reason"),
    [
        (CALLING, {}, PLAIN, "tool_calls, unknown"),
        (QUESTIONS, {"tools": [TOOL]}, PLAIN, "tools, unknown"),
        ([CALLING[0], *CALLING[2:]], {}, TWO_ROLES, "turns of the tool, unknown"),
        ([*QUESTIONS[:3], THINKS], {}, PLAIN, "reasoning_content, unknown"),
        ([*QUESTIONS[:3], THINKS_INLINE], {}, DROPS_THOUGHTS, "<think> in an answer, unknown"),
        ([THINKS_INLINE, *QUESTIONS[2:]], {}, DROPS_THOUGHTS, "<think> in an answer, unknown"),
        ([THINKS_INLINE, ABOUT_THOUGHTS], {}, DROPS_THOUGHTS, "<think> in an answer, unknown"),
        ([QUESTIONS[0], OLD_CALL], {}, PLAIN, "function_call, unknown"),
        (CALLING, {}, KNOWS_TOOLS.replace(" | tojson", ""), "Python text"),
        ([*QUESTIONS[:3], {"role": "assistant", "content": None}], {}, PLAIN, "empty turn"),
        ([*QUESTIONS[:3], {"role": "assistant", "content": " "}], {}, PLAIN, "empty turn"),
        ([*QUESTIONS[:3], {"role": "assistant", "content": "", "tool_calls": []}], {}, PLAIN, "empty turn"),
        ([*QUESTIONS[:3], {"from": "gpt", "value": None}], {}, PLAIN, "empty turn"),
        ([{"role": "user", "content": [IMAGE]}, QUESTIONS[1]], {}, PLAIN, "image_url"),
        (QUESTIONS, {"images": ["lamp.png"]}, PLAIN, "images"),
        ([*QUESTIONS[:3], {"role": "Assistant", "content": "4"}], {}, PLAIN, "Assistant"),
        (CALLING, {"tools": [{**TOOL, "name": "<|im_end|>"}]}, KNOWS_TOOLS, "special tokens"),
        ([QUESTIONS[0], {"role": "user", "content": "<|unnamed|>"}], {}, PLAIN, "special tokens"),
        # The template has the word for another purpose.
        ([QUESTIONS[0], {**QUESTIONS[1], "thinking": "2 + 2"}], {}, OPTION + PLAIN, "thinking, unknown"),
        ([QUESTIONS[0], {**QUESTIONS[1], "reasoning": "2 + 2"}], {}, PLAIN, "reasoning, unknown"),
        ([QUESTIONS[0], {**QUESTIONS[1], "train": False}], {}, PLAIN, "without a turn of the assistant"),
    ],
)
def test_what_the_template_would_lose_is_left_out_with_the_reason(
    messages: list[Any], row: dict[str, Any], template: str, reason: str
) -> None:
    assert reason in left_out(messages, row, template)


def test_parts_of_text_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Two "}, {"type": "text", "text": "parts.", "image": None}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[1:]}]
    text, own = learned(messages, {"system": "Be brief."})
    assert text == "[system]Be brief.[end]\n[user]Two parts.[end]\n[assistant]parts.[end]\n"
    assert own == "parts.[end]\n"


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}]
)
def test_a_turn_that_is_marked_is_not_learned(mark: dict[str, Any]) -> None:
    first = {"from": "gpt", "value": "It is 4.", **mark}
    text, own = learned([QUESTIONS[0], first, *QUESTIONS[2:]], {})
    assert "[assistant]It is 4.[end]" in text
    assert own == "2 + 3 = 5[end]\n"
    kept = {key: not value for key, value in mark.items()}
    assert learned([QUESTIONS[0], {**first, **kept}], {})[1] == "It is 4.[end]\n"
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = KNOWS_TOOLS
    under_all = encoded(tokenizer, [{**QUESTIONS[1], **mark}], 100, {}, train_on_all=True)
    assert "loss: all" in under_all


@pytest.mark.parametrize(
    ("options", "end"),
    [({"end": "stop"}, "stop"), ('{"end": "stop"}', "stop"), ({"end": None}, "end"), ('{"end": null}', "end")],
)
def test_options_of_the_template_are_those_of_the_row(options: Any, end: str) -> None:
    template = KNOWS_TOOLS.replace("[end]", "[{{ end | default('end') }}]")
    assert learned(QUESTIONS[2:], {"chat_template_kwargs": options}, template)[1] == f"2 + 3 = 5[{end}]\n"


THINKS_FIRST = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "counted"),
    [
        (TURNS.replace("}}{%", "}}<|im_end|>\n{%") + THINKS_FIRST, {"think": 2}),
        # As GLM: the next turn ends a turn, and the last one has no end.
        (TURNS, {"special": 1}),
        (TURNS.replace("}}{%", "}}<|im_end|>\n{%"), {}),
    ],
)
def test_answers_unlike_those_at_inference_are_counted(template: str, counted: dict[str, int]) -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = template
    counts = Counter[str]()
    rows = [("", {"messages": QUESTIONS})]
    table = Table(Source(name="x", column="messages"), read=lambda columns, seed: iter(rows), identity={})
    assert len(list(ChatTemplate(tokenizer, 1000).rows(table, counts))) == 1
    words = ("think", "special")
    assert {word: number for word in words for label, number in counts.items() if word in label} == counted


def test_the_day_of_packing_changes_no_chat() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + TURNS
    chat = encoded(tokenizer, QUESTIONS, 1000, {})
    assert isinstance(chat, Labelled)
    assert tokenizer.decode(chat.ids).startswith("01 Jan 2026")


def test_sharegpt_turns_become_messages() -> None:
    theirs = [{"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": role} for role in ROLES]
    messages = messages_of("x:1", theirs)
    assert [(message["role"], message["content"]) for message in messages] == [(role, role) for role in ROLES]
    # As Arrow gives messages, if some of them are of ShareGPT.
    [message] = messages_of("x:1", [{"from": None, "value": None, "role": "user", "content": "a"}])
    assert (message["role"], message["content"]) == ("user", "a")
    with refused(DataError, "x:1: ", "role", "content"):
        messages_of("x:1", [{"text": "a"}])


def test_wrapped_chats_are_packed_without_cuts_and_padded(tmp_path: Path, tokenizer: Any) -> None:
    chats = [question(number, words=number % 17) for number in range(60)] + [question(99, words=500)]
    source = write_chats(tmp_path / "chats.jsonl", chats)
    wrapped = data_of(source, packing="wrapped")
    found = training_data(wrapped, Training(steps=16, global_batch_size=1), tokenizer, 64, 128)
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
    under_all = training_data(wrapped.changed(loss="all"), Training(steps=1, global_batch_size=1), tokenizer, 64, 128)
    [row] = under_all.rows
    assert tokenizer.decode(row["input_ids"][row["loss_mask"]]).startswith("<|im_start|>user\nQuestion")


@pytest.mark.parametrize("positions", ["contiguous", "pose"])
def test_chats_are_isolated_each_with_positions_of_its_own(tmp_path: Path, tokenizer: Any, positions: str) -> None:
    """Packed whole into sequences of at most the target, or of L tokens with PoSE, each as it is alone at inference."""
    chats = [question(number, words=number % 17) for number in range(90)] + [question(99, words=500)]
    source = write_chats(tmp_path / "chats.jsonl", chats)
    length, target = (128, 128) if positions == "contiguous" else (64, 512)
    data = data_of(source, positions=positions, chunks=50)  # more than the shortest chats have tokens
    found = training_data(data, Training(steps=16, global_batch_size=1), tokenizer, 64, target)
    too_long = {128: 1, 64: 14}[length]
    assert found.messages[1:] == [f"chats of over {length} tokens left out: {too_long}"]
    seen = []
    skips = 0
    for row in found.rows:
        lengths = row["lengths"].tolist()
        assert length // 2 < sum(lengths) == len(row["input_ids"]) <= length
        own = row["position_ids"] if positions == "pose" else torch.cat([torch.arange(number) for number in lengths])
        for ids, places in zip(row["input_ids"].split(lengths), own.split(lengths), strict=True):
            text = tokenizer.decode(ids)
            assert text.startswith("<|im_start|>user\nQuestion")
            assert (text.count("<|im_start|>user"), text.endswith("<|im_end|>\n")) == (1, True)
            seen.append(text.partition("?")[0])
            assert places[0] == 0
            assert (places.diff() >= 1).all()
            assert places[-1] < target
            skips += int((places.diff() > 1).sum())
    assert len(seen) == len(set(seen)) > 15
    assert skips > len(seen) if positions == "pose" else not skips


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


@pytest.mark.parametrize("written", ["", "<s>", "<s></s>"])
@pytest.mark.parametrize("added", ["<s>", "<s></s>"])
def test_packed_chats_begin_once_with_the_tokens_that_the_tokenizer_adds(
    tmp_path: Path, written: str, added: str
) -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = f"{written}{{#- #}}{tokenizer.chat_template}"
    specials = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=added.replace(">", "> ") + "$A", special_tokens=specials
    )
    source = write_chats(tmp_path / "chats.jsonl", [question(number) for number in range(60)])
    wrapped = data_of(source, packing="wrapped")
    found = training_data(wrapped, Training(steps=6, global_batch_size=1), tokenizer, 64, 128)
    for row in found.rows:
        text = tokenizer.decode(row["input_ids"].tolist())
        begin = written if written.startswith(added) else added + written
        assert text.startswith(f"{begin}<|im_start|>user")
        assert not row["loss_mask"][:2].any()


def test_a_template_that_wants_a_system_turn_gives_no_second_bos(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("llama3")
    refusal = "{% if messages[0].role != 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    source = write_chats(tmp_path / "chats.jsonl", [[SYSTEM, *question(number)] for number in range(9)])
    found = training_data(
        data_of(source, packing="wrapped"), Training(steps=1, global_batch_size=1), tokenizer, 64, 128
    )
    assert found.rows[0]["input_ids"].tolist()[:2].count(bos) == 1


@pytest.mark.parametrize("positions", ["contiguous", "pose"])
def test_short_chats_stay_short_in_a_mixture_with_text_and_long_chats(
    tmp_path: Path, tokenizer: Any, positions: str
) -> None:
    (tmp_path / "book.txt").write_text("The cat sees the house, and then it sleeps.\n" * 4000)
    chats = write_chats(tmp_path / "chats.jsonl", [question(number, words=number % 17) for number in range(900)])
    sources = [{"name": str(tmp_path / "book.txt"), "weight": 3}, chats]
    data = data_of(*sources, keep_short=0.25, positions=positions, packing="wrapped")
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
    with refused(DataError, "data.source: ", "chat template"):
        training_data(data_of(write_chats(tmp_path / "x.jsonl", [])), training, make_tokenizer(None), 64, 128)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_completion_of_a_prompt_of_messages_is_learned(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    """Rows as TRL has them; the answers in the prompt are not learned, as there."""
    file = tmp_path / f"rows.{suffix}"
    earlier = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "a fox"}]
    row = {"prompt": [*earlier, {"role": "user", "content": "Where?"}], "completion": QUESTIONS[1:2]}
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row] * 40), file)
    else:
        file.write_text("\n".join([json.dumps(row)] * 40))
    data = data_of({"name": str(file), "column": "messages"})
    rows = training_data(data, Training(steps=1, global_batch_size=1), tokenizer, 64, 256).rows
    learned = tokenizer.decode(rows[0]["input_ids"][rows[0]["loss_mask"]])
    assert "It is 4." in learned
    assert "fox" not in learned
    assert "fox" in tokenizer.decode(rows[0]["input_ids"])


@pytest.mark.parametrize(
    ("row", "column", "names"),
    [
        ({"chat": QUESTIONS}, "chat", ["no text", "column chat", "columns: chat"]),
        ({"chat": "a"}, "text", ["no text", "column text", "messages or conversations", "columns: chat"]),
        ({"turns": QUESTIONS}, "text", ["rename turns to messages"]),
        ({"turns": QUESTIONS}, "turns", ["rename turns to messages"]),
        ({"prompt": QUESTIONS, "completion": QUESTIONS[1:2]}, "text", ["name the column messages"]),
        ({"prompt": QUESTIONS, "completion": QUESTIONS[1:2]}, "prompt", ["name the column messages"]),
        (
            {"prompt": QUESTIONS, "chosen": QUESTIONS[1:2], "rejected": QUESTIONS[1:2]},
            "text",
            ["rename chosen to completion"],
        ),
        ({"chosen": QUESTIONS, "rejected": QUESTIONS}, "text", ["rename chosen to messages"]),
        ({"prompt": "a", "completion": "b"}, "text", ['data.template: "{prompt}"', "data.completion: completion"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "text", ["data.completion: chosen"]),
        ({"input_ids": [5, 6], "labels": [5, 6]}, "text", ["token ids", "texts"]),
        ({"input_ids": [5, 6], "labels": [5, 6]}, "messages", ["token ids", "texts"]),
        ({"data": [{"text": "Hello"}]}, "text", ["rows in data", "a file of their own"]),
        ({"messages": "Hello"}, "messages", ["no list of messages", "column messages"]),
        ({"text": "Hello"}, "messages", ["files of rows", ".jsonl", "with messages", "columns: text"]),
    ],
)
def test_a_wrong_column_is_refused_with_a_suggestion(
    tmp_path: Path, row: dict[str, Any], column: str, names: list[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    [problem] = data_problems(data_of({"name": str(file), "column": column}))
    assert problem.startswith(f"data.source: {file}:1: ")
    assert all(name in problem for name in names)
