"""Measure a figure of the README or of docs/ again.

    python benchmarks/reproduce.py NAME

runs the commands of one line of benchmarks/README.md, and writes the pages that show the figures.
`make reproduce NAME=...` does the same.
"""

import shlex
import subprocess
import sys

import record  # first: it finds scripts/
from figures import FIGURES
from record import parser_of
from tables import write_pages


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name", choices=FIGURES)
    name = parser.parse_args().name
    for command in FIGURES[name].commands:
        print(f"$ {command}", file=sys.stderr, flush=True)
        words = shlex.split(command.replace("pi-lora ", "-m pi_lora "))
        status = subprocess.call([sys.executable, *words], cwd=record.ROOT)
        if status:
            sys.exit(status)
    write_pages()


if __name__ == "__main__":
    main()
