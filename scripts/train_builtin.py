"""Pre-train `builtin:tiny`, the small LLaMA that ships inside the package.

    python scripts/train_builtin.py --output pi_lora/builtin/tiny

It needs nothing but the machine: the text is Python's own standard library, mixed with made-up documents that teach
recall. It begins with sequences of 64 tokens, half of them repeated random tokens, until copying appears, and goes on
with 256, the model's window. Muon (Jordan 2024) at a constant rate that falls to zero along a line at the end.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from pretraining import Mixture, optimizers_for, save, train_step, train_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, logging

from pi_lora.data.sources import standard_library

VOCABULARY = 1024
WINDOW = 256
SHORT = 64
# The geometry that LLaMA has at 2048 tokens with 10000: the same share of dimensions that never turn once.
THETA = 500.0
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


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Mean loss in nats a token over `rows`, float32."""
    losses = []
    for batch in rows.split(16):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item())
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=35.2e6, help="in all")
    parser.add_argument("--short-tokens", type=float, default=6e6, help="of these, in sequences of 64")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the steps over which the rate falls to zero")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--save-every", type=int, default=500, help="steps; checkpoints go beside the output")
    parser.add_argument("--resume", type=Path, help="a checkpoint; its optimizer state begins anew")
    parser.add_argument("--resume-step", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    texts = [document.text for document in standard_library().documents()]
    if args.resume:
        tokenizer = AutoTokenizer.from_pretrained(args.resume)
        model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(texts, VOCABULARY, WINDOW, args.seed)
        model = new_model()
    mixture = Mixture(tokenizer, texts, SHARES, args.seed + args.resume_step)
    texts_held_out = [document.text for document in standard_library("validation").documents()]
    held_out = [i for text in texts_held_out for i in tokenizer(text, verbose=False)["input_ids"]]
    held_out_rows = torch.tensor(held_out[: 64 * WINDOW]).view(64, WINDOW)
    print(f"{sum(map(len, mixture.documents)):,} tokens to train on, {len(held_out):,} held out", flush=True)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    optimizers = optimizers_for(model, args.rate)
    compiled = torch.compile(model)
    steps = int(args.tokens // args.batch_tokens)
    started, losses = time.monotonic(), []
    for step in range(args.resume_step, steps):
        length = SHORT if step * args.batch_tokens < args.short_tokens else WINDOW
        warm = (step - args.resume_step + 1) / 100
        rate = args.rate * min(1.0, warm, (steps - step) / (args.decay * steps))
        batch = mixture.rows(args.batch_tokens // length, length)
        loss = train_step(compiled, optimizers, batch, rate)
        losses.append(loss.item())
        if step % 100 == 99 or step == steps - 1:
            line = {
                "step": step + 1,
                "tokens": (step + 1) * args.batch_tokens,
                "loss": round(sum(losses) / len(losses), 4),
                "held_out_perplexity": round(math.exp(held_out_loss(model, held_out_rows)), 3),
                "seconds": round(time.monotonic() - started),
            }
            losses = []
            print(json.dumps(line), flush=True)
        if step % args.save_every == args.save_every - 1:
            save(model, tokenizer, args.output.with_name(f"{args.output.name}-checkpoint"), torch.float32)
    save(model, tokenizer, args.output, torch.float16)


if __name__ == "__main__":
    main()
