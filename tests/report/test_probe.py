"""The scalings before any tuning: what a probe measures, chooses and prints, and what `new` takes from its file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import pi_lora
from conftest import BUILTIN, refused, run_captured
from pi_lora.api import load
from pi_lora.errors import DataError, Interrupted, ModelError, ScalingError
from pi_lora.evaluation import perplexity
from pi_lora.evaluation import probe as probing
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.passkey import Passkey
from pi_lora.evaluation.perplexity import Perplexity
from pi_lora.evaluation.probe import (
    Probe,
    Probed,
    TargetResult,
    choose_best,
    next_command,
    probe,
    read_probe,
)
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions, ProbeOptions
from pi_lora.scaling.extension import Extension
from pi_lora.types import UI, showing

TARGET = 256


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, words in enumerate(("The door is open. ", "A road is long and wide. ")):
        (folder / f"{number}.txt").write_text(words * 60)
    return folder


def test_a_probe_equals_measurements_of_the_untuned_scalings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small_model: Path, texts: Path, tmp_path: Path
) -> None:
    file, words = tmp_path / "probe.json", ["--documents", "2", "--trials", "2"]
    words += ["--scalings", "pi,theta", "--dtype", "float32", "--json", str(file)]
    status, out, _ = run_captured(
        capsys, monkeypatch, "probe", str(small_model), "--target", str(TARGET), "--data", str(texts), *words
    )
    assert status == 0
    content = json.loads(file.read_text())
    assert (content["model"], content["original"], len(content["targets"])) == (str(small_model), 64, 1)
    [reach] = read_probe(file).targets
    assert list(reach.scalings) == ["direct", "pi", "theta"]
    assert reach.summary in out.splitlines()[-2]
    command = f"pi-lora new {small_model} --target {TARGET} --probe {file} --data {texts}"
    assert out.splitlines()[-1].endswith(command)
    losses_of = PerplexityOptions(data=str(texts), windows=(64, TARGET), stride=64, truncate=TARGET)
    lowest = min(found.perplexity.windows[1].perplexity for found in reach.scalings.values())
    for name, found in reach.scalings.items():
        # Passkeys take longest: a scaling that cannot win is not asked for them, and one that can always is.
        can_win = found.perplexity.windows[1].perplexity <= 1.25 * lowest
        assert (found.passkey is not None) == can_win
        loaded = load(
            ModelRef(str(small_model), extension=None if name == "direct" else Extension(TARGET, scaling=name))
        )
        assert found.perplexity.windows == Perplexity().run(loaded, losses_of, Session()).windows
        asked = PasskeyOptions(target=TARGET, depths=8, trials=2)
        assert found.passkey is None or found.passkey.depths == Passkey().run(loaded, asked, Session()).depths
    assert reach.scalings[reach.best].passkey
    assert resolve_model(str(small_model)).window == 64


def test_an_interrupted_probe_continues(small_model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    own = perplexity.scored_losses
    monkeypatch.setattr(perplexity, "scored_losses", lambda *a, **o: passes.append(1) or own(*a, **o))
    options = ProbeOptions(target=(TARGET,), data=str(texts), documents=2, trials=1, scalings=("pi",))

    @contextmanager
    def until_passkeys(title: str) -> Iterator[object]:
        if "passkey" in title:
            raise KeyboardInterrupt
        yield lambda *_: None

    with showing(UI(progress=until_passkeys)), pytest.raises(Interrupted):
        probe(resolve_model(str(small_model)), options)
    measured = len(passes)
    assert measured >= 4
    [reach] = probe(resolve_model(str(small_model)), options).targets
    assert reach.scalings[reach.best].passkey
    assert len(passes) == measured, "documents were measured again"
    probe(resolve_model(str(small_model)), options)
    assert len(passes) == 2 * measured, "a finished probe is measured anew"


def test_new_names_the_scaling_and_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a probe, and of a plain base."""
    monkeypatch.chdir(tmp_path)
    scores = measured(8.2, 8.3, 0.9)
    reach = TargetResult(target=1024, best="yarn", enough=False, summary="yarn keeps 8.30", scalings={"yarn": scores})
    (tmp_path / "probe.json").write_text(
        Probe(model=BUILTIN, original=256, targets=[reach]).model_dump_json(by_alias=True)
    )

    def header(model: str, *words: str) -> tuple[str, str]:
        """The scaling of the recipe that `new` writes, and the line that says why."""
        status, _, err = run_captured(
            capsys, monkeypatch, "new", model, "--target", "1024", *words, "--output", "new.yaml"
        )
        assert status == 0, err
        recipe = (tmp_path / "new.yaml").read_text()
        (tmp_path / "new.yaml").unlink()
        [line] = [line for line in recipe.splitlines() if line.startswith("# Scaling ")]
        return yaml.safe_load(recipe)["scaling"], line

    own = ["--gpu", "cpu", "--data", "builtin:stdlib"]
    assert header(BUILTIN, *own, "--probe", "probe.json") == ("yarn", "# Scaling yarn: in a probe, yarn keeps 8.30.")
    scaling, why = header(BUILTIN, *own)
    assert (scaling, "before and after tuning" in why) == ("yarn", True)


def test_new_takes_a_probe_of_this_model_and_target_alone(tmp_path: Path) -> None:
    best = TargetResult(target=1024, best="yarn", enough=False, summary="yarn keeps 8.30", scalings={})
    file = tmp_path / "probe.json"

    def new(target: int = 1024, **changes: Any) -> Path:
        about = {"model": BUILTIN, "original": 256, "targets": [best]} | changes
        file.write_text(Probe.model_validate(about).model_dump_json(by_alias=True))
        recipe = tmp_path / "new.yaml"
        recipe.unlink(missing_ok=True)
        return pi_lora.new(BUILTIN, target, gpu="cpu", data="builtin:stdlib", probe=file, output=recipe)

    for changes in ({"original": 512}, {"weights": "another"}, {"model": "o"}):
        with refused(ModelError, "probe: ", changes.get("model", BUILTIN), BUILTIN):
            new(**changes)
    with refused(ModelError, "probe: ", "target 512"):
        new(target=512)
    direct = best.model_copy(update={"best": "direct"})
    with refused(ModelError, "probe: yarn keeps 8.30"):
        new(targets=[direct.model_copy(update={"enough": True})])
    lines: list[str] = []
    with showing(UI(say=lines.append)):
        recipe = new(targets=[direct]).read_text()
    assert yaml.safe_load(recipe)["scaling"] == "yarn"
    assert "in a probe" not in recipe
    [line] = [line for line in lines if line.startswith("--probe: direct ")]
    assert "yarn" in line


def test_the_next_command_of_a_probe_names_text_and_column() -> None:
    scores = {"model": "m", "options": {"data": "rows.jsonl", "column": "body"}, "windows": []}
    scalings = {"yarn": Probed.model_validate({"perplexity": scores})}
    result = TargetResult(target=1024, best="yarn", enough=False, summary="", scalings=scalings)
    probed = Probe(model="m", original=256, targets=[result])
    assert next_command(probed, result, None) == "pi-lora new m --target 1024 --data rows.jsonl --column body"
    enough = result.model_copy(update={"enough": True})
    assert next_command(probed, enough, None) == (
        "pi-lora extend m --target 1024 --scaling yarn --output models/yarn_1024"
    )


def test_the_next_command_of_searched_divisors_names_their_file_once() -> None:
    """A probe holds the divisors that it measured."""
    scores = {"model": "m", "options": {}, "windows": []}
    scalings = {"factors": Probed.model_validate({"perplexity": scores})}
    result = TargetResult(target=1024, best="factors", enough=True, summary="", scalings=scalings, factors="found.json")
    probed = Probe(model="m", original=256, targets=[result])
    extended = "--scaling factors --output models/factors_1024"
    command = "pi-lora extend m --target 1024"
    assert next_command(probed, result, None) == f"{command} --factors found.json {extended}"
    assert next_command(probed, result, Path("probe.json")) == f"{command} --probe probe.json {extended}"


def test_a_long_target_has_one_document_and_passkeys_of_the_lowest_perplexity(
    small_model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file of the probe, the user is told to name one for `new`."""
    monkeypatch.setattr("pi_lora.recipe.budget.CPU_TOKENS", TARGET)
    lines: list[str] = []
    with showing(UI(show=lines.append)):
        [reach] = pi_lora.probe(str(small_model), TARGET, data=str(texts)).targets
    assert set(reach.scalings) == {"direct", "pi", "yarn", "theta", "llama3"}
    [(name, scores)] = ((name, each.passkey) for name, each in reach.scalings.items() if each.passkey)
    assert reach.best == name == min(reach.scalings, key=lambda each: reach.scalings[each].windows[1].value)
    assert [depth.trials for depth in scores.depths] == [1] * 4
    assert reach.scalings[name].perplexity.documents == 1
    note, line = lines
    # The model is random.
    assert "search" in note
    assert line.startswith(reach.summary)
    assert "--json FILE" in line
    assert "pi-lora new --probe FILE" in line


def measured(inside: float, beyond: float, found: float) -> Probed:
    """Two windows, and ten trials at each of two distances."""
    windows = [
        {"window": window, "perplexity": value, "tokens": 100} for window, value in ((1024, inside), (4096, beyond))
    ]
    outcomes = [number < 10 * found for number in range(10)]
    depths = [{"k": k, "success_rate": found, "trials": 10, "outcomes": outcomes} for k in (2048, 4096)]
    keys = {"model": "m", "options": {}, "target": 4096, "k_max": 0, "depths": depths}
    return Probed.model_validate({"perplexity": {"model": "m", "options": {}, "windows": windows}, "passkey": keys})


@pytest.mark.parametrize(
    ("scalings", "best", "enough"),
    [
        # Of twenty trials, 30 % and 50 % are not told apart, 0 % and 50 % are.
        ({"pi": (8.0, 9.0, 0.3), "yarn": (8.2, 9.5, 0.5)}, "pi", False),
        ({"pi": (8.0, 9.0, 0.0), "yarn": (8.2, 9.5, 0.5)}, "yarn", False),
        ({"pi": (8.6, 54.0, 0.0), "yarn": (8.2, 8.3, 0.9)}, "yarn", True),
        # More than 5 % above the base's 8.0 inside its window.
        ({"pi": (8.6, 54.0, 0.0), "yarn": (8.5, 8.3, 0.9)}, "yarn", False),
        ({"pi": (8.6, 54.0, 0.0), "yarn": (8.2, 8.3, 0.7)}, "yarn", False),
    ],
)
def test_the_best_finds_the_most_passkeys_and_then_has_the_lowest_perplexity(
    scalings: dict[str, tuple[float, float, float]], best: str, enough: bool
) -> None:
    found = {name: measured(*values) for name, values in (scalings | {"direct": (8.0, 90.0, 0.0)}).items()}
    reach = choose_best(4096, found)
    assert (reach.best, reach.enough) == (best, enough)
    assert reach.summary.startswith(f"{best} keeps {scalings[best][1]:.2f} at 4,096 (8.00 at 1,024 before) and finds ")


@pytest.mark.parametrize(("of_targets", "finds_none"), [((0.0, 0.0), True), ((0.0, 0.1), False), ((0.1, 0.0), False)])
def test_a_model_that_finds_no_passkey_is_not_to_be_searched(
    of_targets: tuple[float, ...], finds_none: bool, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for number, found in enumerate(of_targets, 1):
        scalings = {"direct": measured(8.0, 90.0, 0.0), "yarn": measured(8.0, 8.0, found)}
        scalings["direct"].passkey = None
        results.append(choose_best(4096 * number, scalings))
    probed = Probe(model=BUILTIN, original=1024, targets=results)
    monkeypatch.setattr(probing, "probe", lambda *_, **options: probed)
    lines: list[Any] = []
    with showing(UI(show=lines.append, show_table=lines.append)):
        pi_lora.probe(str(small_model), TARGET)
    assert ("search" in str(lines[0])) == finds_none
    assert not any("search" in str(line) for line in lines[1:])


def test_several_targets_are_probed_the_shortest_first(small_model: Path, texts: Path, tmp_path: Path) -> None:
    """Divisors of a file are probed."""
    divisors = tmp_path / "found.json"
    divisors.write_text(json.dumps({"factors": [2.0] * 8}))
    options = ProbeOptions(target=(512, TARGET), data=str(texts), documents=1, trials=1, scalings=("pi",))
    found = probe(resolve_model(str(small_model)), options.changed(factors=str(divisors)))
    assert [reach.target for reach in found.targets] == [TARGET, 512]
    assert list(found.targets[0].scalings) == ["direct", "pi", "factors"]


def test_models_and_targets_that_cannot_be_probed_are_refused(small_model: Path, texts: Path) -> None:
    base = resolve_model(str(small_model))
    with refused(ScalingError, "context.target: 64 "):
        probe(base, ProbeOptions(target=(TARGET, 64), data=str(texts)))
    with refused(ScalingError, "scaling: yran: ", "pi, yarn"):
        probe(base, ProbeOptions(target=(TARGET,), data=str(texts), scalings=("pi", "yran")))
    with refused(DataError, f"--data: {texts}: ", "4,096"):
        probe(base, ProbeOptions(target=(4096,), data=str(texts)))
