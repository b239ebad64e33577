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
    BaseName,
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
from pi_lora.terminal import out, working

Models = Annotated[list[str], Parameter(name="MODEL", help="Hub ids, folders, runs or builtin:tiny.")]
Again = Annotated[bool, Parameter(help="Repeat measurements that have scores.")]
OtherText = Annotated[str | None, Parameter(help="Measure perplexity on this text instead of the run's.")]

eval_app = App(name="eval", help="Measure a model, or several with the same options.", group=MEASURE)
app.command(eval_app)


@dataclass(frozen=True)
class Measuring:
    """Options of a measurement: how models are extended and loaded, and where the scores go."""

    loading: Loaded = Loading()
    original: Original = None
    scaling: Annotated[Method | None, Parameter(help="Scaling of a plain base; by default pi or factors.")] = None
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
    """Passkey retrieval and k_max (paper, section 3.3) of several models side by side.

    The context has --target tokens, by default the longest window.

    With --scaling or --original a plain base is extended to --target.
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
    """Perplexity of the assistant's turns in chats; against a base, the KL divergence."""
    _measure("chat", models, options, measuring, target)


@eval_app.command(name="all")
def everything(
    run: Annotated[str, Parameter(name="RUN", help="Folder or hub id of a run.")],
    /,
    *,
    loading: Loaded = Loading(),
    data: OtherText = None,
    again: Again = False,
) -> None:
    """Make the measurements of `evaluation` in RUN's recipe, and keep the scores in RUN/scores."""
    api.evaluate_run(
        run,
        data=data,
        again=again,
        **vars(loading),
    )


@app.command(group=MEASURE)
def probe(
    model: BaseName,
    /,
    *,
    options: Annotated[ProbeOptions, GROUP],
    loading: Loaded = Loading(),
    json: JsonFile = None,
) -> None:
    """Compare scalings of MODEL before any tuning: perplexity and passkeys, inside its window and at --target.

    The last line names the best scaling, and says whether tuning is needed.
    """
    api.probe(
        model,
        dtype=loading.dtype,
        permissions=loading.permissions,
        json=json,
        **options.model_dump(exclude_defaults=True),
    )


@app.command(group=MEASURE)
def search(
    model: BaseName,
    /,
    *,
    options: Annotated[SearchOptions, GROUP],
    output: Annotated[Path, Parameter(help="New file, for context.factors of a recipe.")],
    loading: Loaded = Loading(),
) -> None:
    """Search for the divisors of MODEL's rotary frequencies that read and retrieve best at --target tokens.

    The result is compared with untuned scalings on other text.
    """
    api.search(
        model,
        output=output,
        dtype=loading.dtype,
        permissions=loading.permissions,
        **options.model_dump(exclude_defaults=True),
    )


@app.command(group=MEASURE)
def compare(
    base: Annotated[str, Parameter(name="BASE", help="Hub id, folder or builtin:tiny.")],
    run: Annotated[str, Parameter(name="RUN", help="Folder or hub id of a run that was tuned from BASE.")],
    /,
    *,
    loading: Loaded = Loading(),
    data: OtherText = None,
    another: Annotated[bool, Parameter(help="Allow a BASE that RUN was not tuned from.")] = False,
    no_untuned: Annotated[bool, Parameter(help="Leave out the base under RUN's scaling without tuning.")] = False,
    chat: Annotated[str | None, Parameter(help="Also measure the assistant's turns of these chats.")] = None,
    again: Again = False,
    json: JsonFile = None,
) -> None:
    """Compare a run with its base: what the extension gained and cost, and what the tuning added to the scaling, with
    95 % intervals.

    Scores are read from RUN/scores. Missing scores that RUN's recipe asks for are measured and kept there.

    To add another measurement: pi-lora eval NAME RUN --json RUN/scores/NAME.json.
    """
    api.compare(
        base,
        run,
        data=data,
        another=another,
        untuned=not no_untuned,
        chat=chat,
        again=again,
        dtype=loading.dtype,
        moved_base=loading.base,
        permissions=loading.permissions,
        json=json,
    )


@app.command(group=MEASURE)
def report(
    run: Annotated[Path, Parameter(name="RUN", help="Run folder with scores.")],
    /,
    *,
    html: Annotated[bool, Parameter(help="Also write a self-contained HTML page.")] = False,
) -> None:
    """Write the model card of a run into the run folder, with pictures of scores and loss."""
    with working("writing the report"):
        files = api.write_report(run, html=html)
    out.lines(*files)


@app.command(group=MEASURE)
def generate(
    model: ModelName,
    /,
    *,
    prompt: Annotated[str | None, Parameter(help="Text to answer or to continue.")] = None,
    file: Annotated[str, Parameter(help="File with the prompt; - is standard input.", allow_leading_hyphen=True)] = "-",
    tokens: Annotated[PositiveInt, Parameter(help="Maximum length of the answer in tokens.")] = 256,
    temperature: Annotated[NonNegativeFloat, Parameter(help="Temperature; 0 takes the most probable token.")] = 0.0,
    seed: Annotated[int, Parameter(help="Seed of the sampling.")] = 0,
    no_chat_template: Annotated[bool, Parameter(help="Continue the plain text.")] = False,
    loading: Loaded = Loading(),
) -> None:
    """Generate text from a prompt, in the chat template if the model has one."""
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
    )


@app.command(group=MEASURE)
def summarize(
    model: ModelName,
    file: Annotated[
        str,
        Parameter(name="FILE", help="Text file; - is standard input.", allow_leading_hyphen=True),
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
        **sampling.model_dump(exclude_defaults=True),
    )


@app.command(group=MEASURE)
def push(
    model: Annotated[Path, Parameter(name="RUN|MODEL", help="Run folder, or folder of full weights.")],
    repo: Annotated[str, Parameter(name="REPO", help="As you/name; created if it does not exist.")],
    /,
    *,
    private: Annotated[bool, Parameter(help="Create a private repository.")] = False,
) -> None:
    """Upload a run or a merged model to the Hugging Face hub, with the card, without checkpoints."""
    out.lines(api.push(model, repo, private=private))
