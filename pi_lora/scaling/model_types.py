"""Facts about models that no config states: a row for each `model_type` with a special rule, for each entry that speaks
of positions beside the rope, and for each kind of models that was trained on shorter sequences than it declares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class ModelType:
    """The special rules of a type of models.

    Attributes:
        only_local_rope: Sliding layers alone are rotary; layers with full attention have no positions.
        sees_later_tokens: Tokens see later ones, such as the whole input of PaliGemma: no next token is predicted.
        declares_extended_window: `max_position_embeddings` under `linear` is the extended window, also in vLLM.
        accepts_longrope_only: The config class rejects every scaling but `longrope`, a list of divisors of the
            frequencies. Equal divisors are PI. In transformers 4 it accepts no key but the two lists.
        layered_in_4: There is a rope per layer type in transformers 4, whose `rope_scaling` is for full attention.
        two_fields_in_4: transformers 4 rejects a `rope_scaling` with fields other than `type` and `factor`.
        constant_alpha: A `dynamic` rope with an `alpha` is one of the base `theta x alpha^(d/(d-2))` in inputs of every
            length; `d` is the number of dimensions of a head.
        names_in_4: Other names of theta and of the rotary share of a head in transformers 4.
    """

    only_local_rope: bool = False
    sees_later_tokens: bool = False
    declares_extended_window: bool = False
    accepts_longrope_only: bool = False
    layered_in_4: bool = False
    two_fields_in_4: bool = False
    constant_alpha: bool = False
    names_in_4: Mapping[str, str] = field(default_factory=dict)


_LOCAL_ROPE = ModelType(only_local_rope=True)
_GEMMA = ModelType(declares_extended_window=True, layered_in_4=True)
_HUNYUAN = ModelType(constant_alpha=True)
_GPT_NEOX = ModelType(names_in_4={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"})

MODEL_TYPES: Mapping[str, ModelType] = {
    "afmoe": _LOCAL_ROPE,
    "cohere2": _LOCAL_ROPE,
    "cohere2_moe": _LOCAL_ROPE,
    "diffusion_gemma": ModelType(sees_later_tokens=True),
    "exaone4": _LOCAL_ROPE,
    "exaone_moe": _LOCAL_ROPE,
    "flint": _LOCAL_ROPE,
    "gemma3_text": _GEMMA,
    "gemma3n_text": _GEMMA,
    "gpt_neox": _GPT_NEOX,
    "gpt_neox_japanese": _GPT_NEOX,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hunyuan_vl_text": _HUNYUAN,
    "kolibri1": _LOCAL_ROPE,
    "llama4_text": _LOCAL_ROPE,
    "olmo": ModelType(two_fields_in_4=True),
    "olmo2": ModelType(two_fields_in_4=True),
    "olmo3": ModelType(layered_in_4=True),
    "paligemma": ModelType(sees_later_tokens=True),
    "phi3": ModelType(accepts_longrope_only=True),
    "phi4_multimodal": ModelType(accepts_longrope_only=True),
}
_OTHER = ModelType()


def facts_of(model_type: str | None) -> ModelType:
    """Return what is special about a type of models; nothing about a type without a row."""
    return MODEL_TYPES.get(model_type or "", _OTHER)


# What an extension does with an entry of a config, beside the rope, whose numbers belong to the old window. A window
# becomes that of the extended model. What transformers does not compute is left out. Other positions are refused.
POSITION_ENTRIES: Mapping[str, Literal["scaled", "dropped", "refused"]] = {
    # vLLM takes this one if it is there (Command R), else the smallest of all.
    "model_max_length": "scaled",
    "context_length": "scaled",
    "max_seq_len": "scaled",
    "max_seq_length": "scaled",
    "max_sequence_length": "scaled",
    "max_target_positions": "scaled",
    "n_ctx": "scaled",
    "n_positions": "scaled",
    "seq_len": "scaled",
    "seq_length": "scaled",
    # Qwen2.5-1M. vLLM computes it instead of any scaling of the rope.
    "dual_chunk_attention_config": "dropped",
    # Qwen (1), whose own code changes the frequencies and the attention by the length of the input.
    "use_dynamic_ntk": "refused",
    "use_logn_attn": "refused",
}


class Training(NamedTuple):
    """The longest sequences that models were trained on, as their makers say.

    Attributes:
        tokens: The length of the sequences.
        said: Where the makers say so.
        model_type: The type of the models.
        window: The window that their configs declare, in tokens.
        theta: The base of their rotary frequencies.
    """

    tokens: int
    said: str
    model_type: str
    window: int
    theta: float


_QWEN3 = "QwenLM/Qwen3: docs/source/getting_started/concepts.md"
TRAININGS = (
    Training(32768, _QWEN3, "qwen3", 40960, 1e6),
    Training(32768, _QWEN3, "qwen3_moe", 40960, 1e6),
    Training(32768, "arXiv 2412.15115, section 3.3 (Qwen 2.5)", "qwen2", 131072, 1e6),
    Training(131072, "nvidia/Mistral-NeMo-12B-Base: README.md", "mistral", 1024000, 1e6),
    # DeepSeek-Coder-V2 has the same config and was trained on 131,072 tokens (arXiv 2406.11931, section 3.4).
    Training(32768, "arXiv 2405.04434, section 3.1.4 (DeepSeek-V2)", "deepseek_v2", 163840, 1e4),
    Training(131072, "deepseek-ai/DeepSeek-V3: README.md", "deepseek_v3", 163840, 1e4),
)
