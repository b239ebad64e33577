"""A training step on fake tensors: the bytes and operations of the real program, without its numbers or its device.

transformers, PEFT, TRL and torch run as in `pi-lora train`, on tensors that have a shape, a dtype and a device but no
memory (torch's FakeTensorMode). Every storage is counted while it lives. Replaced are the kernels that need a GPU:
attention, the gated delta rule as flash-linear-attention 0.5 allocates, the Triton kernels of TRL's loss, which
allocate nothing, and the quantized layers of bitsandbytes. All tokens have labels. FSDP2 runs as the first of its
ranks, on torch's fake process group. Not simulated are the allocator, libraries, loading, and measurements during
training.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from peft.helpers import disable_input_dtype_casting
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, PreTrainedConfig, masking_utils, modeling_utils
from trl.kernels import chunked_logprob
from trl.trainer import utils as of_trl

from pi_lora.models import attention
from pi_lora.models.adapter import prepare_for_tuning, without_known_warnings
from pi_lora.models.attention import BLOCK_ON_GPU, BlockwiseMask, use_blockwise
from pi_lora.models.quiet import quiet_loading
from pi_lora.planning.gpus import CPU, Gpu
from pi_lora.planning.memory import ADAMW_8BIT, NF4
from pi_lora.recipe.schema import Recipe
from pi_lora.training.trainer import _change_modules, _checkpointing_options

aten = torch.ops.aten
# Tokens between two states of the gated delta rule.
DELTA_CHUNK = 64
INDEXED = (aten.index.Tensor, aten.index_put.default, aten._index_put_impl_.default)
COUNTED = {
    **flop_registry,
    aten._grouped_mm: None,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Any:
    """Return the output of the kernel that torch chooses on a GPU: FlashAttention; with a mask the memory-efficient
    one, for which the mask becomes numbers.
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    inputs = (query, key, value)
    options = (dropout_p, is_causal)
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(*inputs, *options, scale=scale)[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    bias = attn_mask.expand(*query.shape[:3], key.shape[2])
    keeps_sums = True
    return aten._scaled_dot_product_efficient_attention(*inputs, bias, keeps_sums, *options, scale=scale)[0]


def operations(packet: Any, args: Any, kwargs: Any, made: Any) -> Any:
    """Return the operations of a kernel. Causal attention leaves half of the pairs out. Backwards of attention count
    four products, as a plan does, without the one that is computed again.
    """
    if packet is aten._grouped_mm:
        return 2.0 * args[0].numel() * args[1].shape[-1]
    shaped = args[:3] if packet is aten.addmm else args
    flops = float(COUNTED[packet](*shaped, **kwargs, out_val=made))
    name = str(packet)
    if "flash" in name and any(arg is True for arg in args):
        flops /= 2
    if "attention_backward" in name or "for_cpu_backward" in name:
        flops *= 4 / 5
    return flops


def storage_of(tensor: Any) -> torch.UntypedStorage:
    """Return the storage of a tensor, or that of the shard that this rank holds."""
    storage: torch.UntypedStorage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
    return storage


class Simulation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Counts operations, and the bytes of storages that live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.sizes: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        self.in_layers = False
        self.peak_in_layers = False
        self.flops = 0.0
        self.host = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = self.run(function, args, kwargs)
        packet = function.overloadpacket
        if packet in COUNTED:
            self.flops += operations(packet, args, kwargs, made)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.follow(storage_of(tensor))
        return made

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation. What a mask of tokens selects is all of them: the mask has no values."""
        if function is aten._local_scalar_dense.default:
            return True
        if function is aten.masked_select.default:
            [tensor, _] = args
            return tensor.new_empty(tensor.numel())
        if function is aten._grouped_mm.default:
            left, right, *_ = args
            offsets = kwargs.get("offs", args[-1])
            experts = (len(offsets),) if right.dim() == 2 else ()
            return left.new_empty(*experts, left.shape[0], right.shape[-1])
        if function in INDEXED and args[1][0].dtype == torch.bool:
            tensor, [mask, *_], *_ = args
            if function is aten.index.Tensor:
                return tensor.new_empty(mask.numel(), *tensor.shape[mask.dim() :])
            return tensor if function is aten._index_put_impl_.default else torch.empty_like(tensor)
        return function(*args, **kwargs)

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0
            self.resize(storage)
            weakref.finalize(storage, self.forget, key)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as it is now: FSDP2 empties and fills those of gathered weights."""
        key = storage._cdata
        change = storage.nbytes() - self.sizes[key]
        self.sizes[key] += change
        self.now += change
        if self.now > self.peak:
            self.peak = self.now
            self.peak_in_layers = self.in_layers

    def forget(self, key: int) -> None:
        """No longer count a storage."""
        self.now -= self.sizes.pop(key)


class NF4Linear(nn.Linear):
    """A linear layer whose weight takes the bytes of NF4. It is dequantized for the forward and again for the backward,
    as in bitsandbytes.
    """

    def quantize(self) -> None:
        """Replace the weight by bytes."""
        self.weight = nn.Parameter(
            torch.empty(round(self.weight.numel() * NF4), dtype=torch.uint8), requires_grad=False
        )

    def forward(self, inputs: torch.Tensor) -> Any:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else inputs.dtype
        dequantized = partial(torch.empty, dtype=dtype)
        weight = dequantized((self.out_features, self.in_features))
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.shape, dequantized):
            output = nn.functional.linear(inputs.to(dtype), weight)
        return output if self.bias is None else output + self.bias.to(dtype)


class DeltaRule(torch.autograd.Function):
    """The tensors that the kernels of flash-linear-attention 0.5 make for the gated delta rule and keep."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, decay: Any, beta: Any) -> Any:
        value, decay, beta, query, key = (tensor.contiguous() for tensor in (value, decay, beta, query, key))
        query, key = torch.empty_like(query), torch.empty_like(key)  # normalized
        system = beside(value, key, DELTA_CHUNK)
        states_and_values = chunked(key, value)
        ctx.save_for_backward(query, key, value, torch.empty_like(decay), beta, system)
        del states_and_values
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        query, key, value, decay, beta, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        states_and_values = [*chunked(key, value), *chunked(key, value)]
        of_keys = [beside(value, key, key.shape[-1]) for _ in range(3)]
        del states_and_values, of_keys
        return tuple(torch.empty_like(tensor) for tensor in (query, key, value, decay, beta))


def chunked(key: Any, value: Any) -> list[Any]:
    """The states between chunks, keys as wide as the values, and two tensors of values."""
    sequences, tokens, heads, width = value.shape
    key_width = key.shape[-1]
    states = key.new_empty(sequences, tokens // DELTA_CHUNK, heads, key_width, width)
    keys = beside(value, key, key_width)
    return [states, keys, torch.empty_like(value), torch.empty_like(value)]


def beside(value: Any, key: Any, width: int) -> Any:
    """A tensor in the dtype of the keys with the heads of the values."""
    return key.new_empty(*value.shape[:3], width)


class Convolution(torch.autograd.Function):
    """The convolution of causal-conv1d, which keeps its input."""

    @staticmethod
    def forward(ctx: Any, inputs: Any) -> Any:
        ctx.save_for_backward(inputs)
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.empty_like(gradient)


def delta_rule(query: Any, key: Any, value: Any, *, g: Any, beta: Any, **_: Any) -> Any:
    return DeltaRule.apply(query, key, value, g, beta), None  # type: ignore[no-untyped-call]  # torch has no types for it


def convolution(inputs: Any, *_: Any, **__: Any) -> Any:
    return Convolution.apply(inputs)  # type: ignore[no-untyped-call]  # torch has no types for it


def use_kernels_of_linear_attention(tuned: nn.Module, stack: ExitStack) -> None:
    """Replace transformers' own code of the gated delta rule, as on a GPU with the packages."""
    for code in {sys.modules[type(module).__module__] for module in tuned.modules()}:
        if hasattr(code, "torch_chunk_gated_delta_rule"):
            stack.enter_context(patch.object(code, "torch_chunk_gated_delta_rule", delta_rule))
            stack.enter_context(patch.object(code, "causal_conv1d_fn", convolution))


def build(recipe: Recipe, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Return the model that a run tunes."""
    kernel = None if recipe.model.attention == "auto" else recipe.model.attention
    with quiet_loading():
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)
        if kernel is None:
            use_blockwise(base)
    if recipe.tuning.method == "qlora":
        for module in base.modules():
            if type(module) is nn.Linear and module is not base.get_output_embeddings():
                module.__class__ = NF4Linear
    base.requires_grad_(requires_grad=False)
    tuned = prepare_for_tuning(base, recipe.tuning, "simulated")
    for module in base.modules():
        if isinstance(module, NF4Linear):
            module.quantize()
    return tuned.train()


def simulate(recipe: Recipe, config: PreTrainedConfig, original: int, gpu: Gpu) -> Simulation:
    """Simulate a step on `gpu`, after earlier steps, of a model with a window of `original` tokens.

    `peak` of what is returned has the bytes at the highest point, `peak_in_layers` whether a layer's backward is that
    point, `flops` the operations of one pass, and `host` the bytes that the host pins.
    """
    on_cpu = gpu.name == CPU
    precision = recipe.computes_in(on_cpu, gpu.bfloat16)
    dtype = getattr(torch, recipe.dtype_of_base(on_cpu, gpu.bfloat16))
    tokens = recipe.data.tokens_per_sequence(original, recipe.context.target)
    simulation = Simulation()
    with ExitStack() as stack:
        if not on_cpu:
            stack.enter_context(kernels_of_a_gpu())
        mesh = stack.enter_context(ranks(simulation, recipe.shards)) if recipe.shards > 1 else None
        with torch.device("meta"):
            tuned = build(recipe, config, dtype)
        if not on_cpu:
            use_kernels_of_linear_attention(tuned, stack)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tuned = made_fake(tuned)
        prepare(tuned, recipe, on_cpu)
        if mesh:
            shard(tuned, mesh)
        stack.enter_context(patch.object(modeling_utils, "save_on_cpu", partial(offload, simulation)))
        stack.enter_context(patch.object(masking_utils, "is_tracing", lambda *_: False))
        if not on_cpu:
            stack.enter_context(patch.object(nn.functional, "scaled_dot_product_attention", attend))
            stack.enter_context(patch.object(attention, "scaled_dot_product_attention", attend))
        stack.enter_context(simulation)
        for tensor in (*tuned.parameters(), *tuned.buffers()):
            simulation.follow(storage_of(tensor))
        trained = [weight for weight in tuned.parameters() if weight.requires_grad]
        optimizer = take_step(recipe, trained, tuned.get_input_embeddings().weight)
        mark_layers(simulation, tuned if recipe.tuning.method == "full" else tuned.get_base_model())
        ids = torch.zeros(recipe.training.per_device_batch_size, tokens, dtype=torch.long)
        with disable_input_dtype_casting(tuned, precision != "float32" and not recipe.tuning.dropout):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision != "float32" and not mesh):
                loss = forward(tuned, ids, on_cpu)
            loss.backward()
        if not mesh:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        if recipe.training.optimizer == "adamw":
            optimizer.step()
    return simulation


def forward(tuned: Any, ids: torch.Tensor, on_cpu: bool) -> Any:
    """Return the loss, as the trainers of pi-lora and TRL compute it."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "use_cache": False}
    if on_cpu:
        return tuned(**inputs, num_items_in_batch=1)[0]
    outputs = tuned(**inputs, fused_lm_head=True)
    return -outputs.log_probs.sum()


def offload(simulation: Simulation, **_: Any) -> Any:
    """Keep on the host what a backward needs, pinned in powers of two, as torch's `save_on_cpu`."""

    def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        simulation.host += 2 ** (tensor.nbytes - 1).bit_length()
        return partial(torch.empty, tensor.shape, dtype=tensor.dtype)

    return torch.autograd.graph.saved_tensors_hooks(to_host, lambda saved: saved())


def made_fake(model: nn.Module) -> Any:
    """Return a copy of a model on the meta device whose parameters and buffers are fake; tied ones stay tied."""
    fakes: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = torch.empty_like(tensor, device="cpu")
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
        fakes[id(tensor)] = fake
    return deepcopy(model, fakes)


@contextmanager
def ranks(simulation: Simulation, number: int) -> Iterator[DeviceMesh]:
    """Be the first of so many ranks, without the others; storages that FSDP2 empties are counted as empty."""

    def resized(change: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
        change(tensor)
        simulation.resize(tensor.untyped_storage())

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    with ExitStack() as stack:
        for name in ("alloc_storage", "free_storage"):
            counted = partial(resized, getattr(_fsdp_param, name))
            stack.enter_context(patch.object(_fsdp_param, name, counted))
        yield init_device_mesh("cpu", (number,))
    dist.destroy_process_group()


def shard(tuned: Any, mesh: DeviceMesh) -> None:
    """Shard the layers and the rest, as accelerate does."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in tuned.modules():
        if type(module).__name__ in tuned._no_split_modules:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(tuned, mesh=mesh, mp_policy=policy)


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Use the blocks of a GPU, and TRL's loss as with Triton, whose kernels allocate nothing."""

    def nothing(*_: Any, **__: Any) -> None: ...

    with (
        patch.object(BlockwiseMask, "size", BLOCK_ON_GPU),
        patch.object(of_trl, "_use_triton", lambda _: True),
        patch.object(chunked_logprob, "_forward_tile", nothing),
        patch.object(chunked_logprob, "_backward_tile", nothing),
        patch.object(chunked_logprob, "_addmm_fp32", accumulate),
    ):
        yield


def accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product in float32 without a copy, as on CUDA."""
    torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def prepare(tuned: Any, recipe: Recipe, on_cpu: bool) -> None:
    """Do what the trainers of pi-lora, TRL and transformers do to a model."""
    base = tuned if recipe.tuning.method == "full" else tuned.get_base_model()
    if not on_cpu:
        of_trl.add_fused_lm_head(base)
    _change_modules(tuned, recipe, loss_in_place=on_cpu)
    if recipe.training.activation_checkpointing:
        if recipe.tuning.method != "full":
            tuned.enable_input_require_grads()
        options = _checkpointing_options(recipe) or {}
        with without_known_warnings():
            tuned.activation_checkpointing_enable(**options)


def mark_layers(simulation: Simulation, base: Any) -> None:
    """Say when the loss is done, and the backward of the layers begins."""

    def before_backward(_gradient: torch.Tensor) -> None:
        simulation.in_layers = True

    def after_layers(_module: Any, _inputs: Any, outputs: Any) -> None:
        outputs.last_hidden_state.register_hook(before_backward)

    base.base_model.register_forward_hook(after_layers)


def take_step(recipe: Recipe, trained: list[nn.Parameter], embedding: nn.Parameter) -> Any:
    """Make the moments of the optimizer, and keep the gradients if a step accumulates them."""
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer: Any = torch.optim.AdamW(trained, fused=True)
    if recipe.training.optimizer == "adamw":
        optimizer.step()
    else:
        optimizer.moments = []
        for weight in trained:
            moment_bytes = 8 if weight is embedding else ADAMW_8BIT
            moments = torch.empty(round(weight.numel() * moment_bytes), dtype=torch.uint8)
            optimizer.moments.append(moments)
    if recipe.training.global_batch_size == recipe.sequences_at_once:
        optimizer.zero_grad()
    return optimizer
