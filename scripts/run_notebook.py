"""Execute a notebook in an empty folder and keep what it printed in it.

python scripts/run_notebook.py docs/quickstart.ipynb
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> None:
    path = Path(sys.argv[1])
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times, which differ each time
        if cell.cell_type == "code":  # what libraries say on stderr is of this environment
            cell.outputs = [output for output in cell.outputs if output.get("name") == "stdout"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
