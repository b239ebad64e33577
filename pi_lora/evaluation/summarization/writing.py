"""What a model writes, sampled and seeded: after many prompts, by transformers or vLLM, and the summary of one
document.
"""

import importlib.util
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, TextStreamer, set_seed

from pi_lora.data.examples import Prompter, Task
from pi_lora.errors import DataError, ModelError, PiLoraError
from pi_lora.evaluation.forward import described
from pi_lora.evaluation.journal import identity_of
from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.recipe.schema import Data
from pi_lora.scaling.config import in_both_dialects
from pi_lora.types import Json

# On a CPU the library would take most of the memory for keys and values: tokens a page, requests and tokens at once.
PAGE_TOKENS, REQUESTS_ON_CPU, BATCH_TOKENS_ON_CPU = 256, 8, 4096
# How many prompts vLLM is given at a time: what it has written is kept when all of them are done.
PROMPTS_AT_ONCE = 64

# Token ids by the name of the prompt: what is read, and in pieces what follows.
Prompts = Mapping[str, Sequence[int]]
Written = Iterator[tuple[str, list[int]]]
Say = Callable[[str], object]


@dataclass(frozen=True)
class Sampling:
    """How text is drawn; by default as in the paper (section 3.5). A temperature of 0 is greedy."""

    temperature: float = 0.5
    top_p: float = 0.95
    max_new_tokens: int = 1000
    seed: int = 0

    def config(self, tokenizer: Any) -> GenerationConfig:
        """Return it for transformers, with nothing of the model's own generation config."""
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0} if self.temperature else {}
        end = tokenizer.eos_token_id
        return GenerationConfig(
            do_sample=bool(drawn),
            **drawn,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=end,
            pad_token_id=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )


@dataclass(frozen=True)
class Writer:
    """A model that writes: its tokenizer, its window in tokens, what a result says of it, and what tells it apart."""

    name: str
    tokenizer: Any
    window: int
    facts: Json
    identity: Json
    write: Callable[[Prompts, Sampling], Written]


def find_writer(
    found: Model, engine: Literal["transformers", "vllm"] = "transformers", dtype: str | None = None
) -> Writer:
    """Return a model as a writer; its weights are loaded now, by vLLM when it first writes. Raise PiLoraError as
    `Model.load` does, or if vLLM is missing or cannot take the model.
    """
    if engine == "transformers":
        loaded = found.load(dtype)
        facts = {**described(loaded), "engine": "transformers, continuous batching"}
        write = partial(write_batched, loaded.model, loaded.tokenizer)
        return Writer(found.name, found.tokenizer, found.window, facts, identity_of(loaded), write)
    if importlib.util.find_spec("vllm") is None:
        raise PiLoraError("--engine vllm: vLLM is not installed; pip install vllm, or use --engine transformers")
    if found.adapter is not None:
        how = f"merge it first: pi-lora merge {shlex.quote(found.name)}"
        raise ModelError(f"{found.name}: is an adapter, whose embeddings vLLM cannot load; {how}")
    if found.config != in_both_dialects(found.base_config):
        raise ModelError(
            "--engine vllm: reads the scaling of config.json; leave out --original, --target and --scaling"
        )
    kind = dtype or "auto"
    facts = {"model": found.name, "scale": found.scale, "dtype": kind, "kernel": "vLLM's", "engine": "vllm"}
    identity = {"name": found.name, "path": found.path, "config": found.config}
    write = partial(write_with_vllm, found.path, found.window, kind, found.tokenizer.eos_token_id)
    return Writer(found.name, found.tokenizer, found.window, facts, identity, write)


def write_batched(model: Any, tokenizer: Any, prompts: Prompts, sampling: Sampling) -> Written:
    """Continue each of `prompts` by continuous batching; each result comes as soon as it is whole. All requests wait
    before the first is computed, so that the random numbers they share do not depend on timing. Raise PiLoraError if
    the library gives up, as where memory is short.
    """
    memory: dict[str, int] = {}
    if model.device.type == "cpu":  # on a GPU the library looks how much memory there is
        pages = -(-(max(map(len, prompts.values())) + sampling.max_new_tokens) // PAGE_TOKENS) + 1
        memory = {"page_size": PAGE_TOKENS, "num_blocks": pages * REQUESTS_ON_CPU}
        memory["max_batch_tokens"] = BATCH_TOKENS_ON_CPU
    # It warns of machines that do not show their memory nodes, as containers; what fails is raised.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    batching = ContinuousBatchingConfig(seed=sampling.seed, **memory)
    manager = model.init_continuous_batching(sampling.config(tokenizer), batching)
    for name, ids in prompts.items():
        manager.add_request(list(ids), request_id=name)
    manager.start()
    left = len(prompts)
    try:
        while left:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                lost = f"continuous batching ended with {left} summaries to write"
                raise PiLoraError(f"{lost}; free memory and go on with the same command")
            if result is not None and result.error is not None:
                raise PiLoraError(f"{result.request_id}: could not be written ({result.error})")
            if result is not None and result.is_finished():
                left -= 1
                yield result.request_id, list(result.generated_tokens)
    finally:
        manager.stop(block=True, hard_stop=True)
        manager.destroy()


def write_with_vllm(model: str, window: int, dtype: str, end: int, prompts: Prompts, sampling: Sampling) -> Written:
    """Continue each of `prompts` by vLLM, which must be installed; each has a seed of its own. `end` is EOS."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, max_model_len=window, dtype=dtype, seed=sampling.seed)
    how = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        stop_token_ids=[end],
    )
    names = list(prompts)
    for start in range(0, len(names), PROMPTS_AT_ONCE):
        batch = names[start : start + PROMPTS_AT_ONCE]
        inputs = [{"prompt_token_ids": list(prompts[name])} for name in batch]
        for name, output in zip(batch, engine.generate(inputs, how, use_tqdm=False), strict=True):
            yield name, list(output.outputs[0].token_ids)


def summarize(loaded: Model, name: str, text: str, data: Data, sampling: Sampling, say: Say) -> None:
    """Print a summary of `text` under the task of `data` as it comes, and `say` what was cut off; raise DataError if
    the task needs more than a document, or the window has no room for one.
    """
    task = Task.of(data)
    if task.document is None or task.prompt_columns != [task.document]:
        raise DataError(
            f"{loaded.name}: was tuned on prompts of {' and '.join(task.prompt_columns)}, not of a document alone; "
            "write such rows and measure them with pi-lora eval summarization"
        )
    # All that fits is read, also where examples of training were cut shorter.
    task = replace(task, document_tokens=loaded.window, completion_tokens=sampling.max_new_tokens)
    [prompt] = Prompter(task, loaded.tokenizer, loaded.window).prompts([{task.prompt_columns[0]: text}])
    if not prompt.fits:
        raise DataError(
            f"--max-new-tokens: {sampling.max_new_tokens} leave no room for a document in the {loaded.window} tokens "
            f"that {loaded.name} reads; choose fewer"
        )
    if prompt.kept < prompt.document_tokens:
        cut = f"{prompt.document_tokens:,} tokens are longer than the window of {loaded.name}"
        say(f"{name}: {cut}; truncated to the first {prompt.kept:,}")
    set_seed(sampling.seed)
    ids = torch.tensor([prompt.ids], device=loaded.model.device)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    streamer = _Words(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    with quiet_loading():  # transformers takes max_position_embeddings for the longest input, which is L under `pi`
        loaded.model.generate(**asked, generation_config=sampling.config(loaded.tokenizer), streamer=streamer)


class _Words(TextStreamer):
    begun = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece; the space before the first word is the prompt's."""
        text = text if self.begun else text.lstrip()
        self.begun = self.begun or bool(text)
        super().on_finalized_text(text, stream_end)
