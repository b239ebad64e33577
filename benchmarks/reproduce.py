"""Measure a figure of the README or of docs/ again.

    python benchmarks/reproduce.py NAME

runs the commands below a heading of benchmarks/README.md, and writes the pages that show the figures.
`make reproduce NAME=...` does the same.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import record  # first: it finds scripts/
from record import parser_of
from tables import write_pages

# The name of a figure, and the text below it.
SECTION = re.compile(r"^## (\w+)\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^    .*\n", re.MULTILINE)


def commands_by_name() -> dict[str, str]:
    """The commands of each figure, for a shell."""
    sections = SECTION.findall((record.ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"))
    return {name: "".join(COMMANDS.findall(text)) for name, text in sections}


def main() -> None:
    commands = commands_by_name()
    parser = parser_of(__doc__)
    parser.add_argument("name", choices=commands)
    name = parser.parse_args().name
    # `python`, `pi-lora` and `pytest` are those of this environment.
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = ["sh", "-ex", "-c", commands[name]]
    status = subprocess.call(shell, cwd=record.ROOT, env={**os.environ, "PATH": programs})
    if status:
        sys.exit(status)
    write_pages()


if __name__ == "__main__":
    main()
