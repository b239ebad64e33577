"""The weights of a base model, read on the accelerator, quantized, in host memory, or left out."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging

from pi_lora.errors import ModelError, first_line
from pi_lora.models.machine import device

# `device`: the accelerator if there is one. `quantized`: the same, as NF4 with double quantization (QLoRA, Dettmers et
# al. 2023). `host`: from where FSDP spreads them over several GPUs. `empty`: no weights are read, for the processes
# that FSDP sends their shards from another one.
Placement = Literal["device", "quantized", "host", "empty"]

# Weights are read in this dtype to be quantized: read in another one, the same weight may have another NF4 value.
QUANTIZED_FROM = torch.bfloat16
# How many names a message shows of many.
SHOWN = 3


def read_weights(
    name: str, path: str, config: PreTrainedConfig, dtype: torch.dtype, attention: str, place: Placement, **source: Any
) -> PreTrainedModel:
    """Load the model `name` of `config` with the weights in the folder or hub id `path`; `source` holds the options
    `revision` and `trust_remote_code` of `from_pretrained`. A `quantized` model computes in `dtype`; NF4 is
    always made from bfloat16, as in training.

    Raises:
        ModelError: They cannot be read, are not exactly those of the config, or are infinite or NaN.
    """
    options: dict[str, Any] = {}
    on_gpu = device().type == "cuda"
    if place == "quantized":
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        options["quantization_config"] = transformers.BitsAndBytesConfig(load_in_4bit=True, **nf4)
    # A GPU gets the weights without a copy of the whole model in host memory.
    if place == "quantized" or (place == "device" and on_gpu):
        options["device_map"] = {"": torch.cuda.current_device() if on_gpu else device()}
    with quiet_loading():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=QUANTIZED_FROM if place == "quantized" else dtype,
                attn_implementation=attention,
                use_safetensors=True,
                # Reported below, with the names.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
                **source,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"{name}: its weights cannot be loaded ({first_line(error)})") from error
    _check_complete(name, report)
    if place == "quantized":
        _compute_in(dtype, model)
    loaded: PreTrainedModel = model
    check_finite(name, loaded.named_parameters())
    return loaded


def empty_weights(config: PreTrainedConfig, dtype: torch.dtype, attention: str, trust_remote_code: bool) -> Any:
    """Build the model of `config` with its own buffers, but weights in memory that is reserved and never touched: the
    optimizer is made before FSDP, and accelerate 1.15 tells its parameters apart by their addresses.
    """
    with quiet_loading(), init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code, dtype=dtype, attn_implementation=attention
        )
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(weight, device="cpu")))
    model.tie_weights()
    return model.eval()


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' progress bars and notes off the terminal; errors are exceptions all the same."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _check_complete(name: str, report: Mapping[str, Any]) -> None:
    """Raise ModelError if the weights are not exactly those that the config describes: transformers would give what is
    missing or has another shape random values, and leave out what it does not expect.
    """
    mismatched = [f"{key} is {list(stored)} instead of {list(own)}" for key, stored, own in report["mismatched_keys"]]
    kinds = {"lack": report["missing_keys"], "have": mismatched, "have beyond its config": report["unexpected_keys"]}
    if problems := [f"{verb} {', '.join(sorted(keys)[:SHOWN])}" for verb, keys in kinds.items() if keys]:
        raise ModelError(f"{name}: its weights {', and '.join(problems)}; download all of its files")


def _compute_in(dtype: torch.dtype, model: PreTrainedModel) -> None:
    """Let a quantized model compute in `dtype`, from the weights as they were quantized, on every processor.

    On processors with AVX512-BF16, bitsandbytes 0.50 repacks a layer at its first forward in evaluation mode, and then
    computes in bfloat16. It fails where the inner size is no multiple of the block size of 64 or the outer one of 32,
    rounds the scales of the blocks to bfloat16, and does not undo it for training, whose gradients then do not pass.
    """
    from bitsandbytes.nn.modules import Linear4bit  # an optional package

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    model.config.dtype = dtype


def finite(values: torch.Tensor) -> bool:
    """Return whether all numbers are finite; their sum tells in one pass, unless it overflows itself."""
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return math.isfinite(total.item()) or bool(values.isfinite().all())


def check_finite(name: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ModelError if the model `name` has infinite or NaN weights, also in the scales of NF4 ones."""
    for key, weight in weights:
        state = getattr(weight, "quant_state", None)
        # The mean of the scales, which double quantization subtracts from them, is NaN if one of them is.
        values = weight.detach() if state is None else state.offset
        if values.itemsize > 1 and not finite(values):
            raise ModelError(f"{name}: {key} has infinite or NaN values; it is damaged, download or tune it again")
