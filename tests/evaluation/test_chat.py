"""Chats measured against a straightforward reference: whole logits of both models."""

import json
import math
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import run_captured
from pi_lora.api import load
from pi_lora.data.tokens import Labelled
from pi_lora.evaluation import forward
from pi_lora.evaluation.chat import Chats, ChatScores, chat_score
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.suite import name_of_text_scores
from pi_lora.models.loaded import LoadedModel
from pi_lora.recipe.evaluation import ChatOptions, Evaluation
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.report.card import refresh_scores
from pi_lora.report.scores import MeasuredRun

TEMPLATE = (
    "{% for each in messages %}[{{ each.role }}] {{ each.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TURNS = [["Name a sea.", "The red one."], ["Hi", "Hello."], ["Count", "1 2 3", "More", "4 5 6"], ["a " * 300, "b"]]


def chat(turns: list[str]) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]}


@pytest.fixture
def here(tmp_path: Path, small_model: Path, lora_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with chats, a base that chats and its run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(chat(turns))}\n" for turns in TURNS))
    for name, folder in {"base": small_model, "run": lora_run}.items():
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def measured(model: LoadedModel, **options: Any) -> ChatScores:
    return Chats().run(model, ChatOptions(data="chats.jsonl", **options), Session())


def reference(model: LoadedModel, base: LoadedModel, turns: list[str]) -> tuple[float, float]:
    """The loss and the divergence of every token of the assistant, one at a time."""
    loss, divergence = 0.0, 0.0
    text, tokens = "", 0
    for question, answer in zip(turns[::2], turns[1::2], strict=True):
        text += f"[user] {question}</s>[assistant] "
        prompt_length = len(text)
        text += f"{answer}</s>"
        encoded = base.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # A token of the space before an answer and of its first word is part of the answer.
        before = [
            token
            for token, (_, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            if end <= prompt_length
        ]
        ids = torch.tensor([encoded["input_ids"]])
        own, other = (each.module(ids).logits[0].double().softmax(-1) for each in (model, base))
        for place in range(len(before), ids.shape[1]):
            p, q = other[place - 1], own[place - 1]
            loss -= q[ids[0, place]].log().item()
            divergence += (p * (p / q).log()).sum().item()
            tokens += 1
    return loss / tokens, divergence / tokens


def test_chat_scores_equal_a_plain_reference(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LOGITS_ON_CPU", 5000)  # so that several parts are needed
    model, base = load("run"), load("base")
    scores = measured(model, divergence_from="base")
    assert [each.name for each in scores.per_chat] == ["chats.jsonl:1", "chats.jsonl:2", "chats.jsonl:3"]
    assert (scores.chats, scores.left_out) == (3, 1)
    for found, turns in zip(scores.per_chat, TURNS, strict=False):
        with torch.no_grad():
            expected = reference(model, base, turns)
        assert math.log(found.perplexity) == pytest.approx(expected[0], rel=1e-4)
        assert found.divergence == pytest.approx(expected[1], abs=1e-5)
        assert found.divergence > 1e-4
    assert scores.options.window == base.window
    divergence, pairs = list(Chats().metrics(scores))[1], [(each.divergence, each.tokens) for each in scores.per_chat]
    mean = sum(value * weight for value, weight in pairs) / scores.tokens
    spread = math.sqrt(sum((weight * (value - mean)) ** 2 for value, weight in pairs) * 3 / 2) / scores.tokens
    assert divergence.value == pytest.approx(mean)
    assert divergence.interval == pytest.approx((mean - 4.30 * spread, mean + 4.30 * spread))  # Student's t of three


def test_logits_of_one_part_are_in_memory_at_a_time(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LOGITS_ON_CPU", 5 * 1024)
    model, base = load(str(small_model)), load(str(small_model))
    made: list[weakref.ref[torch.Tensor]] = []
    in_memory: list[int] = []
    for loaded in (model, base):
        head = loaded.module.get_output_embeddings()
        head.register_forward_pre_hook(lambda *_: in_memory.append(sum(ref() is not None for ref in made)))
        head.register_forward_hook(lambda _module, _inputs, logits: made.append(weakref.ref(logits)))
    chat_score("a chat", Labelled([*range(2, 20)], [True] * 18), model, base)
    # Of the model none, and of the base those that the model gave for the same tokens.
    assert in_memory == [0, 1] * 4


def test_a_base_compared_with_itself_has_no_difference(here: Path) -> None:
    plain, against = measured(load("base")), measured(load("base"), divergence_from="base")
    assert plain.perplexity == against.perplexity
    assert (plain.divergence, against.divergence) == (None, 0)
    assert [metric.label for metric in Chats().metrics(plain)] == ["chat perplexity"]


def test_the_comparison_has_a_row_for_each_cost(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = run_captured(
        *(capsys, monkeypatch, "eval", "chat", "run", "--data", "chats.jsonl", "--divergence-from", "base"),
        *("--json", "run/scores/chat.json"),
    )
    assert status == 0
    assert any(line.startswith("chats.jsonl: ") and line.endswith("64 tokens left out: 1") for line in err.splitlines())
    found = json.loads((here / "run" / "scores" / "chat.json").read_text())
    few = {"passkey": {"depths": 2, "trials": 1}}
    recipe = load_recipe(here / "run" / "recipe.yaml").recipe
    recipe = recipe.model_copy(update={"evaluation": Evaluation.model_validate(few)})
    (here / "run" / "recipe.yaml").write_text(dump_recipe(recipe))
    refresh_scores(MeasuredRun(here / "run"))
    card = (here / "run" / "README.md").read_text()
    for metric in Chats().metrics(ChatScores.model_validate(found)):
        assert re.search(rf"\| {re.escape(metric.label)} .*{re.escape(metric.text.split()[0])}", card)
    (here / "text.txt").write_text("The door is open and the road is long. " * 60)
    asked = ("--data", "text.txt", "--chat", "chats.jsonl", "--json", "rows.json")
    status, _, err = run_captured(capsys, monkeypatch, "compare", "base", "run", *asked)
    assert status == 0, err
    rows = {row["measurement"]: row for row in json.loads((here / "rows.json").read_text())["rows"]}
    names = ["chat perplexity", "chat KL divergence from the base"]
    assert [name for name in rows if "chat" in name] == names
    assert [rows[name]["pairs"] for name in names] == [3, 3]
    before, after = (rows[names[0]][name] for name in ("base", "run"))
    assert rows[names[0]]["unit"] == "%"  # of the perplexity, as everywhere else
    assert rows[names[0]]["change"] == pytest.approx(100 * (after / before - 1))
    assert (rows[names[1]]["base"], rows[names[1]]["run"]) == (0, found["divergence"])
    low, high = rows[names[1]]["interval"]
    assert low < found["divergence"] < high
    # Other chats have a file of scores of their own.
    (here / "others.jsonl").write_text(json.dumps(chat(TURNS[0])))
    others = ("--data", "text.txt", "--chat", "others.jsonl", "--json", "rows.json")
    status, _, err = run_captured(capsys, monkeypatch, "compare", "base", "run", *others)
    assert status == 0, err
    assert json.loads((here / "run" / "scores" / "chat.json").read_text()) == found
    settings = json.loads((here / "rows.json").read_text())["settings"]
    assert [name for name in settings if "data others.jsonl" in settings[name]] == [
        name_of_text_scores("others.jsonl", "chat")
    ]


@pytest.mark.parametrize(
    ("model", "rows", "where"),
    [
        ("base", [chat(["a " * 300, "b"])], "--data: chats.jsonl: "),
        ("builtin:tiny", [chat(["a", "b"])], "--data: the tokenizer "),
    ],
    ids=["too long", "no template"],
)
def test_a_mistake_in_eval_chat_is_one_line(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    rows: list[Any],
    where: str,
) -> None:
    (here / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    status, out, err = run_captured(capsys, monkeypatch, "eval", "chat", *model.split(), "--data", "chats.jsonl")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(where)


def test_a_window_longer_than_the_model_is_measured(here: Path) -> None:
    scores = measured(load("run"), divergence_from="base", window=640)
    assert scores.options.window == 640
    assert scores.left_out == 0


def test_a_model_under_autocast_is_compared_with_its_base(here: Path) -> None:
    """As full runs and adapters of float32 bases are on a GPU."""
    model = load("run")
    plain = measured(model, divergence_from="base").divergence
    autocast = replace(model, autocast=True)  # in name alone: the numbers stay
    assert measured(autocast, divergence_from="base").divergence == plain


def test_a_run_whose_base_moved_is_measured_with_its_new_place(
    here: Path, small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("adapter_config.json", "run.json"):
        file = here / "run" / name
        file.write_text(file.read_text().replace(str(small_model), str(here / "gone")))
    arguments = ["eval", "chat", "run", "--data", "chats.jsonl", "--limit", "1"]
    status, _, err = run_captured(capsys, monkeypatch, *arguments)
    assert (status, "--base" in err) == (2, True)
    status, _, err = run_captured(capsys, monkeypatch, *arguments, "--base", "base")
    assert status == 0, err


@pytest.mark.parametrize("other", ["tokens", "logits"])
def test_a_base_with_another_vocabulary_is_refused_before_anything_is_measured(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    shutil.copytree(here / "base", here / "other")
    if other == "tokens":
        file = here / "other" / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        file.write_text(json.dumps(tokenizer))
    else:
        config = json.loads((here / "other" / "config.json").read_text())
        config["vocab_size"] += 64
        (here / "other" / "config.json").write_text(json.dumps(config))
    arguments = ["eval", "chat", "run", "--data", "chats.jsonl", "--divergence-from", "other"]
    status, out, err = run_captured(capsys, monkeypatch, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("--divergence-from: other: ")
    assert err.count("\n") == 1


def test_turns_that_are_not_learned_are_not_measured(here: Path) -> None:
    rows = [chat(TURNS[2]), chat(TURNS[1])]
    rows[0]["messages"][1]["weight"] = 0
    (here / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = load("base")
    scores = measured(model)
    answer = model.tokenizer("4 5 6</s>", add_special_tokens=False)["input_ids"]
    assert scores.per_chat[0].tokens == len(answer)
    assert (scores.chats, scores.left_out) == (2, 0)
