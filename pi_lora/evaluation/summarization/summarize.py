"""The summary of one document, written as it comes."""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import TextStreamer, set_seed

from pi_lora.data.prompts import Prompter, Task
from pi_lora.errors import DataError
from pi_lora.evaluation.summarization.writing import Sampling
from pi_lora.models.load import LoadedModel
from pi_lora.recipe.schema import Data

Tell = Callable[[str], None]


def summarize(
    loaded: LoadedModel, name: str, text: str, data: Data, sampling: Sampling, write: Tell, say: Tell
) -> None:
    """Summarize `text` under the task of `data`; `write` gets the summary in pieces, `say` what was cut off, if any.

    Raises:
        DataError: the task needs more than a document, or the window has no room for one.
    """
    task = Task.of(data)
    if task.document is None or task.read != [task.document]:
        raise DataError(
            f"{loaded.name}: was tuned on prompts of {' and '.join(task.read)}, not of a document alone; "
            "write such rows and measure them with pi-lora eval summarization"
        )
    # All that fits is read, also where examples of training were cut shorter.
    task = replace(task, document_tokens=loaded.window, completion_tokens=sampling.max_new_tokens)
    [prompt] = Prompter(task, loaded.tokenizer, loaded.window).prompts([{task.read[0]: text}])
    if not prompt.fits:
        raise DataError(
            f"--max-new-tokens: {sampling.max_new_tokens} leave no room for a document in the {loaded.window} tokens "
            f"that {loaded.name} reads; choose fewer"
        )
    if prompt.kept < prompt.document_tokens:
        cut = f"{prompt.document_tokens:,} tokens are longer than the window of {loaded.name}"
        say(f"{name}: {cut}; truncated to the first {prompt.kept:,}")
    set_seed(sampling.seed)
    ids = torch.tensor([prompt.ids], device=loaded.model.device)
    config, streamer = sampling.config(loaded.tokenizer), _Pieces(loaded.tokenizer, write)
    with torch.no_grad():
        loaded.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer
        )


class _Pieces(TextStreamer):
    """What is generated, without the prompt, a word at a time."""

    def __init__(self, tokenizer: object, write: Tell) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.begun = write, False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers for each piece; the space before the first word is the prompt's."""
        if piece := text if self.begun else text.lstrip():
            self.begun = True
            self.write(piece)
