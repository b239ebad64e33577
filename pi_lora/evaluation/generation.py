"""Text that a model writes after prompts, greedily or sampled from a seed, and passed on as it is written."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from pi_lora.errors import DataError
from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.recipe.evaluation import Sampling

# Called with text as soon as it is written.
Write = Callable[[str], object]


class Stream(TextStreamer):
    """Passes on the text after a prompt, word by word."""

    def __init__(self, tokenizer: Any, write: Write) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on a piece of text, the last one with the end of its line."""
        self.write(text + "\n" * stream_end)


def generate(
    loaded: Model, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, write: Write | None = None
) -> list[str]:
    """Return the text that is written after each of `prompts` (token ids), as `written_ids` does."""
    texts: list[str] = loaded.tokenizer.batch_decode(
        written_ids(loaded, prompts, sampling, seed, write), skip_special_tokens=True
    )
    return [text.strip() for text in texts]


def written_ids(
    loaded: Model, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int = 0, write: Write | None = None
) -> torch.Tensor:
    """Return the token ids that are written after each of `prompts`, which go through the model together: (prompts,
    tokens), padded. Of the model's own generation config only the tokens that end a text count. `write` gets the text
    after a single prompt.
    """
    tokenizer, longest = loaded.tokenizer, max(map(len, prompts))
    own: Any = loaded.model.generation_config.eos_token_id
    named = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    ends = [end for end in dict.fromkeys(named) if end is not None]
    pad = next(token for token in (tokenizer.pad_token_id, *ends, 0) if token is not None)
    drawn: dict[str, Any] = {}
    if sampling.temperature:
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    config = GenerationConfig(
        **drawn, max_new_tokens=sampling.max_new_tokens, eos_token_id=ends or None, pad_token_id=pad
    )
    lengths = [(longest - len(prompt), len(prompt)) for prompt in prompts]
    rows = [[pad] * left + list(prompt) for prompt, (left, _) in zip(prompts, lengths, strict=True)]
    masks = [[0] * left + [1] * number for left, number in lengths]
    ids, mask = (torch.tensor(each, device=loaded.model.device) for each in (rows, masks))
    stream = Stream(loaded.tokenizer, write) if write else None
    torch.manual_seed(seed % 2**32)
    with quiet_loading():  # transformers takes max_position_embeddings for the longest input, which is L under `pi`
        found = loaded.model.generate(input_ids=ids, attention_mask=mask, generation_config=config, streamer=stream)
    written: torch.Tensor = found[:, longest:]
    return written


def answer(loaded: Model, prompt: str, sampling: Sampling, chat: bool = True, write: Write | None = None) -> str:
    """Return what a model writes after a prompt, with `chat` as the turn of a user under the tokenizer's chat template
    if there is one. Raise DataError if the prompt leaves no room in the window.
    """
    if not prompt.strip():
        raise DataError("--prompt: is empty; give a text")
    tokenizer = loaded.tokenizer
    if chat and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(prompt, verbose=False)["input_ids"]
    room = loaded.window - len(ids)
    if room < 1:
        longer = f"{len(ids):,} tokens are longer than the window of {loaded.name}, {loaded.window:,} tokens"
        raise DataError(f"--prompt: {longer}; shorten it, or choose a model that reads more")
    sampling = sampling.changed(max_new_tokens=min(room, sampling.max_new_tokens or room))
    [text] = generate(loaded, [ids], sampling, sampling.seed, write)
    return text
