"""The check of a server of the OpenAI API (vLLM, SGLang, llama.cpp, mlx-lm, TGI, Ollama) beyond the original window.

The answers of the server to long prompts are compared with those computed here.
"""

import json
import os
import random
from collections.abc import Callable
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
from pi_lora.models.loaded import LoadedModel, load_model
from pi_lora.models.source import ModelSource
from pi_lora.scaling.config import full_attention_rope, with_full_rope, with_legacy_rope_keys
from pi_lora.storage import write_whole
from pi_lora.types import Json, Progress, silent

# The tokens of an answer.
MAX_NEW_TOKENS = 32
# The last tokens of a prompt, whose log probabilities are compared.
NUM_PROMPT_LOGPROBS = 64
# In a merged folder.
REFERENCE_FILE = "server_reference.json"
# How a server can read a prompt.
RIGHT, UNSCALED = "right", "unscaled"
# The entries of a rope without scaling.
UNSCALED_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
# Seconds that a server may take for a long prompt.
TIMEOUT_SECONDS = 3600
# A request that is greedy in every server: some take penalties from their model's generation config.
GREEDY = {
    "temperature": 0,
    "repetition_penalty": 1,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
# Requests for log probabilities, from the most to none. vLLM gives those of the prompt; mlx-lm takes true alone; a
# llama-cpp-python that was started without `--logits_all true` refuses all but the last.
LOGPROBS_REQUESTS: tuple[Json, ...] = ({"logprobs": 1, "prompt_logprobs": 0}, {"logprobs": True}, {})
# Verdicts on a server that reads the prompt in neither way.
CUT, REFUSED, DIFFERENT = "cut", "refused", "different"
# Below this distance in nats between the first and the second choice, rounding decides which one a server takes.
TIE_MARGIN = 0.5
# Without log probabilities, this many equal tokens are an agreement.
MIN_EQUAL_TOKENS = 4
# A server that counts more tokens fewer than are computed here has cut the prompt.
MAX_MISSING_TOKENS = 5


class Answer(BaseModel):
    """A greedy answer.

    Attributes:
        text: The text of all tokens.
        ends: The length of the text after every token, in characters.
        logprobs: The log probabilities of the tokens, in nats.
        margins: The distances to the log probabilities of the second choices, in nats.
        prompt: The log probabilities of the last tokens of the prompt.
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
    """The answers of a model to two prompts, of 90 % of L' (`target`) and of half of L (`original`).

    The prompts begin `own_text`, or sentences that are the same on every machine.
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


AnswerOf = Callable[[Prompt, str], Answer]


def stored_answer(prompt: Prompt, reading: str) -> Answer:
    """Return an answer that a reference holds."""
    return prompt.answers[reading]


class ReferenceComputer:
    """Computes a reference from a model, on demand and once for every reading.

    Attributes:
        reference: The prompts, with the answers that were computed so far.
    """

    def __init__(
        self, model: ModelSource, *, text: str = "", dtype: str | None = None, progress: Progress = silent
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.progress = progress
        self.reference = Reference(model=model.name, original=model.original, target=model.window, own_text=text)
        encoded = model.tokenizer(self.reference.text, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]]
        long_tokens = model.window * 9 // 10
        short_tokens = model.original // 2
        if len(starts) <= long_tokens:
            raise DataError(f"--text: has fewer than {long_tokens:,} tokens; name a longer text")
        self.reference.prompts = [
            Prompt(characters=starts[long_tokens], tokens=long_tokens),
            Prompt(characters=starts[short_tokens], tokens=short_tokens),
        ]
        self.reference.own_text = text[: starts[long_tokens]]

    def answer(self, prompt: Prompt, reading: str) -> Answer:
        """Return the answer to a prompt in one reading."""
        if reading not in prompt.answers:
            self.compute(reading)
        return prompt.answers[reading]

    def compute(self, reading: str) -> None:
        """Answer all prompts with the model, or with the model that engines compute without the scaling."""
        source = self.model if reading == RIGHT else unscaled(self.model)
        loaded = load_model(source, self.dtype)
        for prompt in self.reference.prompts:
            self.progress(0, 0, f"computing {prompt.tokens:,} tokens here: {reading}")
            prompt.answers[reading] = _answer(loaded, self.reference.text[: prompt.characters])


def write_reference(computer: ReferenceComputer, file: Path) -> None:
    """Compute all answers, and write them to a file of some kilobytes."""
    for reading in (RIGHT, UNSCALED):
        computer.compute(reading)
    write_whole(file, computer.reference.model_dump_json() + "\n")


def unscaled(model: ModelSource) -> ModelSource:
    """Return a model without the scaling of its rope."""
    rope = full_attention_rope(model.config)
    plain_rope = {key: rope[key] for key in UNSCALED_ROPE_KEYS if key in rope}
    config = with_full_rope(model.config, {"rope_type": "default", **plain_rope})
    return replace(model, config=with_legacy_rope_keys(config))


@torch.no_grad()
def _answer(loaded: LoadedModel, prompt: str) -> Answer:
    tokenizer = loaded.tokenizer
    model = loaded.module
    prompt_ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
    num_prompt_logprobs = min(NUM_PROMPT_LOGPROBS, len(prompt_ids) - 1)
    ids = list(prompt_ids)
    input_ids = prompt_ids
    cache = None
    rows: list[torch.Tensor] = []
    for _ in range(MAX_NEW_TOKENS):
        output = model(
            torch.tensor([input_ids], device=model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_prompt_logprobs + 1,
        )
        rows += output.logits[0].cpu().double().log_softmax(-1)
        ids.append(int(rows[-1].argmax()))
        input_ids = ids[-1:]
        cache = output.past_key_values
    # Decoded after the last token of the prompt: some tokenizers drop the space before a text.
    first = len(prompt_ids) - 1
    pieces = [ids[first:end] for end in range(len(prompt_ids), len(ids) + 1)]
    before, *texts = tokenizer.batch_decode(pieces, skip_special_tokens=True)
    best, second = torch.stack(rows[num_prompt_logprobs:]).topk(2).values.T
    last_prompt_ids = prompt_ids[-num_prompt_logprobs:]
    return Answer(
        text=texts[-1][len(before) :],
        # A character of several tokens is not counted before the last of them.
        ends=[len(text.rstrip("\ufffd")) - len(before) for text in texts],
        logprobs=best.tolist(),
        margins=(best - second).tolist(),
        prompt=[float(row[token]) for row, token in zip(rows, last_prompt_ids, strict=False)],
    )


@dataclass(frozen=True)
class Completion:
    """The answer of a server.

    Attributes:
        text: The text that the server wrote.
        prompt_tokens: The tokens of the prompt that the server counted, if the server reports them.
        logprobs: The log probabilities of the written tokens, in nats; empty if the server gives none.
        prompt_logprobs: The log probabilities of the tokens of the prompt, likewise.
    """

    text: str
    prompt_tokens: int | None
    logprobs: list[float]
    prompt_logprobs: list[float]


class Server:
    """The server at `url`; `name` is the model that answers, by default the only one that the server lists."""

    def __init__(self, url: str, name: str | None = None) -> None:
        with_scheme = url if "://" in url else f"http://{url}"
        self.url = with_scheme.rstrip("/").removesuffix("/v1")
        try:
            models = self._call("/v1/models").get("data") or []
        except (HTTPError, ValueError):  # mlx-lm without a cache of the hub lists none
            models = []
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise PiLoraError(f"{self.url}: cannot be reached ({reason}); start the server, or correct it") from None
        self.name = name
        if not name and len(models) == 1:
            self.name = models[0]["id"]

    def complete(self, prompt: str) -> Completion | str:
        """Return the greedy continuation of a prompt by `MAX_NEW_TOKENS` tokens, or the message of a refusal."""
        body = {"prompt": prompt, "max_tokens": MAX_NEW_TOKENS, **GREEDY}
        if self.name:
            body["model"] = self.name
        for logprobs in LOGPROBS_REQUESTS:
            try:
                content = self._call("/v1/completions", body | logprobs)
                return _completion(content)
            except HTTPError as error:
                refusal = error.read().decode(errors="replace")
        return refusal[:300]

    def _call(self, path: str, body: Json | None = None) -> Json:
        api_key = os.environ.get("OPENAI_API_KEY")
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        data = json.dumps(body).encode() if body else None
        request = Request(self.url + path, data, headers)
        with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            content: Json = json.load(response)
            return content


def _completion(content: Json) -> Completion:
    choice = content["choices"][0]
    usage: Json = content.get("usage") or {}
    # llama.cpp and mlx-lm name the numbers as the chat API does, the others as the API of completions does.
    scores: Json = choice.get("logprobs") or {}
    chat_scores: list[Json] = scores.get("content") or []
    logprobs = scores.get("token_logprobs") or [token["logprob"] for token in chat_scores]
    # The first token of the prompt has none.
    prompt_scores: list[Json] = (choice.get("prompt_logprobs") or [])[1:]
    prompt_logprobs = []
    for choices_at_token in prompt_scores:
        prompt_logprobs += [entry["logprob"] for entry in choices_at_token.values()]
    return Completion(
        text=choice["text"],
        prompt_tokens=usage.get("prompt_tokens"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


class Verdict(BaseModel):
    """How a server computed a prompt, compared with the reading that the verdict names, else with the right one.

    Attributes:
        tokens: The tokens of the prompt.
        verdict: A reading, or `CUT`, `REFUSED` or `DIFFERENT`.
        detail: An explanation for the user.
        agreed: The tokens at the start of the answer that are equal.
        difference: The mean distance of log probabilities, in nats.
    """

    tokens: int
    verdict: str
    detail: str = ""
    agreed: int = 0
    difference: float | None = None


def verdicts_table(title: str, verdicts: list[Verdict]) -> Table:
    """Return a row for each prompt."""
    table = Table("prompt tokens", "verdict", "equal tokens", "difference, nats", "", title=title)
    for verdict in verdicts:
        tokens = f"{verdict.tokens:,}"
        agreed = f"{verdict.agreed} of {MAX_NEW_TOKENS}"
        difference = "" if verdict.difference is None else f"{verdict.difference:.2g}"
        table.add_row(tokens, verdict.verdict, agreed, difference, verdict.detail)
    return table


def check_server(
    server: Server,
    reference: Reference,
    *,
    answer: AnswerOf = stored_answer,
    tolerance: float = 0.1,
    progress: Progress = silent,
) -> list[Verdict]:
    """Send both prompts of a reference to a server, and compare the answers with those of the reference.

    Log probabilities may differ by `tolerance` nats on average.
    """
    verdicts = []
    for prompt in reference.prompts:
        progress(0, 0, f"asking the server about {prompt.tokens:,} tokens")
        completion = server.complete(reference.text[: prompt.characters])
        if isinstance(completion, str):
            verdict = Verdict(tokens=prompt.tokens, verdict=REFUSED, detail=completion)
        else:
            verdict = _judge(prompt, completion, answer, window=reference.target, tolerance=tolerance)
        verdicts.append(verdict)
    return verdicts


def _judge(prompt: Prompt, completion: Completion, answer: AnswerOf, *, window: int, tolerance: float) -> Verdict:
    for reading in (RIGHT, UNSCALED):
        distance, agreed = _compare(answer(prompt, reading), completion)
        if distance <= tolerance:
            verdict = reading
            break
    else:
        missing = prompt.tokens - (completion.prompt_tokens or prompt.tokens)
        verdict = CUT if missing > MAX_MISSING_TOKENS else DIFFERENT
        distance, agreed = _compare(answer(prompt, RIGHT), completion)
    details = {
        RIGHT: "",
        UNSCALED: "it computes the model without the scaling in its config.json",
        CUT: f"it saw only {completion.prompt_tokens} tokens; start it with a window of {window:,}",
        DIFFERENT: "it computes another model",
    }
    return Verdict(
        tokens=prompt.tokens,
        verdict=verdict,
        detail=details[verdict],
        agreed=agreed,
        difference=distance if completion.logprobs and isfinite(distance) else None,
    )


def _compare(computed: Answer, completion: Completion) -> tuple[float, int]:
    """Return the mean distance of log probabilities and the number of equal tokens.

    The distance is infinite if the texts cannot be of the same model. Without log probabilities it is 0 if enough
    tokens are equal.
    """
    # mlx-lm's server leaves out the space that an answer begins with.
    first_space = " " if computed.text.startswith(" ") else ""
    text = first_space + completion.text.lstrip(" ")
    agreed = sum(1 for end in computed.ends if text.startswith(computed.text[:end]))
    pairs = [*zip(computed.logprobs[:agreed], completion.logprobs, strict=False)]
    pairs += zip(computed.prompt[::-1], completion.prompt_logprobs[::-1], strict=False)
    # A server ends where the model does, or goes on after all that was computed.
    ends = computed.text.startswith(text.rstrip("\ufffd")) or agreed == len(computed.margins)
    follows = ends or computed.margins[agreed] < TIE_MARGIN
    if not follows:
        return inf, agreed
    if pairs:
        return fmean(abs(here - there) for here, there in pairs), agreed
    return (0.0 if agreed >= MIN_EQUAL_TOKENS else inf), agreed
