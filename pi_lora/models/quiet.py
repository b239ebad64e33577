"""transformers without its notes on the terminal."""

import contextlib
from collections.abc import Iterator

from transformers import logging as transformers_logging


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' progress bars and notes off the terminal; errors are exceptions all the same."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
