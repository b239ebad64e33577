"""`pi-lora report`: cards that the hub's library takes, pictures, comparisons, and one HTML page."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from reported import make_run, passkey, perplexity
from test_cli import run as command

from pi_lora.errors import PiLoraError
from pi_lora.evaluation.perplexity.measurement import Perplexity
from pi_lora.report.card import refresh_scores
from pi_lora.report.comparison import compare
from pi_lora.report.pages import html_page, write_report
from pi_lora.report.run import MeasuredRun, measured_run

RELEASED = Path(__file__).parents[2] / "adapters"


@pytest.fixture
def run(small_model: Path, tmp_path: Path) -> Path:
    return make_run(small_model, tmp_path / "mine")


def test_scores_have_stages_in_order(run: Path) -> None:
    for step in (200, 9):
        (run / "scores" / f"perplexity-step-{step}.json").write_text(json.dumps(perplexity(step, step)))
    (run / "scores" / "mine.json").write_text('{"anything": 1}')
    assert {stage: list(results) for stage, results in MeasuredRun(run).scores.items()} == {
        "base": ["passkey", "perplexity"],
        "step 0": ["perplexity"],
        "step 9": ["perplexity"],
        "step 200": ["perplexity"],
        "tuned": ["passkey", "perplexity"],
    }
    assert list(MeasuredRun(run).columns) == ["base", "step 0", "tuned"]
    (run / "scores" / "perplexity.json").unlink()
    assert list(MeasuredRun(run).columns) == ["base", "step 0", "step 200", "tuned"]
    assert MeasuredRun(run).last_scores["perplexity"].model_dump()["windows"][0]["perplexity"] == 200


def test_the_card_holds_what_was_measured(run: Path) -> None:
    files = write_report(measured_run(run))
    assert {file.name for file in files} == {"perplexity.png", "passkey.png", "loss.png", "README.md"}
    text = (run / "README.md").read_text()
    assert "**perplexity**: 3 documents of builtin:stdlib, of at least 128 tokens, stride 32, every token" in text
    assert "| metric | base | step 0 | tuned |\n|---|---|---|---|\n" in text
    assert "| perplexity at 64 | 8.500 | 40.000 | 9.000 |\n" in text
    assert "| perplexity at 128 | 60.250 | 45.500 | 7.125 |\n" in text
    assert "| k_max at 128 | 32 tokens | 128 tokens |\n" in text
    for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text):
        assert (run / picture).read_bytes()[:4] == b"\x89PNG"
    assert "1,024 tokens in 2 seconds, at most 1.0 GiB" in text


def test_a_foreign_card_is_not_overwritten(run: Path) -> None:
    (run / "README.md").write_text("# Mine\n")
    with pytest.raises(PiLoraError, match="has no section for scores"):
        write_report(measured_run(run))
    assert (run / "README.md").read_text() == "# Mine\n"
    assert not (run / "pictures").exists()


@pytest.mark.parametrize(
    ("spoil", "options", "line"),
    [
        (lambda run: shutil.rmtree(run / "scores"), [], "was not measured yet; measure it with: pi-lora eval all"),
        (lambda run: (run / "recipe.yaml").unlink(), [], "holds no recipe.yaml"),
        (
            lambda run: (run / "file").touch(),
            ["--output", "mine/file/page"],
            "mine/file/page: Not a directory; name another file or folder",
        ),
        (lambda run: (run / "scores" / "passkey.json").write_text("{"), [], "passkey.json: is not JSON"),
    ],
)
def test_mistakes_are_one_line(
    spoil: Any,
    options: list[str],
    line: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(run)
    monkeypatch.chdir(run.parent)
    status, _, errors = command(capsys, monkeypatch, "report", "mine", *options)
    assert (status, len(errors.splitlines())) == (2, 1), errors
    assert line in errors


def test_the_page_shows_html_as_text_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "loss.png").write_bytes(b"png")
    own = '![<x" onerror=y>](pictures/loss.png) ![loss](pictures/loss.png)'
    images = f"![a](http://evil/x.png) ![b](pictures/gone.png) ![c][r] ![d](../secret.png) {own}\n\n[r]: //evil/y.png\n"
    page = html_page(f"---\na: b\n---\n# T <script>x</script>\n\n`<img src=x>` | <b>b</b>\n\n{images}", tmp_path)
    assert not any(element in page for element in ("<script", "<b>", "a: b"))
    assert re.findall("<img[^>]*>", page) == [
        f'<img src="data:image/png;base64,cG5n" alt="{caption}">' for caption in ("&lt;x&quot; onerror=y&gt;", "loss")
    ]
    assert "default-src 'none'" in page


def test_a_name_in_scores_is_text_in_the_card(small_model: Path, tmp_path: Path) -> None:
    name = "![x](http://evil/x.png)<img src=//evil>|\n# Title"
    scores = {"model": name, "tasks": {name: {"acc": 0.5, "stderr": None, "examples": 1}}}
    run = make_run(small_model, tmp_path / "run", {"benchmarks-base": scores, "benchmarks": scores})
    write_report(MeasuredRun(run), html=True)
    text = (run / "README.md").read_text().split("<!-- scores -->")[1]
    assert r"\!\[x\](http://evil/x.png)\<img src=//evil>\|" in text
    assert "\n# Title" not in text
    assert "<img src=//" not in (run / "report.html").read_text()


def test_a_failed_write_keeps_what_was_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while a picture or the card is written leaves the former file, whole."""
    write_report(measured_run(run))
    before = {file: file.read_bytes() for file in (run / "README.md", *(run / "pictures").iterdir())}
    (run / "scores" / "passkey.json").write_text(json.dumps(passkey(96)))
    (run / "scores" / "perplexity.json").write_text(json.dumps(perplexity(4.0, 5.0)))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(PiLoraError, match="cannot be written"):
        write_report(measured_run(run))
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        refresh_scores(MeasuredRun(run))
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize("adapter", sorted(RELEASED.iterdir()), ids=lambda path: path.name)
def test_released_adapters_give_a_report_and_a_comparison(adapter: Path, tmp_path: Path) -> None:
    """Their scores are older than the options that are kept in scores now."""
    run = measured_run(adapter)
    write_report(run, tmp_path, html=True)
    assert "| perplexity at 1" in (tmp_path / "README.md").read_text()
    for name, scores in run.scores["tuned"].items():
        assert {row.verdict for row in compare(scores, scores, run.original)} <= {"within noise", "the same"}, name


def test_the_base_on_another_text_has_a_table_and_no_curve_of_its_own(
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
    status, *_ = command(capsys, monkeypatch, "report", "mine", "--html")
    assert (status, drawn) == (0, [["tuned"]])
    for name in ("README.md", "report.html"):
        text = (tmp_path / "mine" / name).read_text()
        assert "3 documents of novels, of at least 128 tokens, stride 32" in text
        assert "3 documents of builtin:stdlib" in text
        assert "measured otherwise and not to be compared" in text
        assert "/home/me" not in text
    text = (tmp_path / "mine" / "README.md").read_text()
    assert "| metric | tuned |\n|---|---|\n| perplexity at 64 | 9.000 |\n" in text
    assert "| metric | base |\n|---|---|\n| perplexity at 64 | 2.500 |\n" in text
