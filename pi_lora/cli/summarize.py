"""`pi-lora summarize`."""

from typing import Annotated

from cyclopts import Parameter

from pi_lora.cli.app import LIBRARIES, MEASURE, app, say, working
from pi_lora.cli.options import GROUP, Loading, ModelName
from pi_lora.recipe.evaluation import Sampling


@app.command(group=MEASURE, sort_key=4)
def summarize(
    model: ModelName,
    file: Annotated[
        str,
        Parameter(name="FILE", help="A .txt, .md or .pdf file, or - for standard input.", allow_leading_hyphen=True),
    ],
    /,
    *,
    sampling: Annotated[Sampling, GROUP] = Sampling(),
    how: Annotated[Loading, GROUP] = Loading(),
) -> None:
    """Summarize a document with a model that was tuned for it."""
    with working(LIBRARIES):
        from pi_lora.data.documents import read_document
        from pi_lora.evaluation.summarization.measure import summarize

        text = read_document(file)
        [found] = how.find(model)
    with working(f"loading {model}"):
        loaded = found.load(how.dtype)
    summarize(loaded, file, text, sampling, say)
