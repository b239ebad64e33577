"""The command lines of the scripts here and in benchmarks/: `--help` shows what a script does, and runs nothing."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def parser_of(documentation: str | None) -> ArgumentParser:
    """Return the parser of a script without arguments of its own, with the documentation of the script."""
    return ArgumentParser(description=documentation, formatter_class=RawDescriptionHelpFormatter)
