"""RULER: the prompts and scores of lm-eval, tasks that fit the window, and the command."""

import json
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
import tqdm
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from conftest import refused, run_captured, small_recipe
from pi_lora.api import load
from pi_lora.errors import DataError, RecipeError
from pi_lora.evaluation import harness
from pi_lora.evaluation.harness import (
    ESSAYS,
    QUESTIONS,
    RULER,
    RULER_TASKS,
    WORDS_MODULE,
    RankedLM,
    ruler_task,
    save_tokenizer,
)
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.ruler import Ruler, RulerTask
from pi_lora.models.loaded import LoadedModel
from pi_lora.preflight import check
from pi_lora.recipe.evaluation import RulerOptions

wonderwords = pytest.importorskip("wonderwords", reason="RULER of lm-eval draws its words from it")

OFFLINE = [name for name in RULER_TASKS if name not in (*ESSAYS, *QUESTIONS)]
WINDOW, SAMPLES, SEED = 1536, 3, 5
TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
# Prompts that lm-eval makes for a task, however few are asked for.
MADE = 500


@pytest.fixture(scope="module", autouse=True)
def few_words() -> Iterator[None]:
    """lm-eval sorts six million pairs of words when it is imported: for 8 seconds, in 800 MB."""
    read_all = wonderwords.RandomWord.__init__

    def read_few(self: Any) -> None:
        read_all(self)
        self._categories = {name: words[:150] for name, words in self._categories.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords.RandomWord, "__init__", read_few)
        yield
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler")]:
        del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def few_prompts() -> Iterator[None]:
    """lm-eval makes prompts in a loop with a bar, which ends after a few; the first are the same."""
    bar = tqdm.tqdm

    def of_few(*iterables: Any, **options: Any) -> Any:
        shorter = [each[: 3 * SAMPLES] if each == range(MADE) else each for each in iterables]
        return bar(*shorter, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "tqdm", of_few)
        yield


@pytest.fixture(scope="module")
def small(small_model: Path) -> LoadedModel:
    return load(str(small_model))


def options(*names: str, **others: Any) -> RulerOptions:
    settings = {"windows": (WINDOW,), "samples": SAMPLES, "seed": SEED, "batch_size": 2}
    return RulerOptions.model_validate({"tasks": names, **settings, **others})


def scored(model: LoadedModel, name: str, **others: Any) -> RulerTask:
    return Ruler().run(model, options(name, **others), Session()).lengths[0].tasks[name]


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
    return []


def knowing(model: LoadedModel, patch: pytest.MonkeyPatch, known: Callable[[list[str]], list[str]]) -> list[str]:
    """Let a model write what it knows of the answers; return the prompts that it will have been given."""
    given: list[str] = []

    def generate(input_ids: torch.Tensor, max_length: int, **_: Any) -> torch.Tensor:
        texts = model.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        given.extend(texts)
        answers = [model.tokenizer(f" {' '.join(known(solve(text)))}")["input_ids"] for text in texts]
        written = [row[: max_length - input_ids.shape[1]] for row in answers]
        width = max(map(len, written))
        end = model.tokenizer.eos_token_id
        return torch.cat([input_ids, torch.tensor([[*row, *[end] * (width - len(row))] for row in written])], dim=1)

    patch.setattr(model.module, "generate", generate)
    return given


def half(answers: list[str]) -> list[str]:
    """Some of the answers, of some prompts all and of some none."""
    return answers[: random.Random("".join(answers)).randint(0, len(answers))]


def theirs(model: LoadedModel, name: str, length: int, chat: bool = False) -> tuple[float, list[float]]:
    """What lm-eval gives a model for a task in a new process, and each sample of it."""
    sys.modules.pop(WORDS_MODULE, None)
    metadata: dict[str, Any] = {"max_seq_lengths": [length], "tokenizer": str(model.source.base.path)}
    tasks = lm_eval.tasks.TaskManager(include_path=RULER, include_defaults=False, metadata=metadata)
    tokenizer = load(model.name).tokenizer
    tokenizer.chat_template = model.tokenizer.chat_template
    lm = HFLM(model.module, tokenizer=tokenizer, max_length=WINDOW, batch_size=2)
    seeds = {"random_seed": SEED, "numpy_random_seed": 1234 + SEED, "apply_chat_template": chat}
    found: Any = simple_evaluate(lm, tasks=[name], task_manager=tasks, limit=SAMPLES, **seeds)
    return found["results"][name][f"{length},none"], [each[str(length)] for each in found["samples"][name]]


@pytest.mark.parametrize("name", OFFLINE)
def test_ruler_scores_equal_lm_evals(small: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a model that knows half of the answers, and of one that knows all; after the same prompts."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    given = knowing(small, monkeypatch, half)
    found = scored(small, name)
    assert (found.score, found.outcomes) == theirs(small, name, found.length)
    assert sorted(given[:SAMPLES]) == sorted(given[SAMPLES:])
    assert 0 < found.score < 1
    given = knowing(small, monkeypatch, list)
    whole = scored(small, name)
    assert whole.score == 1
    assert all(given)
    assert WINDOW / 2 <= whole.tokens <= WINDOW
    longest = max(len(small.tokenizer(prompt)["input_ids"]) for prompt in given)
    assert longest <= whole.tokens - 30  # room for what is generated


def test_in_a_chat_template_scores_equal_lm_evals(small: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the template are left to it: no prompt grows beyond the window."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    template = (TEMPLATES / "chatml.jinja").read_text().replace("<|im_end|>", str(small.tokenizer.eos_token))
    monkeypatch.setattr(small.tokenizer, "chat_template", template.replace("<|im_start|>", "A turn begins here. " * 20))
    given = knowing(small, monkeypatch, half)
    found = scored(small, "niah_single_1", chat=True)
    assert (found.score, found.outcomes) == theirs(small, "niah_single_1", found.length, chat=True)
    assert sorted(given[:SAMPLES]) == sorted(given[SAMPLES:])
    assert all("assistant\nThe special magic number" in prompt for prompt in given)
    assert WINDOW / 2 <= found.tokens <= WINDOW


def test_repeated_measurements_have_the_same_prompts(small: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = knowing(small, monkeypatch, list)
    for _ in range(2):
        Ruler().run(small, options("ruler_cwe", "niah_multikey_3"), Session())
    assert given[: len(given) // 2] == given[len(given) // 2 :]
    scored(small, "ruler_cwe", seed=1)
    assert given[-SAMPLES:] != given[:SAMPLES]


@pytest.mark.parametrize(
    ("name", "window", "reason"),
    [
        ("niah_single_1", 250, "Could not generate"),
        ("niah_single_2", 1536, ""),  # the essays are not on this machine
    ],
)
def test_tasks_whose_prompts_cannot_be_made_are_refused(
    small: LoadedModel, name: str, window: int, reason: str
) -> None:
    with refused(DataError, f"--tasks: {name} in {window} tokens: ", reason):
        scored(small, name, windows=(window,))


def test_a_prompt_that_does_not_fit_or_lacks_its_answer_is_refused(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_tokenizer(small.tokenizer, str(tmp_path))
    lm = RankedLM(small, WINDOW, 1, RulerOptions(), Session())

    def refuses(name: str, room: int, *reason: object) -> None:
        monkeypatch.setattr(harness, "RESERVED_TOKENS", room)
        with refused(DataError, f"--tasks: {name} in {WINDOW} tokens: ", *reason):
            ruler_task(name, options(name), lm, str(tmp_path))

    refuses("ruler_fwe", -100, "the longest prompt")
    refuses("niah_single_1", 900, "the longest prompt")
    build = ConfigurableTask.build_all_requests

    def without_digits(self: ConfigurableTask, **asked: Any) -> None:
        build(self, **asked)
        for each in self.instances:
            each.arguments = (re.sub(r"\d", "0", each.args[0]), *each.args[1:])

    monkeypatch.setattr(ConfigurableTask, "build_all_requests", without_digits)
    refuses("niah_single_1", 128, "lacks its answer")


def test_lm_eval_executes_no_code_that_a_tokenizer_names(small: LoadedModel, tmp_path: Path) -> None:
    tokenizer = load(small.name).tokenizer
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["stranger/model--code.Tokenizer", None]}
    save_tokenizer(tokenizer, str(tmp_path))
    assert "stranger" not in "".join(file.read_text() for file in tmp_path.iterdir())
    again = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert again("a sea of words").input_ids == small.tokenizer("a sea of words").input_ids


def test_eval_ruler_prints_and_writes_the_effective_length(
    small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(small_model)
    asked = ("--windows", "1024,768", "--tasks", "ruler_fwe", "--samples", "2")
    status, out, _ = run_captured(capsys, monkeypatch, "eval", "ruler", "model", *asked, "--json", "r.json")
    assert status == 0
    assert "effective length" in " ".join(out.split())
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["model"] == "model"
    assert written["lengths"][0]["tasks"]["ruler_fwe"]["samples"] == 2
    assert [each["window"] for each in written["lengths"]] == [768, 1024]


def test_a_task_that_does_not_exist_or_fit_is_refused_before_weights_are_read(
    small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the measurement, and by the check of a recipe that asks for it after the training."""
    monkeypatch.setattr("pi_lora.evaluation.suite.load_model", lambda *_: pytest.fail("weights were read"))
    asked = ("--tasks", "ruler_vt,gone", "--windows", "1535,2048")
    status, _, err = run_captured(capsys, monkeypatch, "eval", "ruler", str(small_model), *asked)
    assert status == 2
    unknown, too_short = err.splitlines()
    assert unknown.startswith("--tasks: gone: ")
    assert "niah_single_1" in unknown
    assert too_short.startswith("--tasks: ")
    assert "ruler_vt needs 1536" in too_short
    # The chat template takes room, also if it is not decided yet whether it is used.
    model = shutil.copytree(small_model, tmp_path / "model")
    shutil.copy(TEMPLATES / "chatml.jinja", model / "chat_template.jinja")
    asked = ("--tasks", "ruler_vt", "--windows", "1536")
    status, _, err = run_captured(capsys, monkeypatch, "eval", "ruler", str(model), *asked)
    assert (status, "ruler_vt needs 1536" in err) == (2, True), err
    # Their texts are not on this machine.
    for task in ("niah_single_2", "ruler_qa_squad"):
        asked = ("--tasks", f"niah_single_1,{task}", "--windows", "1536")
        status, _, err = run_captured(capsys, monkeypatch, "eval", "ruler", str(small_model), *asked)
        assert (status, err.startswith(f"--tasks: {task}: ")) == (2, True), err
    recipe = small_recipe(small_model, evaluation={"ruler": {"tasks": ["ruler_vt"]}})
    with refused(RecipeError, "evaluation.ruler.tasks: ", "64 tokens", "ruler_vt needs 1536"):
        check(recipe, tmp_path / "run")


def test_windows_are_reported_in_any_requested_order(small: LoadedModel) -> None:
    asked = RulerOptions(windows=(4096, 1024, 2048), tasks=("ruler_vt",))
    assert Ruler().prepare(asked, [small.source]).windows == asked.windows
