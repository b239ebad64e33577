"""Divisors of the rotary frequencies in a recipe, a file and on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import pi_lora
from conftest import refused, run_captured, small_recipe, train
from pi_lora import cli
from pi_lora.errors import ModelError, PiLoraError, RecipeError, ScalingError
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.factors import read_factors
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import full_attention_rope
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.verify import check_scaling

GOOD = "model: {name: builtin:tiny}\ncontext: {target: 1024}\nscaling: factors\ndata: {source: builtin:stdlib}\n"
DIVISORS = [1.0, 1.0, 1.0, 1.0, 1.5, 2.0, 3.0, 4.0]


@pytest.fixture
def found(tmp_path: Path) -> Path:
    """A file as `pi-lora search` writes it."""
    file = tmp_path / "found.json"
    content = {"original": 64, "target": 256, "factors": DIVISORS, "attention_factor": 1.25}
    file.write_text(json.dumps({"model": "a", **content, "seed": 3}))
    return file


def recipe(folder: Path, *overrides: str) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(GOOD)
    return load_recipe(file, overrides).recipe


def test_a_recipe_names_a_file_or_numbers_and_keeps_the_numbers(tmp_path: Path, found: Path) -> None:
    """The resolved recipe of a run needs no other file."""
    read = recipe(tmp_path, f"context.factors={found}")
    assert read.context.factors == read_factors(found)
    given = recipe(tmp_path, "context.factors=[1, 1.5]").context.factors
    assert given is not None
    assert (given.factors, given.attention_factor) == ((1.0, 1.5), 1.0)
    found.unlink()
    (tmp_path / "resolved.yaml").write_text(dump_recipe(read))
    assert load_recipe(tmp_path / "resolved.yaml").recipe == read


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("[1, -2]", "context.factors.factors.1: "),
        ("[]", "context.factors.factors: "),
        ("nothing.json", "nothing.json: "),
        ("{factors: [1], attention: 2}", "context.factors.attention: "),
    ],
)
def test_wrong_divisors_are_mistakes_of_the_recipe(tmp_path: Path, given: str, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, f"context.factors={given}")
    [line] = caught.value.problems
    assert problem in line


def test_divisors_are_for_the_scaling_factors(tmp_path: Path) -> None:
    with refused(RecipeError, "", "context.factors: ", "scaling: yarn"):
        recipe(tmp_path, "context.factors=[1, 2]", "scaling=yarn")


@pytest.mark.parametrize(
    ("extension", "where", "name"),
    [
        (Extension(256, scaling="factors"), "context.factors: ", "pi-lora search"),
        (Extension(256, scaling="factors", factors=(1.0, 2.0)), "context.factors: 2", "8 rotary frequencies"),
        (Extension(256, scaling="yarn", factors=(2.0,) * 8), "--factors: ", "scaling: yarn"),
        (
            Extension(256, scaling="factors", factors=(2.0,) * 8, searched=(32, 256)),
            "context.factors: ",
            "32 to 256 tokens, not 64 to 256",
        ),
    ],
)
def test_divisors_that_do_not_fit_the_model_are_refused(
    small_model: Path, extension: Extension, where: str, name: str
) -> None:
    with refused(PiLoraError, where, name):
        resolve_model(ModelRef(str(small_model), extension=extension))


def test_a_model_that_drops_the_factor_of_the_attention_is_refused(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve_model(str(small_model))
    extension = Extension(256, scaling="factors", factors=tuple(DIVISORS), attention_factor=1.25)
    check_scaling(source.base.meta_model, source.config, extension)
    rotate = LlamaRotaryEmbedding.forward

    def without_factor(rotary: Any, *inputs: Any) -> Any:
        return tuple(part / rotary.attention_scaling for part in rotate(rotary, *inputs))

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", without_factor)
    with pytest.raises(ScalingError):
        check_scaling(source.base.meta_model, source.config, extension)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("eval perplexity MODEL --factors FILE", "--original, --scaling, --factors: need --target"),
        ("eval passkey MODEL --scaling pi --factors FILE --target 256", "--factors: "),
        ("extend MODEL --scaling factors --target 256 --output OUT", "--factors: scaling: factors"),
        ("extend MODEL --scaling yarn --target 32 --output OUT", "--target: 32"),
        ("extend MODEL --scaling factors --factors FILE --target 512 --output OUT", "--factors: "),
    ],
)
def test_divisors_are_never_left_out_in_silence(
    words: str,
    where: str,
    small_model: Path,
    found: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"MODEL": str(small_model), "FILE": str(found), "OUT": str(tmp_path / "out")}
    status, _, errors = run_captured(capsys, monkeypatch, *(names.get(word, word) for word in words.split()))
    assert status == 2
    assert errors.startswith(where)


@pytest.mark.parametrize(
    "measurement", ["passkey --depths 1 --trials 1", "perplexity --data builtin:stdlib --documents 1"]
)
def test_a_model_is_measured_with_the_divisors_of_a_file(
    measurement: str, small_model: Path, found: Path, tmp_path: Path
) -> None:
    name, *options = measurement.split()
    scores = tmp_path / "scores.json"
    words = ["eval", name, str(small_model), "--factors", str(found), "--target", "256", *options]
    assert not cli.run([*words, "--json", str(scores)])
    assert json.loads(scores.read_text())["scale"] == 4


def test_a_file_without_divisors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with refused(ModelError, f"{tmp_path / 'other.json'}: ", "factors", "pi-lora search"):
        read_factors(tmp_path / "other.json")


def test_an_extended_model_has_the_divisors_of_the_file_and_is_extended_no_further(
    small_model: Path, found: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "extended"
    words = ["extend", str(small_model), "--target", "256", "--scaling", "factors", "--factors", str(found)]
    assert not cli.run([*words, "--output", str(folder)])
    source = resolve_model(str(folder))
    rope = full_attention_rope(source.config)
    assert rope["long_factor"] == rope["short_factor"] == DIVISORS
    assert rope["attention_factor"] == rope["long_mscale"] == 1.25
    assert (source.window, source.scale) == (256, 4)
    with refused(PiLoraError, "scaling: pi: ", "longrope"):
        pi_lora.extend(ModelRef(folder, extension=Extension(512, scaling="pi")), tmp_path / "further")


def test_a_model_is_tuned_measured_and_merged_with_its_divisors(small_model: Path, tmp_path: Path) -> None:
    context = {"target": 128, "factors": {"factors": DIVISORS, "attention_factor": 1.25}}
    steps = {"steps": 2, "global_batch_size": 1, "activation_checkpointing": False}
    run = train(small_recipe(small_model, context=context, scaling="factors", training=steps), tmp_path / "run")
    tuned = pi_lora.load(ModelRef(run, dtype="float32"))
    rope = full_attention_rope(tuned.source.config)
    assert rope["long_factor"] == DIVISORS
    assert (tuned.source.window, tuned.source.scale) == (128, 2)
    merged = pi_lora.merge(run, tmp_path / "merged", check="logits", dtype="float32").folder
    assert "`factors`: every rotary frequency is divided" in (merged / "README.md").read_text()
    ids = torch.arange(128)[None] % 50
    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(ids).logits
        torch.testing.assert_close(tuned.module(ids).logits, logits, rtol=1e-4, atol=1e-4)
        base = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
        base.load_state_dict(plain.state_dict())
        assert not torch.allclose(base(ids).logits, logits, atol=1e-3)
    measured = pi_lora.evaluate(merged, "perplexity", data="builtin:stdlib", windows=(128,), documents=1)
    assert (measured.scale, measured.scaling) == (2, "factors")
