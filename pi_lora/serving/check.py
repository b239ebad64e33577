"""Whether a server computes a model beyond its original window: its answers beside those computed here."""

from collections.abc import Callable
from math import inf, isfinite
from statistics import fmean

from pydantic import BaseModel
from rich.table import Table

from pi_lora.serving.reference import CUT, RIGHT, UNSCALED, WRITTEN, Answer, Prompt, Reference
from pi_lora.serving.server import Completion, Refused, Server
from pi_lora.types import Progress, silent

REFUSED, DIFFERENT = "refused", "different"
# Where the second choice is so close in nats to the first, rounding decides which one a server takes.
TIE = 0.5
# Without log probabilities, so many equal tokens are an agreement.
ENOUGH = 4
# Tokens by which a server may count fewer than are computed here, and has not cut the prompt.
CUT_SLACK = 5
# The answer to a prompt in a reading, None if it is not known.
Answers = Callable[[Prompt, str], Answer | None]


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


def check_server(
    server: Server, reference: Reference, answer: Answers, tolerance: float, progress: Progress = silent
) -> list[Verdict]:
    """Ask a server both prompts of a reference, and judge it by the `answer` to each reading, None where it is not
    known. Log probabilities may differ by `tolerance` nats on average.
    """
    verdicts, text = [], reference.text
    for prompt in reference.prompts:
        progress(0, 0, f"asking the server about {prompt.tokens:,} tokens")
        try:
            said = server.complete(text[: prompt.characters], WRITTEN)
        except Refused as error:
            verdicts.append(Verdict(tokens=prompt.tokens, verdict=REFUSED, detail=str(error)))
        else:
            verdicts.append(_judge(reference, prompt, said, answer, tolerance))
    return verdicts


def _judge(reference: Reference, prompt: Prompt, said: Completion, answer: Answers, tolerance: float) -> Verdict:
    compared: dict[str, tuple[float, int]] = {}
    for reading in reference.readings(prompt):
        if computed := answer(prompt, reading):
            compared[reading] = distance, agreed = _compare(computed, said)
            if distance <= tolerance:
                break
    else:
        counted = said.seen or prompt.tokens
        reading = f"{CUT} {counted}" if prompt.tokens - counted > CUT_SLACK else DIFFERENT
        distance, agreed = compared[RIGHT]
    verdict, _, size = reading.partition(" ")
    details = {
        UNSCALED: "it computes the model without the scaling in its config.json",
        CUT: f"it saw only the last {size} tokens; start it with a window of {reference.target:,}",
        DIFFERENT: "it computes another model",
    }
    difference = distance if said.logprobs and isfinite(distance) else None
    return Verdict(
        tokens=prompt.tokens, verdict=verdict, detail=details.get(verdict, ""), agreed=agreed, difference=difference
    )


def _compare(computed: Answer, said: Completion) -> tuple[float, int]:
    """Return the mean distance of log probabilities, infinite if the texts cannot be of the same model, and how many
    tokens are equal. Without log probabilities the distance is 0 if enough tokens are equal.
    """
    agreed = sum(said.text.startswith(computed.text[:end]) for end in computed.ends)
    pairs = [*zip(computed.logprobs[:agreed], said.logprobs, strict=False)]
    pairs += zip(computed.prompt[::-1], said.prompt_logprobs[::-1], strict=False)
    # A server ends where the model does.
    follows = computed.text.startswith(said.text.rstrip("\ufffd")) or computed.margins[agreed] < TIE
    if not follows or (not pairs and agreed < ENOUGH):
        return inf, agreed
    return fmean(abs(own - other) for own, other in pairs) if pairs else 0.0, agreed
