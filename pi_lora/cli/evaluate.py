"""`pi-lora eval perplexity`, `passkey`, `benchmarks`, `ruler`, and `all` that a run's recipe names."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pi_lora.cli.app import LIBRARIES, eval_app, out, working
from pi_lora.cli.measuring import Loading, Measuring, options_of
from pi_lora.cli.options import Again, Models, Plot, Seed, TaskFiles, extension_of, grouped, lengths_in
from pi_lora.distributed import is_leader

# Of depths, and of trials at each.
MOST = 10_000
PAPERS_TASKS = "boolq,piqa,race_middle,race_high,winogrande"


@eval_app.command()
@grouped
def perplexity(
    models: Models,
    how: Measuring,
    data: Annotated[str, Option(help="A file, folder, glob or hub id; pg19 or proof-pile.")] = "builtin:stdlib",
    windows: Annotated[str | None, Option(help="Lengths in tokens, as 2048,4096.")] = None,
    stride: Annotated[int | None, Option(min=1, help="Tokens a window moves; 256, or half the shortest.")] = None,
    documents: Annotated[int | None, Option(min=1, help="The first N, or N drawn by --seed.")] = None,
    truncate: Annotated[int | None, Option(min=2, help="Cut documents to their first N tokens.")] = None,
    min_tokens: Annotated[int | None, Option(min=1, help="Leave out documents of fewer.")] = None,
    seed: Annotated[int | None, Option(min=0, max=2**32 - 1, help="Draw documents at random.")] = None,
    split: Annotated[str, Option(help="Of a hub data set or builtin:stdlib.")] = "test",
    column: Annotated[str, Option(help="Of rows: the one that holds the text.")] = "text",
    by_position: Annotated[bool, Option("--by-position", help="Also the loss by position in a window.")] = False,
    plot: Plot = None,
) -> None:
    """Sliding-window perplexity (paper, section 3.2), of several models side by side; --plot draws it by position."""
    from pi_lora.recipe.evaluation import PerplexityOptions

    options = options_of(
        PerplexityOptions,
        data=data,
        windows=lengths_in("--windows", windows) or None,
        stride=stride,
        documents=documents,
        truncate=truncate,
        min_tokens=min_tokens,
        seed=seed,
        split=split,
        column=column,
        by_position=by_position or plot is not None,
    )
    with working(LIBRARIES):
        found = how.find_extended(models)
    how.report("perplexity", found, options, plot)


@eval_app.command()
@grouped
def passkey(
    models: Models,
    how: Measuring,
    targets: Annotated[str | None, Option(metavar="L',...", help="Several lengths, as 1024,2048.")] = None,
    depths: Annotated[int, Option(min=1, max=MOST, help="Distances, uniformly spaced to the target.")] = 32,
    trials: Annotated[int, Option(min=1, max=MOST, help="Random keys at each.")] = 10,
    seed: Seed = 0,
    k_max_only: Annotated[bool, Option("--k-max-only", help="Measure no more than decides k_max.")] = False,
    plot: Plot = None,
) -> None:
    """Passkey retrieval and k_max (paper, section 3.3) in --target tokens of context, by default the longest window; of
    several models side by side.
    """
    from pi_lora.recipe.evaluation import PasskeyOptions

    options = options_of(
        PasskeyOptions,
        target=how.target,
        targets=lengths_in("--targets", targets) or None,
        depths=depths,
        trials=trials,
        seed=seed,
        k_max_only=k_max_only,
    )
    # A target alone is a length to measure: a base that is not extended is measured beyond its window.
    extended = how.original is not None or how.scaling is not None
    with working(LIBRARIES):
        target = options.longest if extended else None
        found = how.find(*models, extension=extension_of(how.original, target, how.scaling))
    how.report("passkey", found, options, plot)


@eval_app.command()
@grouped
def benchmarks(
    models: Models,
    how: Measuring,
    tasks: Annotated[str, Option(metavar="NAME,...", help="Tasks or groups of lm-eval.")] = PAPERS_TASKS,
    data: TaskFiles = None,
    limit: Annotated[int | None, Option(min=1, help="Only the first N examples of each.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Inputs a forward pass.")] = 8,
    window: Annotated[int | None, Option(min=2, help="Tokens that inputs are cut to; L by default.")] = None,
) -> None:
    """Short-context benchmarks (paper, table 5) through lm-eval, of several models side by side."""
    from pi_lora.recipe.evaluation import BenchmarksOptions

    named = {"tasks": tuple(tasks.split(",")), "data": tuple(data or ())}
    options = options_of(BenchmarksOptions, **named, limit=limit, batch_size=batch_size, window=window)
    with working("loading benchmarks"):
        found = how.find_extended(models)
    how.report("benchmarks", found, options)


@eval_app.command()
@grouped
def ruler(
    models: Models,
    how: Measuring,
    windows: Annotated[str | None, Option(help="As 4096,8192; by default L', halved down to L.")] = None,
    tasks: Annotated[str | None, Option(metavar="NAME,...", help="Of lm-eval's 13; all by default.")] = None,
    samples: Annotated[int, Option(min=1, max=500, help="Prompts of each task and length.")] = 100,
    seed: Seed = 0,
    batch_size: Annotated[int | None, Option(min=1, help="Prompts at a time; as 16,384 tokens hold.")] = None,
    chat_template: Annotated[bool, Option("--chat-template", help="Put prompts as chats.")] = False,
    plot: Plot = None,
) -> None:
    """RULER and the effective length (Hsieh et al. 2024) through lm-eval; several models side by side."""
    from pi_lora.recipe.evaluation import RulerOptions

    options = options_of(
        RulerOptions,
        windows=lengths_in("--windows", windows) or None,
        tasks=tuple(tasks.split(",")) if tasks else None,
        samples=samples,
        seed=seed,
        batch_size=batch_size,
        chat_template=chat_template,
    )
    with working("loading RULER"):
        found = how.find_extended(models)
    how.report("ruler", found, options, plot)


@eval_app.command("all")
@grouped
def everything(
    run: Annotated[Path, Argument(metavar="RUN", help="A run folder.")], how: Loading, again: Again = False
) -> None:
    """Measure what RUN's recipe names under `evaluation`, and keep it in RUN/scores."""
    with working(LIBRARIES):
        from pi_lora.evaluation.suite import evaluate_run
        from pi_lora.evaluation.table import scores_table
    scores = evaluate_run(run, lambda name: how.find(name)[0], again=again, dtype=how.dtype, display=how.display)
    for each in scores.values() if is_leader() else ():
        out.print(scores_table([each]))
