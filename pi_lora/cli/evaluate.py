"""`pi-lora eval`: every measurement, with its options as the command's, and `all` that a run's recipe names."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from pi_lora.cli.app import LIBRARIES, eval_app, out, progress_bar, say, working
from pi_lora.cli.options import (
    GROUP,
    Again,
    JsonFile,
    Loading,
    Models,
    Original,
    OtherText,
    Plot,
    Scaling,
    Target,
    extension_of,
)
from pi_lora.distributed import is_leader
from pi_lora.recipe.evaluation import (
    BenchmarksOptions,
    ChatOptions,
    PasskeyOptions,
    PerplexityOptions,
    RulerOptions,
    SummarizationOptions,
)

if TYPE_CHECKING:
    from pi_lora.evaluation.suite import Display


@dataclass(frozen=True)
class Measuring(Loading):
    """How models are found, extended if they are plain bases, and loaded, and where their scores go."""

    original: Original = None
    scaling: Scaling = None
    json: JsonFile = None

    def report(self, name: str, models: list[str], options: Any, target: int | None, plot: Path | None = None) -> None:
        """Measure models alike, plain bases extended to `target`, and write, print and draw their scores."""
        with working(LIBRARIES):
            from pi_lora.evaluation.suite import evaluate, scores_table

            found = self.find(*models, extension=extension_of(target, self.original, self.scaling))
        files = {name: self.json} if self.json else {}
        scores = evaluate(found, {name: options}, files, plot=plot, dtype=self.dtype, display=display())
        if is_leader():
            out.print(scores_table(scores[name]))


@dataclass(frozen=True)
class Extending(Measuring):
    """How models are measured that `target` extends."""

    target: Target = None


@eval_app.command
def perplexity(
    models: Models,
    /,
    *,
    options: Annotated[PerplexityOptions, GROUP] = PerplexityOptions(),
    how: Annotated[Extending, GROUP] = Extending(),
    plot: Plot = None,
) -> None:
    """Sliding-window perplexity (paper, section 3.2) of several models; --plot also draws the loss by position."""
    how.report("perplexity", models, options, how.target, plot)


@eval_app.command
def passkey(
    models: Models,
    /,
    *,
    options: Annotated[PasskeyOptions, GROUP] = PasskeyOptions(),
    how: Annotated[Measuring, GROUP] = Measuring(),
    plot: Plot = None,
) -> None:
    """Passkey retrieval and k_max (paper, section 3.3) in --target tokens of context, by default the longest window; of
    several models side by side. With --scaling or --original a plain base is extended to --target.
    """
    # A target alone is a length to measure: a base that is not extended is measured beyond its window.
    how.report("passkey", models, options, options.longest if how.original or how.scaling else None, plot)


@eval_app.command
def benchmarks(
    models: Models,
    /,
    *,
    options: Annotated[BenchmarksOptions, GROUP] = BenchmarksOptions(),
    how: Annotated[Extending, GROUP] = Extending(),
) -> None:
    """Short-context benchmarks (paper, table 5) through lm-eval, of several models side by side."""
    how.report("benchmarks", models, options, how.target)


@eval_app.command
def ruler(
    models: Models,
    /,
    *,
    options: Annotated[RulerOptions, GROUP] = RulerOptions(),
    how: Annotated[Extending, GROUP] = Extending(),
) -> None:
    """RULER and the effective length (Hsieh et al. 2024) through lm-eval, of several models side by side."""
    how.report("ruler", models, options, how.target)


@eval_app.command
def summarization(
    models: Models,
    /,
    *,
    options: Annotated[SummarizationOptions, GROUP] = SummarizationOptions(),
    how: Annotated[Extending, GROUP] = Extending(),
) -> None:
    """Summaries of long documents, scored by ROUGE (paper, section 3.5): GovReport's, or as a run was tuned."""
    how.report("summarization", models, options, how.target)


@eval_app.command
def chat(
    models: Models, /, *, options: Annotated[ChatOptions, GROUP], how: Annotated[Extending, GROUP] = Extending()
) -> None:
    """Perplexity of the assistant's turns in chats; against the base, KL divergence and the share of equal answers."""
    how.report("chat", models, options, how.target)


@eval_app.command(name="all")
def everything(
    run: Annotated[str, Parameter(name="RUN", help="A run, a folder or hub id.")],
    /,
    *,
    how: Annotated[Loading, GROUP] = Loading(),
    data: OtherText = None,
    again: Again = False,
) -> None:
    """Measure what RUN's recipe names under `evaluation`, and keep it in RUN/scores."""
    with working(LIBRARIES):
        from pi_lora.evaluation.suite import asked_of, scores_of, scores_table
        from pi_lora.models.model import run_folder
        from pi_lora.run import TUNED, Run

        folder = Run(run_folder(run))
    options: Any = {"again": again, "dtype": how.dtype, "display": display()}
    scores = scores_of(folder, TUNED, asked_of(folder, data), lambda: how.find(run)[0], **options)
    for each in scores.values() if is_leader() else ():
        out.print(scores_table([each]))


def display() -> "Display":
    """Return what a user sees while models are measured."""
    from pi_lora.evaluation.suite import Display

    return Display(say, working, progress_bar)
