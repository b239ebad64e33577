"""The shape of a model, counted from the modules on the meta device; memory and hours are planned from it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_lora.errors import ModelError
from pi_lora.scaling.config import FULL_ATTENTION, LOCAL_ATTENTION, SLIDING_ATTENTION, Config

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# Layer types without attention weights: their operations grow linearly with the sequence.
LINEAR_ATTENTION = "linear_attention"
WITHOUT_ATTENTION = {LINEAR_ATTENTION, "conv", "mamba"}


@dataclass(frozen=True)
class Shape:
    """A decoder: layers between an embedding and a head, which may share their weights (`tied`).

    Attributes:
        parameters: The number of parameters.
        layers: The number of layers.
        layer: The parameters of the largest layer.
        hidden: The width of hidden states.
        intermediate: The width of the widest MLP.
        heads: The number of attention heads.
        queries: The width of the queries of a layer.
        keys: The width of the keys of a layer.
        vocabulary: The number of tokens in the vocabulary.
        tied: Whether head and embedding share their weights.
        linear_weights: The weights of linear layers without biases and head, which are quantized and multiplied with
            each token.
        lora: The numbers in the matrices of LoRA on linear layers per rank, by names of `tuning.target_modules`.
        expert_lora: The numbers in the matrices of LoRA on experts per rank; an expert has an adapter of its own.
        experts: The numbers in the weights of experts.
        active_experts: Those of them that a token is multiplied with.
        experts_per_token: The experts of a layer that a token is multiplied with; 0 without experts.
        clamped: Whether experts clamp what they multiply, as in gpt-oss, whose backward needs more.
        norms: The norms of hidden states in a layer.
        norm_weights: The weights of all norms.
        float_norms: Whether norms multiply by their weights in float32, as Gemma's.
        head_normed: Whether attention has norms.
        gated: Whether queries come with a gate for the output of attention, as in Qwen3.5.
        in_blocks: Whether attention has sinks or soft caps, for which the default kernel takes all layers in blocks.
        soft_capped: Whether attention has soft caps.
        full_layers: The layers that attend to everything.
        sliding_layers: The layers that attend to a window.
        sliding_window: The length of that window, in tokens.
        delta_layers: The layers with linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464).
        delta_keys: The width of the keys of such a layer.
        delta_values: The width of the values of such a layer.
    """

    parameters: int
    layers: int
    layer: int
    hidden: int
    intermediate: int
    heads: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    linear_weights: int
    lora: dict[str, int]
    expert_lora: int
    experts: int
    active_experts: int
    experts_per_token: int
    clamped: bool
    norms: int
    norm_weights: int
    float_norms: bool
    head_normed: bool
    gated: bool
    in_blocks: bool
    soft_capped: bool
    full_layers: int
    sliding_layers: int
    sliding_window: int
    delta_layers: int
    delta_keys: int
    delta_values: int

    @property
    def embedding(self) -> int:
        """Numbers in the embedding matrix; the head has as many, or the same ones if `tied`."""
        return self.vocabulary * self.hidden


def shape_of(model: "PreTrainedModel") -> Shape:
    """Count the shape of a model on any device; raise ModelError if transformers knows no layers, or no head, of it."""
    from torch import nn

    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    layer_classes = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in layer_classes]
    if head is None or not layers:
        raise ModelError(f"model of type {config.model_type}: has no decoder layers with a head; no plan for it")
    hidden = config.hidden_size
    query_widths, key_widths = zip(*map(attention_widths, config.per_layer_config), strict=True)
    experts_per_token = getattr(config, "num_experts_per_tok", None)
    modules = dict(model.named_modules())
    experts = _experts(model)
    limits = [getattr(module, "limit", None) for module in modules.values()]
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    soft_capped = bool(getattr(config, "attn_logit_softcapping", None))
    norms = {name: module for name, module in modules.items() if "Norm" in type(module).__name__}
    attention_norms = [name for name in norms if in_attention(name)]
    linears = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and module is not head:
            linears[name] = module
    full_layers, sliding_layers, window = _attended_layers(config.to_dict(), len(layers))
    queries = max(query_widths)
    # Norms like Gemma's have a method for what precedes the multiplication, other classes have none.
    float_norms = any(hasattr(module, "_norm") for module in norms.values())
    projections = [module for name, module in linears.items() if name.endswith("q_proj")]
    delta_keys, delta_values = _delta_widths(config)
    return Shape(
        parameters=_count_parameters(model),
        layers=len(layers),
        layer=max(_count_parameters(layer) for layer in layers),
        hidden=hidden,
        intermediate=max(_mlp_width(layer, hidden, experts_per_token) for layer in layers),
        heads=config.num_attention_heads,
        queries=queries,
        keys=max(key_widths),
        vocabulary=head.out_features,
        tied=head.weight is model.get_input_embeddings().weight,
        linear_weights=sum(module.weight.numel() for module in linears.values()),
        lora=_lora_numbers(linears),
        expert_lora=sum(len(weight) * sum(weight.shape[1:]) for weight in experts.values()),
        experts=sum(weight.numel() for weight in experts.values()),
        active_experts=_active_numbers(experts, experts_per_token),
        experts_per_token=experts_per_token if experts and experts_per_token else 0,
        clamped=bool(experts) and any(isinstance(limit, float) for limit in limits),
        norms=(len(norms) - len(attention_norms)) // len(layers),
        norm_weights=_count_parameters(nn.ModuleList(norms.values())),
        float_norms=float_norms,
        head_normed=bool(attention_norms),
        gated=any(module.out_features == 2 * queries for module in projections),
        in_blocks=sinks or soft_capped,
        soft_capped=soft_capped,
        full_layers=full_layers,
        sliding_layers=sliding_layers,
        sliding_window=window,
        delta_layers=(config.layer_types or []).count(LINEAR_ATTENTION) if delta_keys else 0,
        delta_keys=delta_keys,
        delta_values=delta_values,
    )


def dense_mlps(model: "nn.Module") -> "list[nn.Module]":
    """Return the MLPs of a model that can be computed in chunks; raise ModelError if all consist of experts."""
    dense = []
    for name, module in model.named_modules():
        is_mlp = name.rpartition(".")[2] in ("mlp", "feed_forward")
        inner_names = [inner.rpartition(".")[2] for inner, _ in module.named_modules()]
        has_experts = "experts" in inner_names
        if is_mlp and not has_experts:
            dense.append(module)
    if not dense:
        raise ModelError("training.mlp_chunk_tokens: the model has no dense MLP; leave the key out")
    return dense


def attention_widths(config: "PreTrainedConfig") -> tuple[int, int]:
    """Return the widths of the queries and of the keys of a layer."""
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    # `qk_head_dim` is that of multi-head latent attention, whose `head_dim` is the rotary part alone.
    head_dim = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    if not head_dim:
        head_dim = config.hidden_size // heads
    return heads * head_dim, key_value_heads * head_dim


def _delta_widths(config: "PreTrainedConfig") -> tuple[int, int]:
    """Return the widths of the keys and of the values of layers with the gated delta rule; 0 without such layers."""
    if not hasattr(config, "linear_num_value_heads"):
        return 0, 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, config.linear_num_value_heads * config.linear_value_head_dim


def _lora_numbers(linears: "Mapping[str, nn.Linear]") -> dict[str, int]:
    """Return the numbers in the matrices of LoRA per rank, by names that `tuning.target_modules` may have.

    Routers are counted, although they do not train.
    """
    per_rank: Counter[str] = Counter()
    for name, module in linears.items():
        targets = {"all-linear", name.rpartition(".")[2]}
        if in_attention(name):
            targets.add("attention")
        for target in targets:
            per_rank[target] += module.in_features + module.out_features
    return dict(sorted(per_rank.items()))


def _count_parameters(module: "nn.Module") -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def in_attention(name: str) -> bool:
    """Whether a module of this name belongs to attention; architectures have two words for it."""
    return "attn." in name or "attention." in name


def _experts(module: "nn.Module") -> "dict[str, nn.Parameter]":
    """Return the weights of experts by name: tensors of (experts, rows, columns)."""
    experts = {}
    for name, weight in module.named_parameters():
        if weight.dim() == 3 and "conv" not in name:
            experts[name] = weight
    return experts


def _active_numbers(experts: "Mapping[str, nn.Parameter]", per_token: int | None) -> int:
    """Count the numbers of experts that a token is multiplied with; all of them if `per_token` is not known."""
    numbers = 0
    for weight in experts.values():
        numbers += weight[0].numel() * (per_token or len(weight))
    return numbers


def _mlp_width(layer: "nn.Module", hidden: int, experts_per_token: int | None) -> int:
    """Return the width of the MLPs of a layer: the inputs of projections to hidden states, outside attention.

    An expert has three matrices of hidden x width. Where everything is as wide as the hidden states, so is the MLP.
    """
    from torch import nn

    width = _active_numbers(_experts(layer), experts_per_token) // (3 * hidden)
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and not in_attention(name):
            projects_back = module.out_features == hidden and module.in_features != hidden
            if projects_back:
                width += module.in_features
    return width or hidden


def _attended_layers(config: Config, layers: int) -> tuple[int, int, int]:
    """Return how many layers attend to everything, how many to a window, and the length of the window in tokens."""
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    default_type = SLIDING_ATTENTION if window else FULL_ATTENTION
    layer_types = config.get("layer_types") or [default_type] * layers
    sliding = sum(layer_type in LOCAL_ATTENTION for layer_type in layer_types)
    without_attention = sum(layer_type in WITHOUT_ATTENTION for layer_type in layer_types)
    return layers - sliding - without_attention, sliding, window
