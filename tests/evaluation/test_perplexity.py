import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import PROMISED, small_config, stretched
from architectures import small_model as small_architecture
from hypothesis import given
from hypothesis import strategies as st
from oracle_perplexity import losses_by_token, perplexity
from torch.nn.functional import cross_entropy

from pi_lora.evaluation import forward
from pi_lora.evaluation import sliding_windows as module
from pi_lora.evaluation.perplexity import window_scores
from pi_lora.evaluation.sliding_windows import (
    Sweep,
    batches,
    document_losses,
    pieces,
    position_bounds,
    token_losses,
)
from pi_lora.models.model import Extension, load


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 1024, (length,), generator=generator).tolist() for length in (128, 300, 131)]


@pytest.mark.parametrize("stride", [16, 24, 48, 64])
def test_a_sweep_equals_the_oracle_at_every_window(
    small_model: Path, documents: list[list[int]], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "pass_tokens", lambda model: 300)
    model = load(str(small_model)).model
    sweep = Sweep((128, 64, 96), stride)
    scores = window_scores([document_losses(model, each, sweep) for each in documents])
    assert [score.window for score in scores] == [64, 96, 128]
    for score in scores:
        expected, tokens = perplexity(model, documents, score.window, stride)
        assert score.tokens == tokens
        assert score.perplexity == pytest.approx(expected, rel=1e-5)
        if stride < score.window:
            assert tokens == sum(map(len, documents)) - len(documents)


@pytest.mark.parametrize("window", [64, 100, 128])
def test_under_dynamic_scaling_every_window_is_read_by_itself(small_model: Path, window: int) -> None:
    """Its frequencies follow the length of the input, and transformers does not forget a longer one."""
    model = load(str(small_model), Extension(256, scaling="dynamic")).model
    document = torch.randint(2, 1024, (170,), generator=torch.Generator().manual_seed(2)).tolist()
    expected, _ = perplexity(lambda **inputs: copy.deepcopy(model)(**inputs), [document], window, 24)
    found = document_losses(model, document, Sweep((64, 100, 128), 24, apart=True)).by_window[window]
    assert math.exp(found.loss / found.tokens) == pytest.approx(expected, rel=1e-5)


@given(st.lists(st.integers(2, 60), min_size=1, max_size=4), st.integers(0, 200), st.integers(1, 60), st.booleans())
def test_every_token_is_scored_once_with_enough_before_it(
    windows: list[int], more: int, stride: int, by_position: bool
) -> None:
    stride = max(1, min(stride, min(windows) - 1))
    length = max(windows) + more
    planned = pieces(length, windows, stride, 5 * by_position)
    for window in windows:
        scored = [(token, piece) for piece in planned for token in piece.scored.get(window, ())]
        assert [token for token, _ in scored] == list(range(1, length))
        for token, piece in scored:
            assert token - piece.start < window
            assert token < piece.stop <= length
            assert piece.start == 0 or token - piece.start >= window - stride
            assert token - piece.start in piece.wanted


@given(st.integers(2, 60), st.integers(0, 200))
def test_windows_side_by_side_leave_out_their_first_tokens(window: int, more: int) -> None:
    length = window + more
    scored = [token for piece in pieces(length, [window], window) for token in piece.scored.get(window, ())]
    assert scored == [token for token in range(length) if token % window]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=4), st.integers(0, 200), st.integers(1, 60), st.integers(1, 9))
def test_batches_hold_every_piece_once_and_do_not_mix(windows: list[int], more: int, stride: int, size: int) -> None:
    planned = pieces(max(windows) + more, windows, max(1, min(stride, min(windows))), bins=5)
    together = list(batches(planned, size))
    assert sorted(piece.start for batch in together for piece in batch) == [piece.start for piece in planned]
    assert all(0 < len(batch) <= size for batch in together)
    assert all(len({piece.start == 0 or bool(piece.positions) for piece in batch}) == 1 for batch in together)


@pytest.mark.parametrize("model_type", [*PROMISED, "modernbert-decoder"])
def test_logits_in_parts_are_the_models_own(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an architecture does to them: Gemma 2 caps them, Cohere and Granite scale them."""
    config = small_config(model_type)
    model = small_architecture(type(config), stretched(config)[1])
    ids = torch.randint(2, 60, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    tokens = list(range(1, 48, 3))
    monkeypatch.setattr(forward, "LOGITS_ON_CPU", 2 * 5 * logits.shape[-1])
    for row, losses in enumerate(token_losses(model, ids, tokens)):
        expected = cross_entropy(logits[row, [token - 1 for token in tokens]], ids[row, tokens], reduction="none")
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


def test_few_logits_are_in_memory_at_a_time(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(str(small_model)).model
    monkeypatch.setattr(forward, "LOGITS_ON_CPU", 10 * 1024)
    sizes: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, logits: sizes.append(logits.numel())
    )
    token_losses(model, torch.full((1, 60), 5), range(1, 60))
    hook.remove()
    assert sizes == [10 * 1024] * 5 + [9 * 1024]


def test_losses_by_position_are_those_of_windows_that_do_not_overlap(
    small_model: Path, documents: list[list[int]]
) -> None:
    model, document, bins = load(str(small_model)).model, documents[1], 5
    found = document_losses(model, document, Sweep((32, 64), 16, bins)).by_position
    by_hand: list[Any] = []
    for start in range(0, len(document) - 63, 64):
        by_hand += losses_by_token(model, document[start : start + 64], 64, 64)
    bounds = position_bounds(64, bins)
    for (start, each), first, last in zip(found.items(), bounds, bounds[1:], strict=False):
        expected = [loss for _, before, loss in by_hand if first <= before < last]
        assert start == first
        assert each.tokens == len(expected) > 0
        assert each.loss == pytest.approx(sum(expected), rel=1e-5)
    assert sum(each.tokens for each in found.values()) == 4 * 63
