"""A hub for tests: a server on this machine that speaks the HTTP of the Hugging Face hub, with faults on demand.

Repositories are in memory. Weights and Parquet are behind a redirect, as on the hub, which also asks for a token: 401
without one and 404 with one for a repository that a user may not see, and a gated repository lists its files to all.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from huggingface_hub import HfFileSystem, constants

TOKEN = "hf_standin"
OTHER_TOKEN = "hf_other"
USERS = {TOKEN: "me", OTHER_TOKEN: "other"}
LARGE = (".safetensors", ".parquet", ".zip", ".bin")
DATE = "2026-01-01T00:00:00.000Z"

Files = dict[str, bytes]


@dataclass
class Repository:
    """Commits by their ids, and branches, tags and pull requests by name."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files, ref: str = "main") -> str:
        """Add a commit with exactly these files to a branch, and return its id."""
        content = [len(self.commits), sorted((path, hashlib.sha1(data).hexdigest()) for path, data in files.items())]
        commit = hashlib.sha1(json.dumps(content).encode()).hexdigest()
        self.commits[commit] = files
        self.refs[ref] = commit
        return commit


@dataclass
class Fault:
    """How requests fail whose method and path `match`: by a status, by a closed connection, or without an answer."""

    match: str
    status: int = 0
    hangs: bool = False


@dataclass
class Request:
    method: str
    path: str
    status: int


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.stopped = threading.Event()
        self.clear()

    def clear(self) -> None:
        """Forget repositories, stored files, faults and the log."""
        self.repositories: dict[str, Repository] = {}
        self.stored: Files = {}
        self.faults: list[Fault] = []
        self.log: list[Request] = []

    def add(
        self, name: str, files: Path | Files, ref: str = "main", *, private: bool = False, gated: bool = False
    ) -> str:
        """Commit the files of a folder to `models/OWNER/NAME` or `datasets/OWNER/NAME`; return the commit."""
        if isinstance(files, Path):
            paths = [path for path in files.rglob("*") if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        repository = self.repositories.setdefault(name, Repository(private, gated))
        return repository.commit(files, ref)

    def files(self, name: str) -> Files:
        """Return the files of the main branch."""
        repository = self.repositories[name]
        return repository.commits[repository.refs["main"]]

    def asked(self, part: str = "") -> list[str]:
        """Return the requests whose line has a part."""
        lines = [f"{request.method} {request.path}" for request in self.log]
        return [line for line in lines if part in line]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing on stderr."""

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        line = f"{self.command} {self.path}"
        fault = next((fault for fault in self.server.faults if re.search(fault.match, line)), None)
        try:
            if fault and fault.hangs:
                self.server.stopped.wait(120)
            if fault and not fault.status:
                self.log_status(0)
                self.close_connection = True
                return
            if fault:
                raise Refused(fault.status, "Fault", "The hub has a fault")
            self.route(unquote(urlsplit(self.path).path))
        except Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            self.answer({"error": str(refused)}, refused.status, **headers)
        except OSError:
            self.close_connection = True  # the client is gone

    def log_status(self, status: int) -> None:
        """Log the request before the answer, after which the client goes on."""
        self.server.log.append(Request(self.command, self.path, status))

    do_HEAD = do_POST = do_PUT = do_GET

    @property
    def user(self) -> str | None:
        return USERS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def answer(self, content: object, status: int = 200, **headers: str) -> None:
        self.send(json.dumps(content).encode(), status, **headers)

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.log_status(status)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def route(self, path: str) -> None:
        name = r"((?:models|datasets)/[\w.-]+(?:/[\w.-]+)?)"
        routes: dict[str, Callable[..., None]] = {
            rf"/api/{name}/tree/([^/]+)(?:/(.+))?": self.tree,
            rf"/api/{name}/paths-info/([^/]+)": self.paths_info,
            rf"/api/{name}/preupload/([^/]+)": self.preupload,
            rf"/api/{name}/commit/([^/]+)": self.make_commit,
            rf"/api/{name}(?:/revision/([^/]+))?": self.info,
            r"/_stored/([0-9a-f]+)": self.storage,
            r"/(datasets/)?([\w.-]+(?:/[\w.-]+)?)/resolve/([^/]+)/(.+)": self.file,
            r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch": self.large_files,
            r"/api/repos/create": self.create,
            r"/api/validate-yaml": self.validate,
        }
        raw_path = urlsplit(self.path).path  # a revision such as refs/pr/1 is quoted, as one part
        for pattern, method in routes.items():
            if found := re.fullmatch(pattern, raw_path):
                method(*(unquote(group or "") for group in found.groups()))
                return
        raise Refused(404, "NotFound", f"Sorry, we can't find {path}")

    def visible(self, name: str, *, write: bool = False, contents: bool = False) -> Repository:
        """The repository, if the user may see it, write to it, or read the contents of its files."""
        owner = name.split("/")[1]
        repository = self.server.repositories.get(name)
        if self.headers.get("Authorization") and not self.user:
            raise Refused(401, "InvalidToken", "Invalid credentials in Authorization header")
        if repository is None or (repository.private and self.user != owner):
            raise Refused(404 if self.user else 401, "RepoNotFound", "Repository not found")
        if write and self.user != owner:
            raise Refused(403 if self.user else 401, "Forbidden", "You don't have the rights to write here")
        if contents and repository.gated and self.user != owner:
            raise Refused(403 if self.user else 401, "GatedRepo", "Access is restricted")
        return repository

    def commit_of(self, name: str, revision: str) -> tuple[str, Files]:
        repository = self.server.repositories[name]
        commit = repository.refs.get(revision or "main", revision)
        if commit not in repository.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def info(self, name: str, revision: str) -> None:
        repository = self.visible(name)
        commit, files = self.commit_of(name, revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        about = {"id": name.split("/", 1)[1], "sha": commit, "siblings": siblings, "tags": [], "lastModified": DATE}
        self.answer({**about, "private": repository.private, "gated": "manual" if repository.gated else False})

    def entry(self, path: str, content: bytes) -> dict[str, Any]:
        shown: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": oid_of(content)}
        if path.endswith(LARGE):
            shown["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return shown

    def tree(self, name: str, revision: str, folder: str) -> None:
        self.visible(name)
        commit, files = self.commit_of(name, revision)
        recursive = parse_qs(urlsplit(self.path).query).get("recursive") in (["true"], ["True"])
        prefix = f"{folder}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        if not inside:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist")
        folders = {prefix + path.removeprefix(prefix).split("/")[0] for path in inside} - inside.keys()
        shown = [
            self.entry(path, content) for path, content in inside.items() if recursive or "/" not in path[len(prefix) :]
        ]
        shown += [{"type": "directory", "path": path, "size": 0, "oid": commit} for path in sorted(folders)]
        self.answer(shown)

    def paths_info(self, name: str, revision: str) -> None:
        self.visible(name)
        commit, files = self.commit_of(name, revision)
        asked = json.loads(self.body)["paths"] if self.body[:1] == b"{" else parse_qs(self.body.decode())["paths"]
        shown = []
        for path in asked:
            if path in files:
                shown.append(self.entry(path, files[path]))
            elif any(other.startswith(f"{path}/") for other in files):
                shown.append({"type": "directory", "path": path, "size": 0, "oid": commit})
        self.answer(shown)

    def file(self, folder: str, name: str, revision: str, path: str) -> None:
        name = f"{folder or 'models/'}{name}"
        self.visible(name, contents=path != "README.md")
        commit, files = self.commit_of(name, revision)
        if path not in files:
            self.send(b"", 404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=commit)
            return
        content = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{oid_of(content)}"'}
        if not path.endswith(LARGE):
            self.send_range(content, headers)
            return
        digest = hashlib.sha256(content).hexdigest()
        self.server.stored[digest] = content
        headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        # Another host: the client asks it neither for the commit nor with a token.
        elsewhere = f"http://localhost:{self.server.server_address[1]}/_stored/{digest}"
        self.send(b"", 302, **headers, Location=elsewhere)

    def send_range(self, content: bytes, headers: dict[str, str]) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not found:
            self.send(content, 200, **headers)
            return
        first = int(found[1])
        last = min(int(found[2] or len(content)), len(content) - 1)
        place = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        self.send(content[first : last + 1], 206, **headers, **place)

    def storage(self, digest: str) -> None:
        """Large files, by the SHA-256 of their content."""
        if self.command == "PUT":
            self.server.stored[digest] = self.body
            self.send(b"")
        else:
            self.send_range(self.server.stored[digest], {"ETag": f'"{digest}"'})

    def create(self) -> None:
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or self.user
        if not self.user:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        if owner != self.user:
            raise Refused(403, "", f"You don't have the rights to create a model under the namespace {owner}")
        name = f"{owner}/{wanted['name']}"
        exists = f"models/{name}" in self.server.repositories
        if not exists:
            self.server.add(f"models/{name}", {}, private=wanted.get("visibility") == "private")
        self.answer({"url": f"{self.server.url}/{name}"}, 409 if exists else 200)

    def validate(self) -> None:
        """The hub's documented rule: what a card links must be an id of the hub."""
        metadata = yaml.safe_load(json.loads(self.body)["content"].split("---")[1])
        wrong = [key for key in ("base_model", "datasets") if re.search(r"^/|:", str(metadata.get(key, "")))]
        errors = [{"message": f'"{key}" is not valid'} for key in wrong]
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, name: str, revision: str) -> None:
        self.visible(name, write=True)
        shown = []
        for file in json.loads(self.body)["files"]:
            mode = "lfs" if file["path"].endswith(LARGE) else "regular"
            shown.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        self.answer({"files": shown})

    def large_files(self, name: str) -> None:
        self.visible(f"models/{name}", write=True)
        objects = json.loads(self.body)["objects"]
        for each in objects:
            if each["oid"] not in self.server.stored:
                each["actions"] = {"upload": {"href": f"{self.server.url}/_stored/{each['oid']}"}}
        self.answer({"transfer": "basic", "objects": objects})

    def make_commit(self, name: str, branch: str) -> None:
        repository = self.visible(name, write=True)
        files = dict(self.commit_of(name, branch)[1])
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
        commit = repository.commit(files, branch)
        self.answer({"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})


def oid_of(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture(scope="session")
def hub_server() -> Iterator[Hub]:
    """One server for all tests: clients remember the address of a hub."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.stopped.set()
    server.shutdown()
    thread.join()
    server.server_close()


def forget_commits() -> None:
    """As a new process: it asks for the commits of data sets again."""
    from pi_lora.data import sources

    sources._dataset_commit.cache_clear()


@pytest.fixture
def hub(hub_server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An empty hub that the clients in this process ask without a token, and an empty cache."""
    # Imported here, since it takes a second.
    import datasets.config

    hub_server.clear()
    forget_commits()
    HfFileSystem.clear_instance_cache()
    template = "{repo_id}/resolve/{revision}/{filename}"
    settings = {
        "ENDPOINT": hub_server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub_server.url}/{template}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        # Where the client keeps what `hf auth login` was told.
        "HF_TOKEN_PATH": "/nonexistent",
    }
    for name, setting in settings.items():
        monkeypatch.setattr(constants, name, setting)
    monkeypatch.setattr("pi_lora.hub._Hub.fell_back", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub_server.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    # Threads that read Parquet are given five seconds to end (apache/arrow#45214).
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1)
    # The clients wait between two attempts, up to half a minute in all.
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return hub_server
