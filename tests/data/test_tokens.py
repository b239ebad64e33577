"""Text to token ids: special tokens in a text are text, and a long text is tokenized in pieces."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from conftest import refused
from pi_lora.data import tokens
from pi_lora.data.batches import training_data
from pi_lora.data.examples import Prompter
from pi_lora.data.sources import STDLIB, find_table
from pi_lora.data.tokens import pieces, prompt_ids, token_spans, tokenized, tokenizer_identity
from pi_lora.errors import DataError
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.tokenizer import load_tokenizer, save_tokenizer
from pi_lora.recipe.data import Data, Source
from pi_lora.recipe.schema import Training
from small_tokenizers import made


@pytest.fixture(scope="module", params=["builtin", "llama", "cl100k", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "builtin":
        return load_tokenizer(BUILTIN_FOLDER / "tiny", 1024)
    folder = tmp_path_factory.mktemp(request.param)
    own = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made(request.param), **own).save_pretrained(folder)
    return load_tokenizer(folder, 1024)


@given(text=st.text("ab \n", max_size=60))
def test_pieces_join_to_the_text_and_end_with_a_line(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "PIECE", 7)
        found = list(pieces(text))
    assert "".join(found) == text
    assert all(0 < len(piece) <= 7 for piece in found)
    assert all(piece.endswith("\n") for piece in found[:-1] if "\n" in piece)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text is one of more than 2,000 characters."""
    monkeypatch.setattr(tokens, "PIECE", 1000)


def test_a_long_text_is_tokenized_in_pieces(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the frame of a whole text, its characters, and other tokens only where it was cut."""
    text = "".join(
        document.text for document, _ in zip(find_table(Source(name=STDLIB)).documents(), range(5), strict=False)
    )
    [whole] = tokenized(tokenizer, [text])
    monkeypatch.setattr(tokens, "PIECE", 1000)
    cuts = len(list(pieces(text)))
    short, long = tokenized(tokenizer, ["short", text])
    assert list(short) == tokenizer("short")["input_ids"]
    assert (long[0], long[-1]) == (whole[0], whole[-1])
    plain = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (long, whole))
    assert len({text.replace(" ", "").replace("▁", "") for text in plain}) == 1
    assert 0 <= len(long) - len(whole) <= 2 * cuts
    # Of a text that is cut later, pieces that hold enough.
    [start] = tokenized(tokenizer, [text], enough=500)
    assert 500 <= len(start) < 1500
    assert list(start[:-1]) == list(long[: len(start) - 1])


def test_short_and_long_texts_keep_their_places(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are tokenized whole and texts that are tokenized in pieces come back in the order of the call."""
    monkeypatch.setattr(tokens, "PIECE", 8)
    texts = ["abcdefgh" * (length // 8) + "x" * (length % 8) for length in (1, 20, 16, 30, 17, 8, 24, 3)]
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokenized(tokenizer, texts)]
    assert ["".join(text.replace("▁", " ").split()) for text in decoded] == texts


def test_memory_is_bounded_by_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of the text's 80,000 ids takes 3 MB and tokenizing it as a whole several times that; the text itself
    takes 0.2, and its ids as they are kept 0.3.
    """
    monkeypatch.setattr(tokens, "PIECE", 10_000)
    (tmp_path / "book.txt").write_text("The cat sees the house, and then it sleeps.\n" * 5_000)
    data = Data.model_validate({"source": str(tmp_path / "book.txt")})
    tokenizer = load_tokenizer(BUILTIN_FOLDER / "tiny", 1024)
    training_data(data, Training(steps=1, global_batch_size=1), tokenizer, 64, 128)
    tracemalloc.start()
    training_data(data, Training(steps=500, global_batch_size=1), tokenizer, 64, 128)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6


@pytest.mark.parametrize("text", ["a </s> b", "</s>", "<s>x</s>", "<unk></s></s>"])
def test_special_tokens_in_a_text_are_tokenized_as_text(tokenizer: Any, text: str) -> None:
    special = set(tokenizer.all_special_ids)
    bare = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert not special & set(bare)
    pieces = "".join(tokenizer.convert_ids_to_tokens(bare))
    assert pieces.replace("▁", " ").replace("Ġ", " ").strip() == text
    assert not special & set(tokenized(tokenizer, ["x" + text])[0][1:-1])
    [allowed] = tokenized(tokenizer, [text], special_tokens=True)
    assert len(special & set(allowed)) >= 1
    frame = tokenized(tokenizer, ["x"])[0].count(tokenizer.eos_token_id)
    assert allowed.count(tokenizer.eos_token_id) == text.count("</s>") + frame


def test_a_saved_tokenizer_parses_special_tokens_for_other_loaders(tokenizer: Any, tmp_path: Path) -> None:
    """Others who load the tokenizer of a run may want the special tokens of a chat template."""
    save_tokenizer(tokenizer, tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.split_special_tokens is False
    assert theirs.eos_token_id in theirs("a </s> b", add_special_tokens=False)["input_ids"]
    assert tokenizer_identity(load_tokenizer(tmp_path, 64)) == tokenizer_identity(tokenizer)


def test_a_template_with_special_tokens_is_refused_with_the_alternative() -> None:
    tokenizer = load_tokenizer(BUILTIN_FOLDER / "tiny", 1024)
    data = Data.model_validate({"source": "x.jsonl", "template": "<s>Q: {q}</s>A:", "completion": "a"})
    with refused(DataError, "data.template: <s>", "data.special_tokens: true"):
        Prompter(data, tokenizer, 1024)
    row = {"q": "</s>", "a": "x </s> y"}
    for keys, ends in (({"special_tokens": True}, 2), ({"template": "Q: {q} A:"}, 0)):
        prompter = Prompter(data.changed(**keys), tokenizer, 1024)
        assert prompter.prompts([row])[0].ids.count(1) == ends
    assert prompter.completions([row])[0].count(1) == 1  # EOS at the end


@pytest.mark.usefixtures("small_pieces")
def test_a_text_with_bos_and_eos_gets_no_second_ones(tokenizer: Any) -> None:
    """Texts in the format of a chat model begin with BOS, and the tokenizer adds one."""
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    texts = ["<s>The lamp burns.", "<s>" + "The lamp burns low.\n" * 200]
    short, long = tokenized(tokenizer, texts, special_tokens=True)
    assert short[0] == long[0] == begin
    assert short.count(begin) == long.count(begin) == 1
    assert list(prompt_ids(tokenizer, texts[0])).count(begin) == 1
    data = Data.model_validate(
        {"source": "x.jsonl", "template": "<s>Q: {q} A:", "completion": "a", "special_tokens": True}
    )
    prompter = Prompter(data, tokenizer, 1024)
    row = {"q": "x", "a": "y</s>"}
    assert prompter.prompts([row])[0].ids.count(begin) == 1
    assert prompter.completions([row])[0].count(end) == 1


@pytest.mark.parametrize("text", ["The lamp burns.", "The lamp burns low.\n" * 200], ids=["short", "long"])
@pytest.mark.usefixtures("small_pieces")
def test_a_text_with_the_two_tokens_that_a_tokenizer_adds_gets_them_once(text: str) -> None:
    """As that of GLM-4 adds [gMASK] and <sop>, which chats in text begin with."""
    tokenizer = load_tokenizer(BUILTIN_FOLDER / "tiny", 1024)
    added = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    specials = list(zip(["<s>", "</s>"], added, strict=True))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> </s> $A", special_tokens=specials)
    plain, framed = tokenized(tokenizer, [text, "<s></s>" + text], special_tokens=True)
    assert list(plain) == list(framed)
    assert list(plain[:3]) == [*added, plain[2]]
    spans = token_spans(tokenizer, text)
    assert spans[:2] == [(0, 0), (0, 0)]
    assert len(spans) == len(plain)


@pytest.mark.parametrize("text", ["The lamp burns.", "The lamp burns low.\n" * 200], ids=["short", "long"])
@pytest.mark.usefixtures("small_pieces")
def test_spans_are_those_of_a_text_without_the_eos_after_it(tokenizer: Any, text: str) -> None:
    [ids] = tokenized(tokenizer, [text])
    spans = token_spans(tokenizer, text)
    assert len(spans) == len(ids) - (ids[-1] == tokenizer.eos_token_id)
    assert spans[-1][1] == len(text)
