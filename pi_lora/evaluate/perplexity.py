"""Sliding-window perplexity on the documents that a user names."""

import dataclasses
from collections.abc import Iterator

import torch

from pi_lora.data.corpus import evaluation_documents
from pi_lora.errors import DataError
from pi_lora.evals.perplexity import WindowScore, sliding_window_perplexity
from pi_lora.evaluate.scores import Progress, Scores, described
from pi_lora.rope import method_of
from pi_lora.run import LoadedModel


def default_windows(window: int, shortest: int = 256) -> list[int]:
    """The model's window and its halves, down to `shortest` tokens.

    >>> default_windows(1024)
    [256, 512, 1024]
    """
    halves = [window]
    while halves[0] // 2 >= shortest:
        halves.insert(0, halves[0] // 2)
    return halves


def default_stride(windows: list[int]) -> int:
    """The paper's 256 tokens, or half the shortest window where that is less."""
    return min(256, max(1, min(windows) // 2))


def evaluate_perplexity(
    loaded: LoadedModel,
    source: str,
    windows: list[int],
    stride: int,
    documents: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Sliding-window perplexity on the documents of `source` that are at least as long as the longest window.

    Raises:
        DataError: the source cannot be read, or no document is long enough.
    """
    encoded = [loaded.tokenizer(each.text, verbose=False)["input_ids"] for each in evaluation_documents(source)]
    longest = max(windows)
    long_enough = [ids for ids in encoded if len(ids) >= longest]
    if not long_enough:
        raise DataError(
            f"--windows: {longest} tokens is longer than every document of {source} "
            f"(the longest has {max(map(len, encoded))}); choose a shorter window"
        )
    measured = long_enough[:documents]
    scores: list[WindowScore] = []
    for sweep in _sweeps(loaded, windows):
        scores += sliding_window_perplexity(loaded.model, measured, sweep, stride, progress=progress)
    return {
        **described(loaded),
        "data": source,
        "documents": len(measured),
        "documents_too_short": len(encoded) - len(long_enough),
        "stride": stride,
        "weighting": "token",
        "bos": bool(measured[0]) and measured[0][0] == loaded.tokenizer.bos_token_id,
        "windows": [dataclasses.asdict(score) for score in scores],
    }


def _sweeps(loaded: LoadedModel, windows: list[int]) -> Iterator[list[int]]:
    """The windows that may share their forward passes: all, unless the length of an input changes what is computed."""
    if method_of(loaded.config) != "dynamic":
        yield windows
        return
    for window in sorted(windows):
        # transformers keeps the frequencies of the longest input so far until one comes that is shorter than L.
        loaded.model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=loaded.model.device))
        yield [window]
