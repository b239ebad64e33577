"""`pi-lora push`."""

from pathlib import Path
from typing import Annotated

import typer

from pi_lora.cli.app import app, out, working


@app.command()
def push(
    model: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run folder, or a folder of full weights.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="As you/name; created if it does not exist.")],
    private: Annotated[bool, typer.Option(help="Create a private repository.")] = False,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="Created if it does not exist.")] = None,
    message: Annotated[str | None, typer.Option(help="The commit message.")] = None,
) -> None:
    """Upload a run or a merged model to the Hugging Face hub, with its card but without checkpoints."""
    with working(f"uploading {model}"):
        from pi_lora.report.upload import push

        url = push(model, repo, private, revision, message)
    out.print(url, highlight=False, soft_wrap=True)
