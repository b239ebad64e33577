"""A model with its weights: read on the accelerator, quantized, in host memory, or left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pi_lora.errors import ModelError, first_line
from pi_lora.models.attention import use_blockwise
from pi_lora.models.composite import other_parts
from pi_lora.models.device import (
    device,
    dtype_named,
    dtype_of_base,
    measured_under_autocast,
)
from pi_lora.models.files import quantization_of
from pi_lora.models.quantized import DEQUANTIZED_ON_LOADING, Header, check_is_quantized, check_loadable
from pi_lora.models.quiet import quiet_loading
from pi_lora.models.source import Base, ModelSource
from pi_lora.models.tokenizer import end_of_turn
from pi_lora.models.weights import check_finite
from pi_lora.scaling.config import Config
from pi_lora.scaling.verify import config_of

# Where the weights of a base go. `device`: the accelerator if there is one. `quantized`: the same, as NF4 with double
# quantization (QLoRA, Dettmers et al. 2023). `host`: host memory, from which FSDP spreads the weights over GPUs.
# `empty`: no weights are read, in the processes to which FSDP sends their shards.
Placement = Literal["device", "quantized", "host", "empty"]

# The dtype of weights before they are quantized: from another dtype, the same weight may get another NF4 value.
QUANTIZED_FROM = torch.bfloat16
# The most problems that a message names.
MAX_PROBLEMS = 3
# The endings of the names of classes in `architectures` whose head predicts the next token.
WITH_NEXT_TOKEN = ("LM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class LoadedModel:
    """A model whose weights are in memory: what measurements, generation and training take.

    Attributes:
        source: The model before it was loaded: base, config, adapter.
        module: The module of transformers or PEFT.
        autocast: Whether float32 weights compute in bfloat16.
        run_name: The name of the run that the model becomes, while the model trains.
    """

    source: ModelSource
    module: Any
    autocast: bool = False
    run_name: str | None = None

    def __str__(self) -> str:
        return f"{self.source}, {self.module.dtype} on {self.module.device}"

    @property
    def name(self) -> str:
        """The model as the user names it."""
        return self.run_name or self.source.name

    @property
    def window(self) -> int:
        """The context window in tokens."""
        return self.source.window

    @property
    def scale(self) -> float:
        """The factor L'/L by which the window is extended."""
        return self.source.scale

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, or of the base."""
        return self.source.tokenizer

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text: EOS, those of the generation config, and the one that ends a turn of a chat."""
        ends = self.module.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        found = {*ends, self.tokenizer.eos_token_id, end_of_turn(self.tokenizer)}
        return sorted(found - {None})

    @property
    def dtype(self) -> str:
        """The dtype of the weights, such as `bfloat16`."""
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def kernel(self) -> str:
        """The attention kernel, by transformers' name."""
        return str(self.module.config._attn_implementation)


def load_model(source: ModelSource, dtype: str | None = None) -> LoadedModel:
    """Read the weights of a model.

    Args:
        source: The model as `resolve_model` returns it.
        dtype: Instead of `source.dtype`. By default float32 on a CPU, that of the training after QLoRA, and on
            an accelerator the stored dtype; a run is computed there in the dtype of its training, which `run.json`
            names. `model.dtype` of the recipe of a run counts everywhere.

    Raises:
        ModelError: Weights are missing, damaged, or not those that a run was tuned from.
    """
    source.check_base_fingerprint()
    dtype = dtype or source.dtype
    recipe = source.recipe
    on_cpu = device().type == "cpu"
    quantized = bool(source.adapter and recipe and recipe.tuning.method == "qlora")
    if dtype:
        weights_dtype = dtype_named(dtype)
    elif source.adapter and recipe and (quantized or not on_cpu or source.run.recipe.model.dtype):
        weights_dtype = dtype_of_base(recipe)
    elif on_cpu:
        weights_dtype = torch.float32
    else:
        weights_dtype = dtype_named(source.base.config.get("dtype") or "float32")
    module = load_base(source, weights_dtype, placement="quantized" if quantized else "device").eval()
    if source.adapter is not None:
        # Imported here: PEFT takes seconds, and bases and full weights do without.
        from pi_lora.models.adapter import load_adapter

        module = load_adapter(module, source.adapter)
    in_float32 = dtype is None and weights_dtype == torch.float32
    autocast = recipe is not None and in_float32 and measured_under_autocast(recipe)
    if autocast:
        # Without a cache, which would hold all weights a second time.
        in_bfloat16 = torch.autocast(module.device.type, torch.bfloat16, cache_enabled=False)
        module.forward = in_bfloat16(module.forward)
    return LoadedModel(source, module, autocast)


def load_base(
    source: ModelSource, dtype: torch.dtype, *, attention: str = "auto", placement: Placement = "device"
) -> PreTrainedModel:
    """Load the base of `source` under the config of `source`, without an adapter. `auto` is the blockwise kernel; other
    kernels are named as transformers names them.

    A `quantized` model computes in `dtype`; NF4 is always made from bfloat16, as in training.

    Raises:
        ModelError: The weights cannot be read, are not exactly those of the config, or are infinite or NaN.
    """
    base = source.base
    kernel = None if attention == "auto" else attention
    if placement == "empty":
        return empty_module(source.typed_config, dtype, kernel)
    options = _placement_options(placement, dtype)
    base.download_weights()
    if quantization_of(base.config):
        check_loadable(base, base.read_weights())
    config = source.typed_config
    is_dequantized = quantization_of(source.config) in DEQUANTIZED_ON_LOADING
    if is_dequantized:
        config.quantization_config = {**config.quantization_config, "dequantize": True}
    with quiet_loading():
        try:
            module, report = AutoModelForCausalLM.from_pretrained(
                base.path,
                config=config,
                dtype=QUANTIZED_FROM if placement == "quantized" else dtype,
                attn_implementation=kernel,
                use_safetensors=True,
                # Reported below, with the names.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
        except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ModelError(
                f"{base.name}: its weights cannot be loaded ({first_line(error)}); "
                "download the model again, or name another"
            ) from error
        if kernel is None:
            use_blockwise(module)
    if source.rope.depends_on_length:
        module.get_decoder().register_forward_pre_hook(_reset_dynamic_rope, with_kwargs=True)
    for part in module.modules():
        if hasattr(part, "rope_deltas"):
            part.register_forward_pre_hook(_forget_rope_deltas, with_kwargs=True)
    _check_complete(base, module, report)
    if module.all_tied_weights_keys != module.get_expanded_tied_weights_keys(all_submodels=True):
        # transformers 5.23 does not tie what differs. Heads of the usual names are found when a model is resolved.
        raise ModelError(
            f"{base.name}: the stored head differs from the embeddings, but config.json ties the two; "
            "name a copy of it whose config.json has tie_word_embeddings: false"
        )
    if is_dequantized:
        # transformers 5.23 leaves the other weights of an FP8 model in the stored dtype.
        _cast_weights(module, dtype)
    if placement == "quantized":
        _compute_in(dtype, module)
    loaded: PreTrainedModel = module
    check_finite(base.name, loaded.named_parameters())
    return loaded


def _placement_options(placement: Placement, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a placement and the dtype of computation."""
    options: dict[str, Any] = {}
    on_gpu = device().type == "cuda"
    if placement == "quantized":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    # A GPU gets the weights without a copy of the whole model in host memory.
    if placement == "quantized" or (placement == "device" and on_gpu):
        options["device_map"] = {"": torch.cuda.current_device() if on_gpu else device()}
    return options


@torch.no_grad()
def _reset_dynamic_rope(decoder: Any, _: Any, options: dict[str, Any]) -> None:
    """Reset `dynamic` frequencies before an input that continues no cache: transformers 5.23 keeps those of the longest
    input until one shorter than L comes, so that results would depend on earlier inputs.
    """
    cache = options.get("past_key_values")
    if cache is None or not cache.get_seq_length():
        single_token = torch.zeros((1, 1), dtype=torch.long, device=decoder.device)
        # The forward of the class: hooks and what replaces the forward of the module are left out.
        type(decoder).forward(decoder, input_ids=single_token, use_cache=False)


def _forget_rope_deltas(model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Forget the offsets of positions after images, if they are those of another batch. Models with images keep them
    from the last `generate` (transformers 5.23), also after texts, where all are 0.
    """
    if model.rope_deltas is None:
        return
    values = (*arguments, *options.values())
    inputs = next(value for value in values if isinstance(value, torch.Tensor))
    if len(inputs) != len(model.rope_deltas):
        model.rope_deltas = None


def empty_module(config: PreTrainedConfig, dtype: torch.dtype, kernel: str | None) -> Any:
    """Build the model of `config` with buffers, but with weights in memory that is reserved and never touched.

    The weights need addresses: the optimizer is made before FSDP, and accelerate 1.15 tells parameters apart by them.
    """
    with quiet_loading(), init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=kernel,
        )
        if kernel is None:
            use_blockwise(model)
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(weight, device="cpu")))
    model.tie_weights()
    return model.eval()


def check_shapes(base: Base, stored: Mapping[str, Header]) -> None:
    """Raise ModelError if the `stored` weights of a base are others than its config describes, by their headers alone.
    Quantized weights have other names and shapes in the files. Whether bitsandbytes quantized any is checked.
    """
    check_is_quantized(base, stored)
    if quantization_of(base.config):
        return
    shapes = {}
    for name, tensor in stored.items():
        shapes[name] = torch.empty(tensor.shape, device="meta")
    module, report = load_on_meta(base.meta_model, base.config, shapes)
    _check_complete(base, module, report)


def load_on_meta(
    model: PreTrainedModel, config: Config, shapes: dict[str, torch.Tensor]
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Return a module of the class of `model` under a config, with weights of these `shapes` on the meta device, and
    the report of transformers on missing and mismatched weights.
    """
    with quiet_loading():
        module, report = type(model).from_pretrained(
            None,
            config=config_of(type(model.config), config),
            state_dict=shapes,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    return module, report


def _check_complete(base: Base, module: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Raise ModelError if the weights of a base are not exactly those of its module, and those of parts that are left
    out.

    transformers would give random values to weights that are missing or have another shape, and ignore unexpected ones.
    """
    problems = problems_of(report)
    prefixes = tuple(f"{part}." for part in other_parts(module))
    for key in report["unexpected_keys"]:
        if not key.startswith(prefixes):
            problems.append(f"{key} is not in its config")
    if problems:
        named = "; ".join(sorted(problems)[:MAX_PROBLEMS])
        remedy = "download all of its files or correct config.json"
        saved_as = ", ".join(base.config.get("architectures") or ())
        if saved_as and not saved_as.endswith(WITH_NEXT_TOKEN):
            remedy = f"a {saved_as} predicts no next token: name the language model that it was made from"
        raise ModelError(f"{base.name}: its weights do not match config.json: {named}; {remedy}")


def problems_of(report: Mapping[str, Any]) -> list[str]:
    """Return the weights that are missing or not of the shape in the config, from what transformers reports of a
    loading.
    """
    problems = [f"{name} is missing" for name in report["missing_keys"]]
    for name, stored_shape, config_shape in report["mismatched_keys"]:
        problems.append(f"{name} is {list(stored_shape)} instead of {list(config_shape)}")
    return problems


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
    _cast_weights(model, dtype)
    model.config.dtype = dtype


def _cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    for weight in model.parameters():
        # The bytes of NF4 may be stored as numbers of another dtype.
        if weight.is_floating_point() and not hasattr(weight, "quant_state"):
            weight.data = weight.data.to(dtype)
