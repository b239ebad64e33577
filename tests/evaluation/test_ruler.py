import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from test_cli import run

from pi_lora.errors import DataError, Interrupted, PiLoraError
from pi_lora.evaluation.results import RulerScores, RulerTask, read_scores, write_scores
from pi_lora.evaluation.suite import MEASUREMENTS, check_has_lm_eval
from pi_lora.models.model import Model, load
from pi_lora.recipe.evaluation import RulerOptions
from pi_lora.types import silent

wonderwords = pytest.importorskip("wonderwords", reason="RULER of lm-eval draws its words from it")

from pi_lora.evaluation.ruler import measure, prompts  # noqa: E402
from pi_lora.evaluation.ruler.effective import effective_length, mean_of, relative_to, side_by_side  # noqa: E402
from pi_lora.evaluation.ruler.measure import evaluate_ruler  # noqa: E402
from pi_lora.evaluation.ruler.prompts import ESSAYS, FOLDER, QUESTIONS, TASKS, Asked, find_texts, fitted  # noqa: E402
from pi_lora.evaluation.ruler.table import ruler_figure, ruler_table  # noqa: E402

OFFLINE = [name for name in TASKS if name not in ESSAYS and name not in QUESTIONS]
WINDOW, SAMPLES, SEED = 1280, 3, 5
PREPARED = "lm_eval.tasks.ruler.prepare_niah"
SENTENCE = "The road over the hill was long, and the rain did not end before we saw the lights of the town. "


@pytest.fixture(scope="module", autouse=True)
def few_words() -> Iterator[None]:
    """lm-eval sorts six million pairs of words when it is imported: for 8 seconds, in 800 MB."""

    class Few(wonderwords.RandomWord):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self._categories = {name: words[:150] for name, words in self._categories.items()}

    def forget() -> None:
        prompts._niah.cache_clear()
        for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler")]:
            del sys.modules[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", Few)
        forget()
        yield
    forget()


@pytest.fixture(scope="module")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "essays.txt"
    file.write_text("\n".join(f"{number}. {SENTENCE}" for number in range(200)))
    return file


@pytest.fixture(scope="module")
def small(small_model: Path) -> Model:
    return load(str(small_model))


@pytest.fixture(scope="module")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions in the format of SQuAD 2.0, some of which have no answer."""
    paragraphs = [
        {
            "context": f"The town number {number} lies on the river {number * 7}. " * 3,
            "qas": [
                {"question": f"On which river lies {number}?", "is_impossible": False, "answers": [{"text": f"{n}"}]}
                for n in (number * 7, "the river")
            ]
            + [{"question": "Why?", "is_impossible": True, "answers": []}],
        }
        for number in range(1, 12)
    ]
    file = tmp_path_factory.mktemp("squad") / "dev-v2.0.json"
    file.write_text(json.dumps({"data": [{"paragraphs": paragraphs[:6]}, {"paragraphs": paragraphs[6:]}]}))
    return file


def solve(prompt: str) -> list[str]:
    """What is asked for in a prompt, as far as the prompt holds it."""
    if asked := re.search(r"special magic \w+ for (.+) mentioned in the provided text\?", prompt):
        keys = re.split(r", and |, ", asked[1])
        return [value for key in keys for value in re.findall(rf"for {re.escape(key)} is: (.+?)\.", prompt)]
    if asked := re.search(r".*assigned the value (\d+) in the text above\.", prompt, re.DOTALL):
        context = prompt[prompt.rfind("Memorize and track") :]
        found = re.findall(rf"VAR (\w+) = {asked[1]}", context)
        for name in found:
            found += re.findall(rf"VAR (\w+) = VAR {name}\b", context)
        return list(found)
    if "numbered list of words" in prompt:
        return [word for word, _ in Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", prompt)).most_common(10)]
    if "coded word" in prompt:
        context = prompt[prompt.find("coded words. ") : prompt.find("\nQuestion")]
        counts = Counter(word for word in context.split()[2:] if "." not in word)
        return [word for word, _ in counts.most_common(3)]
    if found := re.search(r"On which river lies (\d+)\?", prompt):
        return re.findall(rf"number {found[1]} lies on the river (\d+)\.", prompt)[:1]
    return []


def knowing(loaded: Model, patch: pytest.MonkeyPatch, known: Callable[[list[str]], list[str]]) -> None:
    """Let a model write what it knows of the answers."""

    def generate(input_ids: torch.Tensor, max_length: int, **_: Any) -> torch.Tensor:
        texts = [" ".join(known(solve(each))) for each in loaded.tokenizer.batch_decode(input_ids, True)]
        written = [loaded.tokenizer(f" {text}")["input_ids"][: max_length - input_ids.shape[1]] for text in texts]
        width = max(map(len, written))
        end = loaded.tokenizer.eos_token_id
        return torch.cat([input_ids, torch.tensor([[*row, *[end] * (width - len(row))] for row in written])], dim=1)

    patch.setattr(loaded.model, "generate", generate)


def half(answers: list[str]) -> list[str]:
    """Some of the answers, of some prompts all and of some none."""
    return answers[: random.Random("".join(answers)).randint(0, len(answers))]


def theirs(
    loaded: Model, patch: pytest.MonkeyPatch, name: str, length: int, window: int, whole: bool, essays: Path
) -> tuple[float, list[float]]:
    """What lm-eval gives a model for a task, and each sample of it; `whole` makes all 500 samples, as it does."""

    def first(numbers: Iterable[Any], **_: Any) -> Iterable[Any]:
        return islice(numbers, SAMPLES) if isinstance(numbers, range) else numbers

    with patch.context() as changed:
        changed.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
        # As a new process has them; the module of needles keeps no state.
        for module in [each for each in sys.modules if each.startswith("lm_eval.tasks.ruler") and each != PREPARED]:
            changed.delitem(sys.modules, module)
        niah = prompts._niah()
        if not whole:
            changed.setattr("tqdm.tqdm", first)
            changed.setattr(niah, "tqdm", first)
        if name in ESSAYS:
            words = re.sub(r"\s+", " ", essays.read_text().strip()).split(" ")
            changed.setattr(niah, "get_haystack", lambda type_haystack: words)
        metadata: dict[str, Any] = {"max_seq_lengths": [length], "tokenizer": loaded.path}
        tasks = lm_eval.tasks.TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)
        model = HFLM(loaded.model, tokenizer=load(loaded.name).tokenizer, max_length=window, batch_size=2)
        found = simple_evaluate(
            model, tasks=[name], task_manager=tasks, limit=SAMPLES, random_seed=SEED, numpy_random_seed=1234 + SEED
        )
    assert found is not None
    return found["results"][name][f"{length},none"], [each[str(length)] for each in found["samples"][name]]


def ours(loaded: Model, asked: Asked, window: int = WINDOW, **options: Any) -> dict[str, RulerTask]:
    return evaluate_ruler(loaded, asked, [window], SAMPLES, SEED, batch_size=2, **options).lengths[0].tasks


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*OFFLINE, "niah_multiquery"])
def test_scores_are_lm_evals(
    small: Model, haystack: Path, monkeypatch: pytest.MonkeyPatch, name: str, whole: bool
) -> None:
    """Of a random model, of one that knows half of the answers, and of one that knows all but cannot read the whole."""
    asked, window = find_texts([name], haystack), 2048 if name in ESSAYS else WINDOW  # words come in steps of 500
    found = ours(small, asked, window)[name]

    def lm_evals(window: int) -> tuple[float, list[float]]:
        return theirs(small, monkeypatch, name, found.length, window, whole, haystack)

    assert (found.score, found.outcomes) == lm_evals(window)
    knowing(small, monkeypatch, half)
    partly = ours(small, asked, window)[name]
    assert (partly.score, partly.outcomes) == lm_evals(window)
    assert 0 < partly.score < 1
    knowing(small, monkeypatch, list)
    assert ours(small, asked, window)[name].score == 1
    assert lm_evals(window // 2)[0] < 1


def test_only_needles_take_the_time_of_lm_evals_module_of_needles(
    small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, PREPARED, raising=False)
    evaluate_ruler(small, find_texts(["ruler_fwe"]), [WINDOW], 1)
    assert PREPARED not in sys.modules
    assert [prompts._definition(f"{name.removeprefix('ruler_')}.yaml")["task"] for name in TASKS] == list(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_fill_the_window_and_hold_their_answers(small: Model, haystack: Path, squad: Path, name: str) -> None:
    tokenizer, window = small.tokenizer, 2048 if name in ESSAYS else WINDOW
    if name == "ruler_qa_hotpot":
        pytest.skip("as ruler_qa_squad, from another file")
    asked = find_texts([name], haystack, [f"{name}={squad}"] if name in QUESTIONS else ())

    def length(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    def made(window: int, seed: int) -> tuple[list[str], int, int]:
        random.seed(seed), np.random.seed(seed)
        found = fitted(name, window, 4, seed, asked, tokenizer, length)
        return [request.args[0] for request in found.task.instances], found.length, found.tokens

    first, lm_evals, tokens = made(window, 0)
    assert len(first) == 4
    assert window / 2 <= tokens <= window
    assert lm_evals <= window
    assert max(map(length, first)) <= tokens - 30
    assert made(window, 0) == (first, lm_evals, tokens)
    assert made(window, 1)[0] != first or name in QUESTIONS  # of which all documents are in every prompt
    assert all(solve(prompt) for prompt in first)


def test_a_prompt_that_would_be_cut_is_refused(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_length", lambda answering, text: 0)
    with pytest.raises(DataError, match="ruler_fwe has no prompts between 50 and"):
        ours(small, find_texts(["ruler_fwe"]))
    monkeypatch.setattr(measure, "_length", lambda answering, text: 1024 - 50)
    with pytest.raises(DataError, match=r"ruler_fwe: [1-3] prompts do not fit 1024 tokens; choose longer --windows"):
        evaluate_ruler(small, find_texts(["ruler_fwe"]), [1024], SAMPLES)


@pytest.mark.parametrize(
    ("name", "window", "line"),
    [
        ("niah_single_1", 150, "--windows: 150 tokens do not hold niah_single_1 .*Could not generate any sample"),
        (
            "niah_single_2",
            1024,
            r"--windows: niah_single_2 has no prompts between \d+ and 1024 tokens; choose a longer",
        ),
        ("ruler_vt", 900, r"--windows: 900 tokens do not hold ruler_vt \(it needs about \d+\); choose a longer one"),
        ("ruler_cwe", 600, r"--windows: 600 tokens do not hold ruler_cwe \(it needs about"),
        ("ruler_fwe", 100, r"--windows: 100 tokens do not hold ruler_fwe \(it needs about"),
        ("niah_single_2", 50_000, r"--haystack: has \d,\d\d\d tokens, and a window 50,000; give a longer text"),
    ],
)
def test_a_window_that_holds_no_prompt_is_refused(
    small: Model, haystack: Path, name: str, window: int, line: str
) -> None:
    with pytest.raises(DataError, match=f"^{line}"):
        evaluate_ruler(small, find_texts([name], haystack), [window], 2)


def test_an_example_longer_than_its_500_tokens_is_refused(small: Model) -> None:
    """lm-eval would look for a shorter one forever."""

    def letters(text: str, **_: Any) -> Any:
        return {"input_ids": list(text)}

    with pytest.raises(DataError, match="ruler_vt: its example does not fit 500 tokens of this tokenizer"):
        fitted("ruler_vt", 4096, 1, 0, find_texts(["ruler_vt"]), letters, len)


def test_without_texts_tasks_are_named_and_left_out(haystack: Path, squad: Path, tmp_path: Path) -> None:
    asked = find_texts(TASKS)
    assert list(asked.tasks) == OFFLINE
    assert set(asked.left_out) == {*ESSAYS, *QUESTIONS}
    assert "give a text with --haystack FILE" in asked.left_out["niah_single_2"]
    assert "(HF_HUB_OFFLINE is set); give its file with --data ruler_qa_squad=FILE" in asked.left_out["ruler_qa_squad"]
    asked = find_texts(TASKS, haystack, [f"ruler_qa_squad={squad}"])
    assert list(asked.left_out) == ["ruler_qa_hotpot"]
    assert asked.sources == {"essays": str(haystack), "ruler_qa_squad": str(squad)}
    with pytest.raises(DataError, match="--tasks: niah_single_2: no essays from the hub"):
        find_texts(["niah_single_2"])
    with pytest.raises(DataError, match=r"--tasks: niah_singel_1: no task of RULER .* did you mean niah_single_1 or"):
        find_texts(["niah_singel_1"])
    for given in (f"niah_single_1={squad}", str(squad), f"ruler_qa_hotpot={squad}"):
        with pytest.raises(DataError, match=r"^--data: .*: is not TASK=FILE; TASK is one that is asked for of ruler_"):
            find_texts(["niah_single_1", "ruler_qa_squad"], None, [given])
    (tmp_path / "wrong.json").write_text('{"data": [{"titles": []}]}')
    with pytest.raises(DataError, match=r"wrong\.json: is not ruler_qa_squad as its authors publish it \('paragraphs'"):
        find_texts(["ruler_qa_squad"], None, [f"ruler_qa_squad={tmp_path / 'wrong.json'}"])
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read as UTF-8 text"):
        find_texts(["niah_single_2"], tmp_path / "gone.txt")


def test_an_interrupted_measurement_goes_on(small: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path))
    knowing(small, monkeypatch, half)
    asked = find_texts(["niah_single_1", "ruler_fwe"])
    at: list[tuple[int, int, str]] = []
    whole = ours(small, asked, progress=lambda done, total, note="": at.append((done, total, note)))
    assert [each[:2] for each in at] == [(1, 6), (3, 6), (4, 6), (6, 6)]
    assert at[-1][2] == f"ruler_fwe at 1,280: {whole['ruler_fwe'].score:.0%}"
    written = 0
    generate = HFLM._model_generate

    def interrupted(self: HFLM, *arguments: Any, **others: Any) -> torch.Tensor:
        nonlocal written
        written += 1
        if written == 3:
            raise KeyboardInterrupt
        return generate(self, *arguments, **others)

    monkeypatch.setattr(HFLM, "_model_generate", interrupted)
    with pytest.raises(Interrupted, match="interrupted after 2 batches; the same command goes on from there"):
        ours(small, asked)
    assert ours(small, asked) == whole
    assert written == 3 + 2
    assert not list(tmp_path.glob("evaluations/*"))


def test_a_recipe_may_ask_for_it(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    knowing(small, monkeypatch, list)
    asked = RulerOptions(windows=(1024, 768), tasks=("ruler_fwe",), samples=2, chat_template=False)
    scores = MEASUREMENTS["ruler"].prepare(asked)(small, silent)
    assert isinstance(scores, RulerScores)
    assert [each.window for each in scores.lengths] == [768, 1024]
    assert (scores.effective_length, scores.lengths[1].score, scores.relative) == (1024, 1.0, None)


def test_chats_fit_the_window_too(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        small.tokenizer,
        "chat_template",
        "{% for each in messages %}[{{ each.role }}]{{ each.content }}{{ eos_token }}{% endfor %}",
        raising=False,
    )
    knowing(small, monkeypatch, list)
    ends: list[bool] = []
    generate = HFLM._model_generate

    def seen(self: HFLM, context: torch.Tensor, *arguments: Any, **others: Any) -> torch.Tensor:
        ends.extend((row == self.tokenizer.eos_token_id).any().item() for row in context)
        return generate(self, context, *arguments, **others)

    monkeypatch.setattr(HFLM, "_model_generate", seen)
    asked = find_texts(["ruler_fwe"])
    plain, chats = (
        evaluate_ruler(small, asked, [1024], 2, batch_size=1, chat_template=each).lengths[0].tasks["ruler_fwe"]
        for each in (False, True)
    )
    assert chats.score == 1
    assert chats.length < plain.length
    assert chats.tokens <= 1024
    # Special tokens of the template are what they stand for.
    assert ends == [False, False, True, True]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wonderwords" else name)
    check_has_lm_eval("benchmarks")
    with pytest.raises(PiLoraError, match=r"eval ruler: needs the package wonderwords; pip install 'pi-lora\[eval\]'"):
        check_has_lm_eval("ruler")


def scored(model: str, window: int, means: dict[int, float], names: Iterable[str] = ("a", "b")) -> RulerScores:
    """Made-up scores: of the first task a tenth more than the mean, of the second a tenth less."""
    lengths = []
    for length, mean in means.items():
        each = {
            name: RulerTask(score=mean + change, stderr=0.03, samples=10, length=length, tokens=length)
            for name, change in zip(names, (0.1, -0.1), strict=True)
        }
        lengths.append(mean_of(length, each))
    facts: dict[str, Any] = {"samples": 10, "dtype": "float32", "lm_eval": "0", "left_out": {"c": "no text"}}
    found = effective_length(lengths)
    return RulerScores(model=model, window=window, scale=1.0, lengths=lengths, effective_length=found, **facts)


def test_the_effective_length_is_the_last_before_the_first_that_fails() -> None:
    means = {1024: 0.89, 2048: 0.857, 4096: 0.8, 8192: 0.89}
    found = scored("m", 4096, means)
    assert found.effective_length == 2048
    assert effective_length(list(reversed(found.lengths))) == 2048
    assert effective_length(found.lengths, 0.9) == 0
    assert found.lengths[0].stderr == pytest.approx(0.03 / 2**0.5)


def test_the_relative_length_is_of_the_base_inside_its_own_window(tmp_path: Path) -> None:
    base = scored("base", 2048, {1024: 0.7, 2048: 0.6, 4096: 0.1})
    run_ = scored("run", 4096, {1024: 0.65, 2048: 0.575, 4096: 0.5})
    own, other = side_by_side([base, run_])
    assert own.relative is not None
    assert other.relative is not None
    assert (own.relative.window, own.relative.score, own.relative.effective_length) == (2048, 0.6, 2048)
    assert (other.relative.base, other.relative.effective_length) == ("base", 2048)
    assert other.effective_length == 0
    assert relative_to(scored("base", 512, {1024: 0.7}), run_) == run_
    nothing = [each.model_copy(update={"score": 0.0}) for each in base.lengths]
    assert relative_to(base.model_copy(update={"lengths": nothing}), run_) == run_
    assert relative_to(scored("base", 2048, {2048: 0.7}, ("a", "c")), run_) == run_
    write_scores(other, tmp_path / "ruler.json")
    assert read_scores(tmp_path / "ruler.json") == other


def test_the_table_and_the_picture_show_every_model(tmp_path: Path) -> None:
    models = side_by_side([scored("base", 2048, {1024: 0.7, 2048: 0.6}), scored("run", 4096, {2048: 0.575, 4096: 0.5})])
    table = ruler_table(*models)
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["a", "", "b", "", "mean", ""]
    assert columns[1] == ["base", "run"] * 3
    assert columns[3] == ["70.0", "67.5", "50.0", "47.5", "60.0 ± 4.2", "57.5 ± 4.2"]
    assert columns[4][-2:] == ["", "50.0 ± 4.2"]
    assert "run: effective length 0 (85.6%), 2,048 (95% of base's 60.0 at 2,048)" in str(table.caption)
    assert "2 of 13 tasks, left out for want of text: c; 10 samples a task and window, seed 0" in str(table.caption)
    alone = ruler_table(models[0])
    assert [column.header for column in alone.columns] == ["task", "1,024", "2,048"]
    figure = ruler_figure({scores.model: scores for scores in models})
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert titles == ["mean", "a", "b"]
    assert [list(line.get_ydata()) for line in figure.axes[1].lines] == [[80, 70], [67.5, 60]]


def test_the_command(
    small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(small_model)
    options = ("--windows", "768", "--tasks", "niah_single_2,ruler_fwe", "--samples", "2", "--plot", "ruler.png")
    status, out, err = run(capsys, monkeypatch, "eval", "ruler", "model", "builtin:tiny", *options, "--json", "r.json")
    assert status == 0
    assert err.startswith("niah_single_2: left out: no essays from the hub")
    assert "768 tokens are more than the 64 that model covers; measured anyway" in err
    assert "RULER in %" in out
    written = json.loads((tmp_path / "r.json").read_text())
    assert [each["model"] for each in written] == ["model", "builtin:tiny"]
    assert written[0]["lengths"][0]["tasks"]["ruler_fwe"]["samples"] == 2
    assert written[0]["left_out"].keys() == {"niah_single_2"}
    assert (tmp_path / "ruler.png").read_bytes().startswith(b"\x89PNG")
    status, out, err = run(capsys, monkeypatch, "eval", "ruler", "model", "--tasks", "ruler")
    assert (status, out) == (2, "")
    assert err.startswith("--tasks: ruler: no task of RULER in lm-eval")
