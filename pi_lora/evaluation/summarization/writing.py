"""What a model writes, sampled and seeded: after many prompts, by transformers or vLLM, and the summary of one
document.
"""

import importlib.util
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from transformers import ContinuousBatchingConfig, GenerationConfig

from pi_lora.errors import ModelError, PiLoraError
from pi_lora.evaluation.forward import described
from pi_lora.evaluation.journal import identity_of
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import SummarizationOptions
from pi_lora.scaling.config import in_both_dialects
from pi_lora.types import Json

# On a CPU the library would take most of the memory for keys and values: tokens a page, requests and tokens at once.
PAGE_TOKENS, REQUESTS_ON_CPU, BATCH_TOKENS_ON_CPU = 256, 8, 4096
# How many prompts vLLM is given at a time: what it has written is kept when all of them are done.
PROMPTS_AT_ONCE = 64

# Token ids by the name of the prompt: what is read, and in pieces what follows.
Prompts = Mapping[str, Sequence[int]]
Written = Iterator[tuple[str, list[int]]]


def generation_config(options: SummarizationOptions, tokenizer: Any) -> GenerationConfig:
    """Return how text is drawn, for transformers, with nothing of the model's own generation config."""
    drawn = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0} if options.temperature else {}
    end = tokenizer.eos_token_id
    return GenerationConfig(
        do_sample=bool(drawn),
        **drawn,
        max_new_tokens=options.max_new_tokens,
        eos_token_id=end,
        pad_token_id=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


@dataclass(frozen=True)
class Writer:
    """A model that writes: tokenizer, window in tokens, what a result says of it, and what tells it apart. If it
    `draws_together`, the random numbers of a summary depend on which others are written with it.
    """

    name: str
    tokenizer: Any
    window: int
    facts: Json
    identity: Json
    draws_together: bool
    write: Callable[[Prompts, SummarizationOptions], Written]


def find_writer(
    found: Model, engine: Literal["transformers", "vllm"] = "transformers", dtype: str | None = None
) -> Writer:
    """Return a model as a writer: a loaded one, or one that vLLM loads when it first writes. Raise PiLoraError if vLLM
    is missing or cannot take the model.
    """
    if engine == "transformers":
        loaded = found
        facts = {**described(loaded), "engine": "transformers, continuous batching"}
        write = partial(write_batched, loaded.model, loaded.tokenizer)
        return Writer(found.name, found.tokenizer, found.window, facts, identity_of(loaded), True, write)
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
    return Writer(found.name, found.tokenizer, found.window, facts, identity, False, write)


def write_batched(model: Any, tokenizer: Any, prompts: Prompts, options: SummarizationOptions) -> Written:
    """Continue each of `prompts` by continuous batching; each result comes as soon as it is whole. All requests wait
    before the first is computed, so that the random numbers they share do not depend on timing. Raise PiLoraError if
    the library gives up, as where memory is short.
    """
    memory: dict[str, int] = {}
    if model.device.type == "cpu":  # on a GPU the library looks how much memory there is
        pages = -(-(max(map(len, prompts.values())) + (options.max_new_tokens or 0)) // PAGE_TOKENS) + 1
        memory = {"page_size": PAGE_TOKENS, "num_blocks": pages * REQUESTS_ON_CPU}
        memory["max_batch_tokens"] = BATCH_TOKENS_ON_CPU
    batching = ContinuousBatchingConfig(seed=options.seed, **memory)
    manager = model.init_continuous_batching(generation_config(options, tokenizer), batching)
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


def write_with_vllm(
    model: str, window: int, dtype: str, end: int, prompts: Prompts, options: SummarizationOptions
) -> Written:
    """Continue each of `prompts` by vLLM, which must be installed; each has a seed of its own. `end` is EOS."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, max_model_len=window, dtype=dtype, seed=options.seed)
    how = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        max_tokens=options.max_new_tokens,
        seed=options.seed,
        stop_token_ids=[end],
    )
    names = list(prompts)
    for start in range(0, len(names), PROMPTS_AT_ONCE):
        batch = names[start : start + PROMPTS_AT_ONCE]
        inputs = [{"prompt_token_ids": list(prompts[name])} for name in batch]
        for name, output in zip(batch, engine.generate(inputs, how, use_tqdm=False), strict=True):
            yield name, list(output.outputs[0].token_ids)
