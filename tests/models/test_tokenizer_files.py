"""Files of tokenizers that others made, damaged or hostile: each is refused in one line that names file and field."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from random_runs import TOKENIZER

from pi_lora.errors import ModelError
from pi_lora.models import tokenizer_files
from pi_lora.models.model import find
from pi_lora.models.tokenizer import load_tokenizer
from pi_lora.models.tokenizer_files import SPECIAL_FILE, check_expression, check_file

VOCABULARY = 1024
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
FRAME = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}], "pair": []}
GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}


@pytest.fixture
def folder(small_model: Path, tmp_path: Path) -> Path:
    for name in ("config.json", *TOKENIZER):
        shutil.copy(small_model / name, tmp_path)
    return tmp_path


def edit(file: Path, **changes: Any) -> None:
    """Set fields; `model__dropout` is a field of `model`."""
    tree = json.loads(file.read_text()) if file.is_file() else {}
    for key, value in changes.items():
        *sections, last = key.split("__")
        inner = tree
        for section in sections:
            inner = inner[section]
        inner[last] = value
    file.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (0, {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a+)+$"}}}, "pre_tokenizer.pattern.Regex: '(a+)+$' is a"),
        (0, {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a|aa)+$"}}}, "expression that may take very long"),
        (0, {"normalizer": {**GROWS, "pattern": {"String": ""}}}, "normalizer.pattern.String: string should have at"),
        (0, {"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 3}}, "makes texts thousands of times longer"),
        (0, {"post_processor": {**FRAME, "special_tokens": 0.5}}, "post_processor.special_tokens: input should be"),
        (0, {"post_processor": {**FRAME, "special_tokens": {}}}, "special token '<x>' is not among its special_tokens"),
        (0, {"model__dropout": 0.5}, "model.dropout: input should be less than or equal to 0, not 0.5"),
        (0, {"model__vocab": {"a": 2**40}}, "input should be less than 2147483648"),
        (0, {"model": None}, "model: input should be an object"),
        (0, {"added_tokens": [{"id": -1, "content": "x"}]}, "added_tokens.0.id: input should be greater than or equal"),
        (1, {"eos_token": 3}, "input should be a valid string, not 3"),
        (1, {"eos_token": {"content": "x", "own": [1]}}, "eos_token"),
        (1, {"tokenizer_class": 7}, "tokenizer_class: input should be a valid string"),
        (1, {"padding_side": "up"}, "padding_side: input should be 'left' or 'right', not 'up'"),
        (1, {"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder.x"),
        (1, {"model_max_length": "x"}, "input should be a valid number, not 'x'"),
        (2, {"additional_special_tokens": [["a"]]}, "additional_special_tokens"),
        (2, {"eos_token": {"content": 3}}, "eos_token"),
    ],
    ids=str,
)
def test_a_field_that_is_wrong_is_named(name: int, changes: dict[str, Any], problem: str, folder: Path) -> None:
    file = folder / (*TOKENIZER, SPECIAL_FILE)[name]
    edit(file, **changes)
    with pytest.raises(ModelError) as refused:
        load_tokenizer(folder, 64)
    assert str(refused.value).startswith(f"{file}: ")
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff", b"[" * 10**5, b'{"a":' * 10**5, b"9" * 5000])
@pytest.mark.parametrize("name", [*TOKENIZER, SPECIAL_FILE])
def test_what_is_no_such_file(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"{name}: .*; correct it, or download it again$"):
        load_tokenizer(folder, 64)


def test_a_panic_is_a_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """tokenizers 0.23 panics where Oniguruma gives up, and Rust prints a trace."""
    expression = "(?m:.*.*.*.*.*.*.*)(?!)"  # matches nothing, in many ways
    edit(folder / TOKENIZER[0], pre_tokenizer={**SPLIT, "pattern": {"Regex": expression}})
    with pytest.raises(ModelError, match=r"its tokenizer (cannot tokenize|takes very long)") as refused:
        load_tokenizer(folder, 64)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""


def test_tokens_that_the_model_has_not(folder: Path) -> None:
    assert find(str(folder)).tokenizer
    edit(folder / "config.json", vocab_size=200)
    with pytest.raises(ModelError, match=r"its tokenizer gives token \d+, and the model has 200; use the model's own"):
        assert find(str(folder)).tokenizer


def test_a_scaled_base_whose_settings_are_damaged(folder: Path) -> None:
    """Its tokenizer's longest input is looked at when the model is found."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    edit(folder / "config.json", rope_parameters=rope)
    assert find(str(folder)).window
    (folder / TOKENIZER[1]).write_bytes(b"[" * 10**5)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: is not JSON"):
        find(str(folder))


# How GPT-4, o200k, DeepSeek, Llama 3 and Bloom split text.
USED = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r" ?[^(\s|[.,!?…])]+",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
]


@pytest.mark.parametrize("expression", USED)
def test_expressions_in_use_are_allowed(expression: str) -> None:
    assert check_expression(expression) == expression


@pytest.mark.parametrize(
    "expression", ["(a*)*", "(?:a+b?)+", "((a|b))*c", "(a{1,9}){9}", "(x(a+))+", "[(]?(a|a)+", "a" * 5000]
)
def test_expressions_that_may_take_long_are_not(expression: str) -> None:
    with pytest.raises(ValueError, match=r"may take very long|more than 4,000"):
        check_expression(expression)


def test_what_was_sound_is_known_by_its_bytes_and_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    plain = tokenizer_files.read_json
    monkeypatch.setattr(
        tokenizer_files, "read_json", lambda file, *options: (read.append(file.name), plain(file, *options))
    )
    monkeypatch.setenv("PI_LORA_CACHE", str(folder / "cache"))
    own, settings = (folder / name for name in TOKENIZER)
    for file in (own, own, settings, settings):
        check_file(file)
    assert read == [own.name, settings.name]
    edit(own, model__dropout=0.5)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"model\.dropout"):
            check_file(own)
    shutil.copy(settings, own)
    with pytest.raises(ModelError, match="model: field required"):
        check_file(own)


def test_a_cache_that_cannot_be_written_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cache").write_text("a file")
    monkeypatch.setenv("PI_LORA_CACHE", str(folder / "cache"))
    check_file(folder / TOKENIZER[0])
