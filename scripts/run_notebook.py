"""Execute a notebook in an empty folder and keep in it what it printed and drew.

python scripts/run_notebook.py docs/quickstart.ipynb
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from arguments import parser_of

PNG = "image/png"


def kept(outputs: Iterable[Any]) -> Iterator[Any]:
    """Printed text and pictures; what libraries say on stderr is of this environment."""
    for output in outputs:
        if output.get("name") == "stdout":
            yield output
        if PNG in output.get("data", {}):
            output.data = {PNG: output.data[PNG]}
            yield output


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times, which differ each time
        if cell.cell_type == "code":
            cell.outputs = list(kept(cell.outputs))
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
