"""Every causal LM of transformers, built small and asked whether Position Interpolation does what it says.

`python tests/architectures.py` writes docs/models.md; with --published only what `tests/models/published.yaml` says.
"""

import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from pi_lora.errors import ScalingError
from pi_lora.evaluation.probe import FOR_COMPARISON
from pi_lora.models.attention import use_blockwise
from pi_lora.models.composite import other_parts
from pi_lora.models.loaded import load_model
from pi_lora.models.resolve import resolve_model
from pi_lora.models.source import ModelSource
from pi_lora.scaling.config import FULL_ATTENTION, LOCAL_ATTENTION, full_attention_rope, local_window, read_rope
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.model_types import facts_of
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.scalings import Method
from pi_lora.scaling.verify import config_of

PUBLISHED = Path(__file__).parent / "models" / "published.yaml"
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
IMAGE_AND_TEXT = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
MODEL_TYPES = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in IMAGE_AND_TEXT)
WINDOW, SCALE, TOKENS = 64, 4, 48
# Named by what pi-lora promises; the rest follows from what transformers has.
PROMISED = "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 olmo2 granite gpt_neox stablelm cohere smollm3".split()
NOT_SMALL = {
    "gemma4_assistant": "its default config is not valid",
    "phi4_multimodal": "its parts for images and sound cannot be made small",
    "qwen4_exp_text": "its default config leaves out sizes that it needs",
}

# Composites whose parts have sizes of their own, which a small config does not reach, or that need the package timm.
COMPOSITES_NOT_SMALL = """chameleon cosmos3_edge deepseek_ocr2 dots3_note emu3 evolla fast_vlm florence2 fun_asr_nano
gemma3n git glm5_next granite4_vision idefics inkling2 janus kosmos-2 kosmos-2.5 kyutai_speech_to_text mistral_large4
molmo2 muse_spark nemo_speechlm nemotron_h_omni perception_lm phi4_multimodal pi0 qwen2_5_omni
qwen3_omni_moe qwen4_exp unlimited_ocr vibevoice_asr""".split()
# Models for images or sound that are no decoders of text alone.
NO_LANGUAGE_MODEL = {
    "diffusion_gemma",
    "paligemma",
    "shieldgemma2",
    "t5gemma2",
    "udop",
    "vision-encoder-decoder",
    "voxtral_realtime",
}
# A language model without towers, which transformers lists among the composites; `mistral3` is tried around it.
ALONE = {"mistral4"}
COMPOSITE_TYPES = [
    name for name in IMAGE_AND_TEXT if name not in NO_LANGUAGE_MODEL | ALONE and name not in COMPOSITES_NOT_SMALL
]
# Composites as they are published, around another language model than that of the default config.
COMPOSITE_TYPES += [
    "mistral3 around ministral3",
    "mistral3 around mistral4",
    "internvl around qwen3",
    "internvl around qwen3_moe",
]
PROMISED_COMPOSITES = "gemma3 gemma4 glm4v internvl llava mistral3 qwen2_5_vl qwen3_5 qwen3_vl qwen3_vl_moe".split()

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
VISION_SIZES = SIZES | {
    name: size
    for names, size in {
        "hidden_size out_hidden_size embed_dim intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
        "num_heads encoder_attention_heads": 4,
        "depth num_hidden_layers encoder_layers": 1,
        "d_model encoder_ffn_dim output_dim hidden_dim": 64,
    }.items()
    for name in names.split()
}
# Sizes beside the parts of composites, whose defaults take seconds to fill with random numbers.
COMPOSITE_SIZES = {
    "muse_glimmer": {"out_hidden_size": 64, "projector_hidden_size": 64},
    "ovis2": {"hidden_size": 64, "vocab_size": 64},
}
# The text parts of vision-language models whose types are not causal LMs. Left out: `glm5_next_text` (no rope),
# `cosmos3_edge_text`, `mistral_large4_text` and `hunyuan_vl_text`, whose small configs are not valid.
TEXT_PARTS = """glm4v_moe_text glm4v_text glm_image_text glm_ocr_text granite_docling_text molmo2_text muse_glimmer_text
muse_spark_text qwen2_5_vl_text qwen2_vl_text qwen3_vl_moe_text qwen3_vl_text""".split()
# Those that no automatic class builds alone.
TEXT_PARTS_OF_COMPOSITES = "paddleocr_vl_text qwen2_5_omni_text qwen3_omni_moe_text".split()
# What the default config leaves to chance: models without an attention layer, or without positions.
SWITCHES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "zamba2": {"use_mem_rope": True},
}
# The last half of the layers has the keys of the first, as in the small models of Gemma 3n and 4.
SHARED_KEYS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
CHOICES: dict[str, dict[str, Any]] = {
    "gemma4_text": SHARED_KEYS,
    "gemma4_unified_text": SHARED_KEYS,
    "gemma3n_text": {**SHARED_KEYS, "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "bamba": {"attn_layer_indices": [0]},
    "granitemoehybrid": {**SWITCHES["granitemoehybrid"], "layer_types": ["mamba", "attention"]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
        }
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 3, 2]},
    },
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2, 2]}
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": {"head_dim": 16},
    "step3p5": {"sliding_window": 16},
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
    if model_type in TEXT_PARTS + TEXT_PARTS_OF_COMPOSITES:
        fit_sections(config)
    return config


def small_composite(model_type: str, text: Callable[[str], PreTrainedConfig] = small_config) -> PreTrainedConfig:
    """The config of a composite with a small language model and small towers."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    parts: dict[str, Any] = {"text_config": text(default.get_text_config().model_type).to_dict()}
    for name in default.sub_configs:
        part = getattr(default, name)
        if name != "text_config" and part is not None:
            known = part.to_dict()
            parts[name] = {"model_type": known["model_type"]}
            parts[name] |= {
                size: VISION_SIZES[size] for size in VISION_SIZES.keys() & known if type(known[size]) is int
            }
    config: PreTrainedConfig = kind(**parts, **COMPOSITE_SIZES.get(model_type, {}))
    return config


def fit_sections(config: Any) -> None:
    """Let the sections of a rope for time, height and width fill the small heads."""
    width = config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    half = int(width * rope.get("partial_rotary_factor", 1)) // 2
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def resolved(config: PreTrainedConfig) -> ModelSource:
    """What pi-lora makes of a folder that holds this `config.json`.

    Raises:
        ScalingError: it refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return resolve_model(folder)


@cache
def base_of(model_type: str) -> ModelSource:
    """An architecture, small if its default config is valid and has a rope."""
    return resolved(small_config(model_type) if has_rope(model_type) else CONFIG_MAPPING[model_type]())


def times_scale(base: ModelSource, method: Method = "pi") -> dict[str, Any]:
    """The config of a base for `SCALE` times its window.

    Raises:
        ScalingError: pi-lora refuses.
    """
    return dict(base.extended(Extension(SCALE * base.window, scaling=method)).config)


def stretched(config: PreTrainedConfig) -> tuple[ModelSource, dict[str, Any]]:
    """The base of a config, and its config for `SCALE` times its window."""
    base = resolved(config)
    return base, times_scale(base)


def small_model(kind: Any, config: Mapping[str, Any]) -> PreTrainedModel:
    """A random model whose logits depend on every layer: with the usual spread of 0.02, attention is nearly uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(kind, config)).eval()
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


def verify(base: ModelSource, extended: Mapping[str, Any]) -> None:
    """Position `m` of the extended model has the angles that `m / SCALE` has in the plain one, and gives its logits."""
    kind = base.base.config_class
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
    methods: tuple[Method, ...] | None = None if has_rope(model_type) else ("pi",)
    return examined(model_type, lambda: base_of(model_type), rope_layout, methods)


@cache
def examine_composite(name: str) -> Verdict:
    """The same for the language model of a composite, which is also compared with the whole."""
    model_type, _, language_type = name.partition(" around ")
    config = small_composite(model_type, lambda default: small_config(language_type or default))
    verdict = examined(name, lambda: resolved(config), lambda _: f"`{config.get_text_config().model_type}`")
    if verdict.outcome == "verified":
        assert_is_the_language_model(config)
    return verdict


def assert_is_the_language_model(config: PreTrainedConfig) -> None:
    """A composite and the model that pi-lora loads from the same files give the same logits for text."""
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in mapping:
        mapping = MODEL_FOR_MULTIMODAL_LM_MAPPING
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        whole = mapping[type(config)](config).eval()
        whole.save_pretrained(folder)
        language = load_model(resolve_model(folder)).module
        ids = torch.randint(2, 60, (1, TOKENS))
        assert (len(language.state_dict()) < len(whole.state_dict())) == bool(other_parts(language))
        logits = whole(input_ids=ids).logits
        assert same([logits], [language(input_ids=ids).logits])
        kept = torch.tensor([3, 5])
        of_kept = [language(input_ids=ids, logits_to_keep=keep).logits for keep in (2, kept)]
        assert same([logits[:, -2:], logits[:, kept]], of_kept)


def first_extension(base: ModelSource, suitable: tuple[Method, ...]) -> tuple[Method, dict[str, Any]]:
    """The first scaling that a model can be built with, and the extended config."""
    extending: list[Method] = [method for method in suitable if method not in FOR_COMPARISON] or ["pi"]
    for method in extending:
        try:
            return method, times_scale(base, method)
        except ScalingError as refusal:
            if "cannot be built with this scaling" not in str(refusal) or method == extending[-1]:
                raise
    raise AssertionError("the last scaling is refused or not")


def examined(
    model_type: str,
    find: Callable[[], ModelSource],
    note: Callable[[str], str],
    methods: tuple[Method, ...] | None = None,
) -> Verdict:
    """What pi-lora makes of a base, with the `note` of what is verified."""
    try:
        base = find()
        suitable = methods or Rope(base.config).scalings
        method, extended = first_extension(base, suitable)
    except ScalingError as refusal:
        return Verdict(model_type, "refused", re.sub(r"^model of type \S+: ", "", str(refusal)))
    rope = full_attention_rope(extended)
    # Not a longrope from a search: it divides each frequency by another number.
    if method == "pi" and (rope["rope_type"] != "longrope" or Rope(rope).constant_divisor is not None):
        verify(base, extended)
    rejects_first = method != suitable[0]
    return Verdict(model_type, "verified", note(model_type) + f", under `{method}`" * rejects_first)


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
        words += ["`max_position_embeddings` is L'"] * facts_of(model_type).declares_extended_window
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
        words.append(f"`{kind}` by default: {' or '.join(f'`{method}`' for method in Rope(default).scalings)}")
    return ", ".join(words)


def positions_matter_to_full_layers(model_type: str) -> bool:
    """Whether the full-attention layers of an architecture that has sliding ones too, taken alone, have positions."""
    config = small_config(model_type, keep=lambda kind: kind not in LOCAL_ATTENTION)
    model = small_model(type(config), config.to_dict())
    positions = torch.arange(TOKENS)[None]
    return not torch.equal(run(model, positions)[0], run(model, positions / SCALE)[0])


def page(verdict_on: Callable[[str], Verdict], verdict_on_composite: Callable[[str], Verdict]) -> str:
    """docs/models.md: what users choose a model by."""
    verdicts = [verdict_on(model_type) for model_type in MODEL_TYPES]
    layouts, reasons = (rows_by_note(verdicts, outcome) for outcome in ("verified", "refused"))
    left = [f"- `{each.model_type}`: {each.note}." for each in verdicts if each.outcome == "not tried"]
    composites = [verdict_on_composite(model_type) for model_type in COMPOSITE_TYPES]
    taken, refused = (rows_by_note(composites, outcome) for outcome in ("verified", "refused"))
    return TEXT.format(
        version=transformers.__version__,
        published=published_rows(),
        count=sum(each.outcome == "verified" for each in verdicts),
        verified=layouts,
        refused=reasons,
        not_tried="\n".join(left),
        composite_count=sum(each.outcome == "verified" for each in composites),
        composites=taken,
        composites_refused=refused,
        composites_not_small=", ".join(f"`{name}`" for name in COMPOSITES_NOT_SMALL),
    )


# What a refusal of a published model leads to.
WAYS = {
    "keep": "none; `scaling: keep` within its window",
    "other checkpoint": "none; take another checkpoint",
    "its own code": "not tried; needs `--trust-remote-code`",
}


def published_rows() -> str:
    """The rows of the table of published models; models that agree in all of it share a row."""
    models = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))["models"]
    rows: dict[str, list[str]] = defaultdict(list)
    for model in models:
        rows[" | ".join(published_cells(model))].append(f"`{model['model']}`")
    return "\n".join(f"| {', '.join(names)} | {cells} |" for cells, names in rows.items())


def published_cells(model: Mapping[str, Any]) -> Iterator[str]:
    """Declared window, trained window, scaling in the config, scalings that extend it, the makers' extension."""
    entries = model["entries"]
    text = entries.get("text_config", entries)
    window = model.get("window", text["max_position_embeddings"])
    yield f"{window:,}"
    trained = model["trained"]["tokens"] if "trained" in model else window
    yield f"{trained:,}" if trained < window else ""
    yield scaling_in_words(text.get("rope_scaling") or text.get("rope_parameters") or {})
    if "extends" in model:
        methods = ", ".join(f"`{method}`" for method in model["extends"])
        yield "all" if len(model["extends"]) == 4 else methods
    else:
        yield WAYS[model["refused"]["way"]]
    makers = model.get("recommended")
    if makers is None:
        yield ""
    elif "factor" in makers:
        yield f"{makers['window']:,} by `{makers['scaling']}` of {makers['factor']:g}"
    elif makers["scaling"] == "none":
        yield f"{makers['window']:,} without a scaling"
    else:
        yield f"{makers['window']:,} by `{makers['scaling']}`"


def scaling_in_words(rope: Mapping[str, Any]) -> str:
    """The scaling of a published rope, with its factor or `alpha`; nothing of a plain one."""
    rope = rope.get(FULL_ATTENTION, rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "mrope"):
        return ""
    if "alpha" in rope:
        return f"`{kind}`, alpha {rope['alpha']:,g}"
    return f"`{kind}` of {rope['factor']:g}" if "factor" in rope else f"`{kind}`"


def rows_by_note(verdicts: list[Verdict], outcome: str) -> str:
    """The rows of a table: a note, and the architectures of that outcome that have it. NAME stands for their own."""
    names: dict[str, list[str]] = defaultdict(list)
    for each in verdicts:
        if each.outcome == outcome:
            names[each.note.replace(f"`{each.model_type}_text`", "`NAME_text`")].append(f"`{each.model_type}`")
    return "\n".join(f"| {note} | {', '.join(those)} |" for note, those in names.items())


def verdicts_on_page() -> tuple[dict[str, Verdict], dict[str, Verdict]]:
    """The verdicts that docs/models.md gives, on architectures and on composites."""
    _, verified, others = re.split(r"\n## .* verified\n", PAGE.read_text(encoding="utf-8"))
    verified, refused = verified.split("\n## Refused, and why\n")
    others, not_tried = others.split("\n## Not tried\n")
    composites, composites_refused = others.split("\nRefused:\n")
    found = {name: Verdict(name, "not tried", note) for name, note in re.findall(r"(?m)^- `(.+?)`: (.+)\.$", not_tried)}
    return (
        found | verdicts_in(verified, "verified") | verdicts_in(refused, "refused"),
        verdicts_in(composites, "verified") | verdicts_in(composites_refused, "refused"),
    )


def verdicts_in(table: str, outcome: str) -> dict[str, Verdict]:
    """The inverse of `rows_by_note`."""
    rows = re.findall(r"(?m)^\| (.+) \| (`[^|]+`) \|$", table)
    return {
        name: Verdict(name, outcome, note.replace("NAME", name))
        for note, names in rows
        for name in re.findall(r"`(.+?)`", names)
    }


TEXT = """\
# Which models can be extended

Look up the family of your model, its name, or the `model_type` in its `config.json`. `pi-lora train RECIPE --dry-run` checks one model before its weights
are read. [Families](choosing.md#families) has plans for six popular models.

| family | rope in the config | window in the config | scalings | engines |
|---|---|---|---|---|
| Llama 2, Llama 3; Mistral 0.2 and later; Qwen 2.5, Qwen 3; SmolLM2; OLMo 2; Granite; GLM 4; Yi | plain | `max_position_embeddings` | all | transformers, vLLM, llama.cpp and mlx-lm; lists of divisors in llama.cpp [for some](engines.md#lists-of-divisors) |
| Llama 3.1, 3.2, 3.3 | `llama3` | `max_position_embeddings` | `llama3`, `theta` | transformers, vLLM, llama.cpp (stores factors), mlx-lm |
| Qwen 2.5, Qwen 3 with the `yarn` of their card; DeepSeek V2, V3 (MLA) | `yarn` | original window times factor | `yarn` | transformers, vLLM, SGLang |
| gpt-oss, Ministral 3 | `yarn` | original window times factor | `yarn` | transformers 5, vLLM |
| Olmo 3 | `yarn` on full-attention layers | original window times factor | `yarn`, on those layers | transformers, vLLM |
| Phi-3, Phi-4 | plain, or `longrope` | `max_position_embeddings` | plain: `pi`, `theta`, lists of divisors; `longrope`: `pi` | transformers, vLLM |
| Gemma 2 | plain | `max_position_embeddings` | all | transformers, vLLM; not llama.cpp |
| Gemma 3 | `linear` on global layers | `max_position_embeddings` | `pi`, `theta`, on those layers | transformers, vLLM |
| Gemma 4 (text) | `proportional` on global layers | `max_position_embeddings` times factor | `pi`, `theta`, on those layers | transformers 5 |
| Gemma 3 from 4B, Gemma 4 with a vision tower | in `text_config`, as above | as above | as above | transformers, vLLM (checked with Gemma 3) |
| Mistral Small 3.x, InternVL 3, LLaVA | in `text_config`, plain | `max_position_embeddings` | all | transformers, vLLM (checked with Mistral 3) |
| Ministral 3 with a vision tower | in `text_config`, `yarn` | original window times factor | `yarn` | transformers 5 |
| Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4.xV | in `text_config`, plain with `mrope_section` | `max_position_embeddings` | all | transformers, vLLM (`yarn`, `theta`) |
| SmolLM3 | plain; every fourth layer has no rope | `max_position_embeddings` | all | transformers, vLLM |
| Llama 4, Cohere 2 and Aya Vision, EXAONE 4 | only local layers are rotary | | none | |

*All* are `pi`, `yarn`, `theta`, `llama3` and the list of divisors `factors`; `dynamic` and `direct` are for comparison. If the base is already extended, the
extension multiplies its factor. *Engines* names programs that can read such a config; [serving](engines.md) has the checks of running servers.
`tests/scaling/test_config_families.py` compares the frequencies of every family with the papers' formulas, and the window with vLLM's rule.

`python tests/architectures.py` writes the rest of this page from transformers {version}. It builds every causal language model **small and with random
weights**, and extends it by the first suitable scaling. Under `pi` it compares the extended model with the plain model at positions `m / s`: rotary
angles, and logits to float32 precision. `pi-lora eval` measures how well a real model uses the new window.

## Published models

The numbers of published `config.json` files, each read and extended on a small body. *Trained* is the longest sequence of the training, where the makers say
that it is shorter than the window. It is L by default: `pi-lora new`, `plan`, `probe` and `extend` use it and name it; `context.original` and `--original`
change it. *By its makers* is how far the makers extend the model. `python tests/architectures.py --published` writes the table from
`tests/models/published.yaml`, which names the sources.

| models | window | trained | scaling in the config | extended by | by its makers |
|---|---|---|---|---|---|
{published}

- The factor of a base that is scaled already grows from its declared window (DeepSeek-V2-Lite: 163,840), also where it was trained on less.
- A `dynamic` base is extended from the window in which its frequencies are constant (InternLM3: 32,768 of 196,608). Hunyuan's `alpha` is a
  constant theta.
- Qwen2.5-1M computes `dual_chunk_attention_config` in vLLM alone. L is its 262,144; an extension leaves the entry out, and says so.
- Command R declares its window as `model_max_length`. An extension writes it there too, as all names under which engines read a window.

## {count} architectures verified

| rope | `model_type` |
|---|---|
{verified}

- *`max_position_embeddings` is L'*: for all other models it is L under `pi`, and engines multiply it by the factor. Some published models
  declare L' nevertheless (DeepSeek-Coder). The tokenizer's `model_max_length`, L', reveals them.
- *One rope for sliding and full layers*: transformers has one setting for both, so both are extended.
- *Every layer slides*: targets beyond `sliding_window` are refused (Mistral-7B-v0.1: 4096, Phi-3-mini: 2047), because a scaling does not widen
  a sliding window. Configs with `"sliding_window": null` (Mistral-7B-v0.2 and later, Phi-4) have no such limit.
- `phi3` accepts only the `rope_type` `longrope`. `pi` of a plain rope becomes a longrope that divides all frequencies by the same number. `pi` of
  a longrope with searched factors multiplies the long factors; short inputs keep theirs. The attention factor grows with the window, also for short
  inputs, as the authors of Phi define it.
- `su`, the name of `longrope` in the first configs of Phi-3, is refused: transformers 5 does not read it; write `longrope`. No `longrope` of a `phimoe`
  (Phi-3.5-MoE) is extended: transformers 5.23 computes the short factors in inputs of every length.
- LoRA of `all-linear` is refused for `axk2`, `laguna` and `hrm_text`, because PEFT would not load it again or the files join the weights. Full tuning
  works for the first two.
- transformers 4.57 reads the same files with these exceptions. It ignores all scalings of `nemotron`; only Gemma 3 and OLMo 3 have ropes per layer type;
  it rejects `yarn` and `llama3` for `olmo` and `olmo2`, and `dynamic` for `hunyuan_v1_*`; `qwen3_moe` and `granitemoehybrid` saved by transformers 5 do not load.
  In one comparison by hand, the logits of `gemma2` and `vaultgemma` differ from transformers 5, those of `doge` and `modernbert-decoder` even unscaled.

## Refused, and why

| reason | `model_type` |
|---|---|
{refused}

Refused for every architecture:

- a scaling that does not suit the rope of the model; the message names suitable ones;
- a model that transformers builds without rotary embeddings, or without the scaling of its config. The frequencies of the built model are
  compared, so a model's own code is checked too;
- a model that does not predict the next token of a text: encoders, and PaliGemma and DiffusionGemma, whose tokens see later ones.

## Composites: {composite_count} language models verified

Composites are language models with towers for images or sound. pi-lora reads only the language model, and writes the towers unchanged. Every
composite below was built small and with random weights: pi-lora reads text as the whole model does, and the language model passes the check above.
MRoPE gives text three equal positions, so a scaling has the same meaning for text as in a plain model. `NAME_text` is the composite's own name with `_text`.

transformers 4.57.6 gave the logits of 5.23 for extended Gemma 3, Mistral 3 and Qwen3-VL (small, random weights); it has no Qwen3.5.
[vLLM computes](engines.md#composites) some. What tuning on text does to answers about images was not measured: test the model on images before and after.

| language model | composite |
|---|---|
{composites}

Refused:

| reason | composite |
|---|---|
{composites_refused}

## Not tried

{not_tried}
- Composites that cannot be made small: {composites_not_small}.
"""


if __name__ == "__main__":
    if "--published" in sys.argv:
        architectures, composites = verdicts_on_page()
        text = page(architectures.__getitem__, composites.__getitem__)
    else:
        text = page(examine, examine_composite)
    PAGE.write_text(text, encoding="utf-8")
