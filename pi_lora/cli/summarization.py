"""`pi-lora eval summarization` and `pi-lora summarize`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pi_lora.cli.app import (
    AllowChanged,
    Dtype,
    JsonFile,
    ModelName,
    Original,
    Scaling,
    Seed,
    Target,
    TrustRemoteCode,
    app,
    eval_app,
    stretch_of,
    working,
)
from pi_lora.cli.measuring import find_all, loaded, measured, report, say
from pi_lora.types import Allowed

Temperature = Annotated[float, typer.Option(min=0, help="Of sampling; 0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1, help="Sample among the likeliest tokens of this share.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="The longest summary; the run's data.completion_tokens, or 1000.")
]
PREDICTIONS = Path("predictions.jsonl")


@eval_app.command()
def summarization(
    model: ModelName,
    data: Annotated[str | None, typer.Option(metavar="SOURCE", help="Files, a folder, a glob or a hub id.")] = None,
    subset: Annotated[str | None, typer.Option(help="Of a hub data set.")] = None,
    split: Annotated[str | None, typer.Option(help="Of a hub data set; validation by default.")] = None,
    document: Annotated[str | None, typer.Option(metavar="COLUMN", help="What is to be read.")] = None,
    summary: Annotated[str | None, typer.Option(metavar="COLUMN", help="What it is compared with.")] = None,
    template: Annotated[str | None, typer.Option(help="Another prompt than the paper's, with {column}s.")] = None,
    completion: Annotated[str | None, typer.Option(metavar="COLUMN", help="--summary of a --template.")] = None,
    document_tokens: Annotated[int | None, typer.Option(min=1, help="Cut documents to them; 15000.")] = None,
    special_tokens: Annotated[bool, typer.Option("--special-tokens", help="Read them in texts as such.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N examples.")] = None,
    temperature: Temperature = 0.5,
    top_p: TopP = 0.95,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="What generates.")] = "transformers",
    predictions: Annotated[Path, typer.Option(metavar="FILE", help="Kept there as they come.")] = PREDICTIONS,
    original: Original = None,
    target: Target = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_changed: AllowChanged = False,
    json: JsonFile = None,
) -> None:
    """Summaries of long documents, scored by ROUGE (paper, section 3.5): GovReport's, or as a run was tuned."""
    stretch = stretch_of(original, target, scaling)
    with working("loading libraries"):
        from pi_lora.evaluation.results import check_can_write
        from pi_lora.evaluation.summarization.measure import evaluate_summarization, evaluation_data
        from pi_lora.evaluation.summarization.rouge import summarization_table
        from pi_lora.evaluation.summarization.writing import Sampling, find_writer

        check_can_write(predictions)
        [found] = find_all([model], stretch, Allowed(trust_remote_code, allow_changed))
        source = {"name": data, "subset": subset, "split": split}
        columns = {"document": document, "summary": summary, "template": template, "completion": completion}
        limits = {"document_tokens": document_tokens, "completion_tokens": max_new_tokens}
        limits["special_tokens"] = special_tokens or None
        rows = evaluation_data(model, source, {**columns, **limits})
        sampling = Sampling(temperature, top_p, rows.completion_tokens, seed)

    def measure(writer: Any, progress: Any) -> Any:
        return evaluate_summarization(writer, rows, sampling, predictions, limit, progress, say)

    def scores() -> list[Any]:
        with working(f"loading {model}"):
            writer: Any = find_writer(found, engine, dtype)
        return [measured("writing", writer, measure)]

    report(scores, json, summarization_table)


@app.command()
def summarize(
    model: ModelName,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .txt, .md or .pdf file, or - for standard input.")],
    temperature: Temperature = 0.5,
    top_p: TopP = 0.95,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_changed: AllowChanged = False,
) -> None:
    """Write a summary of FILE, as it comes."""
    with working("loading libraries"):
        from pi_lora.data.documents import read_document
        from pi_lora.evaluation.summarization.measure import evaluation_data
        from pi_lora.evaluation.summarization.writing import Sampling, summarize

        text = read_document(file)
        [found] = find_all([model], None, Allowed(trust_remote_code, allow_changed))
        task = evaluation_data(model, {}, {"completion_tokens": max_new_tokens})
    sampling = Sampling(temperature, top_p, task.completion_tokens, seed)
    summarize(loaded(found, dtype), file, text, task, sampling, say)
