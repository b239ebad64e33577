"""Where the config of a model comes from when nothing heavy may be imported.

The shapes of the models that the recipes name are shipped in `configs/`, so that planning them works at once and
offline; of any other hub model `config.json` alone is downloaded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pi_lora.errors import ModelError
from pi_lora.scaling.config import Config

CONFIGS = Path(__file__).parent / "configs"
_BUILTIN = "builtin:"
_BUILTIN_FOLDER = Path(__file__).parents[1] / "builtin"


def find_config(name: str, revision: str = "main") -> dict[str, Any]:
    """The `config.json` of a model: a folder, `builtin:NAME`, a shipped shape, or else a hub id.

    Raises:
        ModelError: there is none that can be read.
    """
    if name.startswith(_BUILTIN):
        return _read(_BUILTIN_FOLDER / name.removeprefix(_BUILTIN) / "config.json", name)
    folder = Path(name).expanduser()
    if folder.is_dir() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return _read(folder / "config.json", name)
    shipped = shipped_config(name)
    # Another revision than the main one may have another shape.
    if revision == "main" and shipped.exists():
        return _read(shipped, name)
    return _read(_download(name, revision), name)


def shipped_config(name: str) -> Path:
    """Where the shape of a hub model is shipped, if it is.

    >>> shipped_config("huggyllama/llama-7b").name
    'huggyllama--llama-7b.json'
    """
    return CONFIGS / f"{name.replace('/', '--')}.json"


def _download(name: str, revision: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except (OSError, ValueError) as error:  # the hub client's errors are of these kinds
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelError(
            f"{name}: its config.json cannot be had ({reason}); give a model folder, or plan while online"
        ) from None


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{name}: no such folder with a config.json; give a model folder, a hub id or builtin:tiny"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); give a JSON file") from None
    return config


@dataclass(frozen=True)
class Linear:
    """A linear layer: `outputs x inputs` weights, and `outputs` biases if it has any."""

    inputs: int
    outputs: int
    bias: bool
    in_attention: bool

    @property
    def weights(self) -> int:
        """Without the biases: what is quantized, and what a token is multiplied with."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Shape:
    """A decoder: `layers` times attention and MLP, between an embedding and a head that may share their weights.

    Widths are numbers per token; `sliding_layers` of the layers look back over `sliding_window` tokens only.
    """

    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    heads: int
    vocabulary: int
    tied: bool
    linears: tuple[Linear, ...]
    norms: int
    layer_norm_weights: int
    final_norm_weights: int
    head_normed: bool
    sliding_layers: int
    sliding_window: int

    @property
    def embedding(self) -> int:
        """Numbers in the embedding matrix; the head has as many, or the same ones if `tied`."""
        return self.vocabulary * self.hidden

    @property
    def linear_weights(self) -> int:
        """Of one layer."""
        return sum(linear.weights for linear in self.linears)

    @property
    def layer(self) -> int:
        """All parameters of one layer."""
        biases = sum(linear.outputs for linear in self.linears if linear.bias)
        return self.linear_weights + biases + self.layer_norm_weights

    @property
    def all_norm_weights(self) -> int:
        """Of every norm in the model."""
        return self.layers * self.layer_norm_weights + self.final_norm_weights

    @property
    def parameters(self) -> int:
        """Of the whole model; shared ones count once."""
        return self.layers * self.layer + self.final_norm_weights + self.embedding * (1 if self.tied else 2)


@dataclass(frozen=True)
class _Family:
    """What the code of an architecture fixes and its config leaves out (transformers 5.23).

    A bias is there or not, or as the config says under a key.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    gated: bool = True
    fused_qkv: bool = False
    fused_gate: bool = False
    norms: int = 2
    norm_bias: bool = False
    head_norm: Literal["each", "all"] | None = None
    sliding: Literal["all", "every second", "five of six"] | None = None


_FAMILIES = {
    "llama": _Family(mlp_bias="mlp_bias"),
    "granite": _Family(mlp_bias="mlp_bias"),
    "mistral": _Family(qkv_bias=False, output_bias=False, defaults={"num_key_value_heads": 8}, sliding="all"),
    "qwen2": _Family(qkv_bias=True, output_bias=False),
    "qwen3": _Family(head_norm="each", defaults={"head_dim": 128}),
    "smollm3": _Family(mlp_bias="mlp_bias", defaults={"tie_word_embeddings": True}),
    "gemma": _Family(defaults={"tie_word_embeddings": True, "head_dim": 256}),
    "gemma2": _Family(
        norms=4,
        sliding="every second",
        defaults={"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    ),
    "gemma3_text": _Family(
        norms=4,
        head_norm="each",
        sliding="five of six",
        defaults={"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    ),
    "phi3": _Family(qkv_bias=False, output_bias=False, fused_qkv=True, fused_gate=True, sliding="all"),
    "olmo2": _Family(head_norm="all"),
    "cohere": _Family(norms=1, defaults={"tie_word_embeddings": True}),
    "stablelm": _Family(qkv_bias="use_qkv_bias", output_bias=False, norm_bias=True),
    "gpt_neox": _Family(mlp_bias=True, gated=False, fused_qkv=True, norm_bias=True, defaults={"attention_bias": True}),
}


def shape_of(config: Config, name: str) -> Shape:
    """The shape of the model `name` that `config` describes, as it stands in a `config.json`.

    Raises:
        ModelError: an architecture whose shape is not known here, or a config that lacks a number.
    """
    kind = config.get("model_type", "unknown")
    if kind not in _FAMILIES or config.get("qk_layernorm") or config.get("use_qk_norm"):
        raise ModelError(f"{name}: no plan for models of type {kind}; known are {', '.join(sorted(_FAMILIES))}")
    family = _FAMILIES[kind]
    config = {**family.defaults, **config}
    try:
        return _build(config, family)
    except KeyError as missing:
        raise ModelError(f"{name}: its config.json lacks {missing.args[0]}; without it there is no plan") from None


def _build(config: Config, family: _Family) -> Shape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    norms = 1 if config.get("use_parallel_residual") and not family.fused_qkv else family.norms
    norm_width = hidden * (2 if family.norm_bias else 1)
    head_norms = {None: 0, "each": 2 * head_dim, "all": queries + keys}[family.head_norm]
    sliding_layers = _sliding_layers(config, family)
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        intermediate=config["intermediate_size"],
        queries=queries,
        keys=keys,
        heads=heads,
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        linears=(*_attention(config, family, queries, keys), *_mlp(config, family)),
        norms=norms,
        layer_norm_weights=norms * norm_width + head_norms,
        final_norm_weights=norm_width,
        head_normed=family.head_norm is not None,
        sliding_layers=sliding_layers,
        sliding_window=config["sliding_window"] if sliding_layers else 0,
    )


def _attention(config: Config, family: _Family, queries: int, keys: int) -> list[Linear]:
    hidden, bias = config["hidden_size"], _switch(config, family.qkv_bias)
    outputs = [queries + 2 * keys] if family.fused_qkv else [queries, keys, keys]
    output = Linear(queries, hidden, _switch(config, family.output_bias), True)
    return [*(Linear(hidden, width, bias, True) for width in outputs), output]


def _mlp(config: Config, family: _Family) -> list[Linear]:
    hidden, width, bias = config["hidden_size"], config["intermediate_size"], _switch(config, family.mlp_bias)
    widths = [2 * width] if family.fused_gate else [width] * (2 if family.gated else 1)
    return [*(Linear(hidden, each, bias, False) for each in widths), Linear(width, hidden, bias, False)]


def _switch(config: Config, key: str | bool) -> bool:
    return key if isinstance(key, bool) else bool(config.get(key, False))


def _sliding_layers(config: Config, family: _Family) -> int:
    layers: int = config["num_hidden_layers"]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if config.get("layer_types"):
        return list(config["layer_types"]).count("sliding_attention")
    shares = {None: 0, "all": layers, "every second": (layers + 1) // 2, "five of six": layers - layers // 6}
    return shares[family.sliding]
