"""Pre-train `builtin:tiny`, the small LLaMA that ships inside the package.

    python scripts/train_builtin.py --output pi_lora/builtin/tiny

It needs nothing but the machine: the text is Python's own standard library, mixed with made-up documents that teach
recall. It begins with sequences of 64 tokens, half of them repeated random tokens, until copying appears, and goes on
with 256, the model's window. Muon (Jordan 2024) at a constant rate that falls to zero along a line at the end.
"""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

from arguments import parser_of
from pi_lora.data.sources import STDLIB, find_table
from pi_lora.models.tokenizer import save_tokenizer
from pi_lora.recipe.data import Source
from pretraining import Mixture, optimizers_for, train_step, train_tokenizer

VOCABULARY = 1024
WINDOW = 256
SHORT = 64
# The geometry that LLaMA has at 2048 tokens with 10000: the same share of dimensions that never turn once.
THETA = 500.0
TOKENS = 35_200_000
# Tokens of the first part, in sequences of SHORT tokens.
SHORT_TOKENS = 6_000_000
BATCH_TOKENS = 8192
# Steps of warm-up.
WARM = 100
# The share of the steps over which the rate falls to zero.
DECAY = 0.3
RATE = 4e-3
SEED = 0
# Shares of recall documents and of repeated random tokens among the rows, by their length; the rest is real text.
SHARES = {SHORT: (0.25, 0.5), WINDOW: (0.4, 0.125)}


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        rms_norm_eps=1e-6,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.manual_seed(SEED)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    table = find_table(Source(name=STDLIB, split="train"))
    texts = [document.text for document in table.documents()]
    tokenizer = train_tokenizer(texts, VOCABULARY, WINDOW, SEED)
    model = new_model()
    mixture = Mixture(tokenizer, texts, SHARES, SEED)
    optimizers = optimizers_for(model, RATE)
    compiled: Any = torch.compile(model)
    steps = TOKENS // BATCH_TOKENS
    started = time.monotonic()
    for step in range(steps):
        length = SHORT if step * BATCH_TOKENS < SHORT_TOKENS else WINDOW
        rate = RATE * min(1.0, (step + 1) / WARM, (steps - step) / (DECAY * steps))
        batch = mixture.rows(BATCH_TOKENS // length, length)
        loss = train_step(compiled, optimizers, batch, rate)
        if step % 100 == 99 or step == steps - 1:
            seconds = time.monotonic() - started
            print(f"step {step + 1} of {steps}: loss {loss:.4f}, {seconds:.0f} s", flush=True)
    model.to(torch.float16).save_pretrained(output)
    save_tokenizer(tokenizer, output)


if __name__ == "__main__":
    main()
