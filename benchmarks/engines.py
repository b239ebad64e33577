"""What servers of other engines compute of every rope that pi-lora writes, by `pi-lora check-server`.

    python benchmarks/engines.py --kit FOLDER
    python benchmarks/engines.py --kit FOLDER --engine "vllm 0.32.0" --server "vllm serve {model} --port {port} ..."

Tiny random models, one for each family of ropes, are written into a folder that can be copied to an engine's machine,
each with the answers to be compared (`server_reference.json`). The command of `--server` is started for each of them,
with the folder `{model}` or its `{gguf}` (made with the converter in $LLAMA_CPP), the `{window}` and a free `{port}`.
Verdicts are kept in benchmarks/results/engines.json.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from pi_lora.api import export_gguf, extend, write_reference
from pi_lora.errors import PiLoraError
from pi_lora.model_ref import ModelRef
from pi_lora.models.files import CHAT_TEMPLATE
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.scalings import Method
from pi_lora.serving.check import Server, check_server
from pi_lora.serving.gguf import CONVERTER
from pi_lora.serving.reference import REFERENCE_FILE, Reference
from record import add_tokenizer, parser_of, write_row

ORIGINAL, TARGET = 256, 1024
SECONDS = 300
TOLERANCE = 0.02
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": ORIGINAL,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
# As published: llama.cpp knows no other pattern of Gemma 3.
LAYERS = [*["sliding_attention"] * 5, "full_attention"]
GEMMA = {
    "layer_types": LAYERS,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
    "sliding_window": 64,
    "query_pre_attn_scalar": 64,
}
GEMMA3 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
}
GEMMA4 = {
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 1,
}
VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [12, 10, 10]}}


class Family(NamedTuple):
    """A model type, and the scaling that extends it; `own` are entries of its config beside `SIZES`."""

    model_type: str
    scaling: Method
    own: Any = ()


FAMILIES = {
    "pi": Family("llama", "pi"),
    "theta": Family("llama", "theta"),
    "yarn": Family("llama", "yarn"),
    "llama3": Family("llama", "llama3"),
    "factors": Family("llama", "factors"),
    "per-layer": Family("gemma3_text", "pi", GEMMA | GEMMA3),
    "proportional": Family("gemma4_text", "pi", GEMMA | GEMMA4),
    "mrope": Family("qwen3_vl", "yarn", SECTIONS),
}
FACTORS = tuple(1 + number / 8 for number in range(32))
TEMPLATE = "{{ bos_token }}{% for turn in messages %}{{ turn.role }}: {{ turn.content }} {% endfor %}assistant:"
# The converter knows tokenizers by a list of hashes, which holds the public ones; the built-in model's splits text the
# way SmolLM's does.
CONVERT = """
import sys
sys.path.insert(0, {sources!r})
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
convert_hf_to_gguf.main()
"""


def write_model(family: Family, folder: Path) -> None:
    """Write the extended model of a family with its reference."""
    torch.manual_seed(0)
    sizes = SIZES | dict(family.own)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        if family.model_type == "qwen3_vl":
            config = AutoConfig.for_model("qwen3_vl", text_config=sizes, vision_config=VISION, tie_word_embeddings=True)
            model = AutoModelForImageTextToText.from_config(config)
        else:
            config = AutoConfig.for_model(family.model_type, **sizes)
            model = AutoModelForCausalLM.from_config(config)
        add_tokenizer(base)
        silence(model, AutoTokenizer.from_pretrained(base))
        model.float().save_pretrained(base)
        (base / CHAT_TEMPLATE).write_text(TEMPLATE)
        extension = Extension(TARGET, scaling=family.scaling)
        if family.scaling == "factors":
            extension = Extension(TARGET, scaling="factors", factors=FACTORS, attention_factor=1.1)
        extend(ModelRef(base, extension=extension), folder)
    write_reference(ModelRef(folder, dtype="float32"), folder / REFERENCE_FILE)


def silence(model: PreTrainedModel, tokenizer: Any) -> None:
    """Set the embeddings of all tokens but words to zero: with tied embeddings, answers are words, which no server
    changes.
    """
    words = [tokenizer.decode([number]).strip() for number in range(SIZES["vocab_size"])]
    is_other = torch.tensor([not (word.isascii() and word.isalnum()) for word in words])
    model.get_input_embeddings().weight.data[is_other] = 0.0
    for name, weight in model.named_parameters():
        if "post_attention_layernorm" in name and "gemma" in model.config.model_type:
            # Otherwise what attention adds is too little to show a rope.
            weight.data += 4.0


def gguf(model: Path) -> Path:
    """A model as llama.cpp's file beside it, by llama.cpp's converter."""
    file = model.with_suffix(".gguf")
    if not file.is_file():
        with tempfile.TemporaryDirectory() as converter:
            script = CONVERT.format(sources=os.environ["LLAMA_CPP"])
            Path(converter, CONVERTER).write_text(script)
            export_gguf(model, file, converter=converter, dtype="f32")
    return file


def verdicts_of(command: str, model: Path) -> dict[str, Any]:
    """The verdicts on the prompts of the server that `command` starts for a model, or why there are none."""
    port = free_port()
    reference = Reference.model_validate_json((model / REFERENCE_FILE).read_text())
    try:
        file = gguf(model) if "{gguf}" in command else None
    except PiLoraError as error:
        return {"failed": str(error).rpartition(": ")[2]}
    words = shlex.split(command.format(model=model, gguf=file, window=TARGET, port=port))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            if answers(port, process):
                server = Server(f"http://127.0.0.1:{port}")
                verdicts = check_server(server, reference, compute=None, tolerance=TOLERANCE)
                return {"verdicts": [verdict.model_dump() for verdict in verdicts]}
        except PiLoraError:  # it ended meanwhile
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        log.seek(0)
        reasons = [line.strip() for line in log if "error" in line.lower()]
    return {"failed": reasons[-1][:300] if reasons else "no answer"}


def answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    """Wait until a server has loaded its model; False if it ends before."""
    for _ in range(SECONDS):
        if process.poll() is not None:
            break
        with suppress(OSError):
            urlopen(f"http://127.0.0.1:{port}/health").close()
            return True
        time.sleep(1)
    return False


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kit", type=Path, default="models/kit", help="The folder of the models.")
    parser.add_argument("--server", help="The command that starts a server.")
    parser.add_argument("--engine", help="The name and version of the engine, for the results.")
    arguments = parser.parse_args()
    for name, family in FAMILIES.items():
        model = arguments.kit / name
        if not model.is_dir():
            write_model(family, model)
        if arguments.server:
            row = verdicts_of(arguments.server, model)
            write_row("engines", ("cases", name, arguments.engine), {"version": arguments.engine, **row})
            print(name, json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
