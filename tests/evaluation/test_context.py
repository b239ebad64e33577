"""`pi-lora eval context`: losses with and without distant context, key tokens, and LongPPL beside the package of its
authors.
"""

import json
import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from longppl.longppl import compute_longppl
from tokenizers import processors
from torch.nn.functional import cross_entropy

from conftest import refused, run_captured
from pi_lora.api import load
from pi_lora.data.tokens import added_prefix, token_spans, tokenized
from pi_lora.errors import DataError, RecipeError
from pi_lora.evaluation import context as context_module
from pi_lora.evaluation.context import Context, ContextScores, context_losses
from pi_lora.evaluation.measurement import Preview, Session
from pi_lora.evaluation.suite import metrics_of, read_scores, write_scores
from pi_lora.model_ref import ModelRef
from pi_lora.models.loaded import LoadedModel
from pi_lora.recipe.evaluation import ContextOptions
from pi_lora.scaling.extension import Extension

WINDOW = 256
SHORT = 64
STRIDE = 32


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(ModelRef("builtin:tiny", extension=Extension(target=512, original=256, scaling="yarn")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two documents of over two windows, parts of which come again far behind, and a short one."""
    texts = tmp_path_factory.mktemp("texts")
    here = Path(__file__)
    for name, file in (("a", here), ("b", here.with_name("test_passkey.py"))):
        source = file.read_text()[:1200]
        (texts / f"{name}.txt").write_text(source[:350] + source + source[:450])
    (texts / "short.txt").write_text("def f(x):\n    return x\n")
    return texts


def options(folder: Path, **others: object) -> ContextOptions:
    sizes = {"window": WINDOW, "short_window": SHORT, "stride": STRIDE, "truncate": 2 * WINDOW}
    return ContextOptions.model_validate({"data": str(folder), **sizes, **others})


def measured(loaded: LoadedModel, folder: Path, **others: object) -> ContextScores:
    return Context().run(loaded, options(folder, **others), Session())


@pytest.fixture(scope="module")
def own(loaded: LoadedModel, folder: Path) -> ContextScores:
    """The scores of both documents, of two windows each, on the model's own key tokens."""
    return measured(loaded, folder)


@pytest.fixture
def key_tokens(own: ContextScores, tmp_path: Path) -> str:
    """The file of these scores."""
    file = tmp_path / "own.json"
    write_scores([own], file)
    return str(file)


@pytest.mark.parametrize("prefix", [[], [0], [0, 7]])
def test_losses_are_those_of_a_context_cut_by_hand(
    loaded: LoadedModel, prefix: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 500, (200,), generator=generator).tolist()
    monkeypatch.setattr(context_module, "added_prefix", lambda _: prefix)
    monkeypatch.setattr(context_module, "pass_tokens", lambda _: 400)
    far, near = context_losses(loaded, ids, short_window=100, stride=30)

    def loss(start: int, token: int) -> float:
        row = torch.tensor([[*prefix, *ids[start + len(prefix) : token + 1]]])
        logits = loaded.module(row).logits[0, -2]
        return cross_entropy(logits, row[0, -1]).item()

    with torch.no_grad():
        for token in (100, 129, 130, 131, 159, 160, 199):
            start = max(0, (token - 100) // 30 * 30)
            assert far[token - 100].item() == pytest.approx(loss(0, token), abs=1e-4)
            assert near[token - 100].item() == pytest.approx(loss(start, token), abs=1e-4)
    assert len(far) == len(near) == 100


def test_longppl_is_that_of_the_authors(loaded: LoadedModel, folder: Path, tmp_path: Path) -> None:
    """A text is one window for them. They give BOS to some inputs and not to others, so this tokenizer adds none."""
    tokenizer = loaded.tokenizer
    model = tmp_path / "model"
    loaded.module.save_pretrained(model)
    plain = deepcopy(tokenizer)
    plain.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    plain.save_pretrained(model)
    without_bos = load(str(model))
    assert added_prefix(without_bos.tokenizer) == []

    text = (folder / "a.txt").read_text()
    module = without_bos.module
    theirs = compute_longppl(text, module, module, plain, plain, trunc_len=SHORT, sliding_window=STRIDE)
    only = tmp_path / "only"
    only.mkdir()
    (only / "a.txt").write_text(text)
    scores = measured(without_bos, only, window=theirs["n_token"], truncate=None)
    [document] = scores.per_document
    assert document.key_tokens == theirs["n_key_token"] > 3
    values = {metric.heading: metric.value for metric in metrics_of(scores)}
    expected = pytest.approx(float(theirs["longppl"]), rel=1e-4)
    assert values[f"LongPPL, own key tokens at {theirs['n_token']:,}"] == expected


def test_scores_hold_gains_key_tokens_and_a_passage(own: ContextScores, folder: Path) -> None:
    scores = own
    assert (scores.documents, scores.documents_too_short, scores.window, scores.short_window) == (2, 1, WINDOW, SHORT)
    assert [document.tokens for document in scores.per_document] == [2 * (WINDOW - SHORT)] * 2
    document = scores.per_document[0]
    text = Path(document.name).read_text()
    marked = [text[first:last] for first, last in document.spans]
    assert len(marked) == document.key_tokens > 3
    assert all(word == word.strip() and word for word in marked)
    # They are in the parts that come again, far behind.
    assert all(text.find(word) < first for word, (first, _) in zip(marked, document.spans, strict=True))
    assert document.key_gain is not None
    assert document.key_gain > 2
    # Tokens before have the same context twice.
    assert (scores.by_distance[0].first, scores.by_distance[-1].last) == (SHORT + STRIDE, WINDOW)
    assert sum(part.tokens for part in scores.by_distance) == 4 * (WINDOW - SHORT - STRIDE)
    weighted = sum(part.gain * part.tokens for part in scores.by_distance)
    assert weighted == pytest.approx(sum(each.gain * each.tokens for each in scores.per_document))
    assert len(scores.excerpt) == 160
    assert "".join(piece for piece, _ in scores.excerpt) in "".join(each.read_text() for each in folder.glob("*.txt"))
    assert sum(gain > 2 for _, gain in scores.excerpt) > 3


def test_metrics_are_gain_share_and_longppl_twice(own: ContextScores) -> None:
    gain, share, far, near = metrics_of(own)
    assert [metric.heading for metric in (gain, share, far, near)] == [
        "gain from distant context at 256",
        "own key tokens at 256",
        "LongPPL, own key tokens at 256",
        "LongPPL, own key tokens at 64",
    ]
    documents = own.per_document
    tokens = sum(document.tokens for document in documents)
    keys = sum(document.key_tokens for document in documents)
    assert gain.value == pytest.approx(sum(document.gain * document.tokens for document in documents) / tokens)
    assert share.value == pytest.approx(100 * keys / tokens)
    mean = sum((document.key_loss or 0) * document.key_tokens for document in documents) / keys
    assert far.value == pytest.approx(math.exp(mean))
    assert near.value > 2 * far.value
    assert not far.higher_is_better
    assert gain.higher_is_better


def test_key_tokens_of_another_model_are_the_same_characters(
    loaded: LoadedModel, own: ContextScores, folder: Path, key_tokens: str
) -> None:
    again = measured(loaded, folder, key_tokens=key_tokens, documents=1)
    assert again.per_document == own.per_document[:1]
    # Another extension finds other key tokens, and is scored on these.
    other = load(ModelRef("builtin:tiny", extension=Extension(target=512, original=256, scaling="pi")))
    on_same = measured(other, folder, key_tokens=key_tokens, documents=1)
    assert on_same.evaluator == "builtin:tiny"
    assert on_same.per_document[0].spans == own.per_document[0].spans
    assert on_same.per_document[0].key_loss != own.per_document[0].key_loss


def test_a_token_counts_if_all_its_characters_are_in_a_span() -> None:
    spans = [(0, 4), (10, 12)]
    inside = [(0, 4), (1, 2), (10, 12), (11, 12)]
    outside = [(3, 5), (4, 6), (9, 11), (11, 13), (13, 14), (2, 2)]
    assert all(context_module._is_within(span, spans) for span in inside)
    assert not any(context_module._is_within(span, spans) for span in outside)


def test_key_tokens_of_other_documents_are_refused(
    loaded: LoadedModel, own: ContextScores, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "scores.json"
    write_scores([own.model_copy(update={"per_document": own.per_document[1:]})], file)
    with refused(DataError, "--key-tokens: builtin:tiny ", folder / "a.txt"):
        measured(loaded, folder, key_tokens=str(file), documents=1)
    # Before weights are read, also of a recipe, and for the documents that are measured alone.
    preview = Preview(WINDOW, loaded.tokenizer, section="evaluation.context")
    [problem] = Context().problems(options(folder, key_tokens=str(file)), preview)
    assert problem.startswith("evaluation.context.key_tokens: ")
    assert str(folder / "a.txt") in problem
    write_scores([own], file)
    assert not [*Context().problems(options(folder, key_tokens=str(file)), preview)]
    file.write_text("{}")
    [problem] = Context().problems(options(folder, key_tokens=str(file)), Preview(64))
    assert problem.startswith(f"--key-tokens: {file}: model: ")


def test_windows_that_do_not_fit_are_refused() -> None:
    asked = ContextOptions(data="texts", window=512)
    for key, tokens in {"short_window": 512, "truncate": 511}.items():
        with refused(RecipeError, f"{key}: {tokens} ", 512):
            asked.changed(**{key: tokens})
        assert asked.changed(short_window=511, truncate=512)


def test_the_near_context_follows_the_window(loaded: LoadedModel) -> None:
    prepared = Context().prepare(ContextOptions(), [loaded.source])
    assert (prepared.window, prepared.short_window, prepared.stride) == (512, 256, 64)
    long = Context().prepare(ContextOptions(window=32768), [loaded.source])
    assert (long.window, long.short_window, long.stride) == (32768, 4096, 1024)


def test_long_texts_have_the_spans_of_their_tokens(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi_lora.data.tokens.PIECE", 200)
    text = Path(__file__).read_text()[:1500]
    [ids] = tokenized(loaded.tokenizer, [text])
    spans = token_spans(loaded.tokenizer, text)
    assert len(spans) == len(ids)
    assert "".join(text[first:last] for first, last in spans) == text


def test_command_compares_on_the_key_tokens_of_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "--window 256 --short-window 64 --stride 32 --documents 1 --target 512 --original 256".split()
    asked = ["eval", "context", "builtin:tiny", "--data", str(folder), *sizes]
    status, out, err = run_captured(capsys, monkeypatch, *asked, "--scaling", "yarn", "--json", "yarn.json")
    assert (status, "own key tokens at 256" in out, "scale 2 (yarn), " in out) == (0, True, True), err
    status, out, err = run_captured(
        capsys, monkeypatch, *asked, "--scaling", "pi", "--key-tokens", "yarn.json", "--json", "pi.json"
    )
    assert (status, "LongPPL, key tokens of" in out) == (0, True), err
    before, after = (read_scores(Path(name)) for name in ("yarn.json", "pi.json"))
    assert before
    assert after
    assert (before.scaling, after.scaling) == ("yarn", "pi")
    rows = {row.heading: row for row in metrics_of(after)}
    gain = metrics_of(before)[0]
    assert gain.by_name.keys() == rows[gain.heading].by_name.keys()
    assert json.loads(Path("pi.json").read_text())["options"]["key_tokens"] == "yarn.json"
    status, out, err = run_captured(capsys, monkeypatch, *asked, "--key-tokens", "missing.json")
    assert (status, err.splitlines()[-1].startswith("--key-tokens: missing.json: ")) == (2, True)
