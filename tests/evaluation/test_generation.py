"""`pi-lora generate`: what transformers writes after the same tokens, streamed, within the window."""

import io
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import pi_lora
from conftest import refused, run_captured
from pi_lora.api import load
from pi_lora.errors import DataError
from pi_lora.evaluation.generation import answer
from pi_lora.model_ref import ModelRef
from pi_lora.models.loaded import LoadedModel
from pi_lora.recipe.evaluation import Sampling
from pi_lora.scaling.extension import Extension

TOKENS = 12
TEMPLATE = "{% for each in messages %}[{{ each.role }}]{{ each.content }}{% endfor %}[{{ add_generation_prompt }}]"


@pytest.fixture
def extended() -> LoadedModel:
    return load(ModelRef("builtin:tiny", extension=Extension(target=512)))


def written(model: LoadedModel, text: str, **tokenized: Any) -> str:
    """What transformers writes after a text, without a line of this package."""
    ids = torch.tensor([model.tokenizer(text, **tokenized)["input_ids"]])
    found = model.module.generate(input_ids=ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]
    return str(model.tokenizer.decode(found, skip_special_tokens=True)).strip()


def test_generated_text_equals_transformers_and_is_printed(
    extended: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS, stream=True)
    assert text == written(extended, "The sea was")
    assert capsys.readouterr().out.strip() == text
    drawn = [
        pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS, temperature=1.0, seed=seed)
        for seed in (3, 3, 4)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    monkeypatch.setattr(extended.tokenizer, "chat_template", TEMPLATE, raising=False)
    chat = pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS)
    assert chat == written(extended, "[user]The sea was[assistant]") != text
    assert pi_lora.generate(extended, "The sea was", chat_template=False, max_new_tokens=TOKENS) == text
    # A template that takes a list of parts would leave a text out.
    of_parts = TEMPLATE.replace("each.content", "each.content[0].text")
    monkeypatch.setattr(extended.tokenizer, "chat_template", of_parts)
    assert pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS) == chat


@pytest.mark.parametrize("top_p", [1.0, 0.4])
def test_a_sample_equals_transformers_with_temperature_and_top_p_alone(extended: LoadedModel, top_p: float) -> None:
    """Without the 50 likeliest tokens, to which transformers would restrict it."""
    text = answer(extended, "The sea was", Sampling(max_new_tokens=TOKENS, temperature=3.0, top_p=top_p, seed=7))
    ids = torch.tensor([extended.tokenizer("The sea was")["input_ids"]])
    torch.manual_seed(7)
    settings = {"do_sample": True, "temperature": 3.0, "top_p": top_p, "top_k": 0}
    found = extended.module.generate(input_ids=ids, max_new_tokens=TOKENS, **settings)[0, ids.shape[1] :]
    assert text == extended.tokenizer.decode(found, skip_special_tokens=True).strip()


@pytest.mark.parametrize("own", [{"do_sample": True, "temperature": 9.0}, {"repetition_penalty": 9.0}])
def test_the_models_generation_config_does_not_change_the_sampling(extended: LoadedModel, own: dict[str, Any]) -> None:
    """Most chat models come with a generation config that samples, which transformers fills in."""
    plain = pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS)
    extended.module.generation_config.update(**own)
    assert pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS) == plain
    assert extended.module.generation_config.to_diff_dict().items() >= own.items()


def test_every_eos_of_the_model_ends_the_text(extended: LoadedModel) -> None:
    """Chat models name the end of a turn beside the end of a text in their generation config."""
    first = extended.tokenizer(" " + pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS))["input_ids"]
    extended.module.generation_config.eos_token_id = [extended.tokenizer.eos_token_id, first[6]]
    short = pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS)
    assert 1 <= len(extended.tokenizer(" " + short)["input_ids"]) <= 8


def test_generation_stops_at_the_window(extended: LoadedModel) -> None:
    ids = extended.tokenizer("The sea was calm. " * 400)["input_ids"][:509]
    text = extended.tokenizer.decode(ids, skip_special_tokens=True)
    left = extended.window - len(extended.tokenizer(text)["input_ids"])
    assert len(extended.tokenizer(pi_lora.generate(extended, text))["input_ids"]) <= left + 1
    with refused(DataError, "prompt: ", "builtin:tiny", 512):
        pi_lora.generate(extended, text * 2)


def test_a_prompt_that_leaves_one_token_is_answered_and_a_longer_one_refused(extended: LoadedModel) -> None:
    text = "The" + " the" * (extended.window - 3)
    assert len(extended.tokenizer(text)["input_ids"]) == extended.window - 1
    pi_lora.generate(extended, text)
    with refused(DataError, f"prompt: {extended.window:,} "):
        pi_lora.generate(extended, f"{text} the")


def test_the_generate_command_reads_prompt_file_or_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lora_run: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("The sea was")
    asked = ("generate", str(lora_run), "--tokens", "8")
    expected = pi_lora.generate(str(lora_run), "The sea was", max_new_tokens=8)
    status, out, err = run_captured(capsys, monkeypatch, *asked, "--prompt", "The sea was")
    assert (status, out.strip(), err) == (0, expected, "")
    assert run_captured(capsys, monkeypatch, *asked, "--file", str(tmp_path / "prompt.txt"))[:2] == (0, out)
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(b"The sea was")))
    assert run_captured(capsys, monkeypatch, *asked)[:2] == (0, out)
    status, out, err = run_captured(capsys, monkeypatch, *asked, "--prompt", "The sea " * 300)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("prompt: ")
    assert run_captured(capsys, monkeypatch, *asked, "--prompt", "")[0] == 2


def test_a_prompt_that_the_chat_template_refuses_is_a_line(extended: LoadedModel, monkeypatch: Any) -> None:
    monkeypatch.setattr(extended.tokenizer, "chat_template", "{{ raise_exception('a system turn is needed') }}")
    with refused(DataError, "builtin:tiny: ", "a system turn is needed", "chat_template=False"):
        pi_lora.generate(extended, "The sea was")
    assert pi_lora.generate(extended, "The sea was", chat_template=False, max_new_tokens=1)


def test_generation_continues_the_prompt_without_an_eos_between(extended: LoadedModel) -> None:
    plain, ends = pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS), [("<s>", 0), ("</s>", 1)]
    extended.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=ends)
    assert extended.tokenizer("The sea was")["input_ids"][-1] == extended.tokenizer.eos_token_id
    assert pi_lora.generate(extended, "The sea was", max_new_tokens=TOKENS) == plain


def test_the_token_that_ends_a_turn_ends_the_text(extended: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert extended.ends == [1]
    template = "{% for m in messages %}{{ m.content }}<s>{% endfor %}"
    monkeypatch.setattr(extended.tokenizer, "chat_template", template)
    assert extended.ends == [0, 1]
