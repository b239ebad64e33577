"""Every causal LM of transformers, built small and asked whether Position Interpolation does what it says.

`python tests/architectures.py` writes docs/models.md.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pi_lora.errors import ScalingError
from pi_lora.models.attention import use_blockwise
from pi_lora.models.resolve import resolve_model
from pi_lora.models.source import ModelSource
from pi_lora.scaling.config import (
    FULL_ATTENTION,
    LOCAL_ATTENTION,
    WINDOW_DECLARED,
    Extension,
    Method,
    constant_longrope,
    full_attention_rope,
    local_window,
    methods_for,
    read_rope,
)

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW, SCALE, TOKENS = 64, 4, 48
# Named by what pi-lora promises; the rest follows from what transformers has.
PROMISED = "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 olmo2 granite gpt_neox stablelm cohere smollm3".split()
NOT_SMALL = {
    "gemma4_assistant": "its default config is not valid",
    "phi4_multimodal": "its parts for images and sound cannot be made small",
    "qwen4_exp_text": "its default config leaves out sizes that it needs",
}

# Sizes of a small model by the names of fields; a config class takes those that it has.
SIZES: dict[str, int] = {
    name: size
    for names, size in {
        "num_attention_heads n_heads": 4,
        """num_key_value_heads num_kv_heads linear_num_key_heads linear_num_value_heads linear_num_heads
        num_query_groups""": 2,
        """hidden_size d_model intermediate_size ffn_hidden_size ffn_dim dense_intermediate_size intermediate_size_mlp
        lru_width vocab_size vocab_size_per_layer_input""": 64,
        "attention_hidden_size mamba_d_ssm": 128,
        """head_dim v_head_dim kv_channels index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim
        attention_head_dim mamba_d_head mamba_headdim""": 16,
        """qk_rope_head_dim qk_nope_head_dim rotary_dim hidden_size_per_layer_input mamba_n_heads mamba_d_state
        n_mamba_heads""": 8,
        """moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size
        shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size kv_lora_rank
        q_lora_rank o_lora_rank block_size index_block_size chunk_size mamba_chunk_size router_hidden_size
        gated_norm_rank laurel_rank adapter_rank""": 16,
        "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
        """num_experts_per_tok num_experts_per_token moe_k moe_topk index_n_heads zero_expert_num num_codebooks
        o_groups num_layers_per_stack num_hidden_layers n_layers num_layers patch_size""": 2,
        """n_group topk_group num_expert_group first_k_dense_replace n_shared_experts num_dense_layers
        moe_layer_end_index bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id""": 1,
        "num_nextn_predict_layers num_kv_shared_layers moe_layer_start_index": 0,
        "max_position_embeddings max_seq_len model_max_length original_max_position_embeddings index_topk": WINDOW,
    }.items()
    for name in names.split()
}
# What the default config leaves to chance: models without an attention layer, or without positions.
SWITCHES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "zamba2": {"use_mem_rope": True},
}
CHOICES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [0]},
    "granitemoehybrid": {**SWITCHES["granitemoehybrid"], "layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba2": {**SWITCHES["zamba2"], "attention_head_dim": 32, "layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Verdict:
    """Whether one architecture is `verified` under a scaling, `refused` by pi-lora or `not tried`; its rope or why."""

    model_type: str
    outcome: str
    note: str


def small_config(model_type: str, keep: Callable[[str], bool] = lambda kind: True) -> PreTrainedConfig:
    """The config of an architecture with small sizes and one layer, or two, of each layer type that `keep` says."""
    kind = CONFIG_MAPPING[model_type]
    default = kind().to_dict()
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if name in default}
    if "qk_rope_head_dim" in default:  # multi-head latent attention
        sizes |= {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
    layers = default.get("layer_types") or []
    if isinstance(layers, list) and layers:
        chosen = [layers.index(each) for each in dict.fromkeys(layers) if keep(each)]
        chosen = chosen if len(chosen) > 1 else [*chosen, len(layers) - 1 - layers[::-1].index(layers[chosen[0]])]
        per_layer = [name for name, value in default.items() if isinstance(value, list) and len(value) == len(layers)]
        sizes |= {name: [default[name][layer] for layer in chosen] for name in per_layer}
        sizes["num_hidden_layers"] = len(chosen)
    config: PreTrainedConfig = kind(**{**sizes, **CHOICES.get(model_type, {})})
    return config


def stretched(config: PreTrainedConfig, method: Method = "pi") -> tuple[ModelSource, dict[str, Any]]:
    """What pi-lora makes of a folder that holds this `config.json`: the base, and its config times `SCALE`.

    Raises:
        ScalingError: it refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        base = resolve_model(folder)
        own_window = base.window
        return base, dict(base.extended(Extension(SCALE * own_window, scaling=method)).config)


def small_model(kind: type[PreTrainedConfig], config: Mapping[str, Any]) -> PreTrainedModel:
    """A random model whose logits depend on every layer: with the usual spread of 0.02, attention is nearly uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind.from_dict(deepcopy(dict(config)))).eval()
        for weights in model.parameters():
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=0.2)
    use_blockwise(model)
    found: PreTrainedModel = model
    return found


Angles = list[tuple[str | None, list[torch.Tensor]]]


@contextmanager
def recorded_angles(model: PreTrainedModel) -> Iterator[Angles]:
    """What each call of a rotary module gives (cosines and sines), with the layer type that it was called for."""
    angles: Angles = []

    def record(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        layer_type = next((each for each in (*arguments, *named.values()) if isinstance(each, str)), None)
        parts = output if isinstance(output, tuple | list) else (output,)
        angles.append((layer_type, [torch.view_as_real(part) if part.is_complex() else part for part in parts]))

    hooks = [
        module.register_forward_hook(record, with_kwargs=True)
        for module in model.modules()
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    ]
    yield angles
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def run(model: PreTrainedModel, positions: torch.Tensor) -> tuple[torch.Tensor, Angles]:
    """Logits and rotary angles of `model` at `positions`, of shape (1, tokens), for the same few tokens each time."""
    ids = torch.randint(2, 60, positions.shape, generator=torch.Generator().manual_seed(1))
    with recorded_angles(model) as angles:
        logits = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits
    return logits, angles


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Equal to within float32."""
    return all(torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(left, right, strict=True))


def verify(kind: type[PreTrainedConfig], base: ModelSource, extended: Mapping[str, Any]) -> None:
    """Position `m` of the extended model has the angles that `m / SCALE` has in the plain one, and gives its logits."""
    positions = torch.arange(TOKENS)[None]
    plain = small_model(kind, base.config)
    at_m, angles_at_m = run(plain, positions)
    by_hand, angles_by_hand = run(plain, positions / SCALE)
    logits, angles = run(small_model(kind, extended), positions)
    assert angles, "no rotary module was called"
    for (layer_type, got), (_, scaled), (_, unscaled) in zip(angles, angles_by_hand, angles_at_m, strict=True):
        if layer_type in LOCAL_ATTENTION:
            assert same(got, unscaled), f"{layer_type} was rescaled"
        else:
            assert same(got, scaled), f"{layer_type}: not the angles of m / s"
            assert not same(got, unscaled), f"{layer_type}: not rescaled"
    assert (logits - at_m).abs().max() > 0.01, "the scaling has no effect"
    if not {layer_type for layer_type, _ in angles} & LOCAL_ATTENTION:
        torch.testing.assert_close(logits, by_hand, rtol=1e-4, atol=1e-4)


@cache
def examine(model_type: str) -> Verdict:
    """Build an architecture small, stretch it by pi-lora, verify it.

    Raises:
        AssertionError: pi-lora accepts it, and the property does not hold.
    """
    if model_type in NOT_SMALL:
        return Verdict(model_type, "not tried", NOT_SMALL[model_type])
    try:
        config = small_config(model_type) if has_rope(model_type) else CONFIG_MAPPING[model_type]()
        suitable = methods_for(config.to_dict()) if has_rope(model_type) else ("pi",)
        method = suitable[0] if suitable else "pi"
        base, extended = stretched(config, method)
    except ScalingError as refusal:
        return Verdict(model_type, "refused", re.sub(r"^model of type \S+: ", "", str(refusal)))
    rope = full_attention_rope(extended)
    # Not a longrope from a search: it divides each frequency by another number.
    if method == "pi" and (rope["rope_type"] != "longrope" or constant_longrope(rope) is not None):
        verify(type(config), base, extended)
    return Verdict(model_type, "verified", rope_layout(model_type))


def has_rope(model_type: str) -> bool:
    """Whether the default config of an architecture, if it is valid, describes a rope."""
    return model_type not in NOT_SMALL and bool(CONFIG_MAPPING[model_type]().to_dict().get("rope_parameters"))


def rope_layout(model_type: str) -> str:
    """In words: one rope or several, on how much of a head, and what sees how far under the default config."""
    default = CONFIG_MAPPING[model_type]().to_dict()
    layers = set(default.get("layer_types") or [])
    words = ["one rope"]
    kind = full_attention_rope(default).get("rope_type", "default")
    if FULL_ATTENTION in read_rope(default):
        words = ["per layer type; sliding layers unchanged"]
        words += ["`max_position_embeddings` is L'"] * (model_type in WINDOW_DECLARED)
    elif layers & LOCAL_ATTENTION and layers - LOCAL_ATTENTION:
        words = ["one rope for sliding and full layers"]
    rotated = full_attention_rope(default).get("partial_rotary_factor", 1.0)
    if rotated != 1.0 or "qk_rope_head_dim" in default:
        words.append("part of each head")
    words += [f"with `{name}: {value}`" for name, value in SWITCHES.get(model_type, {}).items()]
    if layers & {"linear_attention", "conv", "mamba"} or "mamba_d_state" in default:
        words.append("beside layers without positions")
    if (reach := local_window(default)) is not None:
        words.append(f"by default every layer slides: targets up to {reach}")
    if kind != "default":
        words.append(f"`{kind}` by default: {' or '.join(f'`{method}`' for method in methods_for(default))}")
    return ", ".join(words)


def positions_matter_to_full_layers(model_type: str) -> bool:
    """Whether the full-attention layers of an architecture that has sliding ones too, taken alone, have positions."""
    config = small_config(model_type, keep=lambda kind: kind not in LOCAL_ATTENTION)
    model = small_model(type(config), config.to_dict())
    positions = torch.arange(TOKENS)[None]
    return not torch.equal(run(model, positions)[0], run(model, positions / SCALE)[0])


def page() -> str:
    """docs/models.md: what users choose a model by."""
    verdicts = [examine(model_type) for model_type in MODEL_TYPES]
    layouts, reasons = (rows_by_note(verdicts, outcome) for outcome in ("verified", "refused"))
    left = [f"- `{each.model_type}`: {each.note}." for each in verdicts if each.outcome == "not tried"]
    return TEXT.format(
        version=transformers.__version__,
        count=sum(each.outcome == "verified" for each in verdicts),
        verified=layouts,
        refused=reasons,
        not_tried="\n".join(left),
    )


def rows_by_note(verdicts: list[Verdict], outcome: str) -> str:
    """The rows of a table: a note, and the architectures of that outcome that have it."""
    names: dict[str, list[str]] = defaultdict(list)
    for each in verdicts:
        if each.outcome == outcome:
            names[each.note].append(f"`{each.model_type}`")
    return "\n".join(f"| {note} | {', '.join(those)} |" for note, those in names.items())


TEXT = """\
# Which models can be extended

Look up your model's family here, or `model_type` in its `config.json` further below. `pi-lora train RECIPE --dry-run`
says the same about one model before its weights are read.

| family | rope in its config | window that is read | scalings | engines |
|---|---|---|---|---|
| Llama 2, Llama 3; Mistral 0.2 and later; Qwen 2.5, Qwen 3; SmolLM2; OLMo 2; Granite; GLM 4; Yi | plain | `max_position_embeddings` | all | all |
| Llama 3.1, 3.2, 3.3 | `llama3` | `max_position_embeddings` | `llama3`, `theta` | all; llama.cpp stores `llama3` as factors |
| Qwen 2.5, Qwen 3 with the `yarn` of their card; DeepSeek V2, V3 (MLA) | `yarn` | original window times factor | `yarn` | transformers, vLLM, SGLang |
| gpt-oss, Ministral 3 | `yarn` | original window times factor | `yarn` | transformers 5, vLLM |
| Olmo 3 | `yarn` on full-attention layers | original window times factor | `yarn`, on those layers | transformers, vLLM |
| Phi-3, Phi-4 | plain, or `longrope` | `max_position_embeddings` | plain: `pi`, `theta`; `longrope`: `pi` | transformers, vLLM |
| Gemma 2 | plain | `max_position_embeddings` | all | all |
| Gemma 3 | `linear` on global layers | `max_position_embeddings` | `pi`, `theta`, on those layers | transformers, vLLM |
| Gemma 4 (text) | `proportional` on global layers | `max_position_embeddings` times factor | `pi`, `theta`, on those layers | transformers 5 |
| SmolLM3 | plain; no rope in every fourth layer, which stays so | `max_position_embeddings` | all | transformers, vLLM |
| Llama 4, Cohere 2, EXAONE 4 | only local layers are rotary | | none | |

*All scalings* are `pi`, `yarn`, `theta`, `llama3`, and `dynamic` and `direct` for comparison. A base that was extended
before goes on from its own frequencies: its factor is multiplied. The engines' column says which readers know such a
config; [engines](engines.md) says what they answered when they were asked. `tests/scaling/test_config_families.py` checks the frequencies of each family in
transformers against the papers' formulas, and the window against vLLM's rule.

The rest of this page is written by `python tests/architectures.py` from transformers {version}. Every causal language
model in it is built **small and with random weights**, and extended by the first scaling that suits it. Under `pi` it is
compared with the plain model at positions `m / s`: rotary angles, and logits to float32 precision. How well a model
uses its new window is what `pi-lora eval` measures.

## {count} architectures verified

| rope | `model_type` |
|---|---|
{verified}

- *Per layer type*: full-attention layers are extended; sliding-window layers are unchanged.
- *`max_position_embeddings` is L'*: elsewhere it is L under `pi`, which readers multiply by the factor. A published
  model that declares L' all the same (DeepSeek-Coder) is recognized by its tokenizer, whose `model_max_length` is L'.
- *One rope for sliding and full layers*: transformers has one setting for both, so both are extended.
- *Every layer slides*: such a model is refused for targets beyond its `sliding_window` (Mistral-7B-v0.1: 4096,
  Phi-3-mini: 2047), because a scaling does not widen a sliding window. Configs with `"sliding_window": null`
  (Mistral-7B-v0.2 and later, Phi-4) have no such limit.
- `phi3` accepts only the `rope_type` `longrope`. PI of a plain one is a longrope that divides every frequency by the
  same number; of one with factors from a search the long factors are multiplied, and short inputs keep theirs.
- transformers 4 (4.57) reads the same files with these exceptions: it ignores every scaling of `nemotron`, has ropes
  per layer type for Gemma 3 and OLMo 3 only, and rejects `yarn` and `llama3` for `olmo` and `olmo2`, `dynamic` for
  `hunyuan_v1_*`. Use transformers 5 for those. Compared once by hand, the logits of `gemma2` and `vaultgemma` differ
  between 4 and 5 by up to 1e-2, those of `doge` and `modernbert-decoder` even unscaled; the cause is not known.
  `qwen3_moe` and `granitemoehybrid` saved by 5 do not load in 4.

## Refused, and why

| reason | `model_type` |
|---|---|
{refused}

Refused for every architecture:

- a scaling that does not suit the rope of a model; the message names those that do. A `dynamic` base has none;
- a model that transformers builds without rotary embeddings, or that does not apply its config's scaling. The
  frequencies of the built model are compared, so a model's own code is checked as well.

## Not tried

{not_tried}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
