"""Text that a model writes after prompts, greedily or sampled from a seed, and printed as it is written."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from pi_lora.errors import DataError
from pi_lora.evaluation.forward import without_end
from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.recipe.evaluation import Sampling


def generate(loaded: Model, prompts: Sequence[Sequence[int]], sampling: Sampling, stream: bool = False) -> list[str]:
    """Return the text that is written after each of `prompts` (token ids), as `generate_ids` does."""
    ids = generate_ids(loaded, prompts, sampling, stream)
    return [text.strip() for text in loaded.tokenizer.batch_decode(ids, skip_special_tokens=True)]


def generate_ids(loaded: Model, prompts: Sequence[Sequence[int]], sampling: Sampling, stream: bool = False) -> Any:
    """Return the token ids that are written after each of `prompts`, which go through the model together: (prompts,
    tokens), padded. Of the model's own generation config only the tokens that end a text count. With `stream`, the
    text after a single prompt is printed word by word.
    """
    model: Any = loaded.model
    own, longest = model.generation_config, max(map(len, prompts))
    named = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    ends = [end for end in (loaded.tokenizer.eos_token_id, *named) if end is not None]
    config = GenerationConfig(max_new_tokens=sampling.max_new_tokens, eos_token_id=ends or None)
    if sampling.temperature:
        config.update(do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=0)
    rows = [[-1] * (longest - len(prompt)) + list(prompt) for prompt in prompts]  # -1 is masked
    ids = torch.tensor(rows, device=model.device)
    inputs = {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long()}
    streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    torch.manual_seed(sampling.seed)
    model.generation_config = config  # what a given config leaves open is taken from the model's
    try:
        with quiet_loading():  # it takes max_position_embeddings for the longest input, which is L under `pi`
            return model.generate(**inputs, streamer=streamer)[:, longest:]
    finally:
        model.generation_config = own


def answer(loaded: Model, prompt: str, sampling: Sampling, chat: bool = True, stream: bool = False) -> str:
    """Return what a model writes after a prompt, with `chat` as the turn of a user under the tokenizer's chat template
    if there is one. Raise DataError if the prompt leaves no room in the window.
    """
    tokenizer = loaded.tokenizer
    if chat and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    else:
        ids = without_end(tokenizer, tokenizer(prompt, verbose=False)["input_ids"])
    room = loaded.window - len(ids)
    if not prompt.strip() or room < 1:
        raise DataError(
            f"--prompt: {len(ids):,} tokens do not suit {loaded.name}, which reads {loaded.window:,}; "
            "give a text that leaves room for the answer"
        )
    fitting = sampling.changed(max_new_tokens=min(room, sampling.max_new_tokens or room))
    return generate(loaded, [ids], fitting, stream)[0]
