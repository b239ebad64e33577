"""What a model is trained on, whatever its kind: packed text, or examples of a task."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow.compute
from datasets import Dataset

from pi_lora.data.batches import Collate, CollateExamples, LengthGroups, collate
from pi_lora.data.examples import Account, training_examples
from pi_lora.data.sequences import training_sequences
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Training

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TrainingData:
    """Rows, and what makes a batch of them.

    `tokens` is how many each row has; `said` is what a user should know of them.
    """

    rows: Dataset
    collate: Collate
    tokens: list[int] | int
    said: list[str]

    @property
    def tokens_per_row(self) -> int | None:
        """None where each row has its own number."""
        return self.tokens if isinstance(self.tokens, int) else None

    def groups(self, at_once: int, seed: int) -> LengthGroups | None:
        """Which rows are computed together, `at_once` at a time; None where any may be, having one length."""
        return None if isinstance(self.tokens, int) else LengthGroups(self.tokens, at_once, seed)


def training_data(
    data: Data, training: Training, tokenizer: Any, original: int, target: int, progress: Progress | None = None
) -> TrainingData:
    """What the sections of a recipe ask for, from the cache where it was made before.

    `original` (L) is the length of sequences whose positions skip, `target` (L') that of others and the most of an
    example, both in tokens.

    Raises:
        DataError: a source cannot be read, or holds too little for the steps.
    """
    if data.has_examples:
        return _examples(data, training, tokenizer, target, progress)
    number = training.steps * training.global_batch_size
    rows = training_sequences(data, tokenizer, original, target, number, progress)
    length = len(rows[0]["input_ids"])
    said = f"{number * length:,} tokens at hand, as many as needed: {number:,} sequences of {length:,}"
    return TrainingData(rows, collate, length, [said])


def _examples(data: Data, training: Training, tokenizer: Any, window: int, progress: Progress | None) -> TrainingData:
    examples = training_examples(data, tokenizer, window, progress)
    rows, number = examples.dataset, len(examples.dataset)
    if number < training.global_batch_size:
        raise DataError(
            f"training.global_batch_size: {training.global_batch_size} is more than the {number:,} examples; lower it"
        )
    # As the Trainer counts: the last step of an epoch takes what is left.
    a_round = -(-number // training.global_batch_size)
    if training.steps > data.epochs * a_round:
        raise DataError(
            f"training.steps: {training.steps:,} of {training.global_batch_size} go {training.steps / a_round:.1f} "
            f"times round the {number:,} examples; set data.epochs to {-(-training.steps // a_round)}, or lower it"
        )
    columns = [rows.data.column(name) for name in ("prompt_ids", "completion_ids")]
    prompts, completions = (pyarrow.compute.list_value_length(column).to_pylist() for column in columns)
    tokens = [sum(each) for each in zip(prompts, completions, strict=True)]
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    collate_examples = CollateExamples(padding, learn_prompts=data.loss == "all")
    return TrainingData(rows, collate_examples, tokens, _said(examples.account, tokens, sum(completions), data))


def _said(account: Account, tokens: list[int], completions: int, data: Data) -> list[str]:
    learned = sum(tokens) if data.loss == "all" else completions
    return [
        f"{account.examples:,} examples of {min(tokens):,} to {max(tokens):,} tokens; {learned:,} of {sum(tokens):,} "
        f"tokens are learned; {account.documents_cut:,} documents and {account.completions_cut:,} completions were cut",
        *account.left_out,
    ]
