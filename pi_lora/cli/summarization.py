"""`pi-lora eval summarization` and `pi-lora summarize`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from pi_lora.cli.app import LIBRARIES, app, eval_app, say, working
from pi_lora.cli.measuring import Loading, Measuring
from pi_lora.cli.options import ModelName, Seed, grouped

Temperature = Annotated[float, Option(min=0, help="Of sampling; 0 takes the likeliest token.")]
TopP = Annotated[float, Option(min=0.01, max=1, help="Sample among the likeliest tokens of this share.")]
MaxNewTokens = Annotated[int | None, Option(min=1, help="The longest summary; the recipe's, or 1000.")]


@eval_app.command()
@grouped
def summarization(
    model: ModelName,
    how: Measuring,
    data: Annotated[str | None, Option(metavar="SOURCE", help="Files, a folder, a glob or a hub id.")] = None,
    subset: Annotated[str | None, Option(help="Of a hub data set.")] = None,
    split: Annotated[str | None, Option(help="Of a hub data set; validation by default.")] = None,
    document: Annotated[str | None, Option(metavar="COLUMN", help="What is to be read.")] = None,
    summary: Annotated[str | None, Option(metavar="COLUMN", help="What it is compared with.")] = None,
    template: Annotated[str | None, Option(help="Another prompt than the paper's, with {column}s.")] = None,
    completion: Annotated[str | None, Option(metavar="COLUMN", help="--summary of a --template.")] = None,
    document_tokens: Annotated[int | None, Option(min=1, help="Cut documents to them; 15000.")] = None,
    special_tokens: Annotated[bool, Option("--special-tokens", help="Read them in texts as such.")] = False,
    limit: Annotated[int | None, Option(min=1, help="Only the first N examples.")] = None,
    temperature: Temperature = 0.5,
    top_p: TopP = 0.95,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    engine: Annotated[Literal["transformers", "vllm"], Option(help="What generates.")] = "transformers",
    predictions: Annotated[Path, Option(metavar="FILE", help="Kept there as they come.")] = Path("predictions.jsonl"),
) -> None:
    """Summaries of long documents, scored by ROUGE (paper, section 3.5): GovReport's, or as a run was tuned."""
    with working(LIBRARIES):
        from pi_lora.evaluation.results import check_can_write
        from pi_lora.evaluation.summarization.measure import evaluate_summarization, evaluation_data
        from pi_lora.evaluation.summarization.rouge import summarization_table
        from pi_lora.evaluation.summarization.writing import Sampling, find_writer

        check_can_write(predictions)
        found = how.find_stretched([model])
        source = {"name": data, "subset": subset, "split": split}
        columns = {"document": document, "summary": summary, "template": template, "completion": completion}
        limits = {"document_tokens": document_tokens, "completion_tokens": max_new_tokens}
        limits["special_tokens"] = special_tokens or None
        rows = evaluation_data(model, source, {**columns, **limits})
        sampling = Sampling(temperature, top_p, rows.completion_tokens, seed)

    def load(found: Any) -> Any:
        with working(f"loading {model}"):
            return find_writer(found, engine, how.dtype)

    def measure(writer: Any, progress: Any) -> Any:
        return evaluate_summarization(writer, rows, sampling, predictions, limit, progress, say)

    how.report(found, "writing", measure, summarization_table, load=load)


@app.command()
@grouped
def summarize(
    model: ModelName,
    file: Annotated[str, Argument(metavar="FILE", help="A .txt, .md or .pdf file, or - for standard input.")],
    how: Loading,
    temperature: Temperature = 0.5,
    top_p: TopP = 0.95,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
) -> None:
    """Write a summary of FILE, as it comes."""
    with working(LIBRARIES):
        from pi_lora.data.documents import read_document
        from pi_lora.evaluation.summarization.measure import evaluation_data
        from pi_lora.evaluation.summarization.writing import Sampling, summarize

        text = read_document(file)
        [found] = how.find(model)
        task = evaluation_data(model, {}, {"completion_tokens": max_new_tokens})
    sampling = Sampling(temperature, top_p, task.completion_tokens, seed)
    summarize(how.load(found), file, text, task, sampling, say)
