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
from tables import write_pages


def main() -> None:
    name = sys.argv[-1]
    if name not in FIGURES:
        sys.exit(f"reproduce: name one of {', '.join(FIGURES)}")
    for command in FIGURES[name].commands:
        print(f"$ {command}", file=sys.stderr, flush=True)
        words = shlex.split(command.replace("pi-lora ", "-m pi_lora "))
        status = subprocess.call([sys.executable, *words], cwd=record.ROOT)
        if status:
            sys.exit(status)
    write_pages()


if __name__ == "__main__":
    main()
