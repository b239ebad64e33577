"""`pi-lora generate` and `pi-lora summarize`: what a model writes."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from pi_lora.cli.app import LIBRARIES, MEASURE, app, out, say, working
from pi_lora.cli.options import GROUP, Loading, ModelName
from pi_lora.recipe.evaluation import Sampling

if TYPE_CHECKING:
    from pi_lora.models.model import Model


@app.command(group=MEASURE, sort_key=4)
def generate(
    model: ModelName,
    /,
    *,
    prompt: Annotated[str | None, Parameter(help="The text to answer or to continue.")] = None,
    file: Annotated[str, Parameter(help="A file that holds it; - is standard input.", allow_leading_hyphen=True)] = "-",
    tokens: Annotated[PositiveInt, Parameter(help="The longest answer.")] = 256,
    temperature: Annotated[NonNegativeFloat, Parameter(help="Of sampling; 0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, Parameter(help="Of sampling.")] = 0,
    no_chat_template: Annotated[bool, Parameter(help="Continue the text as it is.")] = False,
    how: Annotated[Loading, GROUP] = Loading(),
) -> None:
    """Write text after a prompt, as the turn of a user where the model has a chat template."""
    from pi_lora.api import generate

    text, loaded = read_and_load(file, prompt, model, how)
    chat = not no_chat_template
    generate(loaded, text, chat_template=chat, tokens=tokens, temperature=temperature, seed=seed, write=written)


@app.command(group=MEASURE, sort_key=5)
def summarize(
    model: ModelName,
    file: Annotated[
        str,
        Parameter(name="FILE", help="A .txt, .md or .pdf file, or - for standard input.", allow_leading_hyphen=True),
    ],
    /,
    *,
    sampling: Annotated[Sampling, GROUP] = Sampling(),
    how: Annotated[Loading, GROUP] = Loading(),
) -> None:
    """Summarize a document with a model that was tuned for it."""
    from pi_lora.evaluation.summarization import summarize

    text, loaded = read_and_load(file, None, model, how)
    summarize(loaded, file, text, sampling, say, written)


def read_and_load(file: str, prompt: str | None, model: str, how: Loading) -> "tuple[str, Model]":
    """Return the prompt, or the text of a file if there is none, and the model."""
    with working(LIBRARIES):
        from pi_lora.data.documents import read_document

        text = read_document(file) if prompt is None else prompt
        [found] = how.find(model)
    with working(f"loading {model}"):
        return text, found.load(how.dtype)


def written(text: str) -> None:
    """Print text of a model as it comes."""
    out.print(text, end="", soft_wrap=True)
