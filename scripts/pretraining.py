"""The parts of pre-training a small model: a tokenizer, a mixture of text and recall, and Muon."""

import itertools
import random
from collections.abc import Iterator, Mapping

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pi_lora.data.recall import recall_document
from pi_lora.evaluation.passkey import FILLER, prompt

BOS = "<s>"
EOS = "</s>"

# By the length of rows: the shares of recall documents and of repeated random tokens.
Shares = Mapping[int, tuple[float, float]]


def train_tokenizer(texts: list[str], vocabulary: int, window: int, seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with one token a digit, trained on the corpus, recall documents and the passkey prompt."""
    rng = random.Random(seed)
    recall = [recall_document(rng, 400, lambda text: len(text) // 3) for _ in range(2000)]
    recall += [prompt("12345", 20, 20)] * 40
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(texts, recall), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS, model_max_length=window
    )


class Mixture:
    """Endless rows of training tokens, `(rows, length)` int64: real text, recall documents, repeated random tokens.

    `shares` says by the length of rows what part of them the last two are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str], shares: Shares, seed: int) -> None:
        self.tokenizer = tokenizer
        self.shares = shares
        self.rng = random.Random(seed)
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
            budget = room - 2
            if self.rng.random() >= 0.5:
                budget = self.rng.randint(40, room) - 2
            if self.rng.random() < 0.25:
                text = self.passkey_text(budget)
            else:
                start = self.rng.randrange(len(self.lines) - 400)
                text = recall_document(self.rng, budget, self.count, self.lines[start : start + 400])
            row += self.tokenizer(text)["input_ids"]
            row.append(self.tokenizer.eos_token_id)
        rest = max(0, length - len(row))
        row += itertools.islice(self.text, rest)
        return row[:length]

    def passkey_text(self, budget: int) -> str:
        """The passkey prompt and its answer; a third without the first line, so that the key can stand at the start."""
        key = "".join(self.rng.choices("0123456789", k=5))
        headless = self.rng.random() < 1 / 3

        def text(before: int, after: int) -> str:
            whole = f"{prompt(key, before, after)} {key}."
            _, _, rest = whole.partition("\n")
            return rest if headless else whole

        room = budget - self.count(text(0, 0))
        filler_tokens = self.count(FILLER + " ") + 1
        fillers = max(0, room // filler_tokens)
        before = self.rng.choice((0, self.rng.randint(0, fillers)))
        most = fillers - before
        after = self.rng.choice((most, self.rng.randint(0, most)))
        return text(before, after)

    def count(self, text: str) -> int:
        return len(self.tokenizer._tokenizer.encode(text, add_special_tokens=False).ids)

    def random_row(self, length: int) -> list[int]:
        period = self.rng.randint(4, length - 8)
        low = 2 if self.rng.random() < 0.8 else len(self.tokenizer) - 60
        tokens = [self.rng.randrange(low, len(self.tokenizer)) for _ in range(period)]
        repeated = itertools.islice(itertools.cycle(tokens), length - 1)
        return [self.tokenizer.bos_token_id, *repeated]

    def rows(self, rows: int, length: int) -> torch.Tensor:
        recall_share, random_share = self.shares[length]
        recall_rows = round(rows * recall_share)
        random_rows = round(rows * random_share)
        out = [self.recall_row(length) for _ in range(recall_rows)]
        out += [self.random_row(length) for _ in range(random_rows)]
        while len(out) < rows:
            text = itertools.islice(self.text, length)
            out.append(list(text))
        return torch.tensor(out)


def optimizers_for(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings and norms."""
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            matrices.append(parameter)
        else:
            others.append(parameter)
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train_step(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], batch: torch.Tensor, rate: float
) -> torch.Tensor:
    """One step on rows of tokens, in bfloat16 arithmetic; the mean loss in nats per token."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    with torch.autocast(batch.device.type, torch.bfloat16):
        logits = model(input_ids=batch, use_cache=False).logits
    predicted = logits[:, :-1].float().flatten(0, 1)
    loss = cross_entropy(predicted, batch[:, 1:].flatten())
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()
