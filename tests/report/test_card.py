"""The model card: its snippets are run as they stand, its metadata is what the hub takes."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_recipe, train
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from reported import benchmarks, passkey, perplexity, summarization
from transformers import AutoModelForCausalLM

from pi_lora.errors import ModelError
from pi_lora.evaluation.registry import read_scores
from pi_lora.merging.merging import merge
from pi_lora.models.adapter import without_known_warnings
from pi_lora.models.model import load
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.report.card import merged_card, refresh_scores, write_card
from pi_lora.report.run import MeasuredRun

IDS = torch.randint(2, 1024, (2, 128), generator=torch.Generator().manual_seed(5))
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed; pip install pi-lora[qlora]"
)


@pytest.fixture(scope="module")
def qlora_run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small_recipe(small_model, tuning={"method": "qlora", "rank": 4}), tmp_path_factory.mktemp("q") / "run")


@pytest.fixture(scope="module")
def builtin_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from the built-in model, which no hub has."""
    recipe = small_recipe(
        "builtin:tiny",
        context={"target": 512},
        training={**small_recipe("x").training.model_dump(), "steps": 1, "global_batch_size": 1}
        | {"per_device_batch_size": 1},
    )
    return train(recipe, tmp_path_factory.mktemp("builtin") / "run")


@pytest.fixture(scope="module")
def merged(lora_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(lora_run, tmp_path_factory.mktemp("merged") / "model").folder


def card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def snippets(folder: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card(folder), re.DOTALL)


def results_of(folder: Path) -> list[Any]:
    return ModelCard(card(folder)).data.eval_results or []


def data(folder: Path) -> dict[str, Any]:
    return ModelCard(card(folder)).data.to_dict()


@pytest.mark.parametrize(
    ("run", "number"),
    [
        ("lora_run", 2),
        pytest.param("qlora_run", 2, marks=needs_bitsandbytes),
        ("builtin_run", 2),
        ("full_run", 1),
        ("merged", 1),
    ],
)
def test_each_snippet_gives_the_model(
    run: str, number: int, small_model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(run)
    monkeypatch.chdir(folder)
    found = snippets(folder)
    assert len(found) == number
    for snippet in found:
        names: dict[str, Any] = {}
        with without_known_warnings():
            # A card names no path of the machine where it was written.
            exec(snippet.replace(f'"{small_model.name}"', repr(str(small_model))), names)
        model = names["model"]
        own = load(str(folder), dtype=str(model.dtype).removeprefix("torch."))
        with torch.no_grad():
            logits, expected = model(IDS).logits, own.model(IDS).logits
        if model.dtype == torch.float32:
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        else:  # plain PEFT rounds trained embeddings and norms to the base's dtype, pi-lora keeps them in float32
            difference = (logits.float() - expected.float()).norm() / expected.float().norm()
            assert difference <= {torch.float16: 1e-2, torch.bfloat16: 5e-2}[model.dtype]
        assert names["tokenizer"].model_max_length == own.window


@torch.no_grad()
def test_the_snippet_is_needed(lora_run: Path, small_model: Path) -> None:
    """What the card warns of: PEFT alone gives another model."""
    with without_known_warnings():
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_model), lora_run)
    assert (plain(IDS).logits - load(str(lora_run)).model(IDS).logits).abs().max() > 0.1


@pytest.mark.parametrize("run", ["lora_run", "full_run", "merged", "builtin_run"])
def test_metadata_names_nothing_that_the_hub_has_not(run: str, request: pytest.FixtureRequest) -> None:
    """The hub rejects a card whose base_model or data sets are no ids of its own."""
    found = data(request.getfixturevalue(run))
    assert found["library_name"] == ("transformers" if run in ("full_run", "merged") else "peft")
    assert found["pipeline_tag"] == "text-generation"
    assert {"long-context", "position-interpolation", "pi-lora"} < set(found["tags"])
    assert not {"base_model", "base_model_relation", "datasets"} & set(found)


def test_a_base_and_data_of_the_hub_are_linked(lora_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run")
    recipe = load_recipe(run / "recipe.yaml").recipe
    fields = recipe.model_dump()
    fields["model"] |= {"name": "huggyllama/llama-7b", "revision": "v1"}
    fields["data"]["source"] = [{"name": "monology/pile-uncopyrighted", "weight": 3.0}, {"name": "builtin:stdlib"}]
    (run / "recipe.yaml").write_text(dump_recipe(type(recipe).model_validate(fields)))
    adapter = json.loads((run / "adapter_config.json").read_text())
    stands_on = {"base_model_name_or_path": "huggyllama/llama-7b", "revision": "v1"}
    (run / "adapter_config.json").write_text(json.dumps(adapter | stands_on))
    write_card(run)
    found = data(run)
    validate_repo_id(found["base_model"])
    assert (found["base_model"], found["base_model_relation"]) == ("huggyllama/llama-7b", "adapter")
    assert found["datasets"] == ["monology/pile-uncopyrighted"]
    assert 'from_pretrained("huggyllama/llama-7b", config=config, revision="v1")' in card(run)
    assert "`monology/pile-uncopyrighted` (75%), `builtin:stdlib` (25%)" in card(run)


def test_a_merged_card_holds_the_checks(merged: Path, lora_run: Path) -> None:
    assert "- checked: 14 tensors are base + adapter" in card(merged)
    assert "stored in float32" in card(merged)
    unchecked = merged_card(lora_run, merged, [], {"added onto": "the NF4 weights"})
    assert "| added onto | the NF4 weights |" in unchecked
    assert "Not compared." in unchecked


def test_an_adapter_of_other_origin_gets_a_card(lora_run: Path, merged: Path, tmp_path: Path) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run", ignore=shutil.ignore_patterns("recipe.yaml", "run.json"))
    assert "positions are divided by 2" in merged_card(run, merged, [])


SCORES = {
    "perplexity-step-0": {**perplexity(9.0, 50.0), "step": 0},
    "perplexity-step-10": {**perplexity(3.14159, 5.5), "step": 10},
    "perplexity-step-9": {**perplexity(5.0, 8.0), "step": 9},
    "passkey": passkey(96),
    "benchmarks-base": benchmarks(0.8, 0.01),
    "benchmarks": benchmarks(0.75, None),
    "summarization": summarization(30.0, 10.0, 20.0),
    "mine": {"anything": 1},
}
TABLES = [
    """| metric | base | tuned |
|---|---|---|
| BoolQ (0-shot) | 80 % (71 to 87) | 75 % (66 to 82) |
""",
    """**passkey**: 4 trials at each of 4 depths, seed 0, greedy decoding

| metric | tuned |
|---|---|
| k_max at 128 | 96 tokens |
""",
    """**perplexity**: 3 documents of builtin:stdlib, of at least 128 tokens, stride 32, every token weighted equally

| metric | step 0 | step 10 |
|---|---|---|
| perplexity at 64 | 9.000 | 3.142 |
| perplexity at 128 | 50.000 | 5.500 |
""",
    """| metric | tuned |
|---|---|
| ROUGE-1 | 30.00 (29.00 to 31.00) |
| ROUGE-2 | 10.00 (9.00 to 11.00) |
| ROUGE-L | 20.00 (19.00 to 21.00) |
""",
]


def test_scores_that_came_later_are_put_in_and_nothing_else_changes(
    lora_run: Path, merged: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run")
    mine = card(run).replace("# ", "# My ", 1)
    (run / "README.md").write_text(mine)
    refresh_scores(MeasuredRun(run))
    assert card(run) == mine
    (run / "scores").mkdir()
    for name, scores in SCORES.items():
        (run / "scores" / f"{name}.json").write_text(json.dumps(scores))
    assert not [name for name in SCORES if name != "mine" and read_scores(run / "scores" / f"{name}.json") is None]
    refresh_scores(MeasuredRun(run))
    before, after = ModelCard(mine).text.split("Not measured yet.")
    assert ModelCard(card(run)).text.startswith(before)
    assert ModelCard(card(run)).text.endswith(after)
    assert all(table in card(run) for table in TABLES)
    found = [(each.dataset_name, each.metric_type, each.metric_value) for each in results_of(run)]
    assert found == [
        ("boolq", "accuracy", 75),
        ("passkey retrieval in 128 tokens", "k_max", 96),
        ("builtin:stdlib", "perplexity", 3.14159),
        ("builtin:stdlib", "perplexity", 5.5),
        ("govreport", "rouge1", 30.0),
        ("govreport", "rouge2", 10.0),
        ("govreport", "rougeL", 20.0),
    ]
    assert "With the adapter, before it was merged:\n\n**benchmarks**: " in merged_card(run, merged, [])
    assert all(table in merged_card(run, merged, []) for table in TABLES)
    (run / "scores" / "mine.json").write_text("{")
    with pytest.raises(ModelError, match=r"mine\.json: is not JSON"):
        refresh_scores(MeasuredRun(run))
