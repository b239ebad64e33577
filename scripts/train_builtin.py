"""Pre-train `builtin:tiny`, the small LLaMA that ships inside the package.

    python scripts/train_builtin.py --output pi_lora/builtin/tiny

It needs nothing but the machine: the text is Python's own standard library, mixed with made-up documents that teach
recall. It begins with sequences of 64 tokens, half of them repeated random tokens, until copying appears, and goes on
with 256, the model's window. Muon (Jordan 2024) at a constant rate that falls to zero along a line at the end.
"""

import argparse
import copy
import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

from pi_lora.data.recall import recall_document
from pi_lora.data.stdlib import stdlib_documents
from pi_lora.evals.passkey import FILLER, prompt
from pi_lora.model import save_tokenizer

VOCABULARY = 1024
WINDOW = 256
SHORT = 64
# The geometry that LLaMA has at 2048 tokens with 10000: the same share of dimensions that never turn once.
THETA = 500.0
# Shares of recall documents and of repeated random tokens among the rows, by their length; the rest is real text.
SHARES = {SHORT: (0.25, 0.5), WINDOW: (0.4, 0.125)}
BOS, EOS = "<s>", "</s>"


def train_tokenizer(texts: list[str], seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with one token a digit, trained on the corpus, recall documents and the passkey prompt."""
    rng = random.Random(seed)
    recall = [recall_document(rng, 400, lambda text: len(text) // 3) for _ in range(2000)]
    recall += [prompt("12345", 20, 20)] * 40
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(texts, recall), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS, model_max_length=WINDOW
    )


class Mixture:
    """Endless rows of training tokens, `(rows, length)` int64: real text, recall documents, repeated random tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.documents = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, verbose=False)["input_ids"]]
        self.lines = [line for text in texts for line in text.splitlines() if line.strip()]
        self.text = self.text_stream()

    def text_stream(self) -> Iterator[int]:
        while True:
            order = self.documents[:]
            self.rng.shuffle(order)
            for document in order:
                yield from document

    def recall_row(self, length: int) -> list[int]:
        row: list[int] = []
        while len(row) < length - 40:
            # Half of the documents fill the row, so that every distance inside the window is asked for.
            room = length - len(row)
            budget = (room if self.rng.random() < 0.5 else self.rng.randint(40, room)) - 2
            if self.rng.random() < 0.25:
                text = self.passkey_text(budget)
            else:
                start = self.rng.randrange(len(self.lines) - 400)
                text = recall_document(self.rng, budget, self.count, self.lines[start : start + 400])
            row += self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id]
        rest = length - len(row)
        return (row + list(itertools.islice(self.text, max(rest, 0))))[:length]

    def passkey_text(self, budget: int) -> str:
        """The passkey prompt and its answer; a third without the first line, so that the key can stand at the start."""
        key = "".join(self.rng.choices("0123456789", k=5))
        headless = self.rng.random() < 1 / 3

        def text(before: int, after: int) -> str:
            whole = prompt(key, before, after) + " " + key + "."
            return whole.partition("\n")[2] if headless else whole

        fillers = max(0, (budget - self.count(text(0, 0))) // (self.count(FILLER + " ") + 1))
        before = self.rng.choice((0, self.rng.randint(0, fillers)))
        return text(before, self.rng.choice((fillers - before, self.rng.randint(0, fillers - before))))

    def count(self, text: str) -> int:
        return len(self.tokenizer._tokenizer.encode(text, add_special_tokens=False).ids)

    def random_row(self, length: int) -> list[int]:
        period = self.rng.randint(4, length - 8)
        low = 2 if self.rng.random() < 0.8 else VOCABULARY - 60
        row = [self.rng.randrange(low, VOCABULARY) for _ in range(period)]
        return [self.tokenizer.bos_token_id, *(row * (length // period + 1))[: length - 1]]

    def rows(self, rows: int, length: int) -> torch.Tensor:
        kinds = [round(rows * share) for share in SHARES[length]]
        out = [self.recall_row(length) for _ in range(kinds[0])]
        out += [self.random_row(length) for _ in range(kinds[1])]
        out += [list(itertools.islice(self.text, length)) for _ in range(rows - len(out))]
        return torch.tensor(out)


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


def optimizers_for(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype) -> None:
    """Write the model whole or not at all: beside `folder`, then renamed."""
    part = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    tied = {"lm_head.weight"}
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name not in tied}
    model.save_pretrained(part, state_dict=weights)
    config.save_pretrained(part)
    save_tokenizer(tokenizer, part)
    for file in part.iterdir():
        file.chmod(0o644)
    for kept in folder.glob("*.md"):
        shutil.copy(kept, part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


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
    texts = [text for _, text in stdlib_documents("train")]
    if args.resume:
        tokenizer = AutoTokenizer.from_pretrained(args.resume)
        model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(texts, args.seed)
        model = new_model()
    mixture = Mixture(tokenizer, texts, args.seed + args.resume_step)
    held_out = [i for _, text in stdlib_documents("held-out") for i in tokenizer(text, verbose=False)["input_ids"]]
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
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        batch = mixture.rows(args.batch_tokens // length, length)
        with torch.autocast("cpu", torch.bfloat16):
            logits = compiled(input_ids=batch, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
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
