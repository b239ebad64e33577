"""Models as they write: in transformers with their adapter, or in vLLM as full weights."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pi_lora.errors import ModelError, PiLoraError
from pi_lora.evals.writing import Sampling, Written, write_batched, write_with_vllm
from pi_lora.evaluate.models import identity_of
from pi_lora.evaluate.scores import Scores, described
from pi_lora.model import extended_config, find_base, load_tokenizer
from pi_lora.rope import scale_of, window_of
from pi_lora.run import LoadedModel, Stretch, is_adapter, load

EngineName = Literal["transformers", "vllm"]
Write = Callable[[Mapping[str, Sequence[int]], Sampling], Iterator[Written]]


@dataclass(frozen=True)
class Writer:
    """A model that writes: its tokenizer, its window in tokens, what a result says of it, and what tells it apart."""

    name: str
    tokenizer: Any
    window: int
    facts: Scores
    identity: dict[str, Any]
    write: Write


def find_writer(name: str, engine: EngineName, stretch: Stretch | None = None, dtype: str | None = None) -> Writer:
    """The model `name`, loaded; by vLLM when it first writes.

    Raises:
        PiLoraError: as `run.load`; vLLM is not installed, or cannot take the model as it is.
    """
    if engine == "vllm":
        return _vllm_writer(name, stretch, dtype)
    return loaded_writer(load(name, stretch, dtype))


def loaded_writer(loaded: LoadedModel) -> Writer:
    """A loaded model, that writes by continuous batching."""
    return Writer(
        loaded.name,
        loaded.tokenizer,
        loaded.window,
        {**described(loaded), "engine": "transformers, continuous batching"},
        identity_of(loaded),
        partial(write_batched, loaded.model, loaded.tokenizer),
    )


def _vllm_writer(name: str, stretch: Stretch | None, dtype: str | None) -> Writer:
    if importlib.util.find_spec("vllm") is None:
        raise PiLoraError("--engine vllm: vLLM is not installed; pip install vllm, or use --engine transformers")
    if is_adapter(name):
        raise ModelError(
            f"{name}: is an adapter, whose embeddings vLLM cannot load; merge it first: pi-lora merge {name}"
        )
    if stretch is not None:
        raise ModelError(
            "--engine vllm: reads the scaling of config.json; leave out --original, --target and --scaling"
        )
    base = find_base(name)
    config = extended_config(base, None)
    tokenizer, window = load_tokenizer(base.path, window_of(config)), window_of(config)
    kind = dtype or "auto"

    def write(prompts: Mapping[str, Sequence[int]], sampling: Sampling) -> Iterator[Written]:
        return write_with_vllm(base.path, window, kind, prompts, sampling, tokenizer.eos_token_id)

    facts = {"model": name, "scale": scale_of(config), "dtype": kind, "kernel": "vLLM's", "engine": "vllm"}
    return Writer(name, tokenizer, window, facts, {"name": name, "path": base.path, "config": config}, write)
