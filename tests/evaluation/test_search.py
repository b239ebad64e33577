"""The search for divisors of the rotary frequencies."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pi_lora
from pi_lora import cli
from pi_lora.errors import DataError, Interrupted, ModelError, PiLoraError, RunExistsError
from pi_lora.evaluation import search as searching
from pi_lora.evaluation.forward import token_losses
from pi_lora.evaluation.probe import read_probe
from pi_lora.evaluation.search import (
    PENALTY,
    STARTS,
    Candidate,
    Searched,
    SearchResult,
    child_of,
    search,
    start_of,
)
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import SearchOptions
from pi_lora.recipe.factors import read_factors
from pi_lora.recipe.files import load_recipe
from pi_lora.scaling.config import Extension
from pi_lora.scaling.factors import DROPPED
from pi_lora.scaling.verify import build_on_meta, rotary_frequencies
from pi_lora.storage import read_json

OPTIONS = SearchOptions(target=512, minutes=1)
logarithms = st.lists(st.floats(0, math.log(DROPPED)), min_size=8, max_size=8).map(sorted).map(tuple)
candidates = st.builds(Candidate, logarithms, st.floats(1, 1.5))


@pytest.fixture(autouse=True)
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes a second, so that a minute is sixty scores on every machine."""
    clock = itertools.count()
    monkeypatch.setattr(searching.time, "monotonic", lambda: float(next(clock)))


@pytest.fixture(scope="module")
def searched() -> Searched:
    return Searched(resolve_model("builtin:tiny"), OPTIONS, "float32")


@given(st.lists(candidates, min_size=1, max_size=4), st.integers(0, 1000))
def test_no_frequency_is_divided_by_less_than_a_higher_one(parents: list[Candidate], seed: int) -> None:
    child = child_of(parents, random.Random(seed))
    assert all(lower >= higher for higher, lower in itertools.pairwise(child.logarithms))
    assert child.logarithms[0] >= 0
    assert child.logarithms[-1] <= math.log(DROPPED)
    assert 1 <= child.attention_factor <= searching.MAX_ATTENTION
    divisors = child.divisors["factors"]
    assert divisors == pytest.approx([math.exp(each) for each in child.logarithms], rel=1e-3)


@pytest.mark.parametrize("method", STARTS)
def test_a_start_computes_what_the_scaling_computes(method: Any) -> None:
    base = resolve_model("builtin:tiny")
    config_class = base.base.config_class
    assert config_class
    as_factors = base.extended(Extension(512, scaling="factors", **start_of(base, method, 512).divisors))
    as_formula = base.extended(Extension(512, scaling=method))
    ours, theirs = (
        rotary_frequencies(build_on_meta(config_class, source.config)) for source in (as_factors, as_formula)
    )
    for name, frequencies in theirs.items():
        torch.testing.assert_close(ours[name], frequencies, rtol=1e-3, atol=1e-8)


def test_the_attention_of_yarn_belongs_to_its_start() -> None:
    base = resolve_model("builtin:tiny")
    yarn = base.extended(Extension(1024, scaling="yarn"))
    factor = pi_lora.load(yarn).module.get_decoder().rotary_emb.attention_scaling
    assert start_of(base, "yarn", 1024).attention_factor == pytest.approx(factor)
    assert start_of(base, "theta", 1024).attention_factor == 1


def test_the_exchanged_frequencies_are_those_of_a_model_that_is_loaded_so(searched: Searched) -> None:
    candidate = start_of(searched.base, "yarn", 512)
    searched.use(candidate)
    extension = Extension(512, scaling="factors", **candidate.divisors)
    loaded = pi_lora.load("builtin:tiny", extension=extension, dtype="float32")
    with torch.no_grad():
        ours, theirs = (model(searched.long.ids).logits for model in (searched.loaded.module, loaded.module))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_needles_stand_at_all_depths_and_are_asked_for(searched: Searched) -> None:
    decode = searched.loaded.tokenizer.decode
    ids = searched.long.ids[0].tolist()
    assert len(ids) <= 512
    answers = [searched.long.first + answer for answer in searched.long.answers]
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
    positions = searched.short.inputs["position_ids"][0]
    assert positions[-1] >= 512 - searching.CHUNKS
    assert positions[0] == 0
    gaps = positions.diff()
    assert int((gaps > 1).sum()) == searching.CHUNKS - 1
    assert int(gaps.min()) == 1


def test_chunks_of_a_spread_text_see_the_chunks_before_them(searched: Searched) -> None:
    yarn = start_of(searched.base, "yarn", 512)
    before = searched.losses(searched.short, yarn)
    other_ids = searched.short.ids.clone()
    other_ids[:, 3] = 7
    after = searched.losses(searched.short._replace(ids=other_ids), yarn)
    assert before != after


def test_what_the_text_loses_costs(searched: Searched) -> None:
    tokens = searched.long.text_tokens
    unscaled = searched.unscaled[:tokens].mean().item()
    rest = [0.0] * (len(searched.unscaled) - tokens)
    kept = [unscaled] * tokens + rest
    lost = [unscaled + 0.1] * tokens + rest
    assert searched.score(kept, []).value == pytest.approx(0, abs=1e-4)
    assert searched.score(lost, []).value == pytest.approx(0.1 * PENALTY, rel=1e-3)
    kept[searched.half + 2] = 3.0
    assert searched.score(kept, [searched.half + 2]).key_tokens == 3
    kept[searched.long.answers[3]] = 5.0
    assert searched.score(kept, []).needles == pytest.approx(5 / len(searched.long.answers))


def test_a_short_text_is_scored_by_needles_and_text(searched: Searched) -> None:
    short = searched.short
    assert short.first == 128
    losses = [0.0] * (short.ids.shape[1] - short.first)
    assert short.value(losses) == 0
    assert short.value([0.1] * short.text_tokens + losses[short.text_tokens :]) == pytest.approx(0.1 * PENALTY)
    losses[short.answers[0]] = 6.0
    assert short.value(losses) == pytest.approx(6 / len(short.answers))


def test_key_tokens_are_lost_near_and_found_far(searched: Searched) -> None:
    far = (searched.unscaled - 3).clamp(min=0.0)
    lost = [9.0] * len(far)
    beyond = range(searched.half, searched.long.text_tokens)
    expected = [token for token in beyond if 2 < searched.unscaled[token] < 5]
    assert searched.key_tokens([lost, far.tolist()]) == expected
    assert searched.key_tokens([lost]) == []
    assert 0 < len(expected) < len(beyond)


def test_the_unscaled_base_has_half_its_window_or_more_before_a_token(searched: Searched) -> None:
    module = searched.loaded.module
    window = searched.base.window
    searched.use(Candidate((0.0,) * 16, 1.0))
    ids = searched.long.ids
    first = token_losses(module, ids[:, :window], range(window // 2, window))[0]
    later = ids[:, window // 2 : 3 * window // 2].clone()
    later[0, 0] = ids[0, 0]  # BOS
    second = token_losses(module, later, range(window // 2, window))[0]
    torch.testing.assert_close(searched.unscaled[: window // 2], first)
    torch.testing.assert_close(searched.unscaled[window // 2 : window], second)


def test_the_child_that_keeps_needles_and_text_reads_the_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    retrieves = Candidate((0.1,) * 16, 1.0)
    keeps_both = Candidate((0.2,) * 16, 1.0)
    children = itertools.cycle([retrieves, keeps_both])
    read: list[Candidate] = []

    def losses(searched: Searched, exam: searching.Exam, candidate: Candidate) -> list[float]:
        number = exam.ids.shape[1] - exam.first
        if exam is searched.long:
            read.append(candidate)
            return [2.0] * number
        text = 1.0 if candidate == retrieves else 0.5
        needles = 0.0 if candidate == retrieves else 0.5
        return [text] * exam.text_tokens + [needles] * (number - exam.text_tokens)

    monkeypatch.setattr(searching, "child_of", lambda *_: next(children))
    monkeypatch.setattr(Searched, "losses", losses)
    search(resolve_model("builtin:tiny"), SearchOptions(target=512, minutes=4.5 / 60))
    assert read[len(searching.STARTS) :] == [keeps_both]


def test_an_interrupted_search_ends_with_the_same_divisors(monkeypatch: pytest.MonkeyPatch) -> None:
    base = resolve_model("builtin:tiny")
    options = SearchOptions(target=512, minutes=0.75)
    write = searching.append_journal
    written: list[Any] = []
    kept = 21

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
    assert resumed == len(written) - 21
    assert whole.candidates >= 4 + 2 * searching.CHILDREN
    assert whole.scores["factors"].value <= min(score.value for score in whole.scores.values())


def test_the_command_writes_a_file_for_recipes_and_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    words = ["search", "builtin:tiny", "--target", "512", "--minutes", "0.2", "--documents", "2", "--trials", "1"]
    assert not cli.app([*words, "--output", str(file)], result_action="return_value")
    printed = capsys.readouterr().out
    assert "now it is measured on other text" in printed
    assert "passkeys" in printed
    result = read_json(file, SearchResult, "")
    assert read_factors(file).factors == result.factors
    probed = read_probe(file).at(512)
    assert probed.factors == str(file)
    assert set(probed.scalings) == {"direct", *STARTS, "factors"}
    assert probed.scalings["factors"].perplexity.options.documents == 2
    content = json.loads(file.read_text())
    content["targets"][0] |= {"best": "factors", "enough": False}
    file.write_text(json.dumps(content))
    pi_lora.new("builtin:tiny", 512, gpu="cpu", probe=file, output=tmp_path / "new.yaml")
    file.unlink()
    recipe = load_recipe(tmp_path / "new.yaml").recipe
    assert recipe.scaling == "factors"
    assert recipe.context.factors
    assert recipe.context.factors.factors == result.factors
    (tmp_path / "new.yaml").rename(file)
    with pytest.raises(RunExistsError):
        pi_lora.search("builtin:tiny", 512, file)


def test_bad_input_is_one_line(tmp_path: Path, lora_run: Path) -> None:
    base = resolve_model("builtin:tiny")
    with pytest.raises(PiLoraError, match="not longer than the model's own window"):
        search(base, SearchOptions(target=256))
    (tmp_path / "one.txt").write_text("word " * 3000)
    with pytest.raises(DataError, match=r"one\.txt: one document is long enough; the search and its test need two"):
        search(base, SearchOptions(target=512, data=str(tmp_path / "one.txt")))
    with pytest.raises(ModelError, match="brings its own scaling; search for its base"):
        search(resolve_model(str(lora_run)), SearchOptions(target=512))
