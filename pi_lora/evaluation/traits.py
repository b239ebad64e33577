"""Traits of a model that make an extension harder, as public studies found them."""

from pi_lora.models.source import ModelSource
from pi_lora.scaling.config import SLIDING_ATTENTION

# The names of the modules that normalize queries, in models that normalize queries and keys.
QUERY_NORMS = (".q_norm", ".q_layernorm", ".query_layernorm")
# OlmPool compares models that were pre-trained on this number of tokens with models of twice as many.
SHORT_PRETRAINING = 4096


def traits_line(base: ModelSource) -> str | None:
    """Return a line that names the traits of a model that make an extension harder together; None if it has none.

    OlmPool (Bertsch et al. 2026, arXiv 2608.10296) compares 26 models of 7B parameters that differ in these traits.
    """
    config = base.config
    heads = config.get("num_attention_heads")
    key_heads = config.get("num_key_value_heads") or heads
    sliding = (config.get("layer_types") or []).count(SLIDING_ATTENTION)
    traits = []
    if any(name.endswith(QUERY_NORMS) for name, _ in base.base.meta_model.named_modules()):
        traits.append("normalized queries and keys")
    if key_heads != heads:
        traits.append(f"fewer key heads than query heads ({key_heads} and {heads})")
    if sliding:
        traits.append(f"sliding windows in {sliding} of {config['num_hidden_layers']} layers")
    if base.original <= SHORT_PRETRAINING:
        before = " before the model's own scaling" if base.original < base.window else ""
        traits.append(f"short pre-training (a window of {base.original:,} tokens{before})")
    if not traits:
        return None
    return (
        f"This model has {', '.join(traits)}. One such trait costs an extended model little, three or more up to 47 % "
        "of its scores on long contexts (OlmPool, arXiv 2608.10296)."
    )
