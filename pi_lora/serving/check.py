"""The check of a server of the OpenAI API (vLLM, SGLang, llama.cpp, mlx-lm, TGI, Ollama) beyond the original window.

The answers of the server to long prompts are compared with those computed here.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from math import inf, isfinite
from statistics import fmean
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pydantic import BaseModel
from pydantic.dataclasses import dataclass
from rich.table import Table

from pi_lora.errors import PiLoraError
from pi_lora.serving.reference import (
    ADDS_BOS,
    ADDS_EOS,
    LACKS_BOS,
    MAX_NEW_TOKENS,
    RIGHT,
    UNSCALED,
    Answer,
    Prompt,
    Reference,
)
from pi_lora.types import Json, Progress, silent

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
# Requests for log probabilities, and for none. mlx-lm takes true alone; a llama-cpp-python that was started without
# `--logits_all true` refuses all but the last.
LOGPROBS_REQUESTS: tuple[Json, ...] = ({"logprobs": 1}, {"logprobs": True}, {})
# What reading an answer raises that is not in the form of the OpenAI API.
MALFORMED = (AttributeError, LookupError, TypeError, ValueError)
# Verdicts beside the readings.
CUT, REFUSED, DIFFERENT, UNCLEAR, OTHER_TEMPLATE = "cut", "refused", "different", "unclear", "other template"
# The tokens that a server adds to every prompt, by reading.
ADDED = {ADDS_EOS: 1, ADDS_BOS: 1, LACKS_BOS: -1}
DETAILS = {
    ADDS_EOS: "it puts EOS behind a prompt; correct add_eos_token and the post_processor of its tokenizer",
    ADDS_BOS: "it puts a BOS before a prompt that the model does not read; correct add_bos_token and post_processor "
    "of its tokenizer",
    LACKS_BOS: "it leaves out the BOS that the model reads first; correct add_bos_token and post_processor of its "
    "tokenizer",
    UNSCALED: "it computes the model without the scaling in its config.json",
    OTHER_TEMPLATE: "it does not answer a chat as the model under its own chat template; start it with that template, "
    "without a system prompt (a reference for a template that writes the date holds for one day)",
}
# Below this distance in nats between the first and the second choice, rounding decides which one a server takes.
TIE_MARGIN = 0.5
# Fewer equal tokens prove nothing. Some tokenizers need three for a blank and a code.
MIN_EQUAL_TOKENS = 3
# A server that counts more tokens fewer than are computed here has cut the prompt.
MAX_MISSING_TOKENS = 5


@dataclass(frozen=True)
class Completion:
    """The answer of a server.

    Attributes:
        text: The text that the server wrote.
        prompt_tokens: The tokens of the prompt that the server counted, if the server reports them.
        logprobs: The log probabilities of the written tokens, in nats; empty if the server gives none.
    """

    text: str
    prompt_tokens: int | None
    logprobs: list[float]


class Server:
    """The server at `url`; `name` is the model that answers, by default the only one that the server lists. `choices`
    lists the models of a server with several if the user named none.
    """

    def __init__(self, url: str, name: str | None = None) -> None:
        with_scheme = url if "://" in url else f"http://{url}"
        self.url = with_scheme.rstrip("/").removesuffix("/v1")
        self.name = name
        self.choices: list[str] = []
        # mlx-lm without a cache of the hub lists none.
        with suppress(HTTPError, *MALFORMED):
            listed = [model["id"] for model in self._call("/v1/models")["data"]]
            if not name and len(listed) == 1:
                self.name = listed[0]
            elif not name:
                self.choices = listed

    def complete(self, prompt: str, *, chat: bool = False) -> Completion | str:
        """Return the greedy continuation of a prompt by `MAX_NEW_TOKENS` tokens, or the message of a refusal. With
        `chat`, return the answer to the prompt as the turn of a user.
        """
        path = "/v1/chat/completions" if chat else "/v1/completions"
        asked: Json = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        body = {"max_tokens": MAX_NEW_TOKENS, **GREEDY, **asked}
        if self.name:
            body["model"] = self.name
        for logprobs in LOGPROBS_REQUESTS[chat:]:
            content = None
            try:
                content = self._call(path, body | logprobs)
                return _completion(content, chat=chat)
            except HTTPError as error:
                refusal = error.read().decode(errors="replace") or str(error)
            except MALFORMED as error:  # LM Studio answers an error with status 200, a proxy with a page
                refusal = f"it does not answer as the API of completions does: {content or error}"
        return refusal[:300]

    def _call(self, path: str, body: Json | None = None) -> Any:
        api_key = os.environ.get("OPENAI_API_KEY")
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        data = json.dumps(body).encode() if body else None
        try:
            request = Request(self.url + path, data, headers)
            with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                answer = response.read()
        except HTTPError:
            raise
        except (OSError, HTTPException, ValueError) as error:  # ValueError: not a URL
            reason = getattr(error, "reason", error)
            raise PiLoraError(f"{self.url}: cannot be reached ({reason}); start the server or fix the URL") from None
        return json.loads(answer)


def _completion(content: Json, *, chat: bool) -> Completion:
    choice = content["choices"][0]
    usage: Json = content.get("usage") or {}
    # llama.cpp and mlx-lm name the numbers as the chat API does, the others as the API of completions does.
    scores: Json = choice.get("logprobs") or {}
    chat_scores: list[Json] = scores.get("content") or []
    logprobs = scores.get("token_logprobs") or [token["logprob"] for token in chat_scores]
    text = choice["message"]["content"] if chat else choice["text"]
    if chat and not text:
        # The server takes thoughts out of an answer.
        text = "".join(token["token"] for token in chat_scores)
    return Completion(
        text=text,
        prompt_tokens=usage.get("prompt_tokens"),
        logprobs=logprobs,
    )


class Verdict(BaseModel):
    """How a server computed a prompt, compared with the reading that the verdict names, else with the right one.

    Attributes:
        tokens: The tokens of the prompt.
        depth: Where the code that is asked for stands, in percent of the prompt; None in a chat.
        verdict: A reading, or `CUT`, `REFUSED`, `DIFFERENT` or `UNCLEAR`.
        detail: An explanation for the user.
        agreed: The tokens at the start of the answer that are equal.
        difference: The mean distance of log probabilities, in nats.
    """

    tokens: int
    depth: int | None
    verdict: str
    detail: str = ""
    agreed: int = 0
    difference: float | None = None


def verdicts_table(title: str, verdicts: list[Verdict]) -> Table:
    """Return a row for each prompt, and below the explanations of the verdicts."""
    table = Table("prompt tokens", "asked for", "verdict", "equal tokens", "difference, nats", title=title)
    table.caption_justify = "left"
    details = [f"{verdict.verdict}: {verdict.detail}" for verdict in verdicts if verdict.detail]
    table.caption = "\n".join(dict.fromkeys(details))
    for verdict in verdicts:
        tokens = f"{verdict.tokens:,}"
        asked = "in a chat" if verdict.depth is None else f"at {verdict.depth} %"
        agreed = f"{verdict.agreed} of {MAX_NEW_TOKENS}"
        difference = "" if verdict.difference is None else f"{verdict.difference:.2g}"
        table.add_row(tokens, asked, verdict.verdict, agreed, difference)
    return table


def check_server(
    server: Server,
    reference: Reference,
    *,
    compute: Callable[[], None] | None,
    tolerance: float,
    progress: Progress = silent,
) -> list[Verdict]:
    """Send the prompts of a reference to a server, and return how the answers compare with those of the reference.

    A reference without answers is filled in by `compute`. Log probabilities may differ by `tolerance` nats on average.
    """
    verdicts: list[Verdict] = []
    for prompt in reference.prompts:
        progress(0, 0, f"asking the server about {prompt.tokens:,} tokens")
        completion = server.complete(reference.text(prompt), chat=prompt.chat)
        if isinstance(completion, str):
            verdict = Verdict(
                tokens=prompt.tokens,
                depth=prompt.depth,
                verdict=REFUSED,
                detail=completion,
            )
        else:
            if compute and not prompt.answers:
                compute()
            verdict = _judge(reference, prompt, completion, tolerance)
        verdicts.append(verdict)
        if verdict.verdict in ADDED and not prompt.chat:
            for each in verdicts:
                if each.verdict in (RIGHT, DIFFERENT, UNCLEAR):
                    each.verdict = verdict.verdict
                    each.detail = verdict.detail
    return verdicts


def _judge(reference: Reference, prompt: Prompt, completion: Completion, tolerance: float) -> Verdict:
    compared = {reading: _compare(answer, completion) for reading, answer in prompt.answers.items()}
    fitting = [reading for reading, (far, equal) in compared.items() if far <= tolerance and equal >= MIN_EQUAL_TOKENS]
    distance, agreed = compared[RIGHT]
    missing = prompt.tokens - (completion.prompt_tokens or prompt.tokens)
    closer = [reading for reading in fitting if RIGHT not in fitting or compared[reading] < compared[RIGHT]]
    added = [reading for reading in closer if ADDED.get(reading) == -missing]
    # Rounding may move the log probability of one token by more, in mixtures of experts above all.
    proves_nothing = isfinite(distance) and agreed < MIN_EQUAL_TOKENS and UNSCALED not in fitting
    start = f"start it with a window of {reference.target:,}"
    detail = ""
    if added:
        verdict = added[0]
    elif missing > MAX_MISSING_TOKENS and not prompt.chat:
        verdict = CUT
        detail = f"it saw only {completion.prompt_tokens} tokens; {start}"
    elif (distance <= tolerance or proves_nothing) and not (prompt.chat and missing):
        needs_scaling = UNSCALED in fitting and prompt.tokens > reference.original
        detail = _doubt(prompt, completion, agreed, ambiguous=needs_scaling)
        verdict = UNCLEAR if detail else RIGHT
    elif UNSCALED in fitting:
        verdict = UNSCALED
    else:
        verdict = OTHER_TEMPLATE if prompt.chat else DIFFERENT
        counts = f"{prompt.tokens - missing} tokens there, {prompt.tokens} here"
        detail = f"it computes another model, or not the whole prompt ({counts}): {start}"
    distance, agreed = compared.get(verdict, compared[RIGHT])
    return Verdict(
        tokens=prompt.tokens,
        depth=prompt.depth,
        verdict=verdict,
        detail=DETAILS.get(verdict, detail),
        agreed=agreed,
        difference=distance if completion.logprobs and isfinite(distance) else None,
    )


def _doubt(prompt: Prompt, completion: Completion, agreed: int, *, ambiguous: bool) -> str:
    """Return why an answer like the model's is no proof, and what decides; "" if it is one."""
    if not prompt.chat and not prompt.is_found_in(prompt.answers[RIGHT].text):
        return "the model does not find the code, so a cut may go unnoticed; check with a model that was tuned longer"
    if not completion.logprobs:
        return "the text is right, but log probabilities are missing; start the server so that it gives them"
    compared = min(agreed, len(completion.logprobs))
    # The short prompts are for the weights and the tokens: no window is shorter.
    found = prompt.is_short or prompt.is_found_in(completion.text)
    if compared < MIN_EQUAL_TOKENS or not found:
        return f"only {compared} tokens can be compared; try another --text"
    if ambiguous:
        return "the model gives the same answer without its scaling; lower --tolerance"
    return ""


def _compare(computed: Answer, completion: Completion) -> tuple[float, int]:
    """Return the mean distance of log probabilities and the number of equal tokens.

    The distance is infinite if the texts cannot be of the same model, and 0 without log probabilities.
    """
    # mlx-lm's server leaves out the space that an answer begins with.
    spaces = len(computed.text) - len(computed.text.lstrip(" "))
    text = completion.text.lstrip(" ")
    if text:
        text = " " * spaces + text
    beginnings = [computed.text[:end] for end in computed.ends]
    agreed = sum(map(text.startswith, beginnings))
    end = computed.ends[agreed - 1] if agreed else 0
    expected = computed.text[end:].rstrip("\ufffd")
    answered = text[end:]
    # Some servers leave out the spaces at the end. They may go on after all that was computed, and end no earlier.
    follows = not expected.strip()
    if answered and expected:
        # A part of a token or of a character.
        follows = expected.startswith(answered.rstrip("\ufffd"))
    if not follows and computed.margins[agreed] >= TIE_MARGIN:
        return inf, agreed
    pairs = zip(computed.logprobs[:agreed], completion.logprobs, strict=False)
    distances = [abs(here - there) for here, there in pairs]
    return fmean(distances or [0.0]), agreed
