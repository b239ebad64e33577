"""`pi-lora eval`, `probe` and `compare`; the report of a run and its way to the hub; and texts that a model writes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from pi_lora import api
from pi_lora.cli.app import (
    GROUP,
    MEASURE,
    FactorsFile,
    JsonFile,
    Loaded,
    Loading,
    ModelName,
    Original,
    Target,
    app,
)
from pi_lora.errors import PiLoraError
from pi_lora.recipe.evaluation import (
    BenchmarksOptions,
    ChatOptions,
    ContextOptions,
    PasskeyOptions,
    PerplexityOptions,
    ProbeOptions,
    RulerOptions,
    Sampling,
    SearchOptions,
    SummarizationOptions,
)
from pi_lora.recipe.factors import read_factors
from pi_lora.scaling.config import Method
from pi_lora.scaling.extension import Extension
from pi_lora.terminal import TERMINAL, out, working

Models = Annotated[list[str], Parameter(name="MODEL", help="Hub ids, folders, runs or builtin:tiny.")]
Again = Annotated[bool, Parameter(help="Measure again what has scores.")]
OtherText = Annotated[str | None, Parameter(help="Measure perplexity on this text instead of the run's.")]

eval_app = App(name="eval", help="Measure a model, or several with the same options.", group=MEASURE)
app.command(eval_app)


@dataclass(frozen=True)
class Measuring:
    """Options of a measurement: how models are extended and loaded, and where the scores go."""

    loading: Loaded = Loading()
    original: Original = None
    scaling: Annotated[Method | None, Parameter(help="Scaling of a plain base; pi or factors by default.")] = None
    factors: FactorsFile = None
    json: JsonFile = None


Measured = Annotated[Measuring, GROUP]


def _measure(name: str, models: list[str], options: Any, measuring: Measuring, target: int | None) -> None:
    """Measure models alike, plain bases extended to `target`."""
    if not target and (measuring.original or measuring.scaling or measuring.factors):
        raise PiLoraError("--original, --scaling, --factors: need --target, the window to extend to; give it as well")
    extension = None
    if target:
        divisors = read_factors(measuring.factors).model_dump() if measuring.factors else {}
        default: Method = "factors" if measuring.factors else "pi"
        extension = Extension(target, measuring.original, measuring.scaling or default, **divisors)
    api.evaluate_models(
        models,
        name,
        options,
        extension=extension,
        json=measuring.json,
        **vars(measuring.loading),
        progress=TERMINAL,
    )


@eval_app.command
def perplexity(
    models: Models,
    /,
    *,
    options: Annotated[PerplexityOptions, GROUP] = PerplexityOptions(),
    measuring: Measured = Measuring(),
    target: Target = None,
) -> None:
    """Sliding-window perplexity (paper, section 3.2) of several models side by side."""
    _measure("perplexity", models, options, measuring, target)


@eval_app.command
def context(
    models: Models,
    /,
    *,
    options: Annotated[ContextOptions, GROUP] = ContextOptions(),
    measuring: Measured = Measuring(),
    target: Target = None,
) -> None:
    """Gain of the tokens from distant context, and LongPPL (Fang et al. 2024), of several models side by side."""
    _measure("context", models, options, measuring, target)


@eval_app.command
def passkey(
    models: Models,
    /,
    *,
    options: Annotated[PasskeyOptions, GROUP] = PasskeyOptions(),
    measuring: Measured = Measuring(),
) -> None:
    """Passkey retrieval and k_max (paper, section 3.3) in --target tokens of context, by default the longest window; of
    several models side by side. With --scaling or --original a plain base is extended to --target.
    """
    # A target alone is a length to measure: a base that is not extended is measured beyond its window.
    is_extended = measuring.original or measuring.scaling or measuring.factors
    _measure("passkey", models, options, measuring, options.longest if is_extended else None)


@eval_app.command
def benchmarks(
    models: Models,
    /,
    *,
    options: Annotated[BenchmarksOptions, GROUP] = BenchmarksOptions(),
    measuring: Measured = Measuring(),
    target: Target = None,
) -> None:
    """Short-context benchmarks (paper, table 5) through lm-eval, of several models side by side."""
    _measure("benchmarks", models, options, measuring, target)


@eval_app.command
def ruler(
    models: Models,
    /,
    *,
    options: Annotated[RulerOptions, GROUP] = RulerOptions(),
    measuring: Measured = Measuring(),
    target: Target = None,
) -> None:
    """RULER and the effective length (Hsieh et al. 2024) through lm-eval, of several models side by side."""
    _measure("ruler", models, options, measuring, target)


@eval_app.command
def summarization(
    models: Models,
    /,
    *,
    options: Annotated[SummarizationOptions, GROUP] = SummarizationOptions(),
    measuring: Measured = Measuring(),
    target: Target = None,
) -> None:
    """Summaries of long documents, scored by ROUGE (paper, section 3.5): GovReport's, or as a run was tuned."""
    _measure("summarization", models, options, measuring, target)


@eval_app.command
def chat(
    models: Models,
    /,
    *,
    options: Annotated[ChatOptions, GROUP],
    measuring: Measured = Measuring(),
    target: Target = None,
) -> None:
    """Perplexity of the assistant's turns in chats; against the base, KL divergence and the share of equal answers."""
    _measure("chat", models, options, measuring, target)


@eval_app.command(name="all")
def everything(
    run: Annotated[str, Parameter(name="RUN", help="A run, a folder or hub id.")],
    /,
    *,
    loading: Loaded = Loading(),
    data: OtherText = None,
    again: Again = False,
) -> None:
    """Measure what RUN's recipe names under `evaluation`, and keep it in RUN/scores."""
    api.evaluate_run(
        run,
        data=data,
        again=again,
        **vars(loading),
        progress=TERMINAL,
    )


@app.command(group=MEASURE)
def probe(
    model: ModelName,
    /,
    *,
    options: Annotated[ProbeOptions, GROUP],
    loading: Loaded = Loading(),
    json: JsonFile = None,
) -> None:
    """Measure before any tuning which scaling suits MODEL: perplexity and passkeys, inside its window and at --target.

    The last line names the best, and whether tuning is needed at all.
    """
    api.probe(
        model,
        dtype=loading.dtype,
        permissions=loading.permissions,
        json=json,
        progress=TERMINAL,
        **options.model_dump(exclude_defaults=True),
    )


@app.command(group=MEASURE)
def search(
    model: ModelName,
    /,
    *,
    options: Annotated[SearchOptions, GROUP],
    output: Annotated[Path, Parameter(help="A new file, for context.factors of a recipe.")],
    loading: Loaded = Loading(),
) -> None:
    """Search for the divisors of MODEL's rotary frequencies with which it reads and retrieves best at --target tokens.

    The result is measured on other text beside untuned scalings.
    """
    api.search(
        model,
        output=output,
        dtype=loading.dtype,
        permissions=loading.permissions,
        progress=TERMINAL,
        **options.model_dump(exclude_defaults=True),
    )


@app.command(group=MEASURE)
def compare(
    base: Annotated[str, Parameter(name="BASE", help="Hub id, folder or builtin:tiny.")],
    run: Annotated[str, Parameter(name="RUN", help="A run, a folder or hub id, tuned from BASE.")],
    /,
    *,
    loading: Loaded = Loading(),
    data: OtherText = None,
    another: Annotated[bool, Parameter(help="BASE is another model than the one that RUN was tuned from.")] = False,
    untuned: Annotated[bool, Parameter(help="Also the base under RUN's scaling without tuning.")] = True,
    chat: Annotated[str | None, Parameter(help="Also the assistant's turns of these chats.")] = None,
    again: Again = False,
    json: JsonFile = None,
) -> None:
    """Compare a run with its base: what the extension gained and cost, and what the tuning added to the scaling, with
    95 % intervals.

    Scores are read from RUN/scores; those that RUN's recipe names and that are missing are measured and kept there.
    Another measurement joins with pi-lora eval NAME RUN --json RUN/scores/NAME.json.
    """
    api.compare(
        base,
        run,
        data=data,
        another=another,
        untuned=untuned,
        chat=chat,
        again=again,
        dtype=loading.dtype,
        moved_base=loading.base,
        permissions=loading.permissions,
        json=json,
        progress=TERMINAL,
    )


@app.command(group=MEASURE)
def report(
    run: Annotated[Path, Parameter(name="RUN", help="A run folder that was measured.")],
    /,
    *,
    html: Annotated[bool, Parameter(help="Also write one HTML page that needs no other file.")] = False,
) -> None:
    """Write the model card of a run into its folder, with pictures of its scores and its loss."""
    with working("writing the report"):
        files = api.write_report(run, html=html)
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
    loading: Loaded = Loading(),
) -> None:
    """Write text after a prompt, as the turn of a user where the model has a chat template."""
    with working():
        text = api.read_prompt(file) if prompt is None else prompt
    api.generate(
        model,
        text,
        chat_template=not no_chat_template,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        stream=True,
        **vars(loading),
        progress=TERMINAL,
    )


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
    loading: Loaded = Loading(),
) -> None:
    """Summarize a document with a model that was tuned for it."""
    api.summarize(
        model,
        file,
        **vars(loading),
        progress=TERMINAL,
        **sampling.model_dump(exclude_defaults=True),
    )


@app.command(group=MEASURE)
def push(
    model: Annotated[Path, Parameter(name="RUN|MODEL", help="A run folder, or a folder of full weights.")],
    repo: Annotated[str, Parameter(name="REPO", help="As you/name; created if it does not exist.")],
    /,
    *,
    private: Annotated[bool, Parameter(help="Create a private repository.")] = False,
) -> None:
    """Upload a run or a merged model to the Hugging Face hub, with its card but without checkpoints."""
    out.lines(api.push(model, repo, private=private, progress=TERMINAL))
