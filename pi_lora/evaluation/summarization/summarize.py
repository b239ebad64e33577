"""The summary of one document, as it is written."""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import TextStreamer, set_seed

from pi_lora.data.examples import Prompter, Task
from pi_lora.errors import DataError
from pi_lora.evaluation.summarization.measure import complete, evaluation_data
from pi_lora.evaluation.summarization.writing import generation_config
from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.recipe.evaluation import SummarizationOptions


def summarize(loaded: Model, name: str, text: str, options: SummarizationOptions, say: Callable[[str], object]) -> None:
    """Print a summary of `text` as it comes, by the prompt that the model was tuned on or the paper's, and `say` what
    was cut off; raise DataError if the prompt needs more than a document, or the window has no room for one.
    """
    data = evaluation_data(loaded.name, options)
    options = complete(options, data)
    task = Task.of(data)
    if task.document is None or task.prompt_columns != [task.document]:
        raise DataError(
            f"{loaded.name}: was tuned on prompts of {' and '.join(task.prompt_columns)}, not of a document alone; "
            "write such rows and measure them with pi-lora eval summarization"
        )
    # All that fits is read, also where examples of training were cut shorter.
    task = replace(task, document_tokens=loaded.window, completion_tokens=data.completion_tokens)
    [prompt] = Prompter(task, loaded.tokenizer, loaded.window).prompts([{task.prompt_columns[0]: text}])
    if not prompt.fits:
        raise DataError(
            f"--max-new-tokens: {options.max_new_tokens} leave no room for a document in the {loaded.window} tokens "
            f"that {loaded.name} reads; choose fewer"
        )
    if prompt.kept < prompt.document_tokens:
        cut = f"{prompt.document_tokens:,} tokens are longer than the window of {loaded.name}"
        say(f"{name}: {cut}; truncated to the first {prompt.kept:,}")
    set_seed(options.seed)
    ids = torch.tensor([prompt.ids], device=loaded.model.device)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    streamer = _Words(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    with quiet_loading():  # transformers takes max_position_embeddings for the longest input, which is L under `pi`
        loaded.model.generate(
            **asked, generation_config=generation_config(options, loaded.tokenizer), streamer=streamer
        )


class _Words(TextStreamer):
    begun = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece; the space before the first word is the prompt's."""
        text = text if self.begun else text.lstrip()
        self.begun = self.begun or bool(text)
        super().on_finalized_text(text, stream_end)
