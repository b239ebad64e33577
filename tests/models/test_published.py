"""Published models in their own numbers: the window that pi-lora reads, every scaling that extends them as transformers
computes it, the makers' own extension, and refusals that name a way.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from conftest import refused
from pi_lora.errors import PiLoraError, ScalingError
from pi_lora.models.resolve import resolve_for_training, resolve_model
from pi_lora.models.source import ModelSource
from pi_lora.planning.gpus import find_gpu
from pi_lora.planning.training_plan import plan_training
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import full_attention_rope
from pi_lora.scaling.extension import Extension, extend_config
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.verify import rotary_frequencies

FILE = Path(__file__).with_name("published.yaml")
Row = dict[str, Any]
ROWS: dict[str, Row] = {row["model"]: row for row in yaml.safe_load(FILE.read_text(encoding="utf-8"))["models"]}
EXTENDED = [name for name, row in ROWS.items() if "extends" in row]
REFUSED = [name for name, row in ROWS.items() if "refused" in row]
TRAINED = [name for name, row in ROWS.items() if "trained" in row and "window" in row]
BY_MAKERS = [name for name, row in ROWS.items() if row.get("recommended", {}).get("scaling") == "yarn"]
LISTS = ("layer_types", "hybrid_layer_pattern", "no_rope_layers", "compress_ratios", "attn_type_list")
WAYS = {"keep", "other checkpoint", "its own code"}
OWN_CODE = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}


def few_layers(entries: Row) -> Row:
    """The entries for a model of two layers, or of one period of layers that differ."""
    periods = [len(entries[key]) for key in (*LISTS, "hybrid_override_pattern") if key in entries]
    periods += [
        value for key in ("full_attention_interval", "sliding_window_pattern") if type(value := entries.get(key)) is int
    ]
    if "attention_chunk_size" in entries:
        periods.append(4)  # of Llama 4: every fourth layer attends to everything
    layers = max(2, *periods) if periods else 2
    lists = {key: (entries[key] * layers)[:layers] for key in LISTS if key in entries}
    return {**entries, **lists, "num_hidden_layers": layers}


def write(row: Row, folder: Path) -> None:
    """The files of a model without weights, whose numbers are those that were published, but for fewer layers."""
    config = few_layers(row["entries"])
    if "text_config" in config:
        config = {**row["entries"], "text_config": few_layers(config["text_config"])}
    if row.get("code"):
        config |= OWN_CODE
    (folder / "config.json").write_text(json.dumps(config))
    if "tokenizer" in row:
        (folder / "tokenizer_config.json").write_text(json.dumps(row["tokenizer"]))


@cache
def published(name: str) -> ModelSource:
    """A model as `resolve_model` reads it, which needs no files afterwards."""
    with TemporaryDirectory() as folder:
        write(ROWS[name], Path(folder))
        return resolve_model(folder)


def test_every_row_says_where_and_when_it_was_seen() -> None:
    assert len(ROWS) >= 50
    for name, row in ROWS.items():
        assert row["seen"], name
        assert row["date"].year >= 2026, name
        assert ("extends" in row) != ("refused" in row), name
        assert row.get("refused", {"way": "keep"})["way"] in WAYS, name
        assert all(claim["said"] for key in ("trained", "recommended") if (claim := row.get(key))), name


@pytest.mark.parametrize("name", [name for name in ROWS if "window" in ROWS[name]])
def test_the_window_and_the_frequencies_are_read(name: str) -> None:
    row, source = ROWS[name], published(name)
    read = {"window": source.window, "original": source.original}
    expected = {key: row[key] for key in ("window", "original") if key in row}
    assert {key: read[key] for key in expected} == expected
    if full_attention_rope(source.config)["rope_type"] == "default" and "extends" in row:
        built = rotary_frequencies(source.base.meta_model)
        [of_full] = [each for name, each in built.items() if "original" not in name and "sliding" not in name]
        assert of_full.tolist() == pytest.approx(Rope(source.config).frequencies, rel=1e-5)


@pytest.mark.parametrize("name", EXTENDED)
def test_every_scaling_extends_it(name: str) -> None:
    source = published(name)
    target = 2 * source.window
    verified = []
    for method in ("pi", "yarn", "theta", "llama3"):
        try:
            extended = source.extended(Extension(target, scaling=method))
        except PiLoraError:
            continue
        assert extended.window == target
        verified.append(method)
    assert verified == ROWS[name]["extends"]
    tree = {"model": {"name": name}, "context": {"target": target}, "data": {"source": "text"}, "scaling": verified[0]}
    plan = plan_training(Recipe.model_validate(tree), extended, find_gpu("H200"))
    assert plan.flops.forward > 0


@pytest.mark.parametrize("name", BY_MAKERS)
def test_the_extension_of_the_makers_is_that_from_the_trained_window(name: str) -> None:
    row, source = ROWS[name], published(name)
    makers = row["recommended"]
    trained = row.get("trained", {"tokens": row["window"]})["tokens"]
    target = round(makers["factor"] * trained)
    # Some declare a round number of tokens.
    assert makers["window"] == pytest.approx(target, rel=0.05)
    rope = full_attention_rope(source.extended(Extension(target, scaling="yarn")).config)
    assert rope["factor"] == makers["factor"]
    assert rope["original_max_position_embeddings"] == trained


@pytest.mark.parametrize("name", TRAINED)
def test_l_is_the_trained_window_by_default(name: str) -> None:
    row, source = ROWS[name], published(name)
    trained = row["trained"]["tokens"]
    assert source.base.rope.trained == trained
    if "extends" not in row:
        return
    extended = source.extended(Extension(2 * row["window"], scaling=row["extends"][0]))
    assert extended.original == trained
    quoted = [note for note in extended.notes if f"context.original: {trained} " in note]
    assert bool(quoted) == (trained != row["window"])
    assert all(str(row["window"]) in note for note in quoted)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_it_is_about(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    line = row["refused"]
    write(row, tmp_path)
    with refused(PiLoraError, line["where"] or str(tmp_path), *line["names"]):
        source = resolve_model(str(tmp_path))
        source.extended(Extension(2 * source.window))
    if line["way"] == "keep":
        assert resolve_for_training(kept(tmp_path, source.window)).window == source.window


def kept(folder: Path, target: int) -> Recipe:
    """A recipe that leaves the scaling of a model as it is."""
    tree = {"model": {"name": str(folder)}, "context": {"target": target}, "data": {"source": "text"}}
    return Recipe.model_validate(tree | {"scaling": "keep"})


@pytest.mark.parametrize("name", [name for name in REFUSED if ROWS[name]["refused"]["where"] == "context.target"])
def test_a_kept_scaling_reaches_no_farther_than_the_layers(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    write(row, tmp_path)
    [reach] = row["refused"]["names"]
    assert resolve_for_training(kept(tmp_path, reach)).window == row["window"]
    if reach < row["window"]:
        with refused(ScalingError, f"context.target: {row['window']}", reach, "full attention"):
            resolve_for_training(kept(tmp_path, row["window"]))


def test_a_model_that_nothing_extends_is_not_to_be_extended_first(tmp_path: Path) -> None:
    row = ROWS["meta-llama/Llama-3.1-8B"]
    divided = Extension(2 * row["window"], scaling="factors", factors=(1.0,) * 63 + (2.0,))
    plain = {**row["entries"], "rope_scaling": None}
    write({"entries": extend_config(few_layers(plain), divided)}, tmp_path)
    with refused(ScalingError, "context.target", 2 * row["window"], "lower the target") as raised:
        resolve_for_training(kept(tmp_path, 4 * row["window"]))
    assert "extend" not in str(raised.value)
