"""Prompts in a chat template: what precedes an answer, which models are asked so, and templates that cannot ask."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from conftest import refused, run_captured, small_recipe, train
from pi_lora.api import compare, evaluate, evaluate_run, load, probe
from pi_lora.data.chats import chat_prompt, chat_prompt_ids
from pi_lora.data.tokens import prompt_ids
from pi_lora.errors import DataError, RecipeError
from pi_lora.evaluation.passkey import make_trial
from pi_lora.models.loaded import LoadedModel
from pi_lora.preflight import check
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.types import UI, showing

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
TURNS = "{% for each in messages %}[{{ each.role }}]{{ each.content }}{% endfor %}"
Knows = Callable[..., list[bool]]


@pytest.mark.parametrize(
    ("template", "before"),
    [
        ("chatml", "<|im_start|>assistant\n"),
        ("gemma", "<start_of_turn>model\n"),
        ("glm", "<|assistant|><think></think>\n"),
        ("gptoss", "<|start|>assistant<|channel|>final<|message|>"),
        ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("mistral", "[/INST] "),
        ("parts", "Assistant: "),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3_5", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_an_answer_begins_as_the_template_writes_it_without_a_thought(template: str, before: str) -> None:
    tokenizer = load("builtin:tiny").tokenizer
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    prompt = chat_prompt(tokenizer, " Where is it? ", "It is")
    assert prompt.endswith(f"{before}It is")
    assert prompt.count("Where is it?") == 1
    # An answer that begins with a word brings the space before it.
    assert chat_prompt(tokenizer, "Where is it?").endswith(before.rstrip(" "))
    # Both the tokenizer and some templates write BOS.
    ids = prompt_ids(tokenizer, prompt)
    assert (ids[0], ids.count(tokenizer.bos_token_id)) == (tokenizer.bos_token_id, 1)
    trial = make_trial(tokenizer, 512, 100, "90817", chat=True)
    ids = [*trial.prompt, *trial.answer]
    assert len(ids) - ids.index(tokenizer.convert_tokens_to_ids("9")) == trial.distance


def test_a_template_is_asked_for_no_thought_and_special_tokens_in_a_text_are_text() -> None:
    tokenizer = load("builtin:tiny").tokenizer
    for variable in ("enable_thinking", "thinking"):
        tokenizer.chat_template = f"{{% if {variable} is not false %}}[think]{{% endif %}}{TURNS}"
        assert chat_prompt(tokenizer, "Where?") == "[user]Where?[assistant]"
    # Gemma 4 and Hunyuan write an empty thought in prompts alone. That of DeepSeek R1 is open, and no variable ends it.
    for thought, before in (("{% if enable_thinking is false %}<>{% endif %}", "<>"), ("<", "")):
        ahead = f"{{% if add_generation_prompt %}}[assistant]{thought}{{% endif %}}"
        tokenizer.chat_template = TURNS + ahead
        assert chat_prompt(tokenizer, "Where?", "It is") == f"[user]Where?[assistant]{before}It is"
    assert tokenizer.eos_token_id not in chat_prompt_ids(tokenizer, f"The end {tokenizer.eos_token} is near.")


def test_the_day_of_a_measurement_changes_no_prompt() -> None:
    tokenizer = load("builtin:tiny").tokenizer
    # Some templates call it in a macro, as gpt-oss.
    day = "{% macro today() %}{{ strftime_now('%d %b %Y, %B %m') }}{% endmacro %}"
    tokenizer.chat_template = f"{day}{{% if strftime_now is defined %}}{{{{ today() }}}}{{% endif %}}{TURNS}"
    assert chat_prompt(tokenizer, "Where?") == "01 Jan 2026, January 01[user]Where?[assistant]"


@pytest.fixture
def knows(monkeypatch: pytest.MonkeyPatch) -> Knows:
    """Let every model retrieve so many of eight passkeys as raw text, and so many in the template, if prompts have at
    most `within` tokens; return how it was asked, one by one.
    """
    tokenizer = load("builtin:tiny").tokenizer
    asked: list[bool] = []

    def answers(raw: int, chat: int, within: int = 2048) -> list[bool]:
        def last_logits(_: object, ids: list[int], *, tail: int, prefix: object) -> torch.Tensor:
            text = tokenizer.decode(ids)
            in_template = "[user]" in text
            key = re.findall(r"The pass key is (\d{5})", text)[0]
            assert text.endswith(f"{'[assistant]' if in_template else ' '}The pass key is {key[:-1]}")
            logits = torch.zeros(tail, len(tokenizer))
            if len(ids) <= within and asked.count(in_template) % 8 < (chat if in_template else raw):
                right = [*ids[1 - tail :], tokenizer.convert_tokens_to_ids(key[-1])]
                logits[range(tail), right] = 1
            asked.append(in_template)
            return logits

        monkeypatch.setattr("pi_lora.evaluation.passkey.last_logits", last_logits)
        return asked

    return answers


def with_template() -> LoadedModel:
    model = load("builtin:tiny")
    model.tokenizer.chat_template = TURNS
    return model


@pytest.mark.parametrize(("raw", "chat", "better"), [(8, 8, False), (4, 8, False), (3, 8, True)])
def test_the_template_is_used_where_it_retrieves_more_beyond_noise(
    knows: Knows, raw: int, chat: int, better: bool
) -> None:
    asked = knows(raw, chat)
    lines: list[str] = []
    with showing(UI(say=lines.append)):
        scores = evaluate([with_template(), with_template()], "passkey", target=256, depths=2, trials=1)
    assert [result.options.chat for result in scores] == [better, better]
    assert asked == [False] * 8 + [True] * 8 + [better] * 4
    [line] = lines
    assert line.startswith("builtin:tiny: ")
    assert re.findall(r"\d", line.partition(": ")[2])[:3] == [str(raw), "8", str(chat)]


def test_models_without_a_template_stay_raw_and_so_do_those_that_they_are_compared_with(knows: Knows) -> None:
    asked = knows(0, 8)
    for models in ([load("builtin:tiny")], [with_template(), load("builtin:tiny")]):
        scores = evaluate(models, "passkey", target=256, depths=2, trials=1)
        assert {result.options.chat for result in scores} == {False}
    assert not any(asked)


def test_the_base_decides_how_all_scalings_are_asked(knows: Knows, template_model: Path, tmp_path: Path) -> None:
    asked = knows(0, 8)
    (tmp_path / "text.txt").write_text("The door is open and the road is long. " * 200)
    options = {"data": tmp_path / "text.txt", "scalings": ["pi", "yarn"], "documents": 1, "trials": 1}
    [result] = probe(template_model, 320, **options).targets
    passkeys = [scaling.passkey for scaling in result.scalings.values() if scaling.passkey]
    assert all(passkey.options.chat is True for passkey in passkeys)
    assert asked[:16] == [False] * 8 + [True] * 8
    assert all(asked[16:])


@pytest.fixture
def template_model(small_model: Path, tmp_path: Path) -> Path:
    """A small model with a chat template, whose window holds the passkey prompt."""
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    (model / "chat_template.jinja").write_text(TURNS)
    return model


def test_a_run_is_asked_as_in_its_training_and_as_its_base(knows: Knows, template_model: Path, tmp_path: Path) -> None:
    asked = knows(0, 8, within=256)  # L
    passkey = {"target": 320, "depths": 1, "trials": 1}
    evaluation = {"every": 2, "passkey": passkey}
    run = train(small_recipe(template_model, context={"target": 320}, evaluation=evaluation), tmp_path / "run")
    assert asked == [False] * 8 + [True] * 8 + [True] * 3  # at steps 0, 2 and 4
    evaluate_run(run)
    compare(template_model, run)
    assert asked[19:] == [True] * 2
    kept = {file.name: json.loads(file.read_text())["options"]["chat"] for file in (run / "scores").iterdir()}
    assert kept == dict.fromkeys(
        [*(f"passkey-step-{step}.json" for step in (0, 2, 4)), "passkey.json", "passkey-base.json"], True
    )
    # Under another prompt nothing is read again.
    recipe = yaml.safe_load((run / RECIPE_FILE).read_text())
    recipe["evaluation"]["passkey"]["chat"] = False
    (run / RECIPE_FILE).write_text(yaml.safe_dump(recipe))
    compare(template_model, run)
    assert asked[21:] == [False] * 3
    # Scores of earlier versions were asked as raw text.
    for file in (run / "scores").iterdir():
        content = json.loads(file.read_text())
        del content["options"]["chat"]
        file.write_text(json.dumps(content))
    compare(template_model, run)
    assert len(asked) == 24


def test_a_long_template_has_its_room_in_prompts(
    knows: Knows, template_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knows(0, 8)
    config = json.loads((template_model / "config.json").read_text())
    (template_model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    (template_model / "chat_template.jinja").write_text("The sea is wide and deep. " * 80 + TURNS)
    scores: Any = evaluate(template_model, "passkey", depths=1, trials=1)
    assert scores.options.chat is True
    monkeypatch.setattr("pi_lora.evaluation.suite.load_model", lambda *_: pytest.fail("weights were read"))
    with refused(DataError, "target: 400 "):
        evaluate(template_model, "passkey", target=400, depths=1, trials=1, chat=True)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('a system turn is needed') }}", "a system turn is needed"),
        ("{% for each in messages %}{% if each.role == 'user' %}{{ each.content }}{% endif %}{% endfor %}", ""),
        ("{% for each in messages %}{% if each.role == 'assistant' %}{{ each.content }}{% endif %}{% endfor %}", ""),
    ],
)
def test_a_template_that_cannot_ask_is_a_line_before_weights_are_read(
    template_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    template: str | None,
    reason: str,
) -> None:
    file = template_model / "chat_template.jinja"
    if template:
        file.write_text(template)
    else:
        file.unlink()
    recipe = small_recipe(template_model, context={"target": 320}, evaluation={"passkey": {"chat": True}})
    with refused(RecipeError, "evaluation.passkey.chat: ", reason):
        check(recipe, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("pi_lora.evaluation.suite.load_model", None)
        status, _, err = run_captured(capsys, monkeypatch, "eval", "passkey", str(template_model), "--chat", "true")
    assert (status, err.count("\n"), err.startswith("--chat: "), reason in err) == (2, 1, True, True)
    # By default such a model is asked as raw text.
    scores: Any = evaluate(template_model, "passkey", depths=1, trials=1)
    assert scores.options.chat is False
