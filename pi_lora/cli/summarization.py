"""`pi-lora eval summarization` and `pi-lora summarize`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from pi_lora.cli.app import (
    Dtype,
    JsonFile,
    ModelName,
    Original,
    Scaling,
    app,
    err,
    eval_app,
    out,
    progress_bar,
    stretch_of,
    working,
)

Temperature = Annotated[float, typer.Option(min=0, help="Of sampling; 0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1, help="Sample among the likeliest tokens of this share.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="The longest summary; the run's data.completion_tokens, or 1000.")
]


@eval_app.command()
def summarization(
    model: ModelName,
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="A .jsonl, .parquet or .csv file, a folder, glob or hub id.")
    ] = None,
    subset: Annotated[str | None, typer.Option(help="Of a hub data set.")] = None,
    split: Annotated[str | None, typer.Option(help="Of a hub data set; validation by default.")] = None,
    document: Annotated[str | None, typer.Option(metavar="COLUMN", help="What is to be read.")] = None,
    summary: Annotated[str | None, typer.Option(metavar="COLUMN", help="What it is compared with.")] = None,
    template: Annotated[str | None, typer.Option(help="Another prompt than the paper's, with {column}s.")] = None,
    completion: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="With --template, instead of --summary.")
    ] = None,
    document_tokens: Annotated[int | None, typer.Option(min=1, help="Cut documents to them; 15000.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N examples.")] = None,
    temperature: Temperature = 0.5,
    top_p: TopP = 0.95,
    max_new_tokens: MaxNewTokens = None,
    seed: int = 0,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="What generates.")] = "transformers",
    predictions: Annotated[Path, typer.Option(metavar="FILE", help="Where they are kept as they come.")] = Path(
        "predictions.jsonl"
    ),
    original: Original = None,
    target: Annotated[int | None, typer.Option(help="L', the window to stretch to.")] = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    json: JsonFile = None,
) -> None:
    """Summaries of long documents, scored by ROUGE (paper, section 3.5): GovReport's, or as a run was tuned."""
    stretch = stretch_of(original, target, scaling)
    with working("loading libraries"):
        from pi_lora.data.tables import SCROLLS
        from pi_lora.distributed import is_launched, is_leader, join_processes
        from pi_lora.evaluation.results import write_scores
        from pi_lora.evaluation.summarization.measure import evaluate_summarization, evaluation_data
        from pi_lora.evaluation.summarization.table import summarization_table
        from pi_lora.evaluation.summarization.writing import Sampling, find_writer
        from pi_lora.models.base import device
        from pi_lora.models.load import find

        find(model, stretch)
        source = _given(name=data, subset=subset, split=split)
        columns = {"document": document, "summary": summary, "template": template, "completion": completion}
        limits = {"document_tokens": document_tokens, "completion_tokens": max_new_tokens}
        rows = evaluation_data(model, source, _given(**columns, **limits))
        sampling = Sampling(temperature, top_p, rows.completion_tokens, seed)
        if is_launched():
            join_processes(cpu=device().type == "cpu")
    with working(f"loading {model}"):
        writer = find_writer(model, engine, stretch, dtype)
    say = _say if is_leader() else None
    with progress_bar("writing", quiet=not is_leader()) as progress:
        scores = evaluate_summarization(writer, rows, sampling, predictions, limit, progress, say)
    if not is_leader():
        return
    if json:
        write_scores(scores, json)
    out.print(summarization_table(scores, beside_the_paper=rows.source[0].name == SCROLLS))


@app.command()
def summarize(
    model: ModelName,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .txt, .md or .pdf file, or - for standard input.")],
    temperature: Temperature = 0.5,
    top_p: TopP = 0.95,
    max_new_tokens: MaxNewTokens = None,
    seed: int = 0,
    dtype: Dtype = None,
) -> None:
    """Write a summary of FILE, as it comes."""
    with working("loading libraries"):
        from pi_lora.data.documents import read_document
        from pi_lora.evaluation.summarization.measure import evaluation_data
        from pi_lora.evaluation.summarization.summarize import summarize
        from pi_lora.evaluation.summarization.writing import Sampling
        from pi_lora.models.load import find, load

        text = read_document(file)
        find(model, None)
        task = evaluation_data(model, {}, _given(completion_tokens=max_new_tokens))
    with working(f"loading {model}"):
        loaded = load(model, None, dtype)
    sampling = Sampling(temperature, top_p, task.completion_tokens, seed)
    summarize(loaded, file, text, task, sampling, lambda piece: print(piece, end="", flush=True), _say)
    print()


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _say(line: str) -> None:
    err.print(line, highlight=False, soft_wrap=True)
