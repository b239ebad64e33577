"""The model card, whose snippets are run as they stand, its pictures, and the page that `pi-lora report` makes."""

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from conftest import refused, run_captured, small_recipe
from pi_lora.api import load, merge
from pi_lora.errors import ModelError
from pi_lora.evaluation.chat import ChatScores
from pi_lora.evaluation.perplexity import Perplexity
from pi_lora.evaluation.suite import read_scores
from pi_lora.model_ref import ModelRef
from pi_lora.models.adapter import without_known_warnings
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.report.card import card_of, html_page, refresh_scores, write_card, write_report
from pi_lora.report.comparison import compare
from pi_lora.report.scores import MeasuredRun, public_setting
from pi_lora.scaling.extension import Extension
from random_runs import save_run
from reported import benchmarks, make_run, passkey, perplexity, summarization

IDS = torch.randint(2, 1024, (2, 128), generator=torch.Generator().manual_seed(5))
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed; pip install pi-lora[qlora]"
)


@pytest.fixture(scope="module")
def qlora_run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = small_recipe(small_model, tuning={"method": "qlora", "rank": 2})
    run = make_run(small_model, tmp_path_factory.mktemp("q") / "run", recipe=recipe)
    edit(run / "tokenizer_config.json", model_max_length=128)
    write_card(run)
    return run


@pytest.fixture(scope="module")
def builtin_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from the built-in model, which no hub has."""
    folder = tmp_path_factory.mktemp("builtin") / "run"
    run = save_run(BUILTIN_FOLDER / "tiny", folder, Extension(512), r=2, target_modules="all-linear")
    edit(run / "adapter_config.json", base_model_name_or_path="builtin:tiny")
    edit(run / "tokenizer_config.json", model_max_length=512)
    (run / "recipe.yaml").write_text(dump_recipe(small_recipe("builtin:tiny", context={"target": 512})))
    write_card(run)
    return run


@pytest.fixture(scope="module")
def merged(lora_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(lora_run, tmp_path_factory.mktemp("merged") / "model").folder


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


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
def test_every_snippet_of_the_card_loads_the_model(
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
        own = load(ModelRef(str(folder), dtype=str(model.dtype).removeprefix("torch.")))
        with torch.no_grad():
            logits, expected = model(IDS).logits, own.module(IDS).logits
        if model.dtype == torch.float32:
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        else:  # plain PEFT rounds trained embeddings and norms to the base's dtype, pi-lora keeps them in float32
            difference = (logits.float() - expected.float()).norm() / expected.float().norm()
            assert difference <= {torch.float16: 1e-2, torch.bfloat16: 5e-2}[model.dtype]
        assert names["tokenizer"].model_max_length == own.window


@pytest.mark.parametrize("run", ["lora_run", "full_run", "merged", "builtin_run"])
def test_metadata_links_only_names_on_the_hub(run: str, request: pytest.FixtureRequest) -> None:
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
    edit(run / "adapter_config.json", base_model_name_or_path="huggyllama/llama-7b", revision="v1")
    write_card(run)
    found = data(run)
    validate_repo_id(found["base_model"])
    assert (found["base_model"], found["base_model_relation"]) == ("huggyllama/llama-7b", "adapter")
    assert found["datasets"] == ["monology/pile-uncopyrighted"]
    assert 'from_pretrained("huggyllama/llama-7b", config=config, revision="v1")' in card(run)
    assert "`monology/pile-uncopyrighted` (75%), `builtin:stdlib` (25%)" in card(run)


def test_a_merged_card_holds_the_checks(merged: Path) -> None:
    assert "- checked: 14 tensors are base + adapter" in card(merged)
    assert "stored in float32" in card(merged)


def test_an_adapter_without_a_recipe_gets_a_card(lora_run: Path, merged: Path, tmp_path: Path) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run", ignore=shutil.ignore_patterns("recipe.yaml", "run.json"))
    assert "positions are divided by 2" in card_of(MeasuredRun(run, merged))


def test_a_card_tells_the_scaling_of_the_base_from_that_of_the_run(lora_run: Path, tmp_path: Path) -> None:
    """As of Gemma 3, whose positions are divided by 8 before any extension."""
    run = shutil.copytree(lora_run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    for rope in (config["rope_parameters"], config["rope_scaling"]):
        rope["factor"] = 16.0
    config["max_position_embeddings"] = 8
    (run / "config.json").write_text(json.dumps(config))
    text = card_of(MeasuredRun(run))
    assert "positions are divided by 16, of the base alone 8 |" in text
    assert "Positions are divided by 2 in short inputs too" in text
    assert "of the base alone" not in card_of(MeasuredRun(lora_run))
    # As of DeepSeek-V2-Lite, which was trained on shorter sequences than those that it was scaled for.
    metadata = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(metadata | {"original": 16, "base_window": metadata["original"]}))
    assert ", of the base alone 8 |" in card_of(MeasuredRun(run))


def test_the_card_of_a_run_that_keeps_the_scaling_claims_no_extension(lora_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run")
    recipe = load_recipe(run / "recipe.yaml").recipe
    base = json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"]
    kept = recipe.changed(scaling="keep", model=recipe.model.changed(name=base))
    (run / "recipe.yaml").write_text(dump_recipe(kept))
    text = card_of(MeasuredRun(run))
    assert "in its own context window of 128 tokens" in text
    assert "extended" not in text.partition("## Scores")[0]
    assert "64 to 128" not in text


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
| boolq (0-shot) | 80 % (71 to 87) | 75 % (66 to 82) |
""",
    """**passkey**: target 128, depths 4, trials 4, seed 0

| metric | tuned |
|---|---|
| k_max at 128 | 96 tokens |
""",
    """**perplexity**: data builtin:stdlib, documents 3, split test, column text, windows 64/128, stride 32

| metric | untuned | step 10 |
|---|---|---|
| perplexity at 64 | 9.000 | 3.142 |
| perplexity at 128 | 50.000 | 5.500 |
""",
    """| metric | tuned |
|---|---|
| ROUGE-1 | 30.00 (27.52 to 32.48) |
| ROUGE-2 | 10.00 (7.52 to 12.48) |
| ROUGE-L | 20.00 (17.52 to 22.48) |
""",
]


def test_later_scores_are_added_to_the_card_and_nothing_else_changes(
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
    before, after = ModelCard(mine).text.split(
        "Not measured yet: `pi-lora eval all .` measures it, in the folder of the run."
    )
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
    assert "With the adapter, before it was merged:\n\n- **Reads**: " in card_of(MeasuredRun(run, merged))
    assert all(table in card_of(MeasuredRun(run, merged)) for table in TABLES)
    (run / "scores" / "mine.json").write_text("{")
    with refused(ModelError, f"{run / 'scores' / 'mine.json'}: ", "JSON"):
        refresh_scores(MeasuredRun(run))


RELEASED = Path(__file__).parents[2] / "adapters"


@pytest.fixture
def run(small_model: Path, tmp_path: Path) -> Path:
    return make_run(small_model, tmp_path / "mine")


def test_scores_are_grouped_by_text_and_ordered_by_stage(run: Path) -> None:
    for step in (200, 9):
        (run / "scores" / f"perplexity-step-{step}.json").write_text(json.dumps(perplexity(step, step)))
    (run / "scores" / "perplexity-text_novel_txt.json").write_text(json.dumps(perplexity(9, 8, "novel.txt")))
    (run / "scores" / "mine.json").write_text('{"anything": 1}')
    assert {name: list(stages) for name, stages in MeasuredRun(run).scores.items()} == {
        "passkey": ["base", "tuned"],
        "perplexity": ["base", "step 0", "step 9", "step 200", "tuned"],
        "perplexity-text_novel_txt": ["tuned"],
    }
    assert list(MeasuredRun(run).side_by_side("perplexity")[0]) == ["base", "untuned", "tuned"]
    (run / "scores" / "perplexity.json").unlink()
    assert list(MeasuredRun(run).side_by_side("perplexity")[0]) == ["base", "untuned", "step 200"]
    assert MeasuredRun(run).last_scores["perplexity"].model_dump()["windows"][0]["perplexity"] == 200


def test_the_card_holds_the_measured_scores(run: Path) -> None:
    files = write_report(run)
    assert {file.name for file in files} == {"perplexity.png", "passkey.png", "loss.png", "README.md"}
    text = (run / "README.md").read_text()
    assert "**perplexity**: data builtin:stdlib, documents 3," in text
    assert "| metric | base | untuned | tuned |\n|---|---|---|---|\n" in text
    assert "| perplexity at 64 | 8.500 | 40.000 | 9.000 |\n" in text
    assert "| perplexity at 128 | 60.250 | 45.500 | 7.125 |\n" in text
    assert "| k_max at 128 | 32 tokens | 128 tokens |\n" in text
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(pictures) == 3
    for picture in pictures:
        assert (run / picture).read_bytes()[:4] == b"\x89PNG"
    assert "1,024 tokens in 2 seconds, at most 1.0 GiB" in text
    assert "pi-lora compare" not in text


@pytest.mark.parametrize(
    ("spoil", "where", "name"),
    [
        (lambda run: shutil.rmtree(run / "scores"), "mine: ", "pi-lora eval perplexity mine --data"),
        (lambda run: (run / "recipe.yaml").unlink(), "mine: ", "recipe.yaml"),
        (lambda run: (run / "scores" / "passkey.json").write_text("{"), "mine/scores/passkey.json: ", "JSON"),
        (lambda run: (run / "README.md").write_text("# Mine"), "mine/README.md: ", "scores"),
    ],
    ids=["no scores", "no recipe", "damaged scores", "another card"],
)
def test_mistakes_in_report_are_one_line_and_write_nothing(
    spoil: Any,
    where: str,
    name: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(run)
    monkeypatch.chdir(run.parent)
    status, _, errors = run_captured(capsys, monkeypatch, "report", "mine")
    assert (status, len(errors.splitlines())) == (2, 1), errors
    assert errors.startswith(where)
    assert name in errors
    assert not (run / "pictures").exists()


def test_the_page_escapes_html_and_loads_no_external_resource(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "loss.png").write_bytes(b"png")
    own = '![<x" onerror=y>](pictures/loss.png) ![loss](pictures/loss.png)'
    images = f"![a](http://evil/x.png) ![b](pictures/gone.png) ![c][r] ![d](../secret.png) {own}\n\n[r]: //evil/y.png\n"
    page = html_page(
        f"---\na: b\n---\n# T <script>x</script>\n\n`<img src=x>` | <b>b</b>\n\n{images}", tmp_path, "<b>title"
    )
    assert not any(element in page for element in ("<script", "<b>", "a: b"))
    assert re.findall("<img[^>]*>", page) == [
        f'<img src="data:image/png;base64,cG5n" alt="{caption}">' for caption in ("&lt;x&quot; onerror=y&gt;", "loss")
    ]
    assert "default-src 'none'" in page


def test_names_in_scores_are_escaped_in_the_card(small_model: Path, tmp_path: Path) -> None:
    name = "![x](http://evil/x.png)<img src=//evil>|\n# Title"
    scores = {
        "measurement": "benchmarks",
        "model": name,
        "options": {},
        "tasks": {name: {"acc": 0.5, "stderr": None, "examples": 1}},
    }
    run = make_run(small_model, tmp_path / "run", {"benchmarks-base": scores, "benchmarks": scores})
    write_report(run, html=True)
    text = (run / "README.md").read_text().split("<!-- scores -->")[1]
    assert r"\!\[x\](http://evil/x.png)\<img src=//evil>\|" in text
    assert "\n# Title" not in text
    assert "<img src=//" not in (run / "report.html").read_text()


def test_names_of_data_and_base_are_whole_cells(small_model: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(small_model, tmp_path / "a|base"))
    data = {"source": [{"name": "x|y<b>&`z`.txt", "weight": 3}, {"name": "owner/books"}]}
    run = make_run(base, tmp_path / "run", recipe=small_recipe(base, data=data))
    write_report(run, html=True)
    page = (run / "report.html").read_text()
    assert "<td><code>x|y&lt;b&gt;&amp;`z`.txt</code> (75%), <code>owner/books</code> (25%)</td>" in page
    assert "<td><code>a|base</code></td>" in page


def test_no_path_of_an_option_is_in_a_setting() -> None:
    options = {"data": "/home/me/chats.jsonl", "divergence_from": "/home/me/base", "window": 256}
    scores = {"model": "m", "scale": 2.0, "options": options, "chats": 3, "left_out": 0, "tokens": 9, "perplexity": 2.0}
    chats = ChatScores.model_validate({**scores, "per_chat": []})
    expected = "data chats.jsonl, column messages, split train, divergence from base, window 256"
    assert public_setting(chats).startswith(expected)


def test_a_failed_write_keeps_the_previous_card(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while a picture or the card is written leaves the former file, whole."""
    write_report(run)
    before = {file: file.read_bytes() for file in (run / "README.md", *(run / "pictures").iterdir())}
    (run / "scores" / "passkey.json").write_text(json.dumps(passkey(96)))
    (run / "scores" / "perplexity.json").write_text(json.dumps(perplexity(4.0, 5.0)))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(run)
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        refresh_scores(MeasuredRun(run))
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize(
    "adapter", sorted(path.parent for path in RELEASED.glob("*/recipe.yaml")), ids=lambda path: path.name
)
def test_released_adapters_give_a_report_and_a_comparison(adapter: Path, tmp_path: Path) -> None:
    """Their scores are older than the options that are kept in scores now."""
    run = MeasuredRun(shutil.copytree(adapter, tmp_path / "run"))
    write_report(run.path, html=True)
    assert "| perplexity at 1" in card(run.path)
    for name, scores in run.last_scores.items():
        verdicts = {row.verdict for row in compare(scores, scores)}
        assert verdicts, name
        assert verdicts <= {"within noise", "the same"}, name


def test_scores_of_the_base_on_another_text_are_neither_listed_nor_drawn(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card of a run on novels showed its base on Python source in the same table, and on one axis."""
    scores = {"perplexity-base": perplexity(2.5, 3.5), "perplexity": perplexity(9.0, 7.125, "/home/me/novels")}
    make_run(small_model, tmp_path / "mine", scores)
    drawn: list[list[str]] = []
    panels = Perplexity.panels

    def watched(self: Perplexity, scores: Any) -> Any:
        drawn.append(list(scores))
        return panels(self, scores)

    monkeypatch.setattr(Perplexity, "panels", watched)
    monkeypatch.chdir(tmp_path)
    status, *_ = run_captured(capsys, monkeypatch, "report", "mine", "--html")
    assert (status, drawn) == (0, [["tuned"]])
    for name in ("README.md", "report.html"):
        text = (tmp_path / "mine" / name).read_text()
        assert "data novels, documents 3, split test, column text, windows 64/128, stride 32" in text
        assert "Not shown: base, measured with other data (data builtin:stdlib," in text
        assert "/home/me" not in text
    text = (tmp_path / "mine" / "README.md").read_text()
    assert "| metric | tuned |\n|---|---|\n| perplexity at 64 | 9.000 |\n" in text
    assert "2.500" not in text
    assert "`pi-lora compare model .` measures it" in text


def test_results_of_texts_that_train_leave_the_metadata(run: Path) -> None:
    write_card(run)
    assert results_of(run)
    for file in (run / "scores").iterdir():
        edit(file, tuned_on=True)
    refresh_scores(MeasuredRun(run))
    assert "the model is tuned on it" in card(run)
    assert "model-index" not in card(run)
