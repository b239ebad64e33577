"""Facts about types of models that no config states: one row for each `model_type`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelType:
    """What is special about a type of models.

    Attributes:
        only_local_rope: Sliding layers alone are rotary; layers with full attention have no positions.
        sees_later_tokens: Tokens see later ones, such as the whole input of PaliGemma: no next token is predicted.
        declares_extended_window: `max_position_embeddings` under `linear` is the extended window, also in vLLM.
        accepts_longrope_only: The config class rejects every scaling but `longrope`, a list of divisors of the
            frequencies. Equal divisors are PI. In transformers 4 it accepts no key but the two lists.
        layered_in_4: There is a rope per layer type in transformers 4, whose `rope_scaling` is for full attention.
        two_fields_in_4: transformers 4 rejects a `rope_scaling` with fields other than `type` and `factor`.
        names_in_4: Other names of theta and of the rotary share of a head in transformers 4.
    """

    only_local_rope: bool = False
    sees_later_tokens: bool = False
    declares_extended_window: bool = False
    accepts_longrope_only: bool = False
    layered_in_4: bool = False
    two_fields_in_4: bool = False
    names_in_4: Mapping[str, str] = field(default_factory=dict)


_LOCAL_ROPE = ModelType(only_local_rope=True)
_GEMMA = ModelType(declares_extended_window=True, layered_in_4=True)
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
