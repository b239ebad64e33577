"""`pi-lora check-server` against a small server that computes a model with transformers and answers as engines do."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pi_lora import cli
from pi_lora.api import merge
from pi_lora.serving.check import Answer, Completion, _compare

Json = dict[str, Any]


class Engine:
    """A model with a window, as an engine serves it: `cut` tokens of a prompt at most, or a refusal."""

    def __init__(self, folder: Path, scaled: bool = True, window: int = 160, cut: int = 160, form: str = "vllm"):
        config = AutoConfig.from_pretrained(folder)
        if not scaled:
            config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
        self.model = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.window, self.cut, self.form = window, cut, form
        self.asked: list[Json] = []

    @torch.no_grad()
    def complete(self, body: Json) -> tuple[int, Json]:
        """Status and answer. Engines of the form `mlx` take `logprobs: true` alone, those of `text` none."""
        self.asked.append(body)
        asked = body.get("logprobs")
        if (self.form == "mlx" and asked is not None and asked is not True) or (self.form == "text" and asked):
            return 400, {"error": "logprobs must be a boolean"}
        ids = self.tokenizer(body["prompt"])["input_ids"]
        if len(ids) + body["max_tokens"] > self.window:
            return 400, {"error": {"message": f"maximum context length is {self.window} tokens", "code": 400}}
        ids = ids[-self.cut :]
        output = self.model.generate(
            torch.tensor([ids]),
            max_new_tokens=body["max_tokens"],
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = output.sequences[0, len(ids) :].tolist()
        rows = torch.cat(output.logits).log_softmax(-1)
        logprobs = [float(row[token]) for row, token in zip(rows, new, strict=True)]
        text = self.tokenizer.decode(ids + new)[len(self.tokenizer.decode(ids)) :]
        choice: Json = {"text": text, "index": 0}
        if self.form == "vllm":
            choice["logprobs"] = {"tokens": [""] * len(new), "token_logprobs": logprobs}
            logits = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            pairs = zip(ids[1:], logits, strict=False)
            choice["prompt_logprobs"] = [None, *({str(i): {"logprob": float(row[i]), "rank": 1}} for i, row in pairs)]
        elif self.form != "text":
            choice["logprobs"] = {"content": [{"id": i, "logprob": p} for i, p in zip(new, logprobs, strict=True)]}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(new)}}


Serve = Callable[[Engine], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with an engine; returns its address."""
    servers = []

    def start(engine: Engine) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say(200, {"data": [{"id": "served"}]})

            def do_POST(self) -> None:
                self.say(*engine.complete(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

            def say(self, status: int, content: Json) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def merged(lora_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """L = 64, L' = 128."""
    return merge(lora_run, tmp_path_factory.mktemp("served") / "merged").folder


@pytest.fixture(scope="module")
def reference(merged: Path) -> Path:
    file = merged.parent / "reference.json"
    check("--write-reference", str(merged), "--reference", str(file))
    return file


def check(*words: str) -> int:
    try:
        cli.app(["check-server", *words], exit_on_error=False, result_action="return_value")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def verdicts(url: str, *words: str) -> tuple[int, list[Json]]:
    file = Path(words[-1]).with_name("result.json")
    status = check(url, *words, "--json", str(file))
    return status, json.loads(file.read_text())["prompts"]


@pytest.mark.parametrize("form", ["vllm", "llama.cpp", "mlx", "text"])
def test_the_served_model_passes_the_check(form: str, merged: Path, serve: Serve) -> None:
    engine = Engine(merged, form=form)
    status, rows = verdicts(serve(engine) + "/v1/", str(merged))
    assert (status, [row["verdict"] for row in rows]) == (0, ["right", "right"])
    assert [row["tokens"] for row in rows] == [115, 32]
    assert all(row["agreed"] == 32 for row in rows)
    assert [row["difference"] is None for row in rows] == [form == "text"] * 2
    assert form == "text" or max(row["difference"] for row in rows) < 1e-4
    assert engine.asked[-1]["model"] == "served"


def test_a_run_is_checked_with_its_scaling(lora_run: Path, merged: Path, serve: Serve, tmp_path: Path) -> None:
    assert check(serve(Engine(merged)), str(lora_run)) == 0


@pytest.mark.parametrize("form", ["vllm", "mlx"])
def test_a_server_that_drops_the_scaling_is_detected(form: str, merged: Path, reference: Path, serve: Serve) -> None:
    url = serve(Engine(merged, scaled=False, form=form))
    for words in ([str(merged)], ["--reference", str(reference)]):
        status, rows = verdicts(url, *words)
        assert (status, rows[0]["verdict"]) == (1, "unscaled")
        assert rows[0]["difference"] < 1e-4


@pytest.mark.parametrize(
    ("text", "agreed"), [(" ship is", 2), ("ship is", 2), ("ship is red", 2), ("ships", 1), ("boat", 0)]
)
def test_a_server_may_leave_out_the_space_that_an_answer_begins_with(text: str, agreed: int) -> None:
    computed = Answer(text=" ship is", ends=[5, 8], logprobs=[-1.0, -1.0], margins=[9.0, 9.0], prompt=[])
    distance, equal = _compare(computed, Completion(text, None, [-1.0, -1.0], []))
    assert (equal, distance) == (agreed, 0.0 if agreed == 2 else inf)


def test_a_server_that_truncates_prompts_is_detected(merged: Path, reference: Path, serve: Serve) -> None:
    url = serve(Engine(merged, cut=64))
    status, rows = verdicts(url, "--reference", str(reference))
    assert (status, [row["verdict"] for row in rows]) == (1, ["cut", "right"])
    assert rows[0]["detail"] == "it saw only 64 tokens; start it with a window of 128"


def test_a_refusal_of_the_server_is_one_line(merged: Path, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = verdicts(serve(Engine(merged, window=96)), str(merged))
    assert (status, [row["verdict"] for row in rows]) == (1, ["refused", "right"])
    assert "maximum context length is 96 tokens" in rows[0]["detail"]
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["vllm", "text"])
def test_another_model_fails_the_check(
    form: str, merged: Path, small_model: Path, reference: Path, serve: Serve, tmp_path: Path
) -> None:
    """The base with the scaling, as a server that lost the adapter."""
    engine = Engine(merged, form=form)
    base = AutoModelForCausalLM.from_pretrained(small_model)
    engine.model.load_state_dict(base.state_dict())
    status, rows = verdicts(serve(engine), "--reference", str(reference))
    assert (status, rows[0]["verdict"]) == (1, "different")


def test_a_reference_file_is_small_and_made_from_its_text(
    reference: Path, serve: Serve, merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reference.stat().st_size < 20_000
    text, own = tmp_path / "text.txt", tmp_path / "own.json"
    text.write_text("Some other words. " * 400)
    assert check("--write-reference", str(merged), "--reference", str(own), "--text", str(text)) == 0
    engine = Engine(merged)
    assert check(serve(engine), "--reference", str(own)) == 0
    assert engine.asked[0]["prompt"].startswith("Some other words. Some")
    text.write_text("Too short.")
    command = ["pi-lora", "check-server", serve(engine), str(merged), "--text", str(text)]
    assert mistake(command, capsys) == "--text: has fewer than 115 tokens; name a longer text"


def test_a_merged_folder_contains_its_reference(lora_run: Path, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    words = ["merge", str(lora_run), "--reference", "--output", str(folder)]
    cli.app(words, exit_on_error=False, result_action="return_value")
    assert check(serve(Engine(folder)), "--reference", str(folder / "server_reference.json")) == 0


def mistake(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_mistakes_in_check_server_are_one_line(
    merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pi-lora", "check-server"]
    said = mistake([*command, "127.0.0.1:9", str(merged)], capsys)
    assert said.startswith("http://127.0.0.1:9: cannot be reached ([Errno 111] Connection refused); start the server")
    assert "URL MODEL, URL --reference FILE, or" in mistake([*command, "http://127.0.0.1:9"], capsys)
