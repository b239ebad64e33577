"""The search for divisors of the rotary frequencies: its texts, its gradient, going on, and the file for recipes."""

import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pi_lora
from architectures import small_config
from conftest import refused
from pi_lora import cli
from pi_lora.errors import DataError, Interrupted, ModelError, PiLoraError, RunExistsError, ScalingError
from pi_lora.evaluation import exams, texts
from pi_lora.evaluation import probe as probing
from pi_lora.evaluation import search as searching
from pi_lora.evaluation.probe import read_probe
from pi_lora.evaluation.search import (
    COMPARED,
    LARGEST,
    PENALTY,
    Searched,
    SearchResult,
    allowed,
    descent,
    search,
    start_of,
)
from pi_lora.evaluation.texts import choose_documents, complete
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import SearchOptions, TextOptions
from pi_lora.recipe.factors import read_factors
from pi_lora.recipe.files import load_recipe
from pi_lora.scaling.config import full_attention_rope
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.verify import build_on_meta, rotary_frequencies
from pi_lora.storage import read_json
from random_runs import save_base

OPTIONS = SearchOptions(target=512, minutes=1)


@pytest.fixture(autouse=True)
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes a second, so that a minute is sixty scores on every machine."""
    clock = itertools.count()
    monkeypatch.setattr(searching.time, "monotonic", lambda: float(next(clock)))


@pytest.fixture(scope="module")
def searched() -> Searched:
    return Searched(resolve_model(ModelRef("builtin:tiny", dtype="float32")), OPTIONS)


@pytest.fixture
def texts_of_words(tmp_path: Path) -> Path:
    """Three texts that fill 512 tokens."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"The road to house {number} is long, and the door of it is open. " * 40)
    return folder


@given(st.lists(st.floats(-2, 30), min_size=4, max_size=12))
def test_no_frequency_is_divided_by_less_than_a_higher_one(values: list[float]) -> None:
    found = allowed(torch.tensor(values)).tolist()
    assert all(lower >= higher for higher, lower in itertools.pairwise(found))
    assert found[0] >= 0
    assert found[-1] <= math.log(LARGEST) + 1e-5
    assert allowed(torch.tensor(found)).tolist() == pytest.approx(found, abs=1e-6)


def test_neighbors_in_the_wrong_order_become_their_mean() -> None:
    found = allowed(torch.tensor([0.5, 2.0, 1.0, 0.9, 3.0]))
    assert found.tolist() == pytest.approx([0.5, 1.3, 1.3, 1.3, 3.0])


def test_the_descent_follows_the_gradient_in_shorter_and_shorter_steps() -> None:
    goal = torch.tensor([0.0, 0.2, 0.4])
    start = torch.tensor([0.3, 0.3, 0.3])
    points = [*itertools.islice(descent(start, lambda point: point - goal), 400)]
    rate = searching.RATE
    assert points[0].tolist() == pytest.approx([0.3 - rate, 0.3 - rate, 0.3 + rate], abs=1e-6)
    torch.testing.assert_close(points[-1], goal, atol=0.02, rtol=0)
    assert start.tolist() == pytest.approx([0.3, 0.3, 0.3])
    away = [*itertools.islice(descent(start, lambda point: -torch.ones(3)), searching.STEPS_TO_HALF + 1)]
    assert (away[-1] - away[-2]).tolist() == pytest.approx([rate / 2] * 3, abs=1e-4)


def test_the_start_computes_what_yarn_computes() -> None:
    base = resolve_model("builtin:tiny")
    config_class = base.base.config_class
    assert config_class
    factors = tuple(start_of(base, 512).exp().tolist())
    as_factors = base.extended(Extension(512, scaling="factors", factors=factors))
    as_formula = base.extended(Extension(512, scaling="yarn"))
    ours, theirs = (
        rotary_frequencies(build_on_meta(config_class, source.config)) for source in (as_factors, as_formula)
    )
    for name, frequencies in theirs.items():
        torch.testing.assert_close(ours[name], frequencies, rtol=1e-3, atol=1e-8)


def test_the_factor_of_the_attention_is_that_of_yarn(searched: Searched) -> None:
    yarn = searched.base.extended(Extension(512, scaling="yarn"))
    factor = pi_lora.load(yarn).module.get_decoder().rotary_emb.attention_scaling
    assert searched.attention_factor == pytest.approx(factor)


def test_the_exchanged_frequencies_are_those_of_a_model_that_is_loaded_so(searched: Searched) -> None:
    start = start_of(searched.base, 512)
    searched.use(start, 1.1)
    extension = Extension(512, scaling="factors", factors=tuple(start.exp().tolist()), attention_factor=1.1)
    loaded = pi_lora.load(ModelRef("builtin:tiny", extension=extension, dtype="float32"))
    with torch.no_grad():
        ours, theirs = (model(searched.long.ids).logits for model in (searched.loaded.module, loaded.module))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_needles_stand_at_all_depths_and_are_asked_for(searched: Searched) -> None:
    decode = searched.loaded.tokenizer.decode
    ids = searched.long.ids[0].tolist()
    assert len(ids) <= 512
    assert [at for at, token in enumerate(ids) if token == searched.loaded.tokenizer.bos_token_id] == [0]
    answers = searched.long.answers
    asked = decode(ids[answers[0] - 1 :])
    text = decode(ids)
    values: list[str] = []
    for token in answers:
        if token - 1 not in answers:
            values.append("")
        values[-1] += decode([ids[token]])
    assert len(values) == 8
    for value in map(str.strip, values):
        assert value.isdigit()
        assert len(value) == 5
        assert text.count(value) == 2
        assert value in asked
    spots = sorted(text.index(value.strip()) / len(text) for value in values)
    assert spots[0] < 0.15
    assert spots[-1] > 0.5


def test_short_exams_are_new_and_spread_over_the_target(searched: Searched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exams, "SHORT_TOKENS", 256)
    drawn = [searched.exams.short() for _ in range(20)]
    assert len({tuple(exam.ids[0].tolist()) for exam in drawn}) == 20
    last = 0
    for exam in drawn:
        positions = exam.inputs["position_ids"][0]
        gaps = positions.diff()
        assert positions[0] == 0
        assert int(gaps.min()) == 1
        assert 1 <= int((gaps > 1).sum()) < exams.CHUNKS
        assert positions[-1] < 512
        last = max(last, int(positions[-1]))
        assert exam.answers[-1] < exam.ids.shape[1] <= 256
    assert last > 440


def test_short_texts_are_parts_of_the_texts_for_the_search(searched: Searched) -> None:
    texts = [" ".join(map(str, text.ids)) for text in searched.texts]
    read = set()
    for _ in range(20):
        bos, *ids = searched.exams.short_text()[0].tolist()
        assert bos == searched.loaded.tokenizer.bos_token_id
        assert len(ids) == 511
        [number] = [index for index, text in enumerate(texts) if f" {' '.join(map(str, ids))} " in f" {text} "]
        read.add(number)
    assert len(read) > 3
    chosen, _ = choose_documents(searched.loaded, complete(TextOptions(), [searched.base]), 512)
    assert searched.test_documents == OPTIONS.documents
    assert [text.digest for text in searched.texts] == [text.digest for text in chosen[OPTIONS.documents :]]


def test_chunks_of_a_spread_text_see_the_chunks_before_them(searched: Searched) -> None:
    yarn = start_of(searched.base, 512)
    short = searched.exams.short()
    other_ids = short.ids.clone()
    other_ids[:, 3] = 7
    with torch.no_grad():
        before = searched.needle_loss(yarn, short)
        after = searched.needle_loss(yarn, short._replace(ids=other_ids))
    assert before != after


def slope(searched: Searched, point: torch.Tensor, step: torch.Tensor, exam: exams.Exam, text: torch.Tensor) -> Any:
    """The change of what is minimized along `step`, in both directions, by its length."""
    scored = range(text.shape[1] // 4, text.shape[1])
    values = []
    with torch.no_grad():
        for end in (point + step, point - step):
            text_loss = searched.losses(end, text, scored).mean()
            values.append(searched.needle_loss(end, exam) + PENALTY * text_loss)
    return ((values[0] - values[1]) / (2 * step.norm())).item()


def test_the_gradient_is_the_slope_of_what_is_minimized(searched: Searched) -> None:
    yarn = start_of(searched.base, 512)
    exam, text = searched.exams.short(), searched.exams.short_text()
    gradient = searched.gradient(yarn, exam, text)
    for index in (5, 15):
        step = torch.zeros(16)
        step[index] = 0.001
        assert gradient[index].item() == pytest.approx(slope(searched, yarn, step, exam, text), rel=0.05, abs=0.02)
    assert gradient[:15].abs().min() > 0
    assert not any(parameter.requires_grad for parameter in searched.loaded.module.parameters())
    # Layers on a GPU compute their activations twice, and give the same gradient.
    module = searched.loaded.module
    passes: list[int] = []
    hook = module.get_decoder().layers[0].input_layernorm.register_forward_hook(lambda *_: passes.append(1))
    searching.checkpoint_layers(module)
    torch.testing.assert_close(searched.gradient(yarn, exam, text), gradient, rtol=1e-4, atol=1e-5)
    assert len(passes) == 4
    hook.remove()
    for layer in module.get_decoder().layers:
        del layer.forward


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_neox", "phi", "granite", "phi3"])
def test_the_gradient_reaches_the_frequencies_of_every_family(kind: str, tmp_path: Path) -> None:
    config = small_config(kind)
    config.vocab_size = 1024
    base = resolve_model(ModelRef(save_base(config, tmp_path), dtype="float32"))
    searched = Searched(base, SearchOptions(target=512, data="builtin:stdlib"))
    start = start_of(base, 512)
    factors = tuple(start.exp().tolist())
    base.extended(Extension(512, scaling="factors", factors=factors, attention_factor=searched.attention_factor))
    exam, text = searched.exams.short(), searched.exams.short_text()
    gradient = searched.gradient(start, exam, text)
    size = gradient.norm().item()
    assert size > 0.1
    assert size == pytest.approx(slope(searched, start, 1e-4 * gradient / size, exam, text), rel=0.15)


def test_the_mean_of_the_later_steps_with_the_best_score_is_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target window is read after every eight steps; the second mean of the last half of the steps is best."""
    points = [torch.full((16,), number / 10) for number in range(1, 41)]
    means = [(first + last) / 20 for first, last in ((5, 8), (9, 16), (13, 24))]
    read: list[float] = []

    def needle_loss(_: Searched, point: torch.Tensor, exam: Any) -> torch.Tensor:
        read.append(point[0].item())
        return torch.tensor(1.0 if point[0].item() == pytest.approx(means[1]) else 2.0)

    def steps(start: torch.Tensor, gradient_of: Callable[..., torch.Tensor]) -> Any:
        for point in points:
            gradient_of(start)
            yield point

    monkeypatch.setattr(searching, "descent", steps)
    monkeypatch.setattr(Searched, "needle_loss", needle_loss)
    monkeypatch.setattr(Searched, "text_loss", lambda searched, point: torch.tensor(3.0))
    monkeypatch.setattr(Searched, "gradient", lambda searched, *inputs: torch.zeros(16))
    found = search(resolve_model("builtin:tiny"), SearchOptions(target=512, minutes=30 / 60))
    assert read[1:] == pytest.approx(means)
    assert found.factors == pytest.approx([math.exp(means[1])] * 16)
    assert found.attention_factor == pytest.approx(1.0693147)
    assert found.steps == 24
    best = found.scores["factors"]
    assert (best.needles, best.text, best.value) == (1.0, 3.0, 1.0 + 3 * PENALTY)


def test_an_interrupted_search_ends_with_the_same_divisors(
    small_model: Path, texts_of_words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = resolve_model(str(small_model))
    options = SearchOptions(target=256, minutes=0.25, documents=1, data=str(texts_of_words))
    write = searching.append_journal
    written: list[Any] = []
    kept = 9

    def journal(*result: Any) -> None:
        write(*result)
        written.append(result)
        if len(written) == kept:
            raise KeyboardInterrupt

    monkeypatch.setattr(searching, "append_journal", journal)
    with pytest.raises(Interrupted):
        search(base, options)
    again = search(base, options)
    resumed = len(written) - kept
    written.clear()
    kept = 0
    whole = search(base, options)
    assert again == whole
    assert resumed == len(written) - 9
    assert len(written) >= whole.steps + 4


def test_a_search_lowers_the_losses_of_needles_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exams, "SHORT_TOKENS", 256)
    monkeypatch.setattr(exams, "PLAIN_TOKENS", 128)
    result = search(resolve_model(ModelRef("builtin:tiny", dtype="float32")), SearchOptions(target=512, minutes=0.2))
    start, found = result.scores["start"], result.scores["factors"]
    assert found.needles < start.needles - 0.1
    assert found.value < start.value - 0.1


def test_the_command_writes_a_file_for_recipes_new_and_extend(
    small_model: Path, texts_of_words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, model, target = tmp_path / "found.json", str(small_model), 256
    words = ["search", model, "--target", str(target), "--minutes", "0.2", "--documents", "1", "--trials", "1"]
    words += ["--data", str(texts_of_words), "--output", str(file)]
    assert not cli.run(words)
    printed = capsys.readouterr().out
    assert "passkeys" in printed
    assert f"--probe {file}" in printed.replace("\n", " ")
    result = read_json(file, SearchResult, "")
    assert read_factors(file).factors == result.factors
    probed = read_probe(file).at(target)
    assert probed.factors == str(file)
    assert set(probed.scalings) == {"direct", *COMPARED, "factors"}
    perplexity = probed.scalings["factors"].perplexity.options
    assert (perplexity.documents, perplexity.data) == (1, str(texts_of_words))
    assert probed.scalings["factors"].passkey
    content = json.loads(file.read_text())
    content["targets"][0] |= {"best": "factors", "enough": False}
    file.unlink()
    moved = tmp_path / "moved.json"
    moved.write_text(json.dumps(content))
    pi_lora.new(model, target, gpu="cpu", data=texts_of_words, probe=moved, output=tmp_path / "new.yaml")
    extended = pi_lora.extend(
        ModelRef(model, extension=Extension(target, scaling="factors")), tmp_path / "out", probe=moved
    )
    assert full_attention_rope(resolve_model(str(extended)).config)["long_factor"] == list(result.factors)
    other = Extension(target, scaling="factors", factors=(3.0,) * len(result.factors))
    with refused(ModelError, "--factors: ", "--probe"):
        pi_lora.extend(ModelRef(model, extension=other), tmp_path / "b", probe=moved)
    moved.unlink()
    recipe = load_recipe(tmp_path / "new.yaml").recipe
    assert recipe.scaling == "factors"
    assert recipe.context.factors
    assert recipe.context.factors.factors == result.factors
    (tmp_path / "new.yaml").rename(file)
    with refused(RunExistsError, f"{file}: ", "--output"):
        pi_lora.search(model, target, file)


def test_a_search_that_was_interrupted_in_its_test_is_tested(
    small_model: Path, texts_of_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    options: dict[str, Any] = {"minutes": 0.05, "documents": 1, "trials": 1, "data": str(texts_of_words)}
    search_again = partial(pi_lora.search, str(small_model), 256, file)
    read = probing.MEASUREMENTS["perplexity"].run

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(probing.MEASUREMENTS["perplexity"]), "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        search_again(**options)
    monkeypatch.setattr(type(probing.MEASUREMENTS["perplexity"]), "run", lambda _, *inputs: read(*inputs))
    untested = read_json(file, SearchResult, "")
    with pytest.raises(RunExistsError):
        search_again(**options, seed=1)
    monkeypatch.setattr(searching, "search", interrupt)
    tested = search_again(**options)
    assert tested.targets
    assert tested.model_copy(update={"targets": None}) == untested
    assert read_probe(file).at(256).scalings["factors"].passkey
    for content in (file.read_text(), "{}"):
        file.write_text(content)
        with pytest.raises(RunExistsError):
            search_again(**options)


def test_copies_of_tested_documents_are_not_searched(small_model: Path, texts_of_words: Path) -> None:
    first = texts_of_words / "0.txt"
    (texts_of_words / "1_copy.txt").write_text(first.read_text())
    options = SearchOptions(target=256, minutes=1, documents=2, data=str(texts_of_words))
    found = Searched(resolve_model(ModelRef(small_model, dtype="float32")), options)
    assert found.test_documents == 2
    assert [Path(text.name).name for text in found.texts] == ["2.txt"]


def test_bad_input_is_one_line(tmp_path: Path, lora_run: Path) -> None:
    base = resolve_model("builtin:tiny")
    with refused(PiLoraError, "context.target: 256 ", 256):
        search(base, SearchOptions(target=256))
    (tmp_path / "one.txt").write_text("word " * 3000)
    with refused(DataError, f"--data: {tmp_path / 'one.txt'}: "):
        search(base, SearchOptions(target=512, data=str(tmp_path / "one.txt")))
    with refused(ModelError, f"{lora_run}: ", resolve_model(str(lora_run)).base.name):
        search(resolve_model(str(lora_run)), SearchOptions(target=512))


def test_a_choice_of_documents_that_cuts_them_does_not_cut_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `proof-pile`, whose documents are measured to 32,768 tokens."""
    monkeypatch.setitem(texts.DEFAULTS, "builtin:stdlib", {"documents": 12, "truncate": 400})
    assert Searched(resolve_model(ModelRef("builtin:tiny", dtype="float32")), OPTIONS).text.shape == (1, 512)


def test_a_model_with_two_ropes_in_full_attention_is_refused(tmp_path: Path) -> None:
    base = resolve_model(str(save_base(small_config("granite_swa"), tmp_path / "base")))
    with refused(ScalingError, "model of type granite_swa: ", "2 ropes"):
        start_of(base, 2 * base.window)
