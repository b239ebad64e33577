"""Small tokenizers of the kinds that families of models have."""

import functools

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pi_lora.data.sources import STDLIB, find_table
from pi_lora.recipe.data import Source

# What cl100k, Llama 3 and Qwen split text by before BPE.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
SPECIAL = ["<unk>", "<s>", "</s>"]
CHARACTERS = 50_000


def made(kind: str) -> Tokenizer:
    """A small tokenizer of the kind of a family's: a new one, which a test may change."""
    return Tokenizer.from_str(trained(kind))


@functools.cache
def trained(kind: str) -> str:
    """A tokenizer in JSON, trained on some of the standard library, once."""
    trainer: trainers.Trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    if kind == "llama":  # SentencePiece's BPE: over the whole text, bytes for what is not known
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=SPECIAL + bytes_, show_progress=False)
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        # Trained by words, or pieces would go across spaces, as they do not in Llama's vocabulary.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    elif kind == "unigram":
        trainer = trainers.UnigramTrainer(
            vocab_size=600, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(CL100K), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    documents = find_table(Source(name=STDLIB)).documents()
    text = "".join(document.text for document, _ in zip(documents, range(12), strict=False))
    tokenizer.train_from_iterator([text[:CHARACTERS]], trainer)
    if kind == "llama":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    frame = ("<s> $A </s>", [("<s>", 1), ("</s>", 2)])
    tokenizer.post_processor = processors.TemplateProcessing(single=frame[0], special_tokens=frame[1])
    return tokenizer.to_str()
