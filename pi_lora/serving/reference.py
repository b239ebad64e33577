"""What a model answers to prompts longer than its original window: computed here, for a server to be compared with."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, BaseModel

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
# How a server can read a prompt; `cut N` is its last N tokens.
RIGHT, UNSCALED, CUT = "right", "unscaled", "cut"
# What is left of a rope without its scaling.
UNSCALED_ROPE = ("rope_theta", "partial_rotary_factor")
# Five digits keep references small.
Nats = list[Annotated[float, AfterValidator(lambda value: round(value, 5))]]


class Answer(BaseModel):
    """A greedy answer: after each token the text so far has `ends` characters. `logprobs` and `margins`, by which they
    exceed the second choice, are in nats; `prompt` has those of the prompt's last tokens.
    """

    text: str
    ends: list[int]
    logprobs: Nats
    margins: Nats
    prompt: Nats


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

    def readings(self, prompt: Prompt) -> list[str]:
        """Return the ways in which a server can read a prompt."""
        sizes = sorted({self.original, *(2**power for power in range(8, 24))})
        return [RIGHT, *(f"{CUT} {size}" for size in sizes if size < prompt.tokens), UNSCALED]

    def answer(self, prompt: Prompt, reading: str) -> Answer | None:
        """Return the answer to a prompt in one reading; None if it is not known."""
        return prompt.answers.get(reading)


class Reader(Reference):
    """A reference that computes the answers of the model `found`, each once and when it is needed."""

    _loaded: dict[bool, Model] = {}

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
        """Return the answer to a prompt in one reading."""
        if reading not in prompt.answers:
            self._progress(0, 0, f"computing {prompt.tokens:,} tokens here: {reading}")
            ids = self._found.tokenizer(self.text[: prompt.characters], verbose=False)["input_ids"]
            size = reading.partition(" ")[2] or len(ids)
            prompt.answers[reading] = _answer(self._model(reading != UNSCALED), ids[-int(size) :])
        return prompt.answers[reading]

    def write(self, file: Path) -> None:
        """Compute all answers, and write them to a file of some kilobytes."""
        pairs = [(prompt, reading) for prompt in self.prompts for reading in self.readings(prompt)]
        # The unscaled model is loaded last.
        for prompt, reading in sorted(pairs, key=lambda pair: pair[1] == UNSCALED):
            self.answer(prompt, reading)
        write_whole(file, self.model_dump_json() + "\n")

    def _model(self, scaled: bool) -> Model:
        """Load the model, or as engines compute it that drop the scaling from its config."""
        if scaled not in self._loaded:
            self._loaded.clear()  # one model at a time
            rope = full_attention_rope(self._found.config)
            plain = {"rope_type": "default", **{key: rope[key] for key in UNSCALED_ROPE if key in rope}}
            config = in_both_dialects(with_full_rope(self._found.config, plain))
            found = self._found if scaled else replace(self._found, config=config)
            self._loaded[scaled] = found.load(self._dtype)
        return self._loaded[scaled]


@torch.no_grad()
def _answer(loaded: Model, ids: list[int]) -> Answer:
    model, scored = loaded.model, min(SCORED, len(ids) - 1)
    output = model(torch.tensor([ids], device=model.device), use_cache=True, logits_to_keep=scored + 1)
    rows, cache = output.logits[0].cpu().double().log_softmax(-1), output.past_key_values
    best = [rows[-1].topk(2)]
    while len(best) < WRITTEN:
        tokens = best[-1].indices[None, :1].to(model.device)
        output = model(tokens, past_key_values=cache, use_cache=True)
        best.append(output.logits[0, -1].cpu().double().log_softmax(-1).topk(2))
    written = [*ids, *(int(each.indices[0]) for each in best)]
    # Decoded after the prompt's last token: some tokenizers drop the space before a text.
    pieces = [written[len(ids) - 1 : end] for end in range(len(ids), len(written) + 1)]
    before, *texts = loaded.tokenizer.batch_decode(pieces, skip_special_tokens=True)
    first, second = torch.stack([each.values for each in best]).T
    return Answer(
        text=texts[-1][len(before) :],
        # A character of several tokens is not counted before the last of them.
        ends=[len(text.rstrip("\ufffd")) - len(before) for text in texts],
        logprobs=first.tolist(),
        margins=(first - second).tolist(),
        prompt=rows[:-1].gather(1, torch.tensor(ids[-scored:])[:, None])[:, 0].tolist(),
    )
