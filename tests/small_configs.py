"""Configs of small models, and names of their modules for adapters."""

from typing import Any

from transformers import GPTNeoXConfig, LlamaConfig, MixtralConfig

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
ALL = "all-linear"
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": False, **changes})


UNTIED = llama()
TIED = llama(tie_word_embeddings=True)
NEOX = GPTNeoXConfig(**SIZES)
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=2, num_key_value_heads=1, head_dim=16)
ATTENTION = ["q_proj", "v_proj"]
