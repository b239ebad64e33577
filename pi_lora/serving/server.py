"""A server of the OpenAI API, asked to continue a text: vLLM, SGLang, llama.cpp, mlx-lm, TGI, Ollama."""

import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pi_lora.errors import PiLoraError
from pi_lora.types import Json

# Seconds that a server may take for a long prompt.
PATIENCE = 3600
# A request that is greedy in every server: some take penalties from their model's generation config.
GREEDY = {"temperature": 0, "repetition_penalty": 1, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
# Requests for log probabilities, from the most to none. vLLM gives those of the prompt; mlx-lm takes true alone; a
# llama-cpp-python that was started without `--logits_all true` refuses all but the last.
LOGPROBS: tuple[Json, ...] = ({"logprobs": 1, "prompt_logprobs": 0}, {"logprobs": True}, {})


@dataclass(frozen=True)
class Completion:
    """The text that a server wrote, and how many tokens of the prompt it counted, if it says so. Log probabilities, in
    nats, are those of the written tokens and of the prompt's; empty where the server gives none.
    """

    text: str
    seen: int | None = None
    logprobs: tuple[float, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()


class Refused(Exception):
    """A request that the server did not answer, with its own message."""


class Server:
    """The server at `url`; `name` is the model that is asked, by default the only one that the server lists."""

    def __init__(self, url: str, name: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            models = self._call("/v1/models").get("data") or []
        except (Refused, ValueError):  # mlx-lm without a cache of the hub lists none
            models = []
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise PiLoraError(f"{self.url}: cannot be reached ({reason}); start the server, or correct it") from None
        self.name = name or (models[0]["id"] if len(models) == 1 else None)

    def complete(self, prompt: str, tokens: int) -> Completion:
        """Return the greedy continuation of a prompt by `tokens` tokens; raise Refused with the server's message."""
        body = {"prompt": prompt, "max_tokens": tokens, **GREEDY, **({"model": self.name} if self.name else {})}
        refusal = Refused()
        for logprobs in LOGPROBS:
            try:
                return _completion(self._call("/v1/completions", body | logprobs))
            except Refused as error:
                refusal = error
            except OSError as error:
                raise Refused(f"the connection ended: {error}") from None
        raise refusal

    def _call(self, path: str, body: Json | None = None) -> Json:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}
        request = Request(self.url + path, json.dumps(body).encode() if body else None, headers)
        try:
            with urlopen(request, timeout=PATIENCE) as answer:
                content: Json = json.load(answer)
                return content
        except HTTPError as error:
            raise Refused(_message(error.read().decode(errors="replace")) or str(error)) from None


def _message(body: str) -> str:
    """Return the message of an error; servers nest it differently."""
    try:
        content = json.loads(body)
    except ValueError:
        return " ".join(body.split())[:300]
    for key in ("error", "message", "detail"):
        content = content.get(key, content) if isinstance(content, dict) else content
    return str(content)


def _completion(content: Json) -> Completion:
    choice = content["choices"][0]
    # llama.cpp and mlx-lm name the numbers as the chat API does, the others as the API of completions does.
    given: Json = choice.get("logprobs") or {}
    written = [token["logprob"] for token in given.get("content") or ()] or given.get("token_logprobs") or []
    # The prompt's first token has none.
    prompt: list[Any] = choice.get("prompt_logprobs") or []
    return Completion(
        text=choice["text"],
        seen=(content.get("usage") or {}).get("prompt_tokens"),
        logprobs=tuple(written),
        prompt_logprobs=tuple(entry["logprob"] for token in prompt[1:] for entry in token.values()),
    )
