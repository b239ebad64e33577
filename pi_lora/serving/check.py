"""Whether a server of the OpenAI API (vLLM, SGLang, llama.cpp, mlx-lm, TGI, Ollama) computes a model beyond its
original window: its answers to long prompts are compared with those computed here.
"""

import json
import os
import random
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from pydantic import BaseModel
from rich.table import Table

from pi_lora.data.recall import sentences
from pi_lora.errors import DataError, PiLoraError
from pi_lora.models.model import Model
from pi_lora.scaling.config import full_attention_rope, with_full_rope, with_legacy_rope_keys
from pi_lora.storage import write_whole
from pi_lora.types import Json, Progress, silent

# Tokens that are written, and the last tokens of a prompt whose log probabilities are compared.
WRITTEN, SCORED = 32, 64
# In a merged folder.
REFERENCE_FILE = "server_reference.json"
# How a server can read a prompt.
RIGHT, UNSCALED = "right", "unscaled"
# What is left of a rope without its scaling.
UNSCALED_ROPE = ("rope_theta", "partial_rotary_factor")
# Seconds that a server may take for a long prompt.
PATIENCE = 3600
# A request that is greedy in every server: some take penalties from their model's generation config.
GREEDY = {"temperature": 0, "repetition_penalty": 1, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
# Requests for log probabilities, from the most to none. vLLM gives those of the prompt; mlx-lm takes true alone; a
# llama-cpp-python that was started without `--logits_all true` refuses all but the last.
LOGPROBS: tuple[Json, ...] = ({"logprobs": 1, "prompt_logprobs": 0}, {"logprobs": True}, {})
CUT, REFUSED, DIFFERENT = "cut", "refused", "different"
# Where the second choice is so close in nats to the first, rounding decides which one a server takes.
TIE = 0.5
# Without log probabilities, so many equal tokens are an agreement.
MIN_EQUAL_TOKENS = 4
# Tokens by which a server may count fewer than are computed here, and has not cut the prompt.
CUT_SLACK = 5


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
    """A reference that computes the answers of `model` by a reading, once and when they are needed."""

    def __init__(self, model: Model, text: str = "", dtype: str | None = None, progress: Progress = silent) -> None:
        super().__init__(model=model.name, original=model.original, target=model.window, own_text=text)
        self._model, self._dtype, self._progress = model, dtype, progress
        ends = model.tokenizer(self.text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        lengths = (model.window * 9 // 10, model.original // 2)
        if len(ends) <= lengths[0]:
            raise DataError(f"--text: has fewer than {lengths[0]:,} tokens; name a longer text")
        self.prompts = [Prompt(characters=ends[tokens][0], tokens=tokens) for tokens in lengths]
        self.own_text = text[: ends[lengths[0]][0]]

    def answer(self, prompt: Prompt, reading: str) -> Answer:
        """Return the answer to a prompt in one reading."""
        if reading not in prompt.answers:
            self._compute(reading)
        return super().answer(prompt, reading)

    def _compute(self, reading: str) -> None:
        """Load the model, or what engines compute that drop the scaling from its config, and answer all prompts."""
        model = self._model if reading == RIGHT else unscaled(self._model)
        loaded = model.load(self._dtype)
        for prompt in self.prompts:
            self._progress(0, 0, f"computing {prompt.tokens:,} tokens here: {reading}")
            prompt.answers[reading] = _answer(loaded, self.text[: prompt.characters])

    def write(self, file: Path) -> None:
        """Compute all answers, and write them to a file of some kilobytes."""
        for reading in (RIGHT, UNSCALED):
            self._compute(reading)
        write_whole(file, self.model_dump_json() + "\n")


def unscaled(model: Model) -> Model:
    """Return a model without the scaling of its rope."""
    rope = full_attention_rope(model.config)
    plain = {"rope_type": "default", **{key: rope[key] for key in UNSCALED_ROPE if key in rope}}
    return replace(model, config=with_legacy_rope_keys(with_full_rope(model.config, plain)))


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


@dataclass(frozen=True)
class Completion:
    """The text that a server wrote, and how many tokens of the prompt it counted, if it says so. Log probabilities, in
    nats, are those of the written tokens and of the prompt's; empty where the server gives none.
    """

    text: str
    seen: int | None
    logprobs: list[float]
    prompt_logprobs: list[float]


class Server:
    """The server at `url`; `name` is the model that is asked, by default the only one that the server lists."""

    def __init__(self, url: str, name: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            models = self._call("/v1/models").get("data") or []
        except (HTTPError, ValueError):  # mlx-lm without a cache of the hub lists none
            models = []
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise PiLoraError(f"{self.url}: cannot be reached ({reason}); start the server, or correct it") from None
        self.name = name or (models[0]["id"] if len(models) == 1 else None)

    def complete(self, prompt: str) -> Completion | str:
        """Return the greedy continuation of a prompt by `WRITTEN` tokens, or why the server refuses."""
        body = {"prompt": prompt, "max_tokens": WRITTEN, **GREEDY, **({"model": self.name} if self.name else {})}
        for logprobs in LOGPROBS:
            try:
                return _completion(self._call("/v1/completions", body | logprobs))
            except HTTPError as error:
                said = error.read().decode(errors="replace")
        return said[:300]

    def _call(self, path: str, body: Json | None = None) -> Json:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}
        request = Request(self.url + path, json.dumps(body).encode() if body else None, headers)
        with urlopen(request, timeout=PATIENCE) as answer:
            content: Json = json.load(answer)
            return content


def _completion(content: Json) -> Completion:
    choice = content["choices"][0]
    # llama.cpp and mlx-lm name the numbers as the chat API does, the others as the API of completions does.
    given: Json = choice.get("logprobs") or {}
    written = given.get("token_logprobs") or [token["logprob"] for token in given.get("content") or ()]
    # The prompt's first token has none.
    prompt: list[Json] = (choice.get("prompt_logprobs") or [])[1:]
    entries = [entry["logprob"] for token in prompt for entry in token.values()]
    return Completion(choice["text"], (content.get("usage") or {}).get("prompt_tokens"), written, entries)


class Verdict(BaseModel):
    """What a server made of a prompt: `agreed` tokens of its answer are those of the reading that the verdict names,
    else of the right one; `difference` is the mean distance of log probabilities from that reading's, in nats.
    """

    tokens: int
    verdict: str
    detail: str = ""
    agreed: int = 0
    difference: float | None = None


def verdicts_table(title: str, verdicts: list[Verdict]) -> Table:
    """Return a row for each prompt."""
    table = Table("prompt tokens", "verdict", "equal tokens", "difference, nats", "", title=title)
    for row in verdicts:
        difference = "" if row.difference is None else f"{row.difference:.2g}"
        table.add_row(f"{row.tokens:,}", row.verdict, f"{row.agreed} of {WRITTEN}", difference, row.detail)
    return table


def check_server(server: Server, reference: Reference, tolerance: float, progress: Progress = silent) -> list[Verdict]:
    """Ask a server both prompts of a reference, and judge it by the answers there. Log probabilities may differ by
    `tolerance` nats on average.
    """
    verdicts = []
    for prompt in reference.prompts:
        progress(0, 0, f"asking the server about {prompt.tokens:,} tokens")
        said = server.complete(reference.text[: prompt.characters])
        if isinstance(said, str):
            verdicts.append(Verdict(tokens=prompt.tokens, verdict=REFUSED, detail=said))
        else:
            verdicts.append(_judge(reference, prompt, said, tolerance))
    return verdicts


def _judge(reference: Reference, prompt: Prompt, said: Completion, tolerance: float) -> Verdict:
    for verdict in (RIGHT, UNSCALED):
        distance, agreed = _compare(reference.answer(prompt, verdict), said)
        if distance <= tolerance:
            break
    else:
        verdict = CUT if prompt.tokens - (said.seen or prompt.tokens) > CUT_SLACK else DIFFERENT
        distance, agreed = _compare(reference.answer(prompt, RIGHT), said)
    details = {
        UNSCALED: "it computes the model without the scaling in its config.json",
        CUT: f"it saw only {said.seen} tokens; start it with a window of {reference.target:,}",
        DIFFERENT: "it computes another model",
    }
    detail, difference = details.get(verdict, ""), distance if said.logprobs and isfinite(distance) else None
    return Verdict(tokens=prompt.tokens, verdict=verdict, detail=detail, agreed=agreed, difference=difference)


def _compare(computed: Answer, said: Completion) -> tuple[float, int]:
    """Return the mean distance of log probabilities, infinite if the texts cannot be of the same model, and how many
    tokens are equal. Without log probabilities the distance is 0 if enough tokens are equal.
    """
    # mlx-lm's server leaves out the space that an answer begins with.
    begins = " " if computed.text.startswith(" ") else ""
    text = begins + said.text.lstrip(" ")
    agreed = sum(text.startswith(computed.text[:end]) for end in computed.ends)
    pairs = [*zip(computed.logprobs[:agreed], said.logprobs, strict=False)]
    pairs += zip(computed.prompt[::-1], said.prompt_logprobs[::-1], strict=False)
    # A server ends where the model does, or goes on after all that was computed.
    ends = computed.text.startswith(text.rstrip("\ufffd")) or agreed == len(computed.margins)
    follows = ends or computed.margins[agreed] < TIE
    if not follows or (not pairs and agreed < MIN_EQUAL_TOKENS):
        return inf, agreed
    return fmean(abs(own - other) for own, other in pairs) if pairs else 0.0, agreed
