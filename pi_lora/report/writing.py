"""Runs to their pages: card, pictures, comparison; the story of `pi-lora report`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pi_lora.errors import DataError, ModelError
from pi_lora.report.card import CARD, check_own_card, refresh_scores, write_card
from pi_lora.report.comparison import comparison_page
from pi_lora.report.kept import RunResults
from pi_lora.report.page import html_page
from pi_lora.report.pictures import Drawings, drawings_of, write_pictures
from pi_lora.report.tables import PICTURES

HTML = "report.html"
COMPARISON = Path("report")


def write_report(runs: Sequence[RunResults], output: Path | None = None, html: bool = False) -> list[Path]:
    """Write the card of one run, or the comparison of several, with pictures, and as an HTML page if asked.

    One run's goes into its folder, several runs' into `report/`, unless `output` names another.

    Raises:
        DataError: the folder cannot be written.
        ModelError: two runs have the same name, or the card that is there is not ours.
    """
    if doubled := {run.name for run in runs if sum(run.name == each.name for each in runs) > 1}:
        raise ModelError(f"{', '.join(sorted(doubled))}: is the name of several of these runs; rename a folder")
    alone = runs[0] if len(runs) == 1 else None
    folder = output or (alone.path if alone else COMPARISON)
    if alone and folder == alone.path:
        check_own_card(alone.path)
    with _writable(folder):
        drawings = _one(alone) if alone else _several(runs)
        files = write_pictures(drawings, folder / PICTURES)
        card = folder / CARD
        if alone:
            _write_card(alone.path, folder)
        else:
            card.write_text(comparison_page(runs, folder), encoding="utf-8")
        files.append(card)
        if html:
            page = folder / HTML
            page.write_text(html_page(card.read_text(encoding="utf-8"), drawings), encoding="utf-8")
            files.append(page)
    return files


def _one(run: RunResults) -> Drawings:
    return drawings_of(
        run.scores.get("perplexity", {}), run.scores.get("passkey", {}), {run.name: run.log}, run.original
    )


def _several(runs: Sequence[RunResults]) -> Drawings:
    """One curve a run, of what was tuned."""
    perplexity = {run.name: scores for run in runs if (scores := run.tuned("perplexity"))}
    passkey = {run.name: scores for run in runs if (scores := run.tuned("passkey"))}
    originals = {run.original for run in runs}
    original = originals.pop() if len(originals) == 1 else None
    return drawings_of(perplexity, passkey, {run.name: run.log for run in runs if run.log}, original)


def _write_card(run: Path, folder: Path) -> None:
    """Bring the run's own card up to date, or write it anew where there is none, or elsewhere."""
    if folder == run and (run / CARD).is_file():
        refresh_scores(run)
    else:
        write_card(run, folder)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from None
