"""Tokenizers that do not fit their model, or cannot be read."""

import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.integrations.mistral import tokenizer as tokenizer_of_mistral
from transformers.models.auto import tokenization_auto

from conftest import refused
from pi_lora.data.chats import ChatTemplate
from pi_lora.data.examples import Prompter
from pi_lora.data.sources import Table
from pi_lora.data.tokens import padding_id, prompt_ids, tokenized
from pi_lora.errors import ModelError
from pi_lora.evaluation.passkey import make_trial
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.resolve import resolve_model
from pi_lora.models.tokenizer import load_tokenizer
from pi_lora.recipe.data import Data, Source
from pi_lora.types import SILENT, showing
from random_runs import TOKENIZER


@pytest.fixture
def folder(small_model: Path, tmp_path: Path) -> Path:
    for name in ("config.json", *TOKENIZER):
        shutil.copy(small_model / name, tmp_path)
    return tmp_path


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder: Path) -> None:
    assert resolve_model(str(folder)).tokenizer
    edit(folder / "config.json", vocab_size=200)
    with refused(ModelError, str(folder), 200, "resize_token_embeddings"):
        assert resolve_model(str(folder)).tokenizer


def test_a_damaged_tokenizer_config_of_an_extended_base_is_refused(folder: Path) -> None:
    """Its tokenizer's longest input is looked at when the model is found."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    edit(folder / "config.json", rope_parameters=rope)
    assert resolve_model(str(folder)).window
    (folder / TOKENIZER[1]).write_bytes(b"{")
    with refused(ModelError, str(folder / TOKENIZER[1]), "not JSON"):
        resolve_model(str(folder))


CHATML = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"


def add_tokens(folder: Path, *tokens: str, special: bool = True, **settings: Any) -> None:
    """Add tokens that the embeddings were not resized for."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(token, special=special) for token in tokens])
    tokenizer.save_pretrained(folder)
    edit(folder / "tokenizer_config.json", **settings)


@pytest.mark.parametrize(
    ("tokens", "special", "settings", "token"),
    [
        (("<|user|>", "<|end|>"), True, {"chat_template": CHATML}, 1025),
        (("<tool>",), False, {}, 1024),
        (("<|end|>",), True, {"eos_token": "<|end|>"}, 1024),
    ],
)
def test_tokens_that_the_embeddings_lack_are_refused(
    tokens: tuple[str, ...], special: bool, settings: dict[str, Any], token: int, folder: Path
) -> None:
    add_tokens(folder, *tokens, special=special, **settings)
    with refused(ModelError, str(folder), token, "1024"):
        assert resolve_model(str(folder)).tokenizer


def test_special_tokens_that_nothing_writes_may_be_missing(folder: Path) -> None:
    """As that of images in Gemma 3 of text, or a padding token that was added for batches."""
    add_tokens(folder, "<image>", "[PAD]", pad_token="[PAD]")
    tokenizer = resolve_model(str(folder)).tokenizer
    assert len(tokenizer) == 1026
    assert padding_id(tokenizer) == tokenizer.eos_token_id == 1


def test_a_tokenizer_without_eos_is_refused(folder: Path) -> None:
    """Documents and completions end with it, and a tekken.json alone has neither EOS nor BOS."""
    settings = json.loads((folder / TOKENIZER[1]).read_text())
    del settings["eos_token"]
    (folder / TOKENIZER[1]).write_text(json.dumps(settings))
    with refused(ModelError, str(folder), "eos_token", "bos_token", "add_bos_token", TOKENIZER[1]):
        assert resolve_model(str(folder)).tokenizer


def test_the_package_that_a_vocabulary_needs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for another package, which does not read it."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    edit(folder / TOKENIZER[1], tokenizer_class="LlamaTokenizer")
    with refused(ModelError, f"{folder / 'tokenizer.model'}: ", "pip install sentencepiece"):
        assert resolve_model(str(folder)).tokenizer


def test_the_tokenizer_of_mistral_common_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM installs that package, and transformers then takes its tokenizer for Mistral's models with a tekken.json."""
    edit(folder / "config.json", model_type="mistral", architectures=["MistralForCausalLM"])
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    monkeypatch.setattr(tokenizer_of_mistral, "resolve_mistral_format", lambda *_, **__: (True, "tekken.json"))
    assert load_tokenizer(folder, 64).is_fast


def test_the_chat_template_of_a_processor_is_the_tokenizers(folder: Path) -> None:
    """In a file that tokenizers of transformers do not read, of composites from before 2025."""
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert resolve_model(str(folder)).tokenizer.chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert resolve_model(str(folder)).tokenizer.chat_template == CHATML
    edit(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    assert resolve_model(str(folder)).tokenizer.chat_template == "{{ messages }}"


def test_texts_longer_than_the_window_are_no_warning() -> None:
    """transformers would print a line about indexing errors, and for a reader all is well."""
    tokenizer = load_tokenizer(BUILTIN_FOLDER / "tiny", 8)
    text = "The sea was calm. " * 40
    long = make_trial(tokenizer, 400, 200, "12345")
    assert min(len(prompt_ids(tokenizer, text)), long.length, *map(len, tokenized(tokenizer, [text]))) > 8
    data = Data.model_validate({"source": "x.jsonl", "document": "text", "summary": "gist"})
    prompter = Prompter(data, tokenizer, 2000)
    assert prompter.prompts([{"text": text}])
    prompter.completions([{"gist": text}])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    rows = [("1", {"messages": turns})]
    table = Table(Source(name="x", column="messages"), read=lambda columns, seed: iter(rows), identity={})
    assert list(ChatTemplate(tokenizer, 2000).rows(table, Counter()))
    assert tokenizer.deprecation_warnings == {}


def test_the_note_that_a_tokenizer_splits_wrongly_is_shown_and_its_remedy_works(folder: Path) -> None:
    """That of a Mistral which transformers 4 wrote, with more than 100,000 tokens."""
    edit(
        folder / "config.json", model_type="mistral", architectures=["MistralForCausalLM"], transformers_version="4.50"
    )
    state = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"Ġlamp{number}": number for number in range(len(vocabulary), 100_100)}
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}+|\P{N}+"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    lines: list[str] = []
    with showing(replace(SILENT, say=lines.append)):
        wrong = resolve_model(str(folder)).tokenizer.backend_tokenizer.to_str()
        [line] = lines
        assert "fix_mistral_regex" in line
        assert "tokenizer_config.json" in line
        edit(folder / "tokenizer_config.json", fix_mistral_regex=True)
        assert resolve_model(str(folder)).tokenizer.backend_tokenizer.to_str() != wrong
    assert lines == [line]
