"""Pre-training the small LLaMA, on the mixture of text and recall that the built-in model learned from."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from pretraining import Mixture, optimizers_for, save, train_step, train_tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pi_lora.data.sources import find_corpus
from pi_lora.models.device import device
from pi_lora.recipe.schema import Source
from small.setting import Setting

# Of recall documents and of repeated random tokens.
SHARES = (0.25, 0.125)
WARM_UP, DECAY = 0.05, 0.3

Tell = Callable[[int, int, str], None]


class Rows(IterableDataset[torch.Tensor]):
    """Endless batches, `(rows, window)`; each process that makes them has a seed of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], setting: Setting) -> None:
        self.tokenizer, self.texts, self.setting = tokenizer, list(texts), setting

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker, window = get_worker_info(), self.setting.window
        mixture = Mixture(self.tokenizer, self.texts, {window: SHARES}, seed=worker.id if worker else 0)
        while True:
            yield mixture.rows(self.setting.batch_tokens // window, window)


def texts_of(sources: Sequence[str], limit: int | None = None) -> list[str]:
    """Every document of the sources, or the first `limit` of each."""
    found = []
    for source in sources:
        for number, document in enumerate(find_corpus(Source(name=source)).documents()):
            if number == limit:
                break
            found.append(document.text)
    return found


def pretrain(setting: Setting, sources: Sequence[str], folder: Path, tell: Tell, tiny: bool = False) -> float:
    """Train the small LLaMA from nothing and save it; the mean loss of the last tenth of its steps, in nats a token."""
    torch.manual_seed(0)
    texts = texts_of(sources, limit=40 if tiny else None)
    tokenizer = train_tokenizer(texts, setting.vocabulary, setting.window, seed=0)
    model = LlamaForCausalLM(setting.config()).to(device())
    workers = 0 if tiny else max(1, (os.cpu_count() or 2) - 2)
    batches = iter(DataLoader(Rows(tokenizer, texts, setting), batch_size=None, num_workers=workers))
    optimizers, losses = optimizers_for(model, setting.rate), []
    for step in range(setting.pretraining_steps):
        left = (setting.pretraining_steps - step) / setting.pretraining_steps
        rate = setting.rate * min(1.0, (1 - left) / WARM_UP + 1e-2, left / DECAY)
        losses.append(train_step(model, optimizers, next(batches).to(device()), rate))
        if step % 20 == 19 or left * setting.pretraining_steps == 1:
            tell(step + 1, setting.pretraining_steps, f"loss {losses[-1]:.3f}")
    save(model, tokenizer, folder, torch.float32)
    return float(torch.stack(losses[-max(1, len(losses) // 10) :]).mean())
