"""What one engine makes of a merged model: called by benchmarks/engines.py, with the Python of its environment.

    python ask.py ENGINE REQUEST.json ANSWER.json

The request names the model's `folder` (or `gguf` file; `base` and `adapter` for an engine that adds them itself), an
empty folder `work`, the prompt's `ids`, and how many tokens are chosen greedily. The answer has these `tokens`, the log
probability of each token of the prompt but the first in nats (`logprobs`) where the engine gives them, and the `window`
that the engine took from the files. Everything is float32 on a processor.
"""

import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

CHUNK = 512


def transformers(ask):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(ask["folder"], dtype=torch.float32).eval()
    ids, tokens = torch.tensor([ask["ids"]]), []
    with torch.no_grad():
        answer = model.model(ids, use_cache=True)
        hidden, cache, logprobs = answer.last_hidden_state, answer.past_key_values, []
        for start in range(0, len(ask["ids"]) - 1, CHUNK):
            following = ids[0, start + 1 : start + 1 + CHUNK, None]
            logits = model.lm_head(hidden[0, start : start + len(following)])
            logprobs += logits.log_softmax(-1).gather(1, following)[:, 0].tolist()
        logits = model.lm_head(hidden[0, -1:])
        for _ in range(ask["greedy"]):
            tokens.append(int(logits.argmax()))
            logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1:]
    window = AutoTokenizer.from_pretrained(ask["folder"]).model_max_length
    return {"window": window, "tokens": tokens, "logprobs": logprobs}


def vllm(ask):
    """Ask the OpenAI server over HTTP; `vllm serve` starts the same one, but not beside the package for processors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    named = ask["folder"]
    own = ["--model", named]
    if adapter := ask.get("adapter"):
        named, own = "long", ["--model", ask["base"], "--hf-config-path", adapter, "--tokenizer", adapter]
        own += ["--enable-lora", "--max-lora-rank", "64", "--lora-modules", f"long={adapter}"]
    how = ["--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "1"]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *own, *how]
    server = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)

    def call(path, body=None):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body and json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    try:
        while True:
            try:
                models = call("/v1/models")["data"]
                break
            except OSError:
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended with status {server.returncode}") from None
                time.sleep(2)
        body = {"model": named, "prompt": ask["ids"], "max_tokens": ask["greedy"], "temperature": 0}
        answer = call("/v1/completions", {**body, "prompt_logprobs": 0, "return_token_ids": True})["choices"][0]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    own = zip(ask["ids"][1:], answer["prompt_logprobs"][1:], strict=True)
    logprobs = [each[str(token)]["logprob"] for token, each in own]
    window = next(each["max_model_len"] for each in models if each["max_model_len"])
    return {"window": window, "tokens": answer["token_ids"], "logprobs": logprobs}


def llama_cpp(ask):
    import numpy
    from llama_cpp import GGML_TYPE_F32, Llama

    keys = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}
    model = Llama(ask["gguf"], n_ctx=len(ask["ids"]) + ask["greedy"], logits_all=True, verbose=False, **keys)
    model.eval(ask["ids"])
    logprobs, tokens = [], []
    for row, token in zip(model.scores, ask["ids"][1:], strict=False):
        logprobs.append(float(row[token] - numpy.logaddexp.reduce(row)))
    for _ in range(ask["greedy"]):
        tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
        if len(tokens) < ask["greedy"]:
            model.eval(tokens[-1:])
    return {"window": int(model.metadata["llama.context_length"]), "tokens": tokens, "logprobs": logprobs}


def mlx(ask):
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    mx.set_default_device(mx.cpu)
    model, _ = load(ask["folder"])
    cache, logprobs, tokens, ids = make_prompt_cache(model), [], [], ask["ids"]
    for start in range(0, len(ids), CHUNK):
        logits = model(mx.array([ids[start : start + CHUNK]]), cache=cache)[0]
        following = mx.array(ids[start + 1 : start + 1 + CHUNK])
        own = mx.take_along_axis(logits[: len(following)], following[:, None], axis=1)[:, 0]
        logprobs += (own - mx.logsumexp(logits[: len(following)], axis=1)).tolist()
    for _ in range(ask["greedy"]):
        tokens.append(int(mx.argmax(logits[-1])))
        logits = model(mx.array([tokens[-1:]]), cache=cache)[0]
    return {"window": None, "tokens": tokens, "logprobs": logprobs}


def ctranslate2(ask):
    from ctranslate2 import Generator
    from ctranslate2.converters import TransformersConverter

    folder = TransformersConverter(ask["folder"]).convert(str(Path(ask["work"]) / "model"), force=True)
    words = json.loads((Path(folder) / "vocabulary.json").read_text())
    model = Generator(folder, compute_type="float32", intra_threads=os.cpu_count())
    prompt = [words[token] for token in ask["ids"]]
    logprobs = model.score_batch([prompt], max_input_length=0)[0].log_probs  # 0: by default it cuts after 1,024
    how = {"max_length": ask["greedy"], "sampling_topk": 1, "include_prompt_in_result": False, "end_token": []}
    tokens = model.generate_batch([prompt], **how)[0].sequences_ids[0]
    return {"window": None, "tokens": tokens, "logprobs": list(logprobs)}


def onnxruntime_genai(ask):
    """Build the model with a longer `max_position_embeddings`, which the builder takes for the window whatever the
    factor is: the engine refuses a longer prompt.
    """
    import onnxruntime_genai as og

    source, folder = Path(ask["work"]) / "source", Path(ask["work"]) / "model"
    shutil.copytree(ask["folder"], source, copy_function=os.symlink)
    config = json.loads((source / "config.json").read_text())
    window = config["max_position_embeddings"]
    (source / "config.json").unlink()
    longer = {"max_position_embeddings": len(ask["ids"]) + ask["greedy"]}
    (source / "config.json").write_text(json.dumps(config | longer))
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(folder)]
    subprocess.run([*command, "-p", "fp32", "-e", "cpu", "-c", ask["work"]], check=True)
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(do_sample=False, max_length=len(ask["ids"]) + ask["greedy"])
    generator, tokens = og.Generator(model, parameters), []
    generator.append_tokens(ask["ids"])
    while len(tokens) < ask["greedy"]:
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return {"window": window, "tokens": tokens, "logprobs": None}


if __name__ == "__main__":
    engine, request, answer = sys.argv[1:]
    ask = json.loads(Path(request).read_text())
    started = time.monotonic()
    found = globals()[engine](ask)
    versions = {name: importlib.metadata.version(name) for name in ask["packages"]}
    found |= {"versions": versions, "seconds": round(time.monotonic() - started, 1)}
    Path(answer).write_text(json.dumps(found))
