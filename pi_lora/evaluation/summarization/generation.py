"""Text that a model writes after prompts, sampled and seeded."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer, set_seed

from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.recipe.evaluation import Sampling


def generate(
    loaded: Model, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, streamer: TextStreamer | None = None
) -> list[str]:
    """Return the text that is written after each of `prompts` (token ids), which go through the model together; nothing
    of the model's own generation config counts. A streamer prints the text after a single prompt.
    """
    tokenizer, longest = loaded.tokenizer, max(map(len, prompts))
    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    drawn: dict[str, Any] = {}
    if sampling.temperature:
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    config = GenerationConfig(
        **drawn,
        max_new_tokens=sampling.max_new_tokens,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end,
        pad_token_id=pad,
    )
    device = loaded.model.device
    ids = torch.tensor([[*[pad] * (longest - len(prompt)), *prompt] for prompt in prompts], device=device)
    mask = torch.tensor([[*[0] * (longest - len(prompt)), *[1] * len(prompt)] for prompt in prompts], device=device)
    set_seed(seed % 2**32)
    with quiet_loading():  # transformers takes max_position_embeddings for the longest input, which is L under `pi`
        written = loaded.model.generate(input_ids=ids, attention_mask=mask, generation_config=config, streamer=streamer)
    texts: list[str] = tokenizer.batch_decode(written[:, longest:], skip_special_tokens=True)
    return [text.strip() for text in texts]
