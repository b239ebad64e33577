"""What a model answers to prompts longer than its original window: computed here, for a server to be compared with."""

import random
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import BaseModel

from pi_lora.data.recall import sentences
from pi_lora.errors import DataError
from pi_lora.models.model import Model
from pi_lora.scaling.config import full_attention_rope, in_both_dialects, with_full_rope
from pi_lora.types import Progress, silent
from pi_lora.writing import write_whole

# Tokens that are written, and the last tokens of a prompt whose log probabilities are compared.
WRITTEN, SCORED = 32, 64
# In a merged folder.
REFERENCE_FILE = "server_reference.json"
# How a server can read a prompt.
RIGHT, UNSCALED = "right", "unscaled"
# What is left of a rope without its scaling.
UNSCALED_ROPE = ("rope_theta", "partial_rotary_factor")


class Answer(BaseModel):
    """A greedy answer: after each token the text so far has `ends` characters. `logprobs` and `margins`, by which they
    exceed the second choice, are in nats; `prompt` has those of the prompt's last tokens.
    """

    text: str
    ends: list[int]
    logprobs: list[float]
    margins: list[float]
    prompt: list[float]


class Prompt(BaseModel):
    """The first `characters` of a text, which are `tokens`, and the answers by reading."""

    characters: int
    tokens: int
    answers: dict[str, Answer] = {}


class Reference(BaseModel):
    """The answers of a model to two prompts, of 90 % of L' (`target`) and of half of L (`original`), from the beginning
    of `own_text`, or of sentences that are the same on every machine.
    """

    model: str
    original: int
    target: int
    own_text: str
    prompts: list[Prompt] = []

    @property
    def text(self) -> str:
        """The text that the prompts begin."""
        return self.own_text or sentences(random.Random(0), self.target)

    def answer(self, prompt: Prompt, reading: str) -> Answer:
        """Return the answer to a prompt in one reading."""
        return prompt.answers[reading]


class Reader(Reference):
    """A reference that computes the answers of the model `found`, each once and when it is needed."""

    _loaded: dict[str, Model] = {}

    def __init__(self, found: Model, text: str = "", dtype: str | None = None, progress: Progress = silent) -> None:
        super().__init__(model=found.name, original=found.original, target=found.window, own_text=text)
        self._found, self._dtype, self._progress = found, dtype, progress
        ends = found.tokenizer(self.text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        lengths = (found.window * 9 // 10, found.original // 2)
        if len(ends) <= lengths[0]:
            raise DataError(f"--text: has fewer than {lengths[0]:,} tokens; name a longer text")
        self.prompts = [Prompt(characters=ends[tokens][0], tokens=tokens) for tokens in lengths]
        self.own_text = text[: ends[lengths[0]][0]]

    def answer(self, prompt: Prompt, reading: str) -> Answer:
        """Return the answer to a prompt in one reading; load the model for it, or as engines compute it that drop the
        scaling from its config.
        """
        if reading not in prompt.answers:
            if reading not in self._loaded:
                self._loaded.clear()  # one model at a time
                found = self._found if reading == RIGHT else unscaled(self._found)
                self._loaded[reading] = found.load(self._dtype)
            self._progress(0, 0, f"computing {prompt.tokens:,} tokens here: {reading}")
            prompt.answers[reading] = _answer(self._loaded[reading], self.text[: prompt.characters])
        return super().answer(prompt, reading)

    def write(self, file: Path) -> None:
        """Compute all answers, and write them to a file of some kilobytes."""
        for reading in (RIGHT, UNSCALED):
            for prompt in self.prompts:
                self.answer(prompt, reading)
        write_whole(file, self.model_dump_json() + "\n")


def unscaled(found: Model) -> Model:
    """Return a model without the scaling of its rope."""
    rope = full_attention_rope(found.config)
    plain = {"rope_type": "default", **{key: rope[key] for key in UNSCALED_ROPE if key in rope}}
    return replace(found, config=in_both_dialects(with_full_rope(found.config, plain)))


@torch.no_grad()
def _answer(loaded: Model, prompt: str) -> Answer:
    tokenizer, model = loaded.tokenizer, loaded.model
    ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
    scored = min(SCORED, len(ids) - 1)
    written, cache = list(ids), None
    rows: list[torch.Tensor] = []
    while len(written) < len(ids) + WRITTEN:
        tokens = torch.tensor([written[-1:] if rows else ids], device=model.device)
        output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=scored + 1)
        rows += output.logits[0].cpu().double().log_softmax(-1)
        written.append(int(rows[-1].argmax()))
        cache = output.past_key_values
    # Decoded after the prompt's last token: some tokenizers drop the space before a text.
    pieces = [written[len(ids) - 1 : end] for end in range(len(ids), len(written) + 1)]
    before, *texts = tokenizer.batch_decode(pieces, skip_special_tokens=True)
    first, second = torch.stack(rows[scored:]).topk(2).values.T
    return Answer(
        text=texts[-1][len(before) :],
        # A character of several tokens is not counted before the last of them.
        ends=[len(text.rstrip("\ufffd")) - len(before) for text in texts],
        logprobs=first.tolist(),
        margins=(first - second).tolist(),
        prompt=[float(row[token]) for row, token in zip(rows, ids[-scored:], strict=False)],
    )
