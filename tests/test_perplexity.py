import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pi_lora.errors import DataError
from pi_lora.evals.perplexity import _scored, _starts, sliding_window_perplexity
from pi_lora.run import load


def reference(model: Any, documents: list[list[int]], window: int, stride: int) -> tuple[float, int]:
    """Press et al. 2022 as plainly as it can be written: one window a forward pass, one token at a time."""
    total, tokens = 0.0, 0
    for document in documents:
        scored_to = 1
        for start in range(0, len(document), stride):
            end = min(start + window, len(document))
            with torch.no_grad():
                log_probabilities = model(torch.tensor([document[start:end]])).logits[0].double().log_softmax(-1)
            for position in range(scored_to, end):
                total -= log_probabilities[position - 1 - start, document[position]].item()
                tokens += 1
            scored_to = end
            if end == len(document):
                break
    return math.exp(total / tokens), tokens


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 1024, (length,), generator=generator).tolist() for length in (128, 300, 131)]


@pytest.mark.parametrize("stride", [16, 24, 48])
def test_a_sweep_equals_the_reference_at_every_window(
    small_model: Path, documents: list[list[int]], stride: int
) -> None:
    model = load(str(small_model)).model
    scores = sliding_window_perplexity(model, documents, [128, 64, 96], stride, batch_tokens=300)
    assert [score.window for score in scores] == [64, 96, 128]
    for score in scores:
        perplexity, tokens = reference(model, documents, score.window, stride)
        assert score.tokens == tokens == sum(map(len, documents)) - len(documents)
        assert score.perplexity == pytest.approx(perplexity, rel=1e-5)


@given(st.integers(2, 60), st.integers(0, 200), st.integers(1, 60), st.integers(0, 40))
def test_every_token_is_scored_once_with_enough_before_it(shortest: int, more: int, stride: int, longer: int) -> None:
    stride = min(stride, shortest - 1)
    length = shortest + longer + more
    for window in (shortest, shortest + longer):
        scored: list[int] = []
        for start in _starts(length, shortest, stride):
            piece = torch.arange(start + 1, min(start + shortest + longer, length))
            found = _scored(window, stride, start, piece).tolist()
            assert all(start == 0 or token - start >= window - stride for token in found)
            scored += found
        assert scored == list(range(1, length))


@pytest.mark.parametrize("stride", [0, 65])
def test_a_stride_longer_than_a_window_is_refused(small_model: Path, stride: int) -> None:
    with pytest.raises(DataError, match="--stride"):
        sliding_window_perplexity(load(str(small_model)).model, [[5] * 200], [64, 128], stride)


def test_a_window_longer_than_a_document_is_refused(small_model: Path) -> None:
    with pytest.raises(DataError, match="--windows: 64 is longer"):
        sliding_window_perplexity(load(str(small_model)).model, [[5] * 50], [64], 16)
