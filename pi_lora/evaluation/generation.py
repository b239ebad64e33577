"""Text generation after prompts, greedy or sampled from a seed, printed as it is generated."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from pi_lora.data.chats import chat_prompt_ids
from pi_lora.data.tokens import prompt_ids
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import pad_rows
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.quiet import quiet_loading
from pi_lora.recipe.evaluation import Sampling


def generate(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stream: bool = False
) -> list[str]:
    """Return the text generated after each of `prompts` (token ids), as `generate_ids` does."""
    ids = generate_ids(loaded, prompts, sampling, stream=stream)
    return [text.strip() for text in loaded.tokenizer.batch_decode(ids, skip_special_tokens=True)]


def generate_ids(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stream: bool = False
) -> Any:
    """Return the token ids generated after each of `prompts` in one batch: (prompts, tokens), padded on the right. The
    model's generation config is ignored except for the tokens that end a text. With `stream`, the text after a single
    prompt is printed word by word.
    """
    model: Any = loaded.module
    model_config = model.generation_config
    config = GenerationConfig(max_new_tokens=sampling.max_new_tokens, eos_token_id=loaded.ends)
    if sampling.temperature:
        config.update(do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=0)
    ids = pad_rows(model, prompts, padding=-1, side="left")  # -1 is masked
    streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    torch.manual_seed(sampling.seed)
    # Set on the model: options that a config argument of `generate` leaves out are taken from the model's config.
    model.generation_config = config
    try:
        with quiet_loading():  # transformers warns above max_position_embeddings, which is L under `pi`
            output = model.generate(
                input_ids=ids.clamp(min=0),
                attention_mask=(ids >= 0).long(),
                streamer=streamer,
            )
    finally:
        model.generation_config = model_config
    return output[:, ids.shape[1] :]


def answer(
    loaded: LoadedModel, prompt: str, sampling: Sampling, *, chat_template: bool = True, stream: bool = False
) -> str:
    """Return the text that a model generates after a prompt. With `chat_template`, the prompt is the turn of a user
    under the tokenizer's chat template, if any. Raise DataError if the prompt leaves no room in the window.
    """
    tokenizer = loaded.tokenizer
    if chat_template and tokenizer.chat_template:
        try:
            ids = chat_prompt_ids(tokenizer, prompt)
        except DataError as problem:
            raise DataError(f"{loaded.name}: {problem}; continue the text with --no-chat-template") from None
    else:
        ids = prompt_ids(tokenizer, prompt)
    if not prompt.strip():
        raise DataError("prompt: is empty; give a text")
    room = loaded.window - len(ids)
    if room < 1:
        raise DataError(
            f"prompt: {len(ids):,} tokens do not suit {loaded.name}, which reads {loaded.window:,}; "
            "give a text that leaves room for the answer"
        )
    max_new_tokens = min(room, sampling.max_new_tokens or room)
    [text] = generate(loaded, [ids], sampling.changed(max_new_tokens=max_new_tokens), stream=stream)
    return text
