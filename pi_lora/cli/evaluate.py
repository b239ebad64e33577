"""`pi-lora eval perplexity`, `passkey`, `benchmarks`, `ruler`, and `all` that a run's recipe names."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from pi_lora.cli.app import LIBRARIES, eval_app, out, say, working
from pi_lora.cli.measuring import Loading, Measuring, measure_into, warn_of_length
from pi_lora.cli.options import Again, Models, Plot, Seed, TaskFiles, extension_of, grouped, lengths_in
from pi_lora.distributed import is_leader
from pi_lora.errors import ModelError, PiLoraError

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
    lengths = lengths_in("--windows", windows)
    with working(LIBRARIES):
        from pi_lora.data.sources import Choice
        from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
        from pi_lora.evaluation.perplexity.table import perplexity_table, position_picture, position_table
        from pi_lora.recipe.evaluation import default_windows

        found = how.find_stretched(models)
    # All are measured alike.
    lengths = lengths or list(default_windows(max(model.window for model in found), stride))
    choice = Choice(documents, min_tokens, truncate, seed, split, column)
    by_position = by_position or plot is not None

    def measure(model: Any, progress: Any) -> Any:
        return evaluate_perplexity(model, data, lengths, stride, choice, progress, by_position=by_position, shared=True)

    def say_how(scores: list[Any]) -> list[Any]:
        warn_of_length(found, "--windows", max(lengths))
        if documents is None and (taken := choice.of(data).documents):
            say(f"{data}: {taken} documents, unless --documents says otherwise")
        return scores

    tables = (perplexity_table, position_table) if by_position else (perplexity_table,)
    how.report(found, "perplexity", measure, *tables, complete=say_how, picture=position_picture, plot=plot)


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
    lengths = lengths_in("--targets", targets)
    if lengths and (how.target or k_max_only):
        raise PiLoraError("--targets: measures every depth of each length; leave out --target and --k-max-only")
    # A target alone is a length to measure: a base that is not stretched is measured beyond its window.
    stretched = how.original is not None or how.scaling is not None
    target = (how.target or max(lengths, default=None)) if stretched else None
    with working(LIBRARIES):
        from pi_lora.evaluation.passkey import table
        from pi_lora.evaluation.passkey.measure import evaluate_passkey, evaluate_passkey_map
        from pi_lora.evaluation.passkey.prompt import Grid

        found = how.find(*models, extension=extension_of(how.original, target, how.scaling))
    lengths = lengths or [how.target or max(model.window for model in found)]
    grids = [Grid(length, depths, trials, seed) for length in lengths]
    warn_of_length(found, "--targets" if targets else "--target", lengths[-1])

    def measure(model: Any, progress: Any) -> Any:
        if targets:
            return evaluate_passkey_map(model, grids, progress, shared=True)
        return evaluate_passkey(model, grids[0], progress, k_max_only=k_max_only, shared=True)

    shown = table.passkey_map_table if targets else table.passkey_table
    picture = table.passkey_map_picture if targets else table.passkey_picture
    how.report(found, "passkey", measure, shown, picture=picture, plot=plot)


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
    with working("loading benchmarks"):
        from pi_lora.evaluation.benchmarks.table import benchmarks_table
        from pi_lora.evaluation.suite import MEASUREMENTS
        from pi_lora.recipe.evaluation import BenchmarksOptions

        found = how.find_stretched(models)
        asked = BenchmarksOptions(
            tasks=tuple(tasks.split(",")), data=tuple(data or ()), limit=limit, batch_size=batch_size, window=window
        )
        measure = MEASUREMENTS["benchmarks"].prepare(asked)
    how.report(found, "benchmarks", measure, benchmarks_table)


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
    lengths = lengths_in("--windows", windows)
    with working("loading RULER"):
        from pi_lora.evaluation.suite import check_has_lm_eval

        check_has_lm_eval("ruler")
        from pi_lora.evaluation.ruler.effective import side_by_side
        from pi_lora.evaluation.ruler.measure import evaluate_ruler
        from pi_lora.evaluation.ruler.prompts import TASKS, unavailable
        from pi_lora.evaluation.ruler.table import ruler_picture, ruler_table
        from pi_lora.recipe.evaluation import RulerOptions, default_windows

        found = how.find_stretched(models)
        names = tuple(tasks.split(",")) if tasks else TASKS
        left_out = unavailable(names)
    original_windows = (round(model.window / model.scale) for model in found)
    lengths = lengths or list(default_windows(max(model.window for model in found), min(original_windows)))
    for task, reason in left_out.items():
        say(f"{task}: left out: {reason}")
    warn_of_length(found, "--windows", max(lengths))

    options = RulerOptions(
        windows=tuple(lengths),
        tasks=names,
        samples=samples,
        seed=seed,
        batch_size=batch_size,
        chat_template=chat_template,
    )

    def measure(model: Any, progress: Any) -> Any:
        return evaluate_ruler(model, options, left_out, progress)

    how.report(found, "RULER", measure, ruler_table, complete=side_by_side, picture=ruler_picture, plot=plot)


@eval_app.command("all")
@grouped
def everything(
    run: Annotated[Path, Argument(metavar="RUN", help="A run folder.")], how: Loading, again: Again = False
) -> None:
    """Measure what RUN's recipe names under `evaluation`, and keep it in RUN/scores."""
    with working(LIBRARIES):
        from pi_lora.evaluation.results import check_can_write, read_scores
        from pi_lora.evaluation.suite import MEASUREMENTS, asked_for, evaluation_of
        from pi_lora.run import SCORES

        evaluation, named = evaluation_of(run)
        asked = asked_for(evaluation)
        files = {name: run / SCORES / f"{name}.json" for name in asked}
        missing = {
            name: MEASUREMENTS[name].prepare(section)
            for name, section in asked.items()
            if again or not files[name].is_file()
        }
        check_can_write(*(files[name] for name in missing))
        found = how.find(*[str(run)] if missing else [])
    if not named:
        say(f"{run}: its recipe names no measurements; perplexity and passkey with their defaults")
    for each in found:
        measure_into(how.load(each), missing, files)
    for name, file in files.items() if is_leader() else ():
        if name not in missing:
            say(f"{file}: measured before; measure again with --again")
        kept = read_scores(file)
        if not isinstance(kept, MEASUREMENTS[name].kind):
            raise ModelError(f"{file}: holds no scores of {name}; measure again with --again")
        out.print(MEASUREMENTS[name].table(kept))
