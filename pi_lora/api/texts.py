"""Texts that a model writes."""

from typing import TYPE_CHECKING, Any

from pi_lora.api.inputs import (
    AnyModel,
    FilePath,
    command,
    join_launched_processes,
    load,
    name_of,
    section_of,
)
from pi_lora.types import LIBRARIES, ui

if TYPE_CHECKING:
    from pi_lora.models.loaded import LoadedModel

# Each function imports what it needs: a plan does without torch.


@command
def generate(
    model: AnyModel,
    prompt: str,
    *,
    chat_template: bool = True,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    stream: bool = False,
) -> str:
    """Return the text that a model writes after a prompt, as `pi-lora generate` does.

    Args:
        model: A model, or what `load` returns.
        prompt: The text to answer or to continue.
        chat_template: Put the prompt as the turn of a user, where the tokenizer has a chat template.
        max_new_tokens: Of the longest answer; a shorter one ends with the model's end of text, or with the window.
        temperature: Of sampling; 0 takes the likeliest token.
        seed: Of sampling.
        stream: Also print every word as soon as it is known.

    Raises:
        DataError: The prompt is empty, or leaves no room in the window.
        ModelError: The model cannot be found or loaded.
        PiLoraError: An option is wrong.
    """
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.generation import answer
        from pi_lora.recipe.evaluation import Sampling

    sampling = section_of(Sampling, {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed})
    loaded = _load_shown(model)
    return answer(loaded, prompt, sampling, chat_template=chat_template, stream=stream)


def read_prompt(file: FilePath) -> str:
    """Return the text of a file, or of standard input for `-`.

    Args:
        file: The file, or `-`.

    Raises:
        DataError: The file cannot be read, or holds no text.
    """
    from pi_lora.data.documents import read_document

    return read_document(str(file))


@command
def summarize(
    model: AnyModel,
    file: FilePath,
    **sampling: Any,
) -> str:
    """Return the summary of a document, by the prompt that a model was tuned on, or the paper's; and print the summary
    as it is generated.

    Args:
        model: A model, or what `load` returns.
        file: A file of text, or `-` for standard input.
        sampling: `temperature`, `top_p`, `max_new_tokens` and `seed`.

    Raises:
        DataError: The document cannot be read, or the prompt needs more than a document.
        PiLoraError: An option is wrong, or the model cannot be loaded.
    """
    with ui.working(LIBRARIES):
        from pi_lora.data.documents import read_document
        from pi_lora.evaluation.summarization import summarize
        from pi_lora.recipe.evaluation import Sampling

        text = read_document(str(file))
        section = section_of(Sampling, sampling)
    loaded = _load_shown(model)
    return summarize(loaded, str(file), text, section, ui.say)


def _load_shown(model: AnyModel) -> "LoadedModel":
    """Load a model, and show that this goes on."""
    join_launched_processes()
    with ui.working(f"loading {name_of(model)}"):
        return load(model)
