"""The search for divisors of the rotary frequencies: its texts, its gradient, going on, and the file for recipes."""

import errno
import itertools
import json
import math
import shlex
import shutil
from collections.abc import Iterator
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
from pi_lora.data import tokens
from pi_lora.errors import DataError, Interrupted, ModelError, PiLoraError, RunExistsError, ScalingError
from pi_lora.evaluation import exams, texts
from pi_lora.evaluation import search as searching
from pi_lora.evaluation.probe import read_probe
from pi_lora.evaluation.search import LARGEST, PENALTY, Descent, Searched, SearchResult, allowed, search, start_of
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
from pi_lora.types import UI, showing
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
    to_goal, away = Descent(start), Descent(start)
    for _ in range(400):
        to_goal.step(to_goal.point - goal)
    rate = searching.RATE
    assert to_goal.points[0].tolist() == pytest.approx([0.3 - rate, 0.3 - rate, 0.3 + rate], abs=1e-6)
    torch.testing.assert_close(to_goal.points[-1], goal, atol=0.02, rtol=0)
    torch.testing.assert_close(to_goal.mean(), goal, atol=0.02, rtol=0)
    assert start.tolist() == pytest.approx([0.3, 0.3, 0.3])
    # A divisor below 1, and one below that of a higher frequency, are not allowed.
    bounded = Descent(torch.tensor([0.0, 0.1, 0.1]))
    bounded.step(torch.tensor([1.0, -1.0, 1.0]))
    assert bounded.points[0].tolist() == pytest.approx([0.0, 0.1, 0.1], abs=1e-6)
    for _ in range(searching.STEPS_TO_HALF + 1):
        away.step(-torch.ones(3))
    assert (away.points[-1] - away.points[-2]).tolist() == pytest.approx([rate / 2] * 3, abs=1e-4)


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


@pytest.fixture
def needles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, float]]:
    """Pairs of a point and the loss of needles there; elsewhere it is 2. The loss of text is 3, the gradient -1."""
    losses: list[tuple[torch.Tensor, float]] = []

    def needle_loss(_: Searched, point: torch.Tensor, exam: Any) -> torch.Tensor:
        found = [loss for other, loss in losses if torch.allclose(point, other, atol=1e-5)]
        return torch.tensor([*found, 2.0][0])

    monkeypatch.setattr(Searched, "needle_loss", needle_loss)
    monkeypatch.setattr(Searched, "text_loss", lambda searched, point: torch.tensor(3.0))
    monkeypatch.setattr(Searched, "gradient", lambda searched, *inputs: torch.full((16,), -1.0))
    return losses


def test_the_mean_of_the_later_steps_with_the_best_score_is_the_result(
    needles: list[tuple[torch.Tensor, float]], tmp_path: Path
) -> None:
    """The target window is read after every eight steps; the second mean of the last half of the steps is best."""
    base = resolve_model("builtin:tiny")
    descent = Descent(start_of(base, 512))
    for _ in range(16):
        descent.step(torch.full((16,), -1.0))
    needles.append((descent.mean(), 1.0))
    found = search(base, SearchOptions(target=512, minutes=30 / 60), tmp_path / "found.json")
    assert found.factors == pytest.approx(torch.stack(descent.points[8:]).mean(dim=0).exp().tolist())
    assert found.attention_factor == pytest.approx(1.0693147)
    assert found.steps == 24
    start, best = found.scores["start"], found.scores["factors"]
    assert (start.needles, best.needles, best.text, best.value) == (2.0, 1.0, 3.0, 1.0 + 3 * PENALTY)
    assert read_json(tmp_path / "found.json", SearchResult, "").model_dump() == found.model_dump()


def test_a_result_is_for_the_window_that_the_base_was_trained_on(
    needles: list[tuple[torch.Tensor, float]], texts_of_words: Path, tmp_path: Path
) -> None:
    """Extensions begin there by default: here at 256 tokens of a `dynamic` base that declares 1,024."""
    folder = Path(shutil.copytree(resolve_model("builtin:tiny").base.path, tmp_path / "dynamic"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    base = resolve_model(str(folder))
    assert (base.window, base.rope.trained) == (1024, 256)
    found = search(base, SearchOptions(target=512, minutes=12 / 60, data=str(texts_of_words)), tmp_path / "found.json")
    assert found.original == 256
    factors = read_factors(tmp_path / "found.json").model_dump()
    assert base.extended(Extension(512, scaling="factors", **factors)).window == 512


def test_a_search_ends_when_the_needles_no_longer_move(
    needles: list[tuple[torch.Tensor, float]], tmp_path: Path
) -> None:
    said: list[str] = []
    base = resolve_model("builtin:tiny")
    options = SearchOptions(target=512, minutes=60)
    steps = searching.LEAST_STEPS
    with showing(UI(say=said.append)):
        still = search(base, options, tmp_path / "still.json")
    assert still.steps == (searching.PATIENCE - 1) * steps
    assert still.factors == pytest.approx(start_of(base, 512).exp().tolist())
    [line] = said
    assert f"{still.steps} steps" in line
    assert "2.000 nats" in line
    # A loss that rises is movement as well; the last two changes are too small.
    descent = Descent(start_of(base, 512))
    for loss in (1.9, 1.92, 1.93, 1.999):
        for _ in range(steps):
            descent.step(torch.full((16,), -1.0))
        needles.append((descent.mean(), loss))
    with showing(UI(say=said.append)):
        moved = search(base, options, tmp_path / "moved.json")
    assert moved.steps == (3 + searching.PATIENCE) * steps
    assert moved.scores["factors"].needles == pytest.approx(1.9)
    assert f"{moved.steps} steps" in said[-1]


def test_an_interrupted_search_ends_with_the_same_divisors(
    small_model: Path, texts_of_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = resolve_model(str(small_model))
    file = tmp_path / "found.json"
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
        search(base, options.changed(minutes=9), file)
    assert not file.exists()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(searching, "write_json", full)
        with pytest.raises(OSError, match="No space"):
            search(base, options, file)
    resumed = len(written) - kept
    again = search(base, options, file)
    assert resumed == len(written) - kept, "the results of a search whose file could not be written are kept"
    written.clear()
    kept = 0
    whole = search(base, options, file)
    assert again == whole
    assert resumed == len(written) - 9
    assert len(written) >= whole.steps + 4


def test_a_search_lowers_the_losses_of_needles_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exams, "SHORT_TOKENS", 256)
    monkeypatch.setattr(exams, "PLAIN_TOKENS", 128)
    base = resolve_model(ModelRef("builtin:tiny", dtype="float32"))
    result = search(base, SearchOptions(target=512, minutes=0.2), tmp_path / "found.json")
    start, found = result.scores["start"], result.scores["factors"]
    assert found.needles < start.needles - 0.1
    assert found.value < start.value - 0.1


def test_the_command_writes_a_file_for_recipes_probe_new_and_extend(
    small_model: Path, texts_of_words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, model, target = tmp_path / "found.json", str(small_model), 256
    words = ["search", model, "--target", str(target), "--minutes", "0.05", "--documents", "1", "--seed", "3"]
    words += ["--data", str(texts_of_words), "--output", str(file)]
    assert not cli.run(words)
    # The test that the last line names.
    program, *test = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert program == "pi-lora"
    assert not cli.run([*test, "--trials", "1"])
    result = read_json(file, SearchResult, "")
    assert read_factors(file).factors == result.factors
    probe_file = tmp_path / "found.probe.json"
    probed = read_probe(probe_file).at(target)
    assert probed.factors == str(file)
    assert set(probed.scalings) == {"direct", "pi", "yarn", "theta", "llama3", "factors"}
    perplexity = probed.scalings["factors"].perplexity
    assert (perplexity.options.documents, perplexity.options.data) == (1, str(texts_of_words))
    assert [Path(document.name).name for document in perplexity.per_document] == ["0.txt"]
    passkey = probed.scalings["factors"].passkey
    assert passkey
    assert passkey.options.seed == 4
    content = json.loads(probe_file.read_text())
    content["targets"][0] |= {"best": "factors", "enough": False}
    probe_file.write_text(json.dumps(content))
    file.unlink()
    pi_lora.new(model, target, gpu="cpu", data=texts_of_words, probe=probe_file, output=tmp_path / "new.yaml")
    extended = pi_lora.extend(
        ModelRef(model, extension=Extension(target, scaling="factors")), tmp_path / "out", probe=probe_file
    )
    assert full_attention_rope(resolve_model(str(extended)).config)["long_factor"] == list(result.factors)
    other = Extension(target, scaling="factors", factors=(3.0,) * len(result.factors))
    with refused(ModelError, "factors: ", "probe"):
        pi_lora.extend(ModelRef(model, extension=other), tmp_path / "b", probe=probe_file)
    recipe = load_recipe(tmp_path / "new.yaml").recipe
    assert recipe.scaling == "factors"
    assert recipe.context.factors
    assert recipe.context.factors.factors == result.factors
    (tmp_path / "new.yaml").rename(file)
    with refused(RunExistsError, f"{file}: ", "output"):
        pi_lora.search(model, target, file)


def test_the_command_that_tests_a_result_names_the_text() -> None:
    options = SearchOptions(target=256, data="my books", column="story", documents=4, seed=6)
    result = SearchResult(
        model="base",
        original=64,
        target=256,
        factors=(1.0,),
        attention_factor=1.0,
        options=options,
        steps=1,
        test_documents=2,
        scores={},
        hardware="",
        versions={},
    )

    def asked(result: SearchResult) -> dict[str, str]:
        program, command, model, *words = shlex.split(searching.probe_command(result, Path("of books.json")))
        assert (program, command, model) == ("pi-lora", "probe", "base")
        return dict(zip(words[::2], words[1::2], strict=True))

    always = {"--target": "256", "--factors": "of books.json", "--json": "of books.probe.json"}
    # Fewer documents than asked for were long enough.
    always |= {"--documents": "2", "--seed": "7", "--column": "text"}
    assert asked(result) == {**always, "--data": "my books", "--column": "story"}
    builtin = result.model_copy(update={"options": SearchOptions(target=256, seed=6)})
    assert asked(builtin) == always


def test_a_file_that_cannot_be_written_is_noticed_before_the_search(
    small_model: Path, texts_of_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OSError, match="/proc"):
        pi_lora.search(small_model, 256, "/proc/found.json", minutes=0.05, documents=1, data=str(texts_of_words))
    assert not list(tmp_path.glob("cache/*/*"))


def test_a_search_reads_no_more_documents_than_it_needs(small_model: Path, texts_of_words: Path) -> None:
    """The row after them is broken, and is not noticed."""
    file = texts_of_words / "rows.jsonl"
    text = (texts_of_words / "0.txt").read_text()
    number = 2 + searching.DOCUMENTS
    rows = "".join(json.dumps({"story": f"{index} {text}"}) + "\n" for index in range(number))
    file.write_text(rows + "broken\n")
    options = SearchOptions(target=256, documents=2, data=str(file), column="story")
    found = Searched(resolve_model(ModelRef(small_model, dtype="float32")), options)
    assert found.test_documents == 2
    assert [text.name for text in found.texts] == [f"{file}:{row}" for row in range(3, number + 1)]


@pytest.mark.parametrize(("most", "read"), [(100, 256), (300, 300)])
def test_a_search_reads_no_more_of_a_document_than_it_needs(
    small_model: Path, texts_of_words: Path, monkeypatch: pytest.MonkeyPatch, most: int, read: int
) -> None:
    monkeypatch.setattr(searching, "DOCUMENT_TOKENS", most)
    monkeypatch.setattr(tokens, "PIECE", 500)
    tokenized: list[str] = []

    def pieces(text: str) -> Iterator[str]:
        for start in range(0, len(text), 500):
            tokenized.append(text[start : start + 500])
            yield tokenized[-1]

    monkeypatch.setattr(tokens, "pieces", pieces)
    options = SearchOptions(target=256, data=str(texts_of_words))
    found = Searched(resolve_model(ModelRef(small_model, dtype="float32")), options)
    assert {len(text.ids) for text in found.texts} == {read}
    whole = sum(len(file.read_text()) for file in texts_of_words.iterdir())
    assert 0 < len("".join(tokenized)) < 0.7 * whole


def test_copies_of_tested_documents_are_not_searched(small_model: Path, texts_of_words: Path) -> None:
    first = texts_of_words / "0.txt"
    (texts_of_words / "1_copy.txt").write_text(first.read_text())
    options = SearchOptions(target=256, minutes=1, documents=2, data=str(texts_of_words))
    found = Searched(resolve_model(ModelRef(small_model, dtype="float32")), options)
    assert found.test_documents == 2
    assert [Path(text.name).name for text in found.texts] == ["2.txt"]


def test_bad_input_is_one_line(tmp_path: Path, lora_run: Path) -> None:
    base = resolve_model("builtin:tiny")
    file = tmp_path / "found.json"
    with refused(PiLoraError, "context.target: 256 ", 256):
        search(base, SearchOptions(target=256), file)
    (tmp_path / "one.txt").write_text("word " * 3000)
    with refused(DataError, f"--data: {tmp_path / 'one.txt'}: "):
        search(base, SearchOptions(target=512, data=str(tmp_path / "one.txt")), file)
    with refused(ModelError, f"{lora_run}: ", resolve_model(str(lora_run)).base.name):
        search(resolve_model(str(lora_run)), SearchOptions(target=512), file)


def test_a_choice_of_documents_that_cuts_them_does_not_cut_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `proof-pile`, whose documents are measured to 32,768 tokens."""
    monkeypatch.setitem(texts.DEFAULTS, "builtin:stdlib", {"documents": 12, "truncate": 400})
    assert Searched(resolve_model(ModelRef("builtin:tiny", dtype="float32")), OPTIONS).text.shape == (1, 512)


def test_a_model_with_two_ropes_in_full_attention_is_refused(tmp_path: Path) -> None:
    base = resolve_model(str(save_base(small_config("granite_swa"), tmp_path / "base")))
    with refused(ScalingError, "model of type granite_swa: ", "2 ropes"):
        start_of(base, 2 * base.window)
