"""`check-server` against a small server that computes a model with transformers and answers as engines do."""

import io
import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pi_lora import cli
from pi_lora.api import load, merge
from pi_lora.errors import PiLoraError
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.serving.check import Completion, Server, Verdict, _compare, _doubt, _judge, verdicts_table
from pi_lora.serving.reference import CODES, DEPTHS, NAMES, Answer, Prompt, Reader, Reference

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
    those that it lists; None of an engine that has no list.
    """

    def __init__(
        self,
        computer: Computer,
        window: int = 10_000,
        cut: Callable[[Ids], Ids] = whole,
        form: str = "vllm",
        count: str | None = "cut",
        miscount: int = 0,
        models: tuple[str, ...] | None = ("served",),
    ):
        self.computer, self.window, self.cut, self.form = computer, window, cut, form
        self.count, self.miscount, self.models = count, miscount, models
        self.asked: list[Json] = []
        self.keys: list[str | None] = []

    def complete(self, body: Json) -> tuple[int, Json]:
        """Status and answer. Engines of the form `mlx` take `logprobs: true` alone, those of `text` none."""
        self.asked.append(body)
        asked = body.get("logprobs")
        if (self.form == "mlx" and asked is not None and asked is not True) or (self.form == "text" and asked):
            return 400, {"error": "logprobs must be a boolean"}
        tokenizer = self.computer.tokenizer
        sent = tokenizer(body["prompt"])["input_ids"]
        if len(sent) + body["max_tokens"] > self.window:
            return 400, {"error": {"message": f"maximum context length is {self.window} tokens", "code": 400}}
        ids = self.cut(sent)
        # As engines that take a penalty from the model's generation config, under either name.
        penalty_key = "repeat_penalty" if self.form == "llama.cpp" else "repetition_penalty"
        new, logprobs = self.computer.answers(tuple(ids), body["max_tokens"], body.get(penalty_key, 2.0))
        text = tokenizer.decode(ids + new, skip_special_tokens=True)
        choice: Json = {"text": text[len(tokenizer.decode(ids, skip_special_tokens=True)) :], "index": 0}
        if self.form == "vllm" and asked:
            choice["logprobs"] = {"tokens": [""] * len(new), "token_logprobs": logprobs}
        elif self.form != "text" and asked:
            choice["logprobs"] = {"content": [{"id": i, "logprob": p} for i, p in zip(new, logprobs, strict=True)]}
        content: Json = {"choices": [choice]}
        if self.count:
            counted = ids if self.count == "cut" else sent
            content["usage"] = {"prompt_tokens": len(counted) - self.miscount, "completion_tokens": len(new)}
        return 200, content


Serve = Callable[[Engine], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with an engine; returns its address."""
    servers = []

    def start(engine: Engine) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listed = {"data": [{"id": name} for name in engine.models or ()]}
                self.say(404 if engine.models is None else 200, listed)

            def do_POST(self) -> None:
                engine.keys.append(self.headers["Authorization"])
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
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, which finds codes, in a window of 512 tokens instead of 1,024: L = 128, scaled by 4."""
    folder = merge(DEMO, tmp_path_factory.mktemp("served") / "demo", dtype="float32").folder
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "max_position_embeddings": 128}))
    return folder


@pytest.fixture(scope="module")
def computer(demo: Path) -> Computer:
    return Computer(demo)


@pytest.fixture(scope="module")
def reference(demo: Path) -> Path:
    file = demo.parent / "reference.json"
    check("--write-reference", str(demo), "--reference", str(file))
    return file


@pytest.fixture(scope="module")
def untrained(lora_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """L = 64, L' = 128."""
    return merge(lora_run, tmp_path_factory.mktemp("served") / "untrained").folder


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
    for cut, served, is_said in ((last(50), (), True), (last(50), ("--served", "pi"), False), (whole, (), False)):
        url = serve(Engine(computer, cut=cut, models=("base", "pi")))
        check(url, "--reference", str(reference), *served)
        said = f"{url}: has several models, and chose one; name one with --served: base, pi"
        assert (said in capsys.readouterr().err) == is_said


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


@pytest.mark.parametrize(("margin", "distance"), [(0.45, 0.0), (0.55, inf)])
def test_rounding_decides_between_tokens_that_are_half_a_nat_apart(margin: float, distance: float) -> None:
    computed = Answer(text="a b c", ends=[1, 3, 5], logprobs=[-1.0] * 3, margins=[9.0, 9.0, margin])
    assert _compare(computed, Completion("a b d", None, [-1.0] * 3)) == (distance, 2)


def test_the_difference_is_the_mean_over_equal_tokens(computer: Computer) -> None:
    computed = Answer(text="a b c", ends=[1, 3, 5], logprobs=[-1.0, -2.0, -3.0], margins=[9.0, 9.0, 0.1])
    assert _compare(computed, Completion("a b d", None, [-1.5, -1.0, -9.0])) == (0.75, 2)


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
    assert {row["detail"] for row in rows} == {
        "the text is right, but log probabilities are missing; start the server so that it gives them"
    }


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
    assert rows[0]["detail"] == f"it saw only {rows[0]['tokens'] - 6} tokens; start it with a window of 512"


@pytest.mark.parametrize("cut", [whole, last(50), last(95), both_ends(50)])
def test_an_untrained_model_is_unclear(cut: Callable[[Ids], Ids], untrained: Path, serve: Serve) -> None:
    url = serve(Engine(Computer(untrained), cut=cut, count="sent"))
    status, rows = verdicts(url, str(untrained))
    found = [row["verdict"] for row in rows]
    assert status == 1
    assert "right" not in found
    if cut is whole:
        assert found == ["unclear"] * 5
        assert "the model does not find the code" in rows[0]["detail"]


def test_a_run_is_checked_with_its_scaling(lora_run: Path, untrained: Path, serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    check(serve(Engine(Computer(untrained))), str(lora_run), "--json", str(file))
    rows = json.loads(file.read_text())["prompts"]
    assert all(row["agreed"] == 16 and row["difference"] < 1e-4 for row in rows)


@pytest.mark.parametrize("form", ["vllm", "mlx"])
def test_a_server_that_drops_the_scaling_is_detected(form: str, demo: Path, reference: Path, serve: Serve) -> None:
    url = serve(Engine(Computer(demo, scaled=False), form=form))
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


def test_a_near_tie_ends_the_comparison(computer: Computer, reference: Path, serve: Serve, tmp_path: Path) -> None:
    """Two equal tokens before it are too few."""
    file = tmp_path / "reference.json"
    tied = Reference.model_validate_json(reference.read_text())
    for prompt in tied.prompts:
        answer = prompt.answers["right"]
        answer.text = answer.text[: answer.ends[1]] + "?" + answer.text[answer.ends[1] + 1 :]
        answer.margins[2] = 0.1
    file.write_text(tied.model_dump_json())
    status, rows = verdicts(serve(Engine(computer)), "--reference", str(file))
    assert (status, [row["verdict"] for row in rows]) == (1, ["unclear"] * 5)
    assert all(row["agreed"] == 2 for row in rows)


@pytest.mark.parametrize(("codes", "doubt"), [(1, ""), (4, "only 5 tokens can be compared; try another --text")])
def test_a_near_tie_ahead_of_the_code_is_unclear_in_long_prompts(codes: int, doubt: str) -> None:
    computed = Answer(text=": A) 25473", ends=[1, 3, 4, 5, 10], logprobs=[-1.0] * 5, margins=[9.0] * 5)
    prompt = Prompt(characters=0, code_starts=[0] * codes, answers={"right": computed})
    assert _doubt(prompt, Completion(": A) the", None, [-1.0] * 5), 5, ambiguous=False) == doubt


@pytest.mark.parametrize(("agreed", "doubt"), [(2, "only 2 tokens can be compared; try another --text"), (3, "")])
def test_a_code_of_three_tokens_is_enough_proof(agreed: int, doubt: str) -> None:
    """Else a right server of a tokenizer with whole numbers, a blank and two halves of a code, would never pass."""
    computed = Answer(text=" 25473", ends=[1, 4, 6], logprobs=[-1.0] * 3, margins=[9.0] * 3)
    prompt = Prompt(characters=0, code_starts=[0] * 4, answers={"right": computed})
    assert _doubt(prompt, Completion(" 25473", None, [-1.0] * 3), agreed, ambiguous=False) == doubt


@pytest.mark.parametrize(("margin", "verdict"), [(0.1, "unclear"), (9.0, "unscaled")])
def test_a_near_tie_is_no_proof_that_a_server_is_unscaled(margin: float, verdict: str) -> None:
    """A right server that takes the second choice may go on as the model without its scaling does."""
    right = Answer(text=" 25473", ends=[1, 2, 4, 6], logprobs=[-1.0] * 4, margins=[9.0, margin, 9.0, 9.0])
    unscaled = Answer(text=" 11111", ends=[1, 2, 4, 6], logprobs=[-1.0] * 4, margins=[9.0] * 4)
    prompt = Prompt(characters=0, code_starts=[0] * 4, tokens=900, answers={"right": right, "unscaled": unscaled})
    reference = Reference(model="m", original=256, target=1024, own_text="", prompts=[prompt])
    assert _judge(reference, prompt, Completion(" 11111", 900, [-1.0] * 4), 0.1).verdict == verdict
    assert _judge(reference, prompt, Completion(" 25473", 900, [-1.0] * 4), 0.1).verdict == "right"


@pytest.mark.parametrize(
    ("margin", "equal", "verdict"), [(0.1, 2, "unclear"), (0.1, 3, "different"), (9.0, 2, "different")]
)
def test_few_tokens_before_a_near_tie_do_not_prove_another_model(margin: float, equal: int, verdict: str) -> None:
    """In bfloat16, a right server of a mixture of experts gave one token by 0.11 nats another log probability."""
    margins = [9.0] * 4
    margins[equal] = margin
    right = Answer(text=" 25473", ends=[1, 2, 4, 6], logprobs=[-1.0] * 4, margins=margins)
    prompt = Prompt(characters=0, code_starts=[0], tokens=100, answers={"right": right})
    reference = Reference(model="m", original=256, target=1024, own_text="", prompts=[prompt])
    text = right.text[: right.ends[equal - 1]] + "9999"
    assert _judge(reference, prompt, Completion(text, 100, [-1.2] * 4), 0.1).verdict == verdict


def test_no_code_holds_the_digits_that_identify_another() -> None:
    assert len(NAMES) == len(CODES) == 4
    assert all(code[:2] not in other for code in CODES for other in CODES if code != other)


@pytest.mark.parametrize(
    ("text", "agreed"), [(" ship is", 2), ("ship is", 2), ("ship is red", 2), ("ships", 1), ("boat", 0)]
)
def test_a_server_may_leave_out_the_space_that_an_answer_begins_with(text: str, agreed: int) -> None:
    computed = Answer(text=" ship is", ends=[5, 8], logprobs=[-1.0, -1.0], margins=[9.0, 9.0])
    distance, equal = _compare(computed, Completion(text, None, [-1.0, -1.0]))
    assert (equal, distance) == (agreed, 0.0 if agreed == 2 else inf)


@pytest.mark.parametrize(
    ("text", "follows"),
    [("", False), (" ship", False), (" ship is", True), (" ship is\n", True), (" sh\ufffd", True), (" shop", False)],
)
def test_a_server_that_ends_earlier_gives_another_answer(text: str, follows: bool) -> None:
    """A model without its scaling may end at once; servers cut characters and spaces at the end of an answer."""
    computed = Answer(text=" ship is\n", ends=[5, 8, 9], logprobs=[-1.0] * 3, margins=[9.0] * 3)
    distance, _ = _compare(computed, Completion(text, None, []))
    assert distance == (0 if follows else inf)


def test_an_answer_ends_where_servers_stop(demo: Path, reference: Path) -> None:
    reader = Reader(load(str(demo), dtype="float32"))
    read = Reference.model_validate_json(reference.read_text())
    text = read.text(read.prompts[-1])
    whole_answer = reader.answer(text)
    tokenizer = reader.loaded.tokenizer
    prompt_tokens = len(tokenizer(text)["input_ids"])
    # An answer to the same prompt begins with the same tokens.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(reader.ids[prompt_tokens + 3])
    answer = reader.answer(text)
    assert len(answer.ends) == len(answer.logprobs) == 4
    assert whole_answer.text.startswith(answer.text)
    assert _compare(answer, Completion(answer.text, None, answer.logprobs)) == (0.0, 4)


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
    assert refusal.startswith("it does not answer as the API of completions does: ")


@pytest.mark.parametrize("listed", [{"data": None}, [{"id": "served"}], {"data": [{"name": "served"}]}, "<html>"])
def test_a_list_of_models_in_another_form_names_none(listed: Any, computer: Computer, serve: Serve) -> None:
    engine = Engine(computer)
    url = serve(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "_call", lambda *_: listed)
        server = Server(url)
    assert isinstance(server.complete("The code"), Completion)
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
    assert "log probabilities are missing" in rows[0]["detail"]


@pytest.mark.parametrize("text", [" ship", " ship\ufffd", " ship is"])
def test_an_answer_that_ends_inside_a_character_is_compared_to_there(text: str) -> None:
    computed = Answer(text=" ship\ufffd", ends=[5, 5], logprobs=[-1.0] * 2, margins=[9.0] * 2)
    assert _compare(computed, Completion(text, None, [-1.5] * 2)) == (0.5, 2)


def test_a_server_that_dies_between_two_prompts_is_one_line(computer: Computer, serve: Serve) -> None:
    class Dying(Engine):
        def complete(self, body: Json) -> tuple[int, Json]:
            raise ConnectionAbortedError

    server = Server(serve(Dying(computer)))
    with pytest.raises(PiLoraError, match=r"cannot be reached \(.*\); start the server"):
        server.complete("The code")


def test_another_model_fails_the_check(demo: Path, reference: Path, serve: Serve) -> None:
    """The base with the scaling, as a server that lost the adapter."""
    lost = Computer(demo)
    base = AutoModelForCausalLM.from_pretrained(BUILTIN_FOLDER / "tiny", dtype=torch.float32)
    lost.model.load_state_dict(base.state_dict())
    status, rows = verdicts(serve(Engine(lost)), "--reference", str(reference))
    assert (status, rows[0]["verdict"]) == (1, "different")


def test_a_reference_file_is_small_and_made_from_its_text(
    computer: Computer, demo: Path, reference: Path, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reference.stat().st_size < 20_000
    text, own = tmp_path / "text.txt", tmp_path / "own.json"
    text.write_text("Some other words are here. " * 400)
    assert check("--write-reference", str(demo), "--reference", str(own), "--text", str(text)) == 0
    engine = Engine(computer)
    _, rows = verdicts(serve(engine), "--reference", str(own))
    assert all(row["agreed"] == 16 for row in rows)
    assert engine.asked[0]["prompt"].startswith("The code of Laura is 25473.\nSome other words are here. Some")
    assert engine.asked[2]["prompt"].endswith("\nWhat is the code of Helen? The code of Helen is")
    text.write_text("Too short.")
    command = ["pi-lora", "check-server", serve(engine), str(demo), "--text", str(text)]
    assert mistake(command, capsys).startswith("--text: has fewer than 3")


def test_a_merged_folder_contains_its_reference(lora_run: Path, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    words = ["merge", str(lora_run), "--reference", "--output", str(folder)]
    cli.app(words, exit_on_error=False, result_action="return_value")
    _, rows = verdicts(serve(Engine(Computer(folder))), "--reference", str(folder / "server_reference.json"))
    assert all(row["agreed"] == 16 and row["difference"] < 1e-4 for row in rows)


def mistake(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_mistakes_in_check_server_are_one_line(
    untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pi-lora", "check-server"]
    said = mistake([*command, "127.0.0.1:9", str(untrained)], capsys)
    assert said.startswith("http://127.0.0.1:9: cannot be reached ([Errno 111] Connection refused); start the server")
    for url in ("http://local host:8000", "http://localhost:abc", "http://[::1"):
        assert "cannot be reached (" in mistake([*command, url, str(untrained)], capsys)
    assert "URL MODEL, URL --reference FILE, or" in mistake([*command, "http://127.0.0.1:9"], capsys)
