"""GGUF files of small LLaMAs, written as llama.cpp's converter writes them."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a weight."""
    module = name.removesuffix(".weight")
    if module in WHOLE:
        return f"{WHOLE[module]}.weight"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Queries or keys as llama.cpp rotates them: neighbours in pairs, not the halves of a head."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    file: Path,
    kind: str,
    *,
    pre: str = "smollm",
    scaling: tuple[str, float] | None = None,
    window: int | None = None,
    extra: dict[str, np.ndarray] | None = None,
    without: str | None = None,
) -> Path:
    """Write the LLaMA in `folder` with its matrices stored as `kind`; `extra` tensors, and one left out, are damage."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, stored = model.config, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("small")
    writer.add_context_length(window or config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling[0])
        writer.add_rope_scaling_factor(scaling[1])
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), pre)
    for name, weight in model.named_parameters():
        if name == without:
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = interleaved(weight, heads)
        values = weight.detach().numpy()
        if values.ndim > 1:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(gguf_name(name), values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict, pre: str) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    control = {token["content"] for token in tokenizer["added_tokens"]}
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    kinds = (gguf.TokenType.CONTROL if token in control else gguf.TokenType.NORMAL for token in vocabulary)
    ids = vocabulary.values()
    writer.add_token_types([kind for _, kind in sorted(zip(ids, kinds, strict=True))])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(vocabulary["<s>"])
    writer.add_eos_token_id(vocabulary["</s>"])
    writer.add_pad_token_id(vocabulary["</s>"])
    writer.add_add_bos_token(True)
