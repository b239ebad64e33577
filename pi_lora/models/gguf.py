"""Models in GGUF files: config, dequantized weights and tokenizer, through transformers.

What transformers 5.23 drops from such a file without a word is restored here, or the file is refused: the scaling of
positions, tensors that it does not expect, and how the tokenizer splits text.
"""

import importlib.util
import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

from pi_lora.errors import ModelError
from pi_lora.scaling.config import full_attention_rope, with_full_rope

SUFFIX = ".gguf"
# By ggml's number: what is stored as plain numbers. Those of all other types are dequantized, to bfloat16: its rounding
# of 2^-9 is less than what any quantization has rounded before.
PLAIN = {0: "float32", 1: "float16"}
# Frequencies of their own (llama3, longrope), in tensors that transformers does not read.
OWN_FREQUENCIES = re.compile(r"rope_(freqs|factors_\w+)\.weight")
# By llama.cpp's names for how a byte-level tokenizer splits text (src/llama-vocab.cpp, which lists them with their
# regular expressions): as GPT-2 does, and as GPT-2 does after splitting off each digit. transformers takes every name
# that it does not know for GPT-2's.
AS_GPT2 = set(
    "gpt-2 phi-2 jina-es jina-de gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling".split()
)
DIGITS_FIRST = set("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2".split())


def is_gguf(name: str | Path) -> bool:
    """Return whether a model's name is that of a GGUF file."""
    return str(name).lower().endswith(SUFFIX)


def read_gguf(file: Path) -> PreTrainedConfig:
    """Return the config of the model in `file`, with its scaling and the dtype that its weights are to be loaded in;
    raise ModelError if it cannot be read, or describes positions or a tokenizer in a way that is not supported.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{file}: reading it needs the package gguf; pip install 'pi-lora[gguf]'")
    fields, header = _read(file)
    if own := [tensor.name for tensor in header.tensors if OWN_FREQUENCIES.fullmatch(tensor.name)]:
        raise _refused(file, f"{own[0]} scales its positions (as in Llama 3.1), and transformers does not read it")
    architecture = fields["general.architecture"]
    # llama.cpp takes a factor without a type for a linear one.
    kind = fields.get(f"{architecture}.rope.scaling.type", "linear")
    if kind not in ("linear", "none"):
        raise _refused(file, f"its positions are scaled by {kind}, which transformers does not read from such a file")
    if fields.get("tokenizer.ggml.model") == "gpt2" and not file.with_name("tokenizer.json").is_file():
        splits = fields.get("tokenizer.ggml.pre", "default")
        if splits not in AS_GPT2 | DIGITS_FIRST | GGUF_PRE_TOKENIZER_SPLITS.keys():
            how = f"its tokenizer splits text in a way ({splits}) that transformers does not know"
            raise ModelError(f"{file}: {how}; put the model's tokenizer.json and tokenizer_config.json beside it")
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.__dict__.pop("_model_name_or_path", None)  # `general.name`
    factor = fields.get(f"{architecture}.rope.scaling.factor") or fields.get(f"{architecture}.rope.scale_linear")
    if factor and kind == "linear" and factor != 1:
        plain = config.to_dict()
        rope = {**full_attention_rope(plain), "rope_type": "linear", "factor": float(factor)}
        config.rope_parameters = with_full_rope(plain, rope)["rope_parameters"]
        # llama.cpp takes `context_length` for the window after scaling.
        config.max_position_embeddings = math.floor(config.max_position_embeddings / factor)
    numbers: Counter[str] = Counter()
    for tensor in header.tensors:
        numbers[PLAIN.get(tensor.ggml_type, "bfloat16")] += math.prod(tensor.shape)
    config.dtype = numbers.most_common(1)[0][0]
    return config


def dequantize(file: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model in `file`, dequantized to the dtype of `config`; raise ModelError if weights are left out."""
    model, found = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        config=config,
        dtype=config.dtype,
        quantization_config=transformers.GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    # Layers beyond the last predict several tokens at once; the decoder has no such layers.
    layers = model.config.num_hidden_layers
    blocks = ((re.match(r"blk\.(\d+)\.", tensor.name), math.prod(tensor.shape)) for tensor in _read(file)[1].tensors)
    stored = sum(numbers for block, numbers in blocks if block is None or int(block.group(1)) < layers)
    if found["missing_keys"] or stored != model.num_parameters():
        counts = f"{stored:,} numbers, of a model of {model.num_parameters():,}"
        raise _refused(file, f"it holds {counts}: transformers does not read all of its weights")
    return model


def tokenizer_of(file: Path, config: PreTrainedConfig) -> Any:
    """Return the tokenizer in `file`, or the one in a `tokenizer.json` beside it."""
    if (own := file.with_name("tokenizer.json")).is_file():
        tokenizer = AutoTokenizer.from_pretrained(file.parent)
        if len(tokenizer) > config.vocab_size:
            theirs = f"has {len(tokenizer)} tokens, the model in {file.name} {config.vocab_size}"
            raise ModelError(f"{own}: {theirs}; remove it, or put that model's own there")
        return tokenizer
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if _read(file)[0].get("tokenizer.ggml.pre") in DIGITS_FIRST:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def _read(file: Path) -> tuple[Mapping[str, Any], GgufHeader]:
    """Return the keys and values of a file, of long arrays the length (the package gguf takes seconds for those), and
    the names, shapes, types and places of its tensors, all of which lie within it.
    """
    try:
        fields, header = dict(read_gguf_metadata(str(file))[0]), GgufHeader.from_file(str(file))
        if max(header.data_start + each.offset + each.nbytes for each in header.tensors) > file.stat().st_size:
            raise ValueError("it ends within a tensor")
    except (OSError, ValueError, IndexError, struct.error) as error:
        why = f"truncated, damaged or not GGUF ({str(error).strip().rstrip('.')})"
        raise ModelError(f"{file}: {why}; download it again") from None
    return fields, header


def _refused(file: Path, why: str) -> ModelError:
    return ModelError(f"{file}: {why}; name the folder or hub id of the model that it was made from")
