"""`pi-lora eval summarization` and `pi-lora summarize`."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from pi_lora.cli.app import LIBRARIES, app, eval_app, say, working
from pi_lora.cli.measuring import Loading, Measuring, options_of
from pi_lora.cli.options import ModelName, Models, Seed, grouped

Temperature = Annotated[float, Option(min=0, help="Of sampling; 0 takes the likeliest token.")]
TopP = Annotated[float, Option(min=0.01, max=1, help="Sample among the likeliest tokens of this share.")]
MaxNewTokens = Annotated[int | None, Option(min=1, help="The longest summary; the recipe's, or 1000.")]


@eval_app.command()
@grouped
def summarization(
    models: Models,
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
    predictions: Annotated[Path | None, Option(metavar="FILE", help="For what was written; predictions.jsonl.")] = None,
) -> None:
    """Summaries of long documents, scored by ROUGE (paper, section 3.5): GovReport's, or as a run was tuned."""
    from pi_lora.recipe.evaluation import SummarizationOptions

    options = options_of(
        SummarizationOptions,
        data=data,
        subset=subset,
        split=split,
        document=document,
        summary=summary,
        template=template,
        completion=completion,
        document_tokens=document_tokens,
        special_tokens=special_tokens,
        limit=limit,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
        engine=engine,
        predictions=str(predictions or "predictions.jsonl") if predictions or len(models) == 1 else None,
    )
    with working(LIBRARIES):
        found = how.find_extended(models)
    how.report("summarization", found, options)


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
    from pi_lora.recipe.evaluation import SummarizationOptions

    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens, "seed": seed}
    options = options_of(SummarizationOptions, **sampling)
    with working(LIBRARIES):
        from pi_lora.data.documents import read_document
        from pi_lora.evaluation.summarization.summarize import summarize

        text = read_document(file)
        [found] = how.find(model)
    with working(f"loading {model}"):
        loaded = found.load(how.dtype)
    summarize(loaded, file, text, options, say)
