"""The shape of a model, counted from its modules: built on the meta device, they take no memory for weights."""

from collections import Counter
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.planning.shape import Shape
from pi_lora.scaling.config import FULL_ATTENTION, LOCAL_ATTENTION, SLIDING_ATTENTION, Config

# Layer types without attention weights: their operations grow linearly with the sequence.
WITHOUT_ATTENTION = {"linear_attention", "conv", "mamba"}


def shape_of(model: PreTrainedModel) -> Shape:
    """Count the shape of a model on any device; raise ModelError if transformers knows no layers, or no head, of it."""
    config, head = model.config, model.get_output_embeddings()
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if head is None or not layers:
        raise ModelError(f"model of type {config.model_type}: has no decoder layers with a head; no plan for it")
    hidden, heads = config.hidden_size, config.num_attention_heads
    per_token = getattr(config, "num_experts_per_tok", None)
    # `qk_head_dim` is that of multi-head latent attention, whose `head_dim` is the rotary part alone.
    head_dim = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or hidden // heads
    modules, experts = dict(model.named_modules()), _experts(model)
    norms = {name: module for name, module in modules.items() if "Norm" in type(module).__name__}
    linears = {name: each for name, each in modules.items() if isinstance(each, nn.Linear) and each is not head}
    return Shape(
        parameters=_numbers(model),
        layers=len(layers),
        layer=max(map(_numbers, layers)),
        hidden=hidden,
        intermediate=max(_mlp_width(layer, hidden, _active(_experts(layer), per_token)) for layer in layers),
        queries=heads * head_dim,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=head.out_features,
        tied=head.weight is model.get_input_embeddings().weight,
        linear_weights=sum(module.weight.numel() for module in linears.values()),
        lora=_adapted(linears, experts),
        experts=sum(weight.numel() for weight in experts.values()),
        active_experts=_active(experts, per_token),
        norms=sum(not _in_attention(name) for name in norms) // len(layers),
        norm_weights=_numbers(nn.ModuleList(norms.values())),
        head_normed=any(map(_in_attention, norms)),
        **_local_layers(config.to_dict(), len(layers)),
    )


def _adapted(linears: Mapping[str, nn.Linear], experts: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the numbers of LoRA's matrices per rank, by what `tuning.target_modules` may name.

    PEFT 0.21 adapts every expert of most mixtures by itself, with twice the rank where two projections are fused. It
    leaves dense and shared MLPs out then; and the experts of other mixtures. Here all of them count.
    """
    per_rank: Counter[str] = Counter()
    for name, module in linears.items():
        targets = ["all-linear", name.rpartition(".")[2]] + ["attention"] * _in_attention(name)
        per_rank.update(dict.fromkeys(targets, module.in_features + module.out_features))
    for name, weight in experts.items():
        per_rank["all-linear"] += len(weight) * sum(weight.shape[1:]) * (2 if "gate_up" in name else 1)
    return per_rank


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _in_attention(name: str) -> bool:
    return "attn." in name or "attention." in name


def _experts(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of experts by name: tensors of (experts, rows, columns)."""
    return {name: weight for name, weight in module.named_parameters() if weight.dim() == 3 and "conv" not in name}


def _active(experts: Mapping[str, nn.Parameter], per_token: int | None) -> int:
    """Count the numbers of experts that a token is multiplied with; all of them if `per_token` is not known."""
    return sum(weight[0].numel() * (per_token or len(weight)) for weight in experts.values())


def _mlp_width(layer: nn.Module, hidden: int, active_experts: int) -> int:
    """Return the width inside a layer's MLPs: the inputs of what projects back to hidden states, outside attention.

    An expert has three matrices of hidden x width. Where everything is as wide as the hidden states, so is the MLP.
    """
    back = (
        module.in_features
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and not _in_attention(name) and module.out_features == hidden
    )
    return sum(width for width in back if width != hidden) + active_experts // (3 * hidden) or hidden


def _local_layers(config: Config, layers: int) -> dict[str, int]:
    """Return how many layers attend to everything, how many to a window, and its length in tokens."""
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    kinds = config.get("layer_types") or [SLIDING_ATTENTION if window else FULL_ATTENTION] * layers
    sliding = sum(kind in LOCAL_ATTENTION for kind in kinds)
    full = layers - sliding - sum(kind in WITHOUT_ATTENTION for kind in kinds)
    return {"full_layers": full, "sliding_layers": sliding, "sliding_window": window}
