"""The command lines of the scripts here and in benchmarks/: `--help` shows what a script does, and runs nothing; and
those that they run.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path


def parser_of(documentation: str | None) -> ArgumentParser:
    """Return the parser of a script without arguments of its own, with the documentation of the script."""
    return ArgumentParser(description=documentation, formatter_class=RawDescriptionHelpFormatter)


def train_words(recipe: str, output: Path, *overrides: str) -> list[str]:
    """Return the words of `pi-lora train`, which continues the run if it was interrupted."""
    from pi_lora.staging import staging_path

    words = ["train", recipe, *overrides, "--output", str(output)]
    if staging_path(output).exists():
        words.append("--resume")
    return words
