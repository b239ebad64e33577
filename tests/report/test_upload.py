"""Uploads to a stand-in for the hub's HTTP interface, on this machine."""

import base64
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from conftest import small_recipe
from reported import make_run, passkey, perplexity

from pi_lora import cli
from pi_lora.errors import ModelError
from pi_lora.report.card import write_report
from pi_lora.report.upload import push

TOKEN = "hf_standin"
# huggingface_hub 2.4 hands a file to httpx2 in a way that httpx2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


class Hub(ThreadingHTTPServer):
    """What the hub keeps: repositories, branches and files, all of which it takes as small ones."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        """Say nothing on stderr."""

    def answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        repo = self.path.removeprefix("/api/models/")
        if repo in self.server.private:
            self.answer({"id": repo, "private": self.server.private[repo]})
        else:
            self.answer({"error": f"GET {self.path}: there is no such thing"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/validate-yaml":
            self.validate(json.loads(body)["content"])
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials in Authorization header"}, 401)
        elif self.path == "/api/repos/create":
            self.create(json.loads(body))
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})
        elif found := re.fullmatch(r"/api/models/(\w+/\w+)/commit/(\w+)", self.path):
            self.commit(found[1], found[2], [json.loads(line) for line in body.splitlines()])
        else:
            self.answer({"error": f"POST {self.path}"}, 500)

    def validate(self, card: str) -> None:
        """The hub's documented rule: what a card links must be an id of the hub."""
        fields = yaml.safe_load(card.split("---")[1])
        wrong = [name for name in ("base_model", "datasets") if re.search(r"^/|:", str(fields.get(name, "")))]
        errors = [{"message": f'"{name}" is not valid'} for name in wrong]
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create(self, wanted: dict[str, Any]) -> None:
        if wanted["organization"] == "others":
            self.answer({"error": "You don't have the rights to create a model under the namespace others"}, 403)
            return
        repo = f"{wanted['organization'] or 'me'}/{wanted['name']}"
        status = 409 if repo in self.server.private else 200
        self.server.private.setdefault(repo, wanted.get("visibility") == "private")
        self.answer({"url": f"{self.server.url}/{repo}"}, status)

    def commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> None:
        files = self.server.files.setdefault(f"{repo}@{branch}", {})
        for line in lines:
            value = line["value"]
            if line["key"] != "header":
                files[value["path"]] = base64.b64decode(value["content"])
        self.answer({"commitUrl": f"{self.server.url}/{repo}/commit/{'0' * 40}", "commitOid": "0" * 40})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # Where the client itself would keep what `hf auth login` was told.
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nonexistent")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def contents(folder: Path, model: Path | None = None) -> dict[str, bytes]:
    """Every file; the folder of its base is known by its last name."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: each.replace(str(model).encode(), b"model") for name, each in files.items()} if model else files


@pytest.mark.parametrize("run", ["lora_run", "full_run"])
def test_push_uploads_exactly_the_files_of_the_run(
    run: str, hub: Hub, small_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = shutil.copytree(request.getfixturevalue(run), tmp_path / "run")
    (folder / "modeling_own.py").write_text("the code of the model")
    wanted = contents(folder, small_model)
    (folder / "checkpoint-10").mkdir()
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "optimizer.safetensors",
        "checkpoint-10/model.safetensors",
        ".env",
        "script.py",
    ):
        (folder / name).write_bytes(b"secret")
    assert push(folder, "me/model") == f"{hub.url}/me/model"
    assert hub.files == {"me/model@main": wanted}
    assert hub.private == {"me/model": False}


PRIVATE = "/home/jürgen m/secret project"


def test_no_local_path_is_uploaded(small_model: Path, hub: Hub, tmp_path: Path) -> None:
    """Neither in what runs and results say of themselves, nor in the card; names on the hub stay."""
    sources = [{"name": f"{PRIVATE}/a&b.txt"}, {"name": "../books/*.txt"}, {"name": "owner/books"}]
    evaluation = {"benchmarks": {"data": [f"boolq={PRIVATE}/dev.jsonl"], "tasks": ["boolq"]}, "perplexity": {}}
    recipe = small_recipe(small_model, data={"source": sources}, evaluation=evaluation)
    scores = {"model": f"{PRIVATE}/run"}
    swept = perplexity(9.0, 8.0, data=f"{PRIVATE}/novels.txt")
    run = make_run(small_model, tmp_path / "run", {"passkey": {**passkey(96), **scores}, "perplexity": swept}, recipe)
    write_report(run, html=True)
    facts = {"base": str(small_model), "run": f"{PRIVATE}/run", "checks": [f"{PRIVATE}/run"]}
    (run / "merge.json").write_text(json.dumps(facts))
    before = contents(run)
    push(run, "me/model")
    pushed = hub.files["me/model@main"]
    assert pushed.keys() == before.keys() - {"report.html"}
    texts = {name: content.decode() for name, content in pushed.items() if not name.endswith((".safetensors", ".png"))}
    for name, text in texts.items():
        for private in (
            str(tmp_path),
            str(small_model),
            "jürgen",
            "j\\u00fcrgen",
            "secret project",
            "../books",
        ):
            assert private not in text, name
    assert json.loads(texts["run.json"])["origin"]["path"] == "model"
    assert json.loads(texts["adapter_config.json"])["base_model_name_or_path"] == "model"
    recipe = yaml.safe_load(texts["recipe.yaml"])
    assert [each["name"] for each in recipe["data"]["source"]] == ["a&b.txt", "*.txt", "owner/books"]
    assert recipe["evaluation"]["benchmarks"]["data"] == ["boolq=dev.jsonl"]
    assert json.loads(texts["merge.json"])["checks"] == ["run"]
    assert "`a&b.txt`" in texts["README.md"]
    assert contents(run) == before


def test_push_uploads_the_newest_scores_and_prints_no_token(
    lora_run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run")
    (run / "scores").mkdir()
    (run / "scores" / "passkey.json").write_text(json.dumps(passkey(96)))
    monkeypatch.setattr(sys, "argv", ["pi-lora", "push", str(run), "model", "--private"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code
    captured = capfd.readouterr()
    assert captured.out == f"{hub.url}/me/model\n"
    assert TOKEN not in captured.out + captured.err
    assert hub.private == {"me/model": True}
    assert b"| k_max at 128 | 96 tokens |" in hub.files["me/model@main"]["README.md"]


def test_private_is_refused_for_a_public_repository(lora_run: Path, hub: Hub) -> None:
    push(lora_run, "me/model")
    hub.files.clear()
    with pytest.raises(ModelError, match="me/model: is public already"):
        push(lora_run, "me/model", private=True)
    assert hub.files == {}


def test_a_link_to_a_file_elsewhere_is_refused(lora_run: Path, hub: Hub, tmp_path: Path) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run")
    (tmp_path / "a.json").write_text("secret")
    (run / "tokenizer.model").symlink_to(tmp_path / "a.json")
    with pytest.raises(ModelError, match=r"tokenizer\.model: is a link, which is not followed"):
        push(run, "me/model")
    (run / "tokenizer.model").unlink()
    (run / "scores").symlink_to(tmp_path)
    with pytest.raises(ModelError, match="is a link, which is not followed"):
        push(run, "me/model")
    assert hub.private == {}


def test_a_refusal_of_the_hub_is_one_line(
    lora_run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"others/model: the hub refused it \(.*rights to create") as raised:
        push(lora_run, "others/model")
    assert "\n" not in str(raised.value)
    with pytest.raises(ModelError, match=r"a/b/c: the hub refused it .*check the name"):
        push(lora_run, "a/b/c")
    run = shutil.copytree(lora_run, tmp_path / "run")
    card = run / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nbase_model: /home/me/base\n", 1))
    with pytest.raises(ModelError, match=r'Invalid metadata in README.md. - "base_model" is not valid'):
        push(run, "me/model")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match=r"Invalid credentials.*and your login") as raised:
        push(lora_run, "me/model")
    assert "hf_wrong" not in str(raised.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ModelError, match=r"the hub refused it .*hf auth login"):
        push(lora_run, "me/model")
    assert hub.files == {}


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("lora_run", "config.json"),
        ("lora_run", "README.md"),
        ("full_run", "*.safetensors"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused(
    run: str, name: str, hub: Hub, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    part = shutil.copytree(request.getfixturevalue(run), tmp_path / "run", ignore=shutil.ignore_patterns(name))
    with pytest.raises(ModelError, match=f"{re.escape(name)}: is missing; upload a whole run or model"):
        push(part, "me/model")
    assert hub.private == {}
