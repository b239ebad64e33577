"""Texts with needles, numbers that are stated at all depths and asked for at the end, for the search for divisors."""

import random
from array import array
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

from pi_lora.data.recall import DIGITS, FORMS, NAMES, THINGS
from pi_lora.data.tokens import added_prefix
from pi_lora.errors import DataError
from pi_lora.models.loaded import LoadedModel

# Needles of a text, and the tokens of a short text with needles, whose chunks are spread over the target window.
NEEDLES = 24
SHORT_TOKENS = 4096
CHUNKS = 8
# Tokens of a short text without needles.
PLAIN_TOKENS = 2048
STATEMENT, QUESTION = (f"\n{form}" for form in FORMS[0])


class Exam(NamedTuple):
    """A text with needles: token ids (1, tokens), the positions of the answers, and other inputs of the model."""

    ids: torch.Tensor
    answers: list[int]
    inputs: Mapping[str, torch.Tensor]


class Exams:
    """Texts in token ids for a target window in tokens. The search reads parts of them, with needles and without."""

    def __init__(self, loaded: LoadedModel, texts: Sequence["array[int]"], target: int, seed: int) -> None:
        self.tokenizer = loaded.tokenizer
        self.prefix = added_prefix(loaded.tokenizer)
        self.device = loaded.module.device
        self.texts = texts
        self.target = target
        self.rng = random.Random(seed)

    def long(self) -> Exam:
        """Return the last text with needles, in the whole target window."""
        return self._exam(self.texts[-1], self.target)

    def short(self) -> Exam:
        """Return a random part of a text with new needles, whose chunks are spread over the target window."""
        tokens = min(SHORT_TOKENS, self.target)
        exam = self._exam(self._part(tokens), tokens)
        number = exam.ids.shape[1]
        chunks = torch.tensor(sorted(self.rng.sample(range(1, number), CHUNKS - 1)))
        gaps = sorted(self.rng.choices(range(self.target - number + 1), k=CHUNKS - 1))
        positions = torch.arange(number)
        chunk_of_position = torch.bucketize(positions, chunks, right=True)
        positions += torch.tensor([0, *gaps])[chunk_of_position]
        # A mask of ones says that chunks with gaps between their positions are one sequence.
        inputs = {"position_ids": positions[None].to(exam.ids.device), "attention_mask": torch.ones_like(exam.ids)}
        return exam._replace(inputs=inputs)

    def short_text(self) -> torch.Tensor:
        """Return a random part of a text: token ids (1, tokens)."""
        return self.row(self._part(min(PLAIN_TOKENS, self.target)))

    def _part(self, tokens: int) -> list[int]:
        """Return a random part of a text."""
        text = self.rng.choice(self.texts)
        start = self.rng.randrange(len(text) - tokens + 1)
        return text[start : start + tokens].tolist()

    def row(self, ids: Sequence[int]) -> torch.Tensor:
        """Return token ids, the first ones replaced by those that the tokenizer adds, such as BOS: (1, tokens)."""
        return torch.tensor([[*self.prefix, *ids[len(self.prefix) :]]], device=self.device)

    def _exam(self, text: Sequence[int], tokens: int) -> Exam:
        """Return a text of at most `tokens` tokens with needles at all depths."""
        number = max(1, min(NEEDLES, tokens // 64))
        needles = []
        questions = []
        for name, thing in self.rng.sample([*product(NAMES, THINGS)], number):
            fact = {
                "name": name,
                "thing": thing,
                "value": "".join(self.rng.choices(DIGITS, k=5)),
            }
            needles.append(self._tokens(STATEMENT.format(**fact) + "\n"))
            questions.append(QUESTION.format(**fact))
        self.rng.shuffle(questions)
        asked: list[int] = []
        answers: list[int] = []
        for question in questions:
            # The value and a full stop are the last word.
            before, _, _ = question.rpartition(" ")
            answer = len(asked) + len(self._tokens(before))
            asked += self._tokens(question)
            answers += range(answer, len(asked) - 1)
        taken = len(asked) + sum(map(len, needles))
        part = (tokens - taken) // number
        if part <= len(self.prefix):
            raise DataError(f"--target: {self.target} tokens hold no needles; choose a longer window")
        ids: list[int] = []
        for index, needle in enumerate(needles):
            ids += [*text[index * part : (index + 1) * part], *needle]
        return Exam(self.row(ids + asked), [len(ids) + answer for answer in answers], inputs={})

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids
