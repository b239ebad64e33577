"""The prompts of the check of a server, and the answers of the model that it should compute.

A prompt states codes at several places and asks for one of them. A server that does not read the place of that code
cannot answer as the model does.
"""

import random
from dataclasses import replace
from itertools import takewhile
from operator import eq
from typing import Any

import torch
from pydantic import BaseModel

from pi_lora.data.chats import chat_problem, turn_ids
from pi_lora.data.recall import sentences
from pi_lora.data.tokens import prompt_ids, token_spans
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import keeps_all_tokens
from pi_lora.models.loaded import LoadedModel, load_model
from pi_lora.models.source import ModelSource
from pi_lora.scaling.config import with_full_rope, with_legacy_rope_keys
from pi_lora.types import Progress, silent

# The tokens of an answer: a code of five digits, and the text after it.
MAX_NEW_TOKENS = 16
# In a merged folder.
REFERENCE_FILE = "server_reference.json"
# How a server can read a prompt.
RIGHT, UNSCALED = "right", "unscaled"
ADDS_EOS, ADDS_BOS, LACKS_BOS = "adds EOS", "adds BOS", "lacks BOS"
# The entries of a rope without scaling.
UNSCALED_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
# Where the codes of a long prompt stand, in percent of its tokens.
DEPTHS = (0, 25, 50, 75)
NAMES = ("Laura", "Peter", "Helen", "Oscar")
CODES = ("25473", "45952", "76299", "89378")
STATEMENT = "\nThe code of {} is {}.\n"
QUESTION = "\nWhat is the code of {0}? The code of {0} is"


class Answer(BaseModel):
    """A greedy answer.

    Attributes:
        text: The text of all tokens.
        ends: The length of the text after every token, in characters.
        logprobs: The log probabilities of the tokens, in nats.
        margins: The distances to the log probabilities of the second choices, in nats.
    """

    text: str
    ends: list[int]
    logprobs: list[float]
    margins: list[float]


class Prompt(BaseModel):
    """A text with codes, and the question for one of them.

    Attributes:
        characters: The length of the text without the codes.
        code_starts: Where the codes stand in the text, in characters.
        asked: The index of the code that is asked for.
        tokens: The tokens of the prompt.
        chat: Whether the text is the turn of a user under the chat template.
        answers: The answers by reading.
    """

    characters: int
    code_starts: list[int]
    asked: int = 0
    tokens: int = 0
    chat: bool = False
    answers: dict[str, Answer] = {}

    @property
    def depth(self) -> int | None:
        """Where the code stands, in percent of the prompt; None in a chat."""
        return None if self.chat else DEPTHS[self.asked]

    @property
    def is_short(self) -> bool:
        """Whether the prompt has one code: it shows how a server reads prompts, not its window."""
        return len(self.code_starts) == 1

    def is_found_in(self, text: str) -> bool:
        """Whether a text holds two digits of the code at least, which cannot be guessed."""
        return CODES[self.asked][:2] in text


class Reference(BaseModel):
    """The answers of a model to prompts of 90 % of L' (`target`), one for each depth, to one of half of L (`original`)
    and, if the model has a chat template, to a chat of a few tokens.

    The codes stand in `own_text`, or in sentences that are the same on every machine.
    """

    model: str
    original: int
    target: int
    own_text: str
    prompts: list[Prompt] = []

    def text(self, prompt: Prompt) -> str:
        """Return the text of a prompt."""
        text = self.own_text or sentences(random.Random(0), self.target)
        written = ""
        start = 0
        for name, code, code_start in zip(NAMES, CODES, prompt.code_starts, strict=False):
            written += text[start:code_start] + STATEMENT.format(name, code)
            start = code_start
        written += text[start : prompt.characters] + QUESTION.format(NAMES[prompt.asked])
        return written.strip()

    def ids(self, prompt: Prompt, tokenizer: Any) -> list[int]:
        """Return the tokens of a prompt."""
        encode = turn_ids if prompt.chat else prompt_ids
        ids: list[int] = encode(tokenizer, self.text(prompt))
        return ids


def reference_of(model: ModelSource, text: str = "") -> Reference:
    """Return the prompts for a model, without answers. The codes stand in `text`, or in made-up sentences."""
    filler = text or sentences(random.Random(0), model.window)
    starts = [start for start, _ in token_spans(model.tokenizer, filler)]
    long_tokens = model.window * 9 // 10
    prompts = [_prompt(model, starts, long_tokens, asked=asked) for asked in range(len(DEPTHS))]
    prompts.append(_prompt(model, starts, model.original // 2, num_codes=1))
    if not chat_problem(model.tokenizer):
        prompts.append(Prompt(characters=0, code_starts=[0], chat=True))
    reference = Reference(
        model=model.name,
        original=model.original,
        target=model.window,
        own_text=text[: prompts[0].characters],
        prompts=prompts,
    )
    for prompt in prompts:
        prompt.tokens = len(reference.ids(prompt, model.tokenizer))
    return reference


def _count(model: ModelSource, text: str) -> int:
    return len(prompt_ids(model.tokenizer, text))


def _prompt(
    model: ModelSource, starts: list[int], tokens: int, *, num_codes: int = len(DEPTHS), asked: int = 0
) -> Prompt:
    """Return a prompt of about `tokens` tokens, whose text has tokens that start at the characters `starts`."""
    statement_tokens = _count(model, STATEMENT.format(NAMES[0], CODES[0]))
    question_tokens = _count(model, QUESTION.format(NAMES[0]))
    text_tokens = max(0, tokens - num_codes * statement_tokens - question_tokens)
    if len(starts) <= text_tokens:
        raise DataError(f"--text: has fewer than {text_tokens:,} tokens; name a longer text")
    code_starts = []
    for index, depth in enumerate(DEPTHS[:num_codes]):
        # The middle of a statement stands at its depth.
        statements_before = round((index + 0.5) * statement_tokens)
        text_before = tokens * depth // 100 - statements_before
        index_of_code = min(max(0, text_before), text_tokens)
        code_starts.append(starts[index_of_code])
    return Prompt(characters=starts[text_tokens], code_starts=code_starts, asked=asked)


def compute_answers(reference: Reference, model: ModelSource, progress: Progress = silent) -> None:
    """Answer all prompts of a reference in every reading."""
    readings = {RIGHT: model}
    without_scaling = unscaled(model)
    # `theta` and `direct` have no scaling that an engine could ignore.
    if without_scaling.config != model.config:
        readings[UNSCALED] = without_scaling
    for reading, source in readings.items():
        reader = Reader(load_model(source))
        for prompt in reference.prompts:
            progress(0, 0, f"computing {prompt.tokens:,} tokens here: {reading}")
            ids = reference.ids(prompt, model.tokenizer)
            prompt.answers[reading] = reader.answer(ids)
            if reading == RIGHT and prompt.is_short:
                bos = model.tokenizer.bos_token_id
                prompt.answers[ADDS_EOS] = reader.answer([*ids, model.tokenizer.eos_token_id])
                prompt.answers[ADDS_BOS] = reader.answer([bos or 0, *ids])
                if ids[0] == bos:
                    prompt.answers[LACKS_BOS] = reader.answer(ids[1:])


def unscaled(model: ModelSource) -> ModelSource:
    """Return a model without the scaling of its rope."""
    rope = model.rope.parameters
    plain_rope = {key: rope[key] for key in UNSCALED_ROPE_KEYS if key in rope}
    config = with_full_rope(model.config, {"rope_type": "default", **plain_rope})
    return replace(model, config=with_legacy_rope_keys(config))


class Reader:
    """Answers prompts with a model. The text that a prompt begins with is not computed again if the prompt before it
    began with the same text.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.ids: list[int] = []
        self.cache: Any = None

    def answer(self, ids: list[int]) -> Answer:
        """Return the answer to a prompt, up to the token that ends a text, at which servers stop."""
        tokenizer = self.loaded.tokenizer
        prompt_tokens = len(ids)
        ends = self.loaded.ends
        rows = []
        for _ in range(MAX_NEW_TOKENS):
            row = self._logprobs(ids)
            rows.append(row)
            ids = [*ids, int(row.argmax())]
            if ids[-1] in ends:
                break
        # Decoded after the last token of the prompt: some tokenizers drop the space before a text.
        answer = ids[prompt_tokens - 1 :]
        pieces = [answer[: number + 1] for number in range(len(answer))]
        before, *texts = tokenizer.batch_decode(pieces, skip_special_tokens=True)
        best, second = torch.stack(rows).topk(2).values.T
        return Answer(
            text=texts[-1][len(before) :],
            # A character of several tokens is not counted before the last of them.
            ends=[len(text.rstrip("\ufffd")) - len(before) for text in texts],
            logprobs=best.tolist(),
            margins=(best - second).tolist(),
        )

    @torch.no_grad()
    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        """Return the log probabilities after `ids`: (vocabulary)."""
        equal = map(eq, self.ids, ids[:-1])
        shared = len(list(takewhile(bool, equal)))
        if shared < len(self.ids):
            if keeps_all_tokens(self.cache) and not self.loaded.source.rope.depends_on_length:
                self.cache.crop(shared - len(self.ids))
            else:
                self.cache = None
                shared = 0
        output = self.loaded.module(
            torch.tensor([ids[shared:]], device=self.loaded.module.device),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.ids = ids
        self.cache = output.past_key_values
        logits: torch.Tensor = output.logits[0, -1]
        return logits.cpu().double().log_softmax(-1)
