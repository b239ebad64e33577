"""`check-server` passes a server that computes the model, and none that cuts, drops the scaling or has another model.

The server is small, computes with transformers, and answers as engines do.
"""

import errno
import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conftest import refused, run_captured
from pi_lora import cli
from pi_lora.api import merge
from pi_lora.errors import ModelError, PiLoraError
from pi_lora.model_ref import ModelRef
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.resolve import resolve_model
from pi_lora.serving.check import Completion, Server, Verdict, check_server, verdicts_table
from pi_lora.serving.reference import (
    CODES,
    DEPTHS,
    NAMES,
    Answer,
    Prompt,
    Reference,
    compute_answers,
    reference_of,
)

Json = dict[str, Any]
Ids = list[int]
DEMO = Path(__file__).parents[2] / "adapters" / "demo"


def last(percent: int) -> Callable[[Ids], Ids]:
    """Keep the last tokens, as llama.cpp's context shift."""
    return lambda ids: ids[-(len(ids) * percent // 100) :]


def first(percent: int) -> Callable[[Ids], Ids]:
    """Keep the first tokens."""
    return lambda ids: ids[: len(ids) * percent // 100]


def both_ends(percent: int) -> Callable[[Ids], Ids]:
    """Keep as many of the first and of the last tokens."""

    def cut(ids: Ids) -> Ids:
        kept = len(ids) * percent // 200
        return ids[:kept] + ids[-kept:]

    return cut


def whole(ids: Ids) -> Ids:
    return ids


class Computer:
    """A model that computes every answer once, for engines of all forms."""

    def __init__(self, folder: Path, scaled: bool = True, dtype: torch.dtype = torch.float32):
        config = AutoConfig.from_pretrained(folder)
        if not scaled:
            config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
        self.model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.answers = cache(self.answer)

    @torch.no_grad()
    def answer(self, ids: tuple[int, ...], tokens: int, repetition_penalty: float) -> tuple[Ids, list[float]]:
        output = self.model.generate(
            torch.tensor([ids]),
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=repetition_penalty,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = output.sequences[0, len(ids) :].tolist()
        rows = torch.cat(output.logits).float().log_softmax(-1)
        return new, [float(row[token]) for row, token in zip(rows, new, strict=True)]


class Engine:
    """A model as an engine serves it: `cut` changes the prompt, and a prompt beyond the window is refused. `count` is
    whether prompts are counted as they were `cut`, or `sent`, or not at all, `miscount` tokens too few. `models` are
    those that it lists, None of an engine that has no list, or another answer to the question for them. Log
    probabilities are `off` by so many nats. Chats are rendered by `template`; one that `thinks` leaves out the text of
    answers to them.
    """

    def __init__(
        self,
        computer: Computer,
        window: int = 10_000,
        cut: Callable[[Ids], Ids] = whole,
        form: str = "vllm",
        count: str | None = "cut",
        miscount: int = 0,
        models: Any = ("served",),
        off: float = 0.0,
        template: str | None = None,
        thinks: bool = False,
    ):
        self.computer, self.window, self.cut, self.form = computer, window, cut, form
        self.count, self.miscount, self.models, self.off = count, miscount, models, off
        self.template, self.thinks = template, thinks
        self.asked: list[Json] = []
        self.keys: list[str | None] = []

    def complete(self, body: Json) -> tuple[int, Json]:
        """Status and answer. Engines of the form `mlx` take `logprobs: true` alone, those of `text` none."""
        self.asked.append(body)
        asked = body.get("logprobs")
        if (self.form == "mlx" and asked is not None and asked is not True) or (self.form == "text" and asked):
            return 400, {"error": "logprobs must be a boolean"}
        tokenizer = self.computer.tokenizer
        chat = "messages" in body
        if chat and not self.template:
            return 400, {"error": "there is no chat template"}
        if chat:
            rendered = tokenizer.apply_chat_template(
                body["messages"], chat_template=self.template, add_generation_prompt=True, tokenize=False
            )
            sent = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        else:
            sent = tokenizer(body["prompt"])["input_ids"]
        if len(sent) + body["max_tokens"] > self.window:
            return 400, {"error": {"message": f"maximum context length is {self.window} tokens", "code": 400}}
        ids = self.cut(sent)
        # As engines that take a penalty from the model's generation config, under either name.
        penalty_key = "repeat_penalty" if self.form == "llama.cpp" else "repetition_penalty"
        new, exact = self.computer.answers(tuple(ids), body["max_tokens"], body.get(penalty_key, 2.0))
        logprobs = [each + self.off for each in exact]
        text = tokenizer.decode(ids + new, skip_special_tokens=True)
        written = text[len(tokenizer.decode(ids, skip_special_tokens=True)) :]
        choice: Json = {"message": {"content": None if self.thinks else written}} if chat else {"text": written}
        if self.form == "vllm" and asked and not chat:
            choice["logprobs"] = {"tokens": [""] * len(new), "token_logprobs": logprobs}
        elif self.form != "text" and asked:
            tokens = [{"id": i, "token": tokenizer.decode(i)} for i in new]
            choice["logprobs"] = {"content": [t | {"logprob": p} for t, p in zip(tokens, logprobs, strict=True)]}
        content: Json = {"choices": [choice]}
        if self.count:
            counted = ids if self.count == "cut" else sent
            content["usage"] = {"prompt_tokens": len(counted) - self.miscount, "completion_tokens": len(new)}
        return 200, content


Serve = Callable[[Engine], str]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Give an engine an address of its own on one server."""
    engines: list[Engine] = []

    class Handler(BaseHTTPRequestHandler):
        @property
        def engine(self) -> Engine:
            return engines[int(self.path.split("/")[1])]

        def do_GET(self) -> None:
            models = self.engine.models
            listed = {"data": [{"id": name} for name in models]} if isinstance(models, tuple) else models
            self.say(404 if models is None else 200, listed)

        def do_POST(self) -> None:
            self.engine.keys.append(self.headers["Authorization"])
            self.say(*self.engine.complete(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def say(self, status: int, content: Json) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: Any) -> None:
            pass

    def start(engine: Engine) -> str:
        engines.append(engine)
        return f"http://127.0.0.1:{server.server_port}/{len(engines) - 1}"

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield start
        server.shutdown()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, which finds codes, in a window of 512 tokens instead of 1,024: L = 128, scaled by 4."""
    folder = merge(DEMO, tmp_path_factory.mktemp("served") / "demo", dtype="float32").folder
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "max_position_embeddings": 128}))
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "original": 128}))
    return folder


@pytest.fixture(scope="module")
def computer(demo: Path) -> Computer:
    return Computer(demo)


@pytest.fixture(scope="module")
def unscaled(demo: Path) -> Computer:
    return Computer(demo, scaled=False)


@pytest.fixture(scope="module")
def reference(demo: Path) -> Path:
    file = demo.parent / "reference.json"
    check("--write-reference", str(demo), "--reference", str(file))
    return file


@pytest.fixture(scope="module")
def untrained(lora_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """L = 64, L' = 128, with its reference."""
    folder = tmp_path_factory.mktemp("served") / "untrained"
    words = ["merge", str(lora_run), "--reference", "--output", str(folder)]
    cli.run(words)
    return folder


@pytest.fixture(scope="module")
def untrained_computer(untrained: Path) -> Computer:
    return Computer(untrained)


def test_a_merge_whose_reference_fails_leaves_no_folder(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pi_lora.serving.reference.compute_answers", full)
    with pytest.raises(ModelError):
        cli.run(["merge", str(lora_run), "--reference", "--output", str(tmp_path / "merged")])
    assert not list(tmp_path.iterdir())


def check(*words: str) -> int:
    try:
        cli.run(["check-server", *words])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def verdicts(url: str, *words: str) -> tuple[int, list[Json]]:
    file = Path(words[-1]).with_name("result.json")
    status = check(url, *words, "--json", str(file))
    return status, json.loads(file.read_text())["prompts"]


@pytest.mark.parametrize("form", ["vllm", "llama.cpp", "mlx"])
def test_the_served_model_passes_the_check(form: str, computer: Computer, reference: Path, serve: Serve) -> None:
    engine = Engine(computer, form=form)
    status, rows = verdicts(serve(engine) + "/v1/", "--reference", str(reference))
    assert (status, [row["verdict"] for row in rows]) == (0, ["right"] * 5)
    assert [row["depth"] for row in rows] == [0, 25, 50, 75, 0]
    assert all(445 < row["tokens"] < 465 for row in rows[:4])
    assert all(row["agreed"] == 16 and row["difference"] < 1e-4 for row in rows)
    assert engine.asked[-1]["model"] == "served"
    greedy = {"temperature": 0, "presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 16}
    assert all(greedy.items() <= body.items() for body in engine.asked)


@pytest.mark.parametrize(("key", "sent"), [(None, None), ("", None), ("secret", "Bearer secret")])
def test_a_key_is_sent_only_where_there_is_one(
    key: str | None, sent: str | None, computer: Computer, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    engine = Engine(computer)
    Server(serve(engine)).complete("The door is open.")
    assert set(engine.keys) == {sent}


@pytest.mark.parametrize(
    ("listed", "name", "asked"),
    [
        (("served",), None, "served"),
        (("served",), "other", "other"),
        (("served", "other"), None, None),
        (("served", "other"), "other", "other"),
        ((), None, None),
        (None, None, None),
    ],
)
def test_a_model_is_named_where_one_is_given_or_a_single_one_is_listed(
    listed: tuple[str, ...] | None, name: str | None, asked: str | None, computer: Computer, serve: Serve
) -> None:
    """Of several the server takes its first, and refuses a name that it does not have."""
    engine = Engine(computer, models=listed)
    Server(serve(engine), name).complete("The door is open.")
    assert [body.get("model") for body in engine.asked] == [asked]


def test_a_server_of_several_models_that_is_not_right_says_that_none_was_named(
    computer: Computer, reference: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    for cut, served, is_said in ((last(95), (), True), (last(95), ("--served", "pi"), False), (whole, (), False)):
        url = serve(Engine(computer, cut=cut, models=("base", "pi")))
        check(url, "--reference", str(reference), *served)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{url}: ")]
        assert [("--served" in line, "base, pi" in line) for line in lines] == [(True, True)] * is_said


def test_codes_stand_at_the_depths_that_a_verdict_names(computer: Computer, reference: Path) -> None:
    """By the middle of a statement, and the first at the start. The last prompt is for half of L."""
    made = Reference.model_validate_json(reference.read_text())
    *long, short = made.prompts

    def tokens(text: str) -> int:
        return len(computer.tokenizer(text)["input_ids"])

    for prompt in long:
        text = made.text(prompt)
        assert text.startswith(f"The code of {NAMES[0]} is {CODES[0]}.")
        for name, code, depth in list(zip(NAMES, CODES, DEPTHS, strict=True))[1:]:
            statement = f"The code of {name} is {code}."
            before, after = text.split(statement)
            middle = tokens(before) + tokens(statement) / 2
            assert 100 * middle / tokens(text) == pytest.approx(depth, abs=1)
            assert len(before + after) > 400
    assert 54 <= short.tokens <= 64
    assert made.text(short).count("The code of") == 2


@pytest.mark.parametrize(
    ("off", "options", "verdict"),
    [(0.09, (), "right"), (-0.11, (), "different"), (-0.11, ("--tolerance", "0.12"), "right")],
)
def test_log_probabilities_may_differ_by_the_tolerance(
    off: float, options: tuple[str, ...], verdict: str, computer: Computer, reference: Path, serve: Serve
) -> None:
    status, rows = verdicts(serve(Engine(computer, off=off)), *options, "--reference", str(reference))
    assert (status, {row["verdict"] for row in rows}) == (verdict != "right", {verdict})
    assert rows[0]["difference"] == pytest.approx(abs(off), abs=1e-4)


def test_verdicts_are_printed_in_a_row_for_each_prompt() -> None:
    rows = [
        Verdict(tokens=29_491, depth=25, verdict="right", agreed=16, difference=0.00123),
        *(Verdict(tokens=tokens, depth=0, verdict="refused", detail="no such model") for tokens in (1024, 2048)),
    ]
    console = Console(width=120, file=io.StringIO())
    console.print(verdicts_table("http://localhost", rows))
    printed = console.file.getvalue()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    assert ["29,491", "at 25 %", "right", "16 of 16", "0.0012"] in cells
    assert ["1,024", "at 0 %", "refused", "0 of 16", ""] in cells
    assert printed.count("refused: no such model") == 1


def test_a_server_without_log_probabilities_is_unclear(computer: Computer, reference: Path, serve: Serve) -> None:
    status, rows = verdicts(serve(Engine(computer, form="text")), "--reference", str(reference))
    assert (status, [row["verdict"] for row in rows]) == (1, ["unclear"] * 5)
    assert all("log probabilities" in row["detail"] for row in rows)


def test_a_server_in_bfloat16_is_right(demo: Path, reference: Path, serve: Serve) -> None:
    url = serve(Engine(Computer(demo, dtype=torch.bfloat16)))
    status, rows = verdicts(url, "--reference", str(reference))
    assert (status, [row["verdict"] for row in rows]) == (0, ["right"] * 5)
    assert max(row["difference"] for row in rows) > 1e-3


CUTS = {
    "last 25": last(25),
    "last 50": last(50),
    "last 75": last(75),
    "last 95": last(95),
    "first 95": first(95),
    "ends 25": both_ends(25),
    "ends 50": both_ends(50),
    "ends 95": both_ends(95),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_server_that_cuts_never_passes(cut: str, computer: Computer, reference: Path, serve: Serve) -> None:
    """Whether it counts what it kept, what was sent, or nothing; with log probabilities or without."""
    for form in ("vllm", "text"):
        for count in ("cut", "sent", None):
            url = serve(Engine(computer, cut=CUTS[cut], form=form, count=count))
            status, rows = verdicts(url, "--reference", str(reference))
            assert status == 1
            found = {row["verdict"] for row in rows[:4]}
            assert found == {"cut"} if count == "cut" else "different" in found


def test_a_count_that_is_too_small_is_a_cut_whatever_the_answer(
    computer: Computer, reference: Path, serve: Serve
) -> None:
    """The answers are those of the whole prompt."""
    for missing, verdict in ((5, "right"), (6, "cut")):
        engine = Engine(computer, miscount=missing)
        status, rows = verdicts(serve(engine), "--reference", str(reference))
        assert (status, {row["verdict"] for row in rows}) == (verdict == "cut", {verdict})
    assert {str(rows[0]["tokens"] - 6), "512"} <= set(rows[0]["detail"].split())


def test_a_prompt_has_no_eos_that_the_tokenizer_adds(untrained: Path, tmp_path: Path) -> None:
    """The reference is that of the plain tokenizer, and a server that does put EOS after a prompt is told so."""
    ending = shutil.copytree(untrained, tmp_path / "ending")
    state = json.loads((ending / "tokenizer.json").read_text())
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    state["post_processor"]["single"].append(end)
    state["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": [1], "tokens": ["</s>"]}
    (ending / "tokenizer.json").write_text(json.dumps(state))
    plain, ended = (resolve_model(str(folder)) for folder in (untrained, ending))
    assert ended.tokenizer("a")["input_ids"][-1] == 1
    references = [reference_of(source) for source in (plain, ended)]
    assert references[0].prompts == references[1].prompts
    ids = [references[0].ids(references[0].prompts[-1], source.tokenizer) for source in (plain, ended)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("cut", "verdict"),
    [
        (lambda ids: [*ids, 1], "adds EOS"),
        (lambda ids: [0, *ids], "adds BOS"),
        (lambda ids: ids[1:], "lacks BOS"),
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_a_token_that_a_server_adds_to_prompts_or_leaves_out_is_named(
    cut: Callable[[Ids], Ids],
    verdict: str,
    trained: bool,
    computer: Computer,
    reference: Path,
    untrained: Path,
    untrained_computer: Computer,
    serve: Serve,
) -> None:
    url = serve(Engine(computer if trained else untrained_computer, cut=cut))
    file = reference if trained else untrained / "server_reference.json"
    status, rows = verdicts(url, "--reference", str(file))
    assert (status, [row["verdict"] for row in rows]) == (1, [verdict] * 5)


TEMPLATE = "{{ bos_token }}{% for m in messages %}\n{{ m.content }}{% endfor %}"
OTHER = "{{ bos_token }}The code of Laura is 45952.{% for m in messages %}\n{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def chat_reference(demo: Path) -> Path:
    """Of the demo with a chat template."""
    folder = Path(shutil.copytree(demo, demo.parent / "chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    file = folder / "reference.json"
    check("--write-reference", str(folder), "--reference", str(file))
    return file


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({"template": TEMPLATE}, "right"),
        ({"template": TEMPLATE, "thinks": True}, "right"),
        ({"template": TEMPLATE, "form": "mlx"}, "right"),
        ({"template": TEMPLATE, "count": None}, "right"),
        ({"template": OTHER}, "other template"),
        ({"template": TEMPLATE.replace("m.content", "m.content|upper"), "count": None}, "other template"),
        ({"template": TEMPLATE.replace("}{%", "}{{ bos_token }}{%", 1)}, "adds BOS"),
        ({"template": TEMPLATE.replace("{{ bos_token }}", "")}, "lacks BOS"),
        ({}, "refused"),
    ],
)
def test_a_chat_shows_the_template_of_a_server(
    options: Json, verdict: str, computer: Computer, chat_reference: Path, serve: Serve
) -> None:
    """A server without a template has no chats."""
    status, rows = verdicts(serve(Engine(computer, **options)), "--reference", str(chat_reference))
    assert [row["verdict"] for row in rows] == ["right"] * 5 + [verdict]
    assert status == (verdict != "right")
    assert rows[-1]["depth"] is None


@pytest.mark.parametrize("cut", [whole, last(50), last(95), both_ends(50)], ids=["whole", "50", "95", "ends"])
def test_an_untrained_model_is_unclear(
    cut: Callable[[Ids], Ids], untrained: Path, untrained_computer: Computer, serve: Serve
) -> None:
    url = serve(Engine(untrained_computer, cut=cut, count="sent"))
    status, rows = verdicts(url, str(untrained))
    found = [row["verdict"] for row in rows]
    assert status == 1
    assert "right" not in found
    if cut is whole:
        assert found == ["unclear"] * 5
        assert "code" in rows[0]["detail"]


def test_a_run_is_checked_with_its_scaling(
    lora_run: Path, untrained_computer: Computer, serve: Serve, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    check(serve(Engine(untrained_computer)), str(lora_run), "--json", str(file))
    rows = json.loads(file.read_text())["prompts"]
    assert all(row["agreed"] == 16 and row["difference"] < 1e-4 for row in rows)


@pytest.mark.parametrize("form", ["vllm", "mlx"])
def test_a_server_that_drops_the_scaling_is_detected(
    form: str, unscaled: Computer, reference: Path, serve: Serve
) -> None:
    url = serve(Engine(unscaled, form=form))
    status, rows = verdicts(url, "--reference", str(reference))
    assert (status, rows[0]["verdict"]) == (1, "unscaled")
    assert rows[0]["difference"] < 1e-4


def test_answers_that_fit_both_readings_are_unclear(
    computer: Computer, reference: Path, serve: Serve, tmp_path: Path
) -> None:
    """A model whose scaling changes nothing beyond L."""
    file = tmp_path / "reference.json"
    same = Reference.model_validate_json(reference.read_text())
    for prompt in same.prompts:
        prompt.answers["unscaled"] = prompt.answers["right"]
    file.write_text(same.model_dump_json())
    status, rows = verdicts(serve(Engine(computer)), "--reference", str(file))
    assert (status, [row["verdict"] for row in rows]) == (1, ["unclear"] * 4 + ["right"])


def answer(text: str, ends: list[int], near: tuple[int, float] = (0, 9.0)) -> Answer:
    """A computed answer; `near` is a token by its number, and the margin to its second choice."""
    margins = [9.0] * len(ends)
    margins[near[0]] = near[1]
    return Answer(text=text, ends=ends, logprobs=[-1.0] * len(ends), margins=margins)


def judged(
    computed: Answer,
    text: str,
    logprobs: list[float],
    codes: int = 4,
    unscaled: Answer | None = None,
) -> Verdict:
    """How a server is judged that completes a prompt of 900 tokens by a text. L is 256."""
    answers = {"right": computed}
    if unscaled:
        answers["unscaled"] = unscaled
    prompt = Prompt(characters=0, code_starts=[0] * codes, tokens=900, answers=answers)
    reference = Reference(model="m", original=256, target=1024, own_text="", prompts=[prompt])
    server: Any = SimpleNamespace(complete=lambda prompt, chat: Completion(text, 900, logprobs))
    [verdict] = check_server(server, reference, compute=None, tolerance=0.1)
    return verdict


ABC = ("a b c", [1, 3, 5])
CODE = (" 25473", [1, 2, 4, 6])
LATE_CODE = answer(": A) 25473", [1, 3, 4, 5, 10], (4, 0.1))
OTHER_CODE = {"unscaled": answer(" 11111", [1, 2, 4, 6])}
SHIP, SHIP_AND_LINE = answer(" ship is", [5, 8]), answer(" ship is\n", [5, 8, 9])
HALF_CHARACTER = answer(" ship\ufffd", [5, 5])
SAME = [-1.0] * 5
# What the model answers, and the server; its log probabilities; verdict, equal tokens, and the difference in nats.
JUDGED: dict[str, tuple[Answer, str, list[float], dict[str, Any], tuple[str, int, float | None]]] = {
    "less than half a nat is a tie": (answer(*ABC, (2, 0.45)), "a b d", SAME, {}, ("unclear", 2, 0.0)),
    "more is none": (answer(*ABC, (2, 0.55)), "a b d", SAME, {}, ("different", 2, None)),
    "the mean over equal tokens": (answer(*ABC, (2, 0.1)), "a b d", [-1.5, 0.0, -9.0], {}, ("unclear", 2, 0.75)),
    "a tie ahead of the code": (LATE_CODE, ": A) the", SAME, {}, ("unclear", 4, 0.0)),
    "a tie ahead of the code of the short prompt": (LATE_CODE, ": A) the", SAME, {"codes": 1}, ("right", 4, 0.0)),
    # Else a right server of a tokenizer with whole numbers, a blank and two halves of a code, would never pass.
    "a code of three tokens": (answer(" 25473", [1, 4, 6], (2, 0.1)), " 25473", SAME, {}, ("right", 3, 0.0)),
    "two of the three": (answer(" 25473", [1, 4, 6], (2, 0.1)), " 254xx", SAME, {}, ("unclear", 2, 0.0)),
    # A right server that takes the second choice may go on as the model without its scaling does.
    "unscaled after a tie": (answer(*CODE, (1, 0.1)), " 11111", SAME, OTHER_CODE, ("unclear", 1, 0.0)),
    "unscaled": (answer(*CODE), " 11111", SAME, OTHER_CODE, ("unscaled", 4, 0.0)),
    "scaled": (answer(*CODE), " 25473", SAME, OTHER_CODE, ("right", 4, 0.0)),
    # In bfloat16, a right server of a mixture of experts gave one token by 0.11 nats another log probability.
    "too far, two tokens before a tie": (answer(*CODE, (2, 0.1)), " 29999", [-1.2] * 4, {}, ("unclear", 2, 0.2)),
    "too far, three tokens before a tie": (answer(*CODE, (3, 0.1)), " 2549999", [-1.2] * 4, {}, ("different", 3, 0.2)),
    "two tokens, and no tie": (answer(*CODE), " 29999", [-1.2] * 4, {}, ("different", 2, None)),
    # mlx-lm leaves out the space that an answer begins with.
    "the space": (SHIP, " ship is", SAME, {}, ("unclear", 2, 0.0)),
    "no space": (SHIP, "ship is", SAME, {}, ("unclear", 2, 0.0)),
    "no space, and more": (SHIP, "ship is red", SAME, {}, ("unclear", 2, 0.0)),
    "another word after it": (SHIP, "ships", SAME, {}, ("different", 1, None)),
    "another word": (SHIP, "boat", SAME, {}, ("different", 0, None)),
    # A model without its scaling may end at once; servers cut characters and spaces at the end of an answer.
    "nothing": (SHIP_AND_LINE, "", [], {}, ("different", 0, None)),
    "an early end": (SHIP_AND_LINE, " ship", [], {}, ("different", 1, None)),
    "an end before a space": (SHIP_AND_LINE, " ship is", [], {}, ("unclear", 2, None)),
    "the whole": (SHIP_AND_LINE, " ship is\n", [], {}, ("unclear", 3, None)),
    "an end inside a character": (SHIP_AND_LINE, " sh\ufffd", [], {}, ("unclear", 0, None)),
    "another end": (SHIP_AND_LINE, " shop", [], {}, ("different", 0, None)),
    "before half a character": (HALF_CHARACTER, " ship", [-1.5] * 2, {}, ("unclear", 2, 0.5)),
    "half a character": (HALF_CHARACTER, " ship\ufffd", [-1.5] * 2, {}, ("unclear", 2, 0.5)),
    "beyond half a character": (HALF_CHARACTER, " ship is", [-1.5] * 2, {}, ("unclear", 2, 0.5)),
}


@pytest.mark.parametrize("case", JUDGED)
def test_an_answer_is_judged_by_its_equal_tokens_and_their_log_probabilities(case: str) -> None:
    computed, text, logprobs, options, expected = JUDGED[case]
    found = judged(computed, text, logprobs, **options)
    assert (found.verdict, found.agreed, found.difference) == (*expected[:2], pytest.approx(expected[2]))


def test_no_code_holds_the_digits_that_identify_another() -> None:
    assert len(NAMES) == len(CODES) == 4
    assert all(code[:2] not in other for code in CODES for other in CODES if code != other)


def test_an_answer_ends_where_servers_stop(demo: Path, computer: Computer, reference: Path, tmp_path: Path) -> None:
    """At the token that ends a text: here the fourth of the answer to the short prompt."""
    read = Reference.model_validate_json(reference.read_text())
    del read.prompts[:-1]
    [prompt] = read.prompts
    whole_answer = prompt.answers["right"]
    ids = tuple(computer.tokenizer(read.text(prompt))["input_ids"])
    fourth = computer.answers(ids, 16, 1.0)[0][3]
    folder = Path(shutil.copytree(demo, tmp_path / "demo"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = computer.tokenizer.convert_ids_to_tokens(fourth)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    compute_answers(read, resolve_model(ModelRef(folder, dtype="float32")))
    answer = prompt.answers["right"]
    assert len(answer.ends) == len(answer.logprobs) == 4
    assert whole_answer.text.startswith(answer.text)
    found = judged(answer, answer.text, answer.logprobs)
    assert (found.difference, found.agreed) == (0.0, 4)


def test_a_refusal_of_the_server_is_one_line(
    computer: Computer, reference: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = verdicts(serve(Engine(computer, window=96)), "--reference", str(reference))
    assert (status, [row["verdict"] for row in rows]) == (1, ["refused"] * 4 + ["right"])
    assert "maximum context length is 96 tokens" in rows[0]["detail"]
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "Unexpected endpoint or method. (POST /v1/completions)"},
        {"choices": []},
        {"choices": None},
        {"choices": [{"message": {"role": "assistant", "content": "25473"}}]},
        {"choices": [{"text": None}]},
        {"choices": [{"text": "25473", "logprobs": [{"logprob": -1.0}]}]},
        ["no object"],
        "<html>Sign in</html>",
    ],
)
def test_an_answer_in_another_form_is_a_refusal(answer: Any, computer: Computer, serve: Serve) -> None:
    """LM Studio answers errors with status 200, and proxies with a page; some servers have the API of chats alone."""

    class Other(Engine):
        def complete(self, body: Json) -> tuple[int, Json]:
            return 200, answer

    refusal = Server(serve(Other(computer))).complete("The code")
    assert isinstance(refusal, str)
    assert "API of completions" in refusal


@pytest.mark.parametrize("listed", [{"data": None}, [{"id": "served"}], {"data": [{"name": "served"}]}, "<html>"])
def test_a_list_of_models_in_another_form_names_none(listed: Any, computer: Computer, serve: Serve) -> None:
    engine = Engine(computer, models=listed)
    assert isinstance(Server(serve(engine)).complete("The code"), Completion)
    assert "model" not in engine.asked[0]


def test_a_missing_log_probability_is_left_out_as_all_are(computer: Computer, reference: Path, serve: Serve) -> None:
    class Partial(Engine):
        def complete(self, body: Json) -> tuple[int, Json]:
            status, content = super().complete(body)
            for choice in content["choices"]:
                if "logprobs" in choice:
                    choice["logprobs"]["token_logprobs"][0] = None
            return status, content

    status, rows = verdicts(serve(Partial(computer)), "--reference", str(reference))
    assert (status, {row["verdict"] for row in rows}) == (1, {"unclear"})
    assert "log probabilities" in rows[0]["detail"]


def test_a_server_that_dies_between_two_prompts_is_one_line(computer: Computer, serve: Serve) -> None:
    class Dying(Engine):
        def complete(self, body: Json) -> tuple[int, Json]:
            raise ConnectionAbortedError

    url = serve(Dying(computer))
    server = Server(url)
    with refused(PiLoraError, f"{url}: "):
        server.complete("The code")


def test_another_model_fails_the_check(demo: Path, reference: Path, serve: Serve) -> None:
    """The base with the scaling, as a server that lost the adapter."""
    lost = Computer(demo)
    base = AutoModelForCausalLM.from_pretrained(BUILTIN_FOLDER / "tiny", dtype=torch.float32)
    lost.model.load_state_dict(base.state_dict())
    status, rows = verdicts(serve(Engine(lost)), "--reference", str(reference))
    assert (status, rows[0]["verdict"]) == (1, "different")


def test_a_reference_file_is_small_and_made_from_its_text(
    untrained: Path, untrained_computer: Computer, reference: Path, serve: Serve, tmp_path: Path
) -> None:
    assert reference.stat().st_size < 20_000
    text, own = tmp_path / "text.txt", tmp_path / "own.json"
    text.write_text("Some other words are here. " * 400)
    assert check("--write-reference", str(untrained), "--reference", str(own), "--text", str(text)) == 0
    engine = Engine(untrained_computer)
    _, rows = verdicts(serve(engine), "--reference", str(own))
    assert all(row["agreed"] == 16 for row in rows)
    prompt = engine.asked[2]["prompt"]
    assert prompt.startswith("The code of Laura is 25473.\n")
    assert "\nSome other words are here.\nThe code of Helen is 76299.\n Some other words are here.\n" in prompt
    assert prompt.endswith("\nWhat is the code of Helen? The code of Helen is")


def test_a_merged_folder_contains_its_reference(untrained: Path, untrained_computer: Computer, serve: Serve) -> None:
    _, rows = verdicts(serve(Engine(untrained_computer)), "--reference", str(untrained / "server_reference.json"))
    assert all(row["agreed"] == 16 and row["difference"] < 1e-4 for row in rows)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["127.0.0.1:9", "MODEL"], "http://127.0.0.1:9: "),
        (["http://local host:8000", "MODEL"], "http://local host:8000: "),
        (["http://localhost:abc", "MODEL"], "http://localhost:abc: "),
        (["http://[::1", "MODEL"], "http://[::1: "),
        (["http://127.0.0.1:9"], "check-server: "),
        (["SERVER", "MODEL", "--text", "short.txt"], "--text: "),
    ],
)
def test_mistakes_in_check_server_are_one_line(
    words: list[str],
    where: str,
    computer: Computer,
    untrained: Path,
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("Too short.")
    named = {"MODEL": str(untrained), "SERVER": serve(Engine(computer))}
    status, out, err = run_captured(capsys, monkeypatch, "check-server", *(named.get(word, word) for word in words))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(where)
