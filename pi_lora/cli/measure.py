"""`pi-lora eval`, `probe` and `compare`; the report of a run and its way to the hub; and texts that a model writes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from pi_lora.cli.app import (
    GROUP,
    MEASURE,
    JsonFile,
    Loaded,
    Loading,
    ModelName,
    Original,
    Scaling,
    Target,
    app,
)
from pi_lora.distributed import is_main_process
from pi_lora.errors import PiLoraError
from pi_lora.recipe.evaluation import (
    BenchmarksOptions,
    ChatOptions,
    PasskeyOptions,
    PerplexityOptions,
    ProbeOptions,
    RulerOptions,
    Sampling,
    SummarizationOptions,
)
from pi_lora.scaling.config import Extension
from pi_lora.storage import check_can_write, write_json
from pi_lora.terminal import out, say, working

if TYPE_CHECKING:
    from pi_lora.models.model import Model

Models = Annotated[list[str], Parameter(name="MODEL", help="Hub ids, folders, runs or builtin:tiny.")]
Again = Annotated[bool, Parameter(help="Measure again what has scores.")]
OtherText = Annotated[str | None, Parameter(help="Measure perplexity on this text instead of the run's.")]

eval_app = App(name="eval", help="Measure a model, or several with the same options.", group=MEASURE)
app.command(eval_app)


@dataclass(frozen=True)
class Measuring(Loading):
    """How models are found, extended if they are plain bases, and loaded, and where their scores go."""

    original: Original = None
    scaling: Scaling = None
    json: JsonFile = None

    def report(self, name: str, models: list[str], options: Any, target: int | None) -> None:
        """Measure models alike, plain bases extended to `target`, and write and print their scores."""
        with working():
            from pi_lora.evaluation.suite import evaluate, scores_table

            if not target and (self.original or self.scaling):
                raise PiLoraError("--original, --scaling: need --target, the window to extend to; give it as well")
            extension = Extension(target, self.original, self.scaling or "pi") if target else None
            named = self.find(*models, extension=extension)
        files = {name: self.json} if self.json else {}
        scores = evaluate(named, {name: options}, files, self.measured())
        if is_main_process():
            out.print(scores_table(scores[name]))


@dataclass(frozen=True)
class Extending(Measuring):
    """How models are measured that `target` extends."""

    target: Target = None


Extended = Annotated[Extending, GROUP]


@eval_app.command
def perplexity(
    models: Models,
    /,
    *,
    options: Annotated[PerplexityOptions, GROUP] = PerplexityOptions(),
    how: Extended = Extending(),
) -> None:
    """Sliding-window perplexity (paper, section 3.2) of several models side by side."""
    how.report("perplexity", models, options, how.target)


@eval_app.command
def passkey(
    models: Models,
    /,
    *,
    options: Annotated[PasskeyOptions, GROUP] = PasskeyOptions(),
    how: Annotated[Measuring, GROUP] = Measuring(),
) -> None:
    """Passkey retrieval and k_max (paper, section 3.3) in --target tokens of context, by default the longest window; of
    several models side by side. With --scaling or --original a plain base is extended to --target.
    """
    # A target alone is a length to measure: a base that is not extended is measured beyond its window.
    how.report("passkey", models, options, options.longest if how.original or how.scaling else None)


@eval_app.command
def benchmarks(
    models: Models,
    /,
    *,
    options: Annotated[BenchmarksOptions, GROUP] = BenchmarksOptions(),
    how: Extended = Extending(),
) -> None:
    """Short-context benchmarks (paper, table 5) through lm-eval, of several models side by side."""
    how.report("benchmarks", models, options, how.target)


@eval_app.command
def ruler(
    models: Models,
    /,
    *,
    options: Annotated[RulerOptions, GROUP] = RulerOptions(),
    how: Extended = Extending(),
) -> None:
    """RULER and the effective length (Hsieh et al. 2024) through lm-eval, of several models side by side."""
    how.report("ruler", models, options, how.target)


@eval_app.command
def summarization(
    models: Models,
    /,
    *,
    options: Annotated[SummarizationOptions, GROUP] = SummarizationOptions(),
    how: Extended = Extending(),
) -> None:
    """Summaries of long documents, scored by ROUGE (paper, section 3.5): GovReport's, or as a run was tuned."""
    how.report("summarization", models, options, how.target)


@eval_app.command
def chat(models: Models, /, *, options: Annotated[ChatOptions, GROUP], how: Extended = Extending()) -> None:
    """Perplexity of the assistant's turns in chats; against the base, KL divergence and the share of equal answers."""
    how.report("chat", models, options, how.target)


@eval_app.command(name="all")
def everything(
    run: Annotated[str, Parameter(name="RUN", help="A run, a folder or hub id.")],
    /,
    *,
    how: Loaded = Loading(),
    data: OtherText = None,
    again: Again = False,
) -> None:
    """Measure what RUN's recipe names under `evaluation`, and keep it in RUN/scores."""
    with working():
        from pi_lora.evaluation.suite import requested_of_run, scores_of, scores_table
        from pi_lora.models.model import run_folder
        from pi_lora.run import TUNED, Run

        folder = Run(run_folder(run))
    scores = scores_of(folder, TUNED, requested_of_run(folder, data), lambda: how.find(run)[0], how.measured(again))
    for each in scores.values() if is_main_process() else ():
        out.print(scores_table([each]))
    say(f"{folder.path}: its scores are kept; to put them into its card: pi-lora report {folder.path}")


@app.command(group=MEASURE)
def probe(
    model: ModelName,
    /,
    *,
    options: Annotated[ProbeOptions, GROUP],
    how: Loaded = Loading(),
    json: JsonFile = None,
) -> None:
    """Measure before any tuning which scaling suits MODEL: perplexity and passkeys, inside its window and at --target.

    The last line names the best, and whether tuning is needed at all.
    """
    with working():
        from pi_lora.report.probe import next_command, probe, probe_table

        [base] = how.find(model)
    probed = probe(base, options, json, how.measured())
    for reach in probed.targets if is_main_process() else ():
        out.print(probe_table(probed, reach))
        out.lines(f"{reach.summary}; {'no tuning is needed' if reach.enough else 'tuning can add to it'}:")
        out.commands(next_command(probed, reach, json))


@app.command(group=MEASURE)
def compare(
    base: Annotated[str, Parameter(name="BASE", help="Hub id, folder or builtin:tiny.")],
    run: Annotated[str, Parameter(name="RUN", help="A run, a folder or hub id, tuned from BASE.")],
    /,
    *,
    how: Loaded = Loading(),
    data: OtherText = None,
    another: Annotated[bool, Parameter(help="BASE is another model than the one that RUN was tuned from.")] = False,
    chat: Annotated[str | None, Parameter(help="Also the assistant's turns of these chats.")] = None,
    again: Again = False,
    json: JsonFile = None,
) -> None:
    """Compare a run with its base: what the extension gained and cost, with 95 % intervals.

    Scores are read from RUN/scores; those that RUN's recipe names and that are missing are measured and kept there.
    Another measurement joins with pi-lora eval NAME RUN --json RUN/scores/NAME.json.
    """
    with working():
        from pi_lora.report.comparison import compare_run, comparison_table

    check_can_write(json)
    asked = {"chat": ChatOptions(data=chat, base=base)} if chat else {}
    comparison = compare_run(base, run, how.find, asked, data=data, another=another, how=how.measured(again))
    if is_main_process():
        out.print(comparison_table(comparison))
        if json:
            write_json(json, comparison.model_dump())


@app.command(group=MEASURE)
def report(
    run: Annotated[Path, Parameter(name="RUN", help="A run folder that was measured.")],
    /,
    *,
    html: Annotated[bool, Parameter(help="Also write one HTML page that needs no other file.")] = False,
) -> None:
    """Write the model card of a run into its folder, with pictures of its scores and its loss."""
    with working("writing the report"):
        from pi_lora.report.card import write_report

        files = write_report(run, html)
    out.lines(*files)


@app.command(group=MEASURE)
def generate(
    model: ModelName,
    /,
    *,
    prompt: Annotated[str | None, Parameter(help="The text to answer or to continue.")] = None,
    file: Annotated[str, Parameter(help="A file that holds it; - is standard input.", allow_leading_hyphen=True)] = "-",
    tokens: Annotated[PositiveInt, Parameter(help="The longest answer.")] = 256,
    temperature: Annotated[NonNegativeFloat, Parameter(help="Of sampling; 0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, Parameter(help="Of sampling.")] = 0,
    no_chat_template: Annotated[bool, Parameter(help="Continue the text as it is.")] = False,
    how: Loaded = Loading(),
) -> None:
    """Write text after a prompt, as the turn of a user where the model has a chat template."""
    from pi_lora.api import generate

    text, loaded = _read_and_load(file, prompt, model, how)
    chat = not no_chat_template
    generate(loaded, text, chat_template=chat, tokens=tokens, temperature=temperature, seed=seed, stream=True)


@app.command(group=MEASURE)
def summarize(
    model: ModelName,
    file: Annotated[
        str,
        Parameter(name="FILE", help="A file of text, or - for standard input.", allow_leading_hyphen=True),
    ],
    /,
    *,
    sampling: Annotated[Sampling, GROUP] = Sampling(),
    how: Loaded = Loading(),
) -> None:
    """Summarize a document with a model that was tuned for it."""
    from pi_lora.evaluation.summarization import summarize

    text, loaded = _read_and_load(file, None, model, how)
    summarize(loaded, file, text, sampling, say)


@app.command(group=MEASURE)
def push(
    model: Annotated[Path, Parameter(name="RUN|MODEL", help="A run folder, or a folder of full weights.")],
    repo: Annotated[str, Parameter(name="REPO", help="As you/name; created if it does not exist.")],
    /,
    *,
    private: Annotated[bool, Parameter(help="Create a private repository.")] = False,
) -> None:
    """Upload a run or a merged model to the Hugging Face hub, with its card but without checkpoints."""
    with working(f"uploading {model}"):
        from pi_lora.report.upload import push

        url = push(model, repo, private)
    out.lines(url)


def _read_and_load(file: str, prompt: str | None, model: str, how: Loading) -> "tuple[str, Model]":
    """Return the prompt, or the text of a file if there is none, and the model."""
    with working():
        from pi_lora.data.documents import read_document

        text = read_document(file) if prompt is None else prompt
        [named] = how.find(model)
    with working(f"loading {model}"):
        return text, named.load(how.dtype)
