import importlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from test_cli import run
from transformers import AutoTokenizer

from pi_lora.errors import DataError, Interrupted, PiLoraError
from pi_lora.evaluation.benchmarks.scores import check_has_lm_eval
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.registry import MEASUREMENTS, read_scores, write_scores
from pi_lora.evaluation.ruler.scores import RulerScores, RulerTask
from pi_lora.models.model import Model, load
from pi_lora.recipe.evaluation import RulerOptions

wonderwords = pytest.importorskip("wonderwords", reason="RULER of lm-eval draws its words from it")

from pi_lora.evaluation.benchmarks.lm import RankedLM  # noqa: E402
from pi_lora.evaluation.ruler import prompts  # noqa: E402
from pi_lora.evaluation.ruler.effective import effective_length, mean_of, relative_to, side_by_side  # noqa: E402
from pi_lora.evaluation.ruler.measure import evaluate_ruler  # noqa: E402
from pi_lora.evaluation.ruler.prompts import (  # noqa: E402
    CWE_MODULE,
    ESSAYS,
    FOLDER,
    QUESTIONS,
    TASKS,
    check_terminates,
    make_prompts,
    saved_tokenizer,
    unavailable,
)

OFFLINE = [name for name in TASKS if name not in ESSAYS and name not in QUESTIONS]
WINDOW, SAMPLES, SEED = 1536, 3, 5


@pytest.fixture(scope="module", autouse=True)
def few_words() -> Iterator[None]:
    """lm-eval sorts six million pairs of words when it is imported: for 8 seconds, in 800 MB."""

    class Few(wonderwords.RandomWord):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self._categories = {name: words[:150] for name, words in self._categories.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", Few)
        forget("lm_eval.tasks.ruler")
        patch.setattr(prompts, "CWE_STATE", importlib.import_module(CWE_MODULE).RNG.getstate())
        yield
    forget("lm_eval.tasks.ruler")


def forget(modules: str) -> None:
    """Have lm-eval import its modules again, as a new process does."""
    for name in [name for name in sys.modules if name.startswith(modules)]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def small(small_model: Path) -> Model:
    return load(str(small_model))


def options(*names: str, **others: Any) -> RulerOptions:
    settings = {"windows": (WINDOW,), "samples": SAMPLES, "seed": SEED, "batch_size": 2}
    return RulerOptions.model_validate({"tasks": names, **settings, **others})


def scored(model: Model, name: str, **others: Any) -> RulerTask:
    return evaluate_ruler(model, options(name, **others), {}).lengths[0].tasks[name]


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


def knowing(model: Model, patch: pytest.MonkeyPatch, known: Callable[[list[str]], list[str]]) -> list[str]:
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

    patch.setattr(model.model, "generate", generate)
    return given


def half(answers: list[str]) -> list[str]:
    """Some of the answers, of some prompts all and of some none."""
    return answers[: random.Random("".join(answers)).randint(0, len(answers))]


def theirs(model: Model, name: str, length: int) -> tuple[float, list[float]]:
    """What lm-eval gives a model for a task in a new process, and each sample of it."""
    forget("lm_eval.tasks.ruler.cwe_utils")
    metadata: dict[str, Any] = {"max_seq_lengths": [length], "tokenizer": str(model.path)}
    tasks = lm_eval.tasks.TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)
    lm = HFLM(model.model, tokenizer=load(model.name).tokenizer, max_length=WINDOW, batch_size=2)
    seeds = {"random_seed": SEED, "numpy_random_seed": 1234 + SEED}
    found: Any = simple_evaluate(lm, tasks=[name], task_manager=tasks, limit=SAMPLES, **seeds)
    return found["results"][name][f"{length},none"], [each[str(length)] for each in found["samples"][name]]


@pytest.mark.parametrize("name", OFFLINE)
def test_scores_are_lm_evals(small: Model, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a model that knows half of the answers, and of one that knows all."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    knowing(small, monkeypatch, half)
    found = scored(small, name)
    assert (found.score, found.outcomes) == theirs(small, name, found.length)
    assert 0 < found.score < 1
    given = knowing(small, monkeypatch, list)
    whole = scored(small, name)
    assert whole.score == 1
    assert all(given)
    assert WINDOW / 2 <= whole.tokens <= WINDOW
    longest = max(len(small.tokenizer(prompt)["input_ids"]) for prompt in given)
    assert longest <= whole.tokens - 30  # room for what is generated


def test_every_measurement_of_a_process_has_the_same_prompts(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    given = knowing(small, monkeypatch, list)
    for _ in range(2):
        evaluate_ruler(small, options("ruler_cwe", "ruler_vt", "niah_multikey_3"), {})
    assert given[: len(given) // 2] == given[len(given) // 2 :]
    assert scored(small, "ruler_cwe", seed=1)
    assert given[-SAMPLES:] != given[:SAMPLES]


@pytest.mark.parametrize(
    ("name", "window", "line"),
    [
        ("niah_single_1", 250, r"--windows: 250 tokens do not hold niah_single_1 \(Could not generate any sample"),
        ("ruler_vt", 1000, r"--windows: 1000 tokens do not hold ruler_vt \(it needs about \d+\); choose a longer one"),
        ("ruler_cwe", 700, r"--windows: 700 tokens do not hold ruler_cwe \(it needs about"),
        ("ruler_fwe", 200, r"--windows: 200 tokens do not hold ruler_fwe \(it needs about"),
    ],
)
def test_a_window_that_holds_no_prompt_is_refused(small: Model, name: str, window: int, line: str) -> None:
    with pytest.raises(DataError, match=f"^{line}"):
        scored(small, name, windows=(window,))


def test_a_prompt_that_does_not_fit_or_lacks_its_answer_is_refused(
    small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = RankedLM(small, WINDOW, 1)
    with saved_tokenizer(small.tokenizer) as tokenizer:
        monkeypatch.setattr(prompts, "ROOM", -100)
        with pytest.raises(
            DataError, match=rf"{WINDOW} tokens do not hold ruler_fwe \(a prompt and its answer take 1[56]"
        ):
            make_prompts("ruler_fwe", WINDOW, options("ruler_fwe"), lm, tokenizer)
        monkeypatch.setattr(prompts, "ROOM", 900)
        with pytest.raises(DataError, match=rf"{WINDOW}: lm-eval has prompts of niah_single_1 up to \d+ tokens; leave"):
            make_prompts("niah_single_1", WINDOW, options("niah_single_1"), lm, tokenizer)
        monkeypatch.setattr(prompts, "ROOM", 128)
        monkeypatch.setattr(lm, "apply_chat_template", lambda chat, **_: re.sub(r"\d", "0", chat[0]["content"]))
        with pytest.raises(DataError, match=r"do not hold niah_single_1 \(a prompt lacks its answer\); choose"):
            make_prompts("niah_single_1", WINDOW, options("niah_single_1", chat_template=True), lm, tokenizer)


def test_an_example_longer_than_its_500_tokens_is_refused() -> None:
    """lm-eval would look for a shorter one forever."""
    with pytest.raises(DataError, match="ruler_vt: its example does not fit 500 tokens of this tokenizer"):
        check_terminates("ruler_vt", 4096, lambda text: {"input_ids": list(text)})


def test_lm_eval_executes_no_code_that_a_tokenizer_names(small: Model) -> None:
    tokenizer = load(small.name).tokenizer
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["stranger/model--code.Tokenizer", None]}
    with saved_tokenizer(tokenizer) as folder:
        assert "stranger" not in "".join(file.read_text() for file in folder.iterdir())
        again = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert again("a sea of words").input_ids == small.tokenizer("a sea of words").input_ids


def test_without_texts_tasks_are_named_and_left_out() -> None:
    reasons = unavailable(TASKS)
    assert set(reasons) == {*ESSAYS, *QUESTIONS}
    assert "HF_HUB_OFFLINE is set" in reasons["ruler_qa_squad"]
    with pytest.raises(DataError, match="--tasks: niah_single_2: its texts cannot be had"):
        unavailable(["niah_single_2"])
    with pytest.raises(DataError, match=r"--tasks: niah_singel_1: no task of RULER .* did you mean niah_single_1 or"):
        unavailable(["niah_singel_1"])


def test_an_interrupted_measurement_goes_on(small: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path))
    knowing(small, monkeypatch, half)
    asked = options("niah_single_1", "ruler_fwe")
    at: list[tuple[int, int, str]] = []
    whole = evaluate_ruler(small, asked, {}, Session(lambda done, total, note="": at.append((done, total, note))))
    assert at == [(each, 6, f"{'ruler_fwe' if each > 3 else 'niah_single_1'} at {WINDOW:,}") for each in range(1, 7)]
    batches = 0
    generate = HFLM._model_generate

    def interrupted(self: HFLM, *arguments: Any, **others: Any) -> torch.Tensor:
        nonlocal batches
        batches += 1
        if batches == 3:
            raise KeyboardInterrupt
        return generate(self, *arguments, **others)

    monkeypatch.setattr(HFLM, "_model_generate", interrupted)
    with pytest.raises(Interrupted, match="interrupted"), Session(shared=True) as session:
        evaluate_ruler(small, asked, {}, session)
    with Session(shared=True) as session:
        assert evaluate_ruler(small, asked, {}, session) == whole
    assert batches == 3 + 2
    assert not list(tmp_path.glob("evaluations/*"))


def test_a_recipe_may_ask_for_it(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    knowing(small, monkeypatch, list)
    scores = MEASUREMENTS["ruler"].run(small, options("ruler_fwe", windows=(1024, 768)), Session())
    assert isinstance(scores, RulerScores)
    assert [each.window for each in scores.lengths] == [768, 1024]
    assert (scores.effective_length, scores.lengths[1].score, scores.relative) == (1024, 1.0, None)


def test_special_tokens_of_a_chat_template_are_what_they_stand_for(
    small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for each in messages %}[{{ each.role }}]{{ each.content }}{{ eos_token }}{% endfor %}"
    monkeypatch.setattr(small.tokenizer, "chat_template", template, raising=False)
    knowing(small, monkeypatch, list)
    ends: list[bool] = []
    generate = HFLM._model_generate

    def seen(self: HFLM, context: torch.Tensor, *arguments: Any, **others: Any) -> torch.Tensor:
        ends.extend((row == self.tokenizer.eos_token_id).any().item() for row in context)
        return generate(self, context, *arguments, **others)

    monkeypatch.setattr(HFLM, "_model_generate", seen)
    for chat in (False, True):
        found = scored(small, "ruler_fwe", samples=2, batch_size=1, chat_template=chat)
        assert (found.score, found.tokens <= WINDOW) == (1, True)
    assert ends == [False, False, True, True]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wonderwords" else name)
    check_has_lm_eval("benchmarks")
    with pytest.raises(PiLoraError, match=r"eval ruler: needs the package wonderwords; pip install 'pi-lora\[eval\]'"):
        check_has_lm_eval("ruler")


def made_up(model: str, window: int, means: dict[int, float], names: Iterable[str] = ("a", "b")) -> RulerScores:
    """Scores: of the first task a tenth more than the mean, of the second a tenth less."""
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
    found = made_up("m", 4096, means)
    assert found.effective_length == 2048
    assert effective_length(list(reversed(found.lengths))) == 2048
    assert effective_length(found.lengths, 0.9) == 0


def test_the_relative_length_is_of_the_base_inside_its_own_window(tmp_path: Path) -> None:
    base = made_up("base", 2048, {1024: 0.7, 2048: 0.6, 4096: 0.1})
    run_ = made_up("run", 4096, {1024: 0.65, 2048: 0.575, 4096: 0.5})
    own, other = side_by_side([base, run_])
    assert own.relative is not None
    assert other.relative is not None
    assert (own.relative.window, own.relative.score, own.relative.effective_length) == (2048, 0.6, 2048)
    assert (other.relative.base, other.relative.effective_length) == ("base", 2048)
    assert other.effective_length == 0
    assert relative_to(made_up("base", 512, {1024: 0.7}), run_) == run_
    nothing = [each.model_copy(update={"score": 0.0}) for each in base.lengths]
    assert relative_to(base.model_copy(update={"lengths": nothing}), run_) == run_
    assert relative_to(made_up("base", 2048, {2048: 0.7}, ("a", "c")), run_) == run_
    write_scores(other, tmp_path / "ruler.json")
    assert read_scores(tmp_path / "ruler.json") == other


def test_the_command(
    small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(small_model)
    asked = ("--windows", "768", "--tasks", "niah_single_2,ruler_fwe", "--samples", "2", "--plot", "ruler.png")
    status, out, err = run(capsys, monkeypatch, "eval", "ruler", "model", "builtin:tiny", *asked, "--json", "r.json")
    assert status == 0
    assert "niah_single_2: left out: its texts cannot be had" in err
    assert "model: covers 64 tokens; measured with 768 anyway" in err
    assert "of 13 tasks" in " ".join(out.split())
    written = json.loads((tmp_path / "r.json").read_text())
    assert [each["model"] for each in written] == ["model", "builtin:tiny"]
    assert written[0]["lengths"][0]["tasks"]["ruler_fwe"]["samples"] == 2
    assert written[0]["left_out"].keys() == {"niah_single_2"}
    assert (tmp_path / "ruler.png").read_bytes().startswith(b"\x89PNG")
    status, out, err = run(capsys, monkeypatch, "eval", "ruler", "model", "--tasks", "ruler")
    assert (status, out) == (2, "")
    assert err.startswith("--tasks: ruler: no task of RULER in lm-eval")
