"""Tokenizers that are written load in transformers 4 and 5 with the tokens of the base, and no file is lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, processors
from transformers import AutoTokenizer

from conftest import extend
from pi_lora.api import merge
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.extension import Extension
from random_runs import save_base, save_run
from small_configs import llama
from small_tokenizers import made

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEXT = "The lamp of cabin 3 burns low.<|im_end|>"
# What the repositories of four families hold: the kind of tokenizer, whether it begins with BOS, settings, and files.
FAMILIES: dict[str, tuple[str, bool, dict[str, Any], tuple[str, ...]]] = {
    "qwen": (
        "gpt2",
        False,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_bos_token": False,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "bos_token": None,
        },
        ("vocab.json", "merges.txt"),
    ),
    "llama 3": ("gpt2", True, {"tokenizer_class": "PreTrainedTokenizerFast"}, ("special_tokens_map.json",)),
    "gemma": (
        "llama",
        True,
        {
            "tokenizer_class": "GemmaTokenizer",
            "add_bos_token": True,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "unk_token": "<unk>",
            "pad_token": "<unk>",
        },
        ("tokenizer.model", "chat_template.jinja"),
    ),
    "mistral": (
        "llama",
        True,
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "unk_token": "<unk>", "legacy": False},
        ("tokenizer.model",),
    ),
    # As transformers 5 saves one, which 4.57 does not read.
    "version 5": (
        "gpt2",
        True,
        {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        (),
    ),
}
# Classes of transformers 4.57.
CLASSES = {"Qwen2Tokenizer", "GemmaTokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"}


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, begins, settings, files = FAMILIES[request.param]
    folder = save_base(llama(tie_word_embeddings=True), tmp_path_factory.mktemp("family") / "base")
    tokenizer = made(kind)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    frame, special = ("<s> $A", [("<s>", 1)]) if begins else ("$A", [])
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=special)
    if request.param == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 64, **settings}
    if "chat_template.jinja" not in files:
        whole["chat_template"] = CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))
    for name in files:
        (folder / name).write_text(CHATML if name.endswith("jinja") else "{}")
    return folder


@pytest.fixture(scope="module")
def written(base: Path) -> dict[str, Path]:
    """What extend and merge write; the run has the tokenizer that PEFT's Trainer saved under transformers 5."""
    run = save_run(base, base.parent / "run", r=4, target_modules=["q_proj"])
    AutoTokenizer.from_pretrained(base).save_pretrained(run)
    extended = extend(resolve_model(ModelRef(str(base), extension=Extension(128))), base.parent / "extended")
    return {"extended": extended, "merged": merge(run, base.parent / "merged").folder}


@pytest.mark.parametrize("name", ["extended", "merged"])
def test_a_written_tokenizer_gives_the_tokens_of_the_base(base: Path, written: dict[str, Path], name: str) -> None:
    before, after = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(written[name])
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"]
    assert after.chat_template == before.chat_template
    assert after.model_max_length == 128


@pytest.mark.parametrize("name", ["extended", "merged"])
def test_files_of_the_vocabulary_are_not_lost(base: Path, written: dict[str, Path], name: str) -> None:
    for file in ("tokenizer.model", "vocab.json", "merges.txt"):
        assert (written[name] / file).exists() == (base / file).exists()
    assert (written["extended"] / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["extended", "merged"])
def test_settings_are_those_that_transformers_4_reads(base: Path, written: dict[str, Path], name: str) -> None:
    before = json.loads((base / "tokenizer_config.json").read_text())
    after = json.loads((written[name] / "tokenizer_config.json").read_text())
    assert after["tokenizer_class"] in CLASSES
    assert "extra_special_tokens" not in after
    listed = before.get("additional_special_tokens") or before.get("extra_special_tokens")
    if listed:
        assert after["additional_special_tokens"] == listed
    if name == "extended":
        # Whether BOS is added decides in transformers 4, which writes the frame of tokenizer.json anew.
        assert after.get("add_bos_token") == before.get("add_bos_token")


def test_an_adapter_with_other_tokens_gets_no_vocabulary_of_the_base(
    small_model: Path, lora_run: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    (base / "tokenizer.model").write_bytes(b"pieces")
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    source = resolve_model(ModelRef(str(run), base=str(base)))
    assert source.tokenizer_files["tokenizer.model"] == base / "tokenizer.model"
    vocabulary = json.loads((run / "tokenizer.json").read_text())
    vocabulary["added_tokens"][-1]["content"] = "<changed>"
    (run / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert "tokenizer.model" not in resolve_model(ModelRef(str(run), base=str(base))).tokenizer_files


IDS_IN_4 = """
import sys
from transformers import AutoTokenizer
for folder in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print(bool(tokenizer.chat_template), *tokenizer(sys.argv[1])["input_ids"])
"""


@pytest.mark.slow
def test_transformers_4_gives_the_same_tokens(
    in_transformers_4: Callable[..., str], base: Path, written: dict[str, Path]
) -> None:
    expected = []
    for folder in written.values():
        ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
        expected.append(f"True {' '.join(map(str, ids))}")
    lines = in_transformers_4(IDS_IN_4, TEXT, *written.values()).splitlines()
    assert lines == expected
