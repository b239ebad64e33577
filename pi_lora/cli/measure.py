"""`pi-lora eval`, `probe` and `compare`; the report of a run and its way to the hub; and texts that a model writes."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from pi_lora import api
from pi_lora.cli.app import (
    GROUP,
    MEASURE,
    BaseName,
    DtypeName,
    JsonFile,
    Loaded,
    LoadOptions,
    ModelName,
    ScalingOptions,
    Target,
    TrustCode,
    app,
)
from pi_lora.errors import PiLoraError
from pi_lora.model_ref import ModelRef
from pi_lora.recipe.evaluation import Evaluation, PasskeyOptions, ProbeOptions, Sampling, SearchOptions
from pi_lora.recipe.section import Section
from pi_lora.terminal import out, working

Models = Annotated[list[str], Parameter(name="MODEL", help="Hub ids, folders, runs or builtin:tiny.")]
Again = Annotated[bool, Parameter(help="Repeat measurements that have scores.")]
OtherText = Annotated[str | None, Parameter(help="Measure perplexity on this text instead of the run's.")]

eval_app = App(name="eval", help="Measure a model, or several with the same options.", group=MEASURE)
app.command(eval_app)


def add_eval_command(name: str, kind: type[Section]) -> None:
    """Add the command of a measurement, whose options are of this `kind`."""

    def command(
        models: Models,
        /,
        *,
        options: Any,
        loading: Loaded = LoadOptions(),
        scaling: Annotated[ScalingOptions, GROUP] = ScalingOptions(),
        json: JsonFile = None,
        target: Target = None,
    ) -> None:
        is_scaled = any(vars(scaling).values())
        if isinstance(options, PasskeyOptions):
            # A target alone is a length to measure: a base that is not extended is measured beyond its window.
            target = options.longest if is_scaled else None
        if is_scaled and not target:
            raise PiLoraError(
                "--original, --scaling, --factors: need --target, the window to extend to; give it as well"
            )
        extension = scaling.extension(target) if target else None
        refs = [loading.ref(model, extension) for model in models]
        api.evaluate(refs, name, json=json, **options.model_dump(exclude_unset=True))

    command.__annotations__["options"] = Annotated[kind, GROUP]
    if not any(field.is_required() for field in kind.model_fields.values()):
        assert command.__kwdefaults__
        command.__kwdefaults__["options"] = kind()
    eval_app.command(command, name=name, help=kind.__doc__)


for measurement, kind in Evaluation.measurements().items():
    add_eval_command(measurement, kind)


@eval_app.command(name="all")
def everything(
    run: Annotated[str, Parameter(name="RUN", help="Folder or hub id of a run.")],
    /,
    *,
    options: Loaded = LoadOptions(),
    data: OtherText = None,
    again: Again = False,
) -> None:
    """Make the measurements of `evaluation` in RUN's recipe, and keep the scores in RUN/scores."""
    api.evaluate_run(options.ref(run), data=data, force_remeasure=again)


@app.command(group=MEASURE)
def probe(
    model: BaseName,
    /,
    *,
    options: Annotated[ProbeOptions, GROUP],
    trust_remote_code: TrustCode = False,
    dtype: DtypeName = None,
    json: JsonFile = None,
) -> None:
    """Compare scalings of MODEL before any tuning: perplexity and passkeys, inside its window and at --target.

    The last line names the best scaling, and says whether tuning is needed.
    """
    ref = ModelRef(model, trust_remote_code=trust_remote_code, dtype=dtype)
    api.probe(ref, json=json, **options.model_dump(exclude_unset=True))


@app.command(group=MEASURE)
def search(
    model: BaseName,
    /,
    *,
    options: Annotated[SearchOptions, GROUP],
    output: Annotated[Path, Parameter(help="New file, for context.factors of a recipe.")],
    trust_remote_code: TrustCode = False,
    dtype: DtypeName = None,
) -> None:
    """Search for the divisors of MODEL's rotary frequencies that read and retrieve best at --target tokens.

    The last line is the command that compares the result with untuned scalings on other text.
    """
    ref = ModelRef(model, trust_remote_code=trust_remote_code, dtype=dtype)
    api.search(ref, output=output, **options.model_dump(exclude_unset=True))


@app.command(group=MEASURE)
def compare(
    base: Annotated[str, Parameter(name="BASE", help="Hub id, folder or builtin:tiny.")],
    run: Annotated[str, Parameter(name="RUN", help="Folder or hub id of a run that was tuned from BASE.")],
    /,
    *,
    options: Loaded = LoadOptions(),
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
        options.ref(base),
        options.ref(run),
        data=data,
        allow_other_base=another,
        include_untuned=not no_untuned,
        chat=chat,
        force_remeasure=again,
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
    max_new_tokens: Annotated[
        PositiveInt, Parameter(name=["--max-new-tokens", "--tokens"], help="Maximum length of the answer in tokens.")
    ] = 256,
    temperature: Annotated[NonNegativeFloat, Parameter(help="Temperature; 0 takes the most probable token.")] = 0.0,
    seed: Annotated[int, Parameter(help="Seed of the sampling.")] = 0,
    no_chat_template: Annotated[bool, Parameter(help="Continue the plain text.")] = False,
    options: Loaded = LoadOptions(),
) -> None:
    """Generate text from a prompt, in the chat template if the model has one."""
    with working():
        text = api.read_prompt(file) if prompt is None else prompt
    api.generate(
        options.ref(model),
        text,
        chat_template=not no_chat_template,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stream=True,
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
    options: Loaded = LoadOptions(),
) -> None:
    """Summarize a document in the prompt that the model was tuned on, or the paper's."""
    api.summarize(options.ref(model), file, **sampling.model_dump(exclude_unset=True))


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
