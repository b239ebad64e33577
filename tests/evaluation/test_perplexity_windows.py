"""Sliding windows against an oracle and lm-eval: which tokens count, with what before them, and BOS."""

import copy
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from oracle_perplexity import losses_by_token, perplexity
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy

from pi_lora.api import load
from pi_lora.evaluation.forward import pass_tokens
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.perplexity import (
    LossSum,
    Perplexity,
    Sweep,
    mean_loss,
    scored_losses,
    window_scores,
)
from pi_lora.evaluation.suite import metrics_of
from pi_lora.evaluation.texts import choose_documents
from pi_lora.model_ref import ModelRef
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.scaling.extension import Extension

WINDOWS = st.lists(st.integers(2, 60), min_size=1, max_size=4).map(tuple)


def losses(
    model: Any, document: Sequence[int], sweep: Sweep, bos: int | None = None, tokens: int = 300
) -> list[LossSum]:
    """Those of every forward pass over a document."""
    passes = sweep.passes(len(document), tokens)
    prefix = [] if bos is None else [bos]
    return [
        (name, of_tokens.sum().item(), len(scored))
        for pieces in passes
        for name, scored, of_tokens in scored_losses(model, document, pieces, prefix)
    ]


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 1024, (length,), generator=generator).tolist() for length in (128, 300, 131)]


@pytest.mark.parametrize("bos", [None, 7])
@pytest.mark.parametrize("stride", [16, 24, 48, 64])
def test_a_sweep_of_windows_equals_the_oracle(
    small_model: Any, documents: list[list[int]], stride: int, bos: int | None
) -> None:
    model = load(str(small_model)).module
    documents = [[bos or document[0], *document[1:]] for document in documents]
    sweep = Sweep((64, 96, 128), stride)
    sums = [each for document in documents for each in losses(model, document, sweep, bos)]
    scores = window_scores(sums, sweep.windows)
    assert [score.window for score in scores] == [64, 96, 128]
    for score in scores:
        expected, tokens = perplexity(model, documents, score.window, stride, bos)
        assert score.tokens == tokens
        assert score.perplexity == pytest.approx(expected, rel=1e-5)
        if stride < score.window:
            assert tokens == sum(map(len, documents)) - len(documents)


def test_dynamic_scaling_computes_every_window_on_its_own(small_model: Any, tmp_path: Path) -> None:
    """Its frequencies follow the length of the input, and transformers does not forget a longer one."""
    model = load(ModelRef(str(small_model), extension=Extension(256, scaling="dynamic")))
    unread = copy.deepcopy(model.module)
    (tmp_path / "text.txt").write_text("the road is long and the night is dark " * 20)
    options = PerplexityOptions(data=str(tmp_path), windows=(64, 100, 128), stride=24, truncate=170)
    [(_, document, *_)], _ = choose_documents(model, options, 128)
    scores = Perplexity().run(model, options, Session())
    assert scores.by_position
    assert sum(each.tokens for each in scores.by_position.bins) == 127
    for row in scores.windows:
        assert document[0] == model.tokenizer.bos_token_id == 0
        oracle, _ = perplexity(
            lambda **inputs: copy.deepcopy(unread)(**inputs), [list(document)], row.window, stride=24, bos=0
        )
        assert row.perplexity == pytest.approx(oracle, rel=1e-5)


@given(WINDOWS, st.integers(0, 200), st.integers(1, 60), st.integers(0, 5))
def test_every_token_is_scored_once_with_its_minimal_context(
    windows: tuple[int, ...], more: int, stride: int, bins: int
) -> None:
    stride = max(1, min(stride, min(windows) - 1))
    length = max(windows) + more
    planned = list(Sweep(windows, stride, bins).pieces(length))
    for window in windows:
        scored = [(token, piece) for piece in planned for token in piece.scored.get(f"window {window}", ())]
        assert [token for token, _ in scored] == list(range(1, length))
        for token, piece in scored:
            assert token - piece.start < window
            assert token < piece.stop <= length
            assert piece.start == 0 or token - piece.start >= window - stride


@given(st.integers(2, 60), st.integers(0, 200))
def test_adjacent_windows_leave_their_first_tokens_unscored(window: int, more: int) -> None:
    length = window + more
    planned = Sweep((window,), window).pieces(length)
    scored = [token for piece in planned for token in piece.scored[f"window {window}"]]
    assert scored == [token for token in range(length) if token % window]


@given(WINDOWS, st.integers(0, 200), st.integers(1, 60), st.integers(1, 500))
def test_batches_hold_every_piece_once_without_mixing_kinds(
    windows: tuple[int, ...], more: int, stride: int, tokens: int
) -> None:
    sweep, length = Sweep(windows, max(1, min(stride, min(windows))), bins=5), max(windows) + more
    passes = list(sweep.passes(length, tokens))
    assert sorted(piece.start for each in passes for piece in each) == [piece.start for piece in sweep.pieces(length)]
    assert all(len(each) == 1 or len(each) * max(windows) <= tokens for each in passes)
    assert all(len({piece.score_all for piece in each}) == 1 for each in passes)


def test_later_windows_compute_no_more_logits_than_they_score(small_model: Any, documents: list[list[int]]) -> None:
    """Else the head of a large vocabulary computes a whole window for the few tokens of a stride."""
    model = load(str(small_model)).module
    computed: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, logits: computed.append(logits.shape[0] * logits.shape[1])
    )
    losses(model, documents[0], Sweep((64,), 16))
    hook.remove()
    assert sum(computed) == len(documents[0]) - 1


def test_losses_by_position_are_those_of_windows_that_do_not_overlap(
    small_model: Any, documents: list[list[int]]
) -> None:
    model, document, sweep = load(str(small_model)).module, documents[1], Sweep((32, 64), 16, bins=5)
    by_hand: list[Any] = []
    for start in range(0, len(document) - 63, 64):
        by_hand += losses_by_token(model, document[start : start + 64], 64, 64)
    found = losses(model, document, sweep)
    for first, last in zip(sweep.positions, sweep.positions[1:], strict=False):
        expected = [loss for _, before, loss in by_hand if first <= before < last]
        loss, tokens = mean_loss(found, f"position {first}")
        assert tokens == len(expected) > 0
        assert loss == pytest.approx(sum(expected) / tokens, rel=1e-5)
    assert len(by_hand) == 4 * 63


@pytest.mark.parametrize("bos", ["window", "document"])
def test_the_option_says_which_windows_begin_with_bos(
    small_model: Any, tmp_path: Path, bos: Literal["window", "document"]
) -> None:
    model = load(str(small_model))
    (tmp_path / "text.txt").write_text("the road is long and the night is dark " * 20)
    options = PerplexityOptions(data=str(tmp_path), windows=(64, 128), stride=24, bos=bos)
    [(_, document, *_)], _ = choose_documents(model, options, 128)
    first = model.tokenizer.bos_token_id
    scores = Perplexity().run(model, options, Session())
    assert scores.bos == f"each {bos}"
    for row in scores.windows:
        of_windows = first if bos == "window" else None
        oracle, _ = perplexity(model.module, [list(document)], row.window, stride=24, bos=of_windows)
        assert row.perplexity == pytest.approx(oracle, rel=1e-5)


def test_windows_begin_with_all_tokens_that_the_tokenizer_adds(small_model: Any, tmp_path: Path) -> None:
    """GLM-4 adds two. None of them is scored, also where windows do not overlap."""
    model = load(str(small_model))
    specials = [(token, model.tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> </s> $A", special_tokens=specials)
    (tmp_path / "text.txt").write_text("the road is long and the night is dark " * 20)
    for stride in (24, 64):
        options = PerplexityOptions(data=str(tmp_path), windows=(64, 128), stride=stride)
        [(_, document, *_)], _ = choose_documents(model, options, 128)
        prefix = list(document[:2])
        assert model.tokenizer.convert_ids_to_tokens(prefix) == ["<s>", "</s>"]
        scores = Perplexity().run(model, options, Session())
        assert scores.bos == "each window"
        for row in scores.windows:
            expected = []
            for start in range(0, len(document) - row.window + stride, stride):
                inputs = torch.tensor([[*prefix, *document[start + 2 : start + row.window]]])
                first = max(2, row.window - stride) if start else 2
                with torch.no_grad():
                    logits = model.module(inputs).logits[0]
                expected += cross_entropy(logits[first - 1 : -1], inputs[0, first:], reduction="none").tolist()
            assert row.tokens == len(expected)
            assert row.perplexity == pytest.approx(math.exp(fmean(expected)), rel=1e-5)


def test_a_tokenizer_without_bos_measures_alike_with_both_options(small_model: Any, tmp_path: Path) -> None:
    model = load(str(small_model))
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    (tmp_path / "text.txt").write_text("the road is long and the night is dark " * 20)
    scores = []
    for bos in ("window", "document"):
        options = PerplexityOptions(data=str(tmp_path), windows=(64, 128), stride=24, bos=bos)
        scores.append(Perplexity().run(model, options, Session()))
    assert [result.bos for result in scores] == ["none", "none"]
    assert scores[0].windows == scores[1].windows
    names = [[value.name for value in metrics_of(result)[0].values] for result in scores]
    assert names[0] == names[1]


@pytest.mark.parametrize("bos", ["window", "document"])
def test_lm_eval_finds_the_same_likelihood(
    small_model: Any, tmp_path: Path, bos: Literal["window", "document"]
) -> None:
    """lm-eval's rolling likelihood gives a window one token of context: BOS in the first, the token before in others. A
    text of a single window has BOS as its context. (A last window that is shorter would have more context there.)
    """
    model = load(str(small_model))
    scored = 48
    (tmp_path / "text.txt").write_text("the road is long and the night is dark " * 20)
    windows = {"windows": (scored + 1,), "stride": scored, "truncate": 1 + 3 * scored}
    options = PerplexityOptions(data=str(tmp_path), bos=bos, **windows)
    [(_, document, *_)], _ = choose_documents(model, options, scored + 1)
    [score] = Perplexity().run(model, options, Session()).windows
    tokens = list(document[1:])
    judge = HFLM(
        pretrained=model.module, tokenizer=model.tokenizer, max_length=scored, batch_size=1, add_bos_token=False
    )
    texts = [tokens]
    if bos == "window":
        texts = [tokens[start : start + scored] for start in range(0, len(tokens), scored)]
    judge.tok_encode = lambda text: [int(token) for token in text.split()]  # the same tokens
    requests = [
        Instance("loglikelihood_rolling", {}, (" ".join(map(str, text)),), index) for index, text in enumerate(texts)
    ]
    likelihoods = judge.loglikelihood_rolling(requests, disable_tqdm=True)
    assert score.tokens == len(tokens)
    assert score.perplexity == pytest.approx(math.exp(-sum(likelihoods) / len(tokens)), rel=1e-4)


def loss_by_labels(model: Any, document: list[int], window: int, stride: int) -> float:
    """The sum of the losses in nats as YaRN's evaluator computes it: a forward pass a window, all its logits."""
    total = 0.0
    scored_to = 1
    for start in range(0, len(document), stride):
        end = min(start + window, len(document))
        ids = torch.tensor([document[start:end]])
        labels = ids.clone()
        labels[:, : scored_to - start] = -100
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels).loss.item() * (end - scored_to)
        scored_to = end
        if end == len(document):
            break
    return total


@pytest.mark.slow
def test_a_sweep_is_faster_than_a_forward_pass_for_every_window() -> None:
    """Two cores of an AMD EPYC took 1.7 times as long, with a vocabulary of 1,024, and 2.7 times with 32,000."""
    windows, stride = (256, 512, 1024, 2048), 128
    model = load(ModelRef("builtin:tiny", extension=Extension(target=2048))).module
    document = torch.randint(2, 1024, (3072,), generator=torch.Generator().manual_seed(1)).tolist()
    sweep = Sweep(windows, stride)

    def ours() -> dict[int, float]:
        sums = losses(model, document, sweep, tokens=pass_tokens(model))
        return {score.window: score.perplexity for score in window_scores(sums, windows)}

    def plain() -> dict[int, float]:
        losses_by_window = {window: loss_by_labels(model, document, window, stride) for window in windows}
        return {window: math.exp(loss / (len(document) - 1)) for window, loss in losses_by_window.items()}

    ours()  # the first time chooses kernels
    seconds = []
    results = []
    for measure in (ours, plain):
        started = time.perf_counter()
        results.append(measure())
        seconds.append(time.perf_counter() - started)
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert seconds[0] < seconds[1]
