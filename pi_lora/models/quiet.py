"""transformers without its notes on the terminal, except for those that say that a result is wrong."""

import contextlib
import logging
import re
from collections.abc import Iterator

from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from transformers import logging as transformers_logging

from pi_lora.types import ui

WRONG = re.compile(r"\b(incorrect|wrong|corrupted|not been properly)\b", re.IGNORECASE)


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' progress bars and notes off the terminal, except for notes that something is wrong; errors are
    exceptions all the same.
    """
    said = set[str]()

    def passes(record: logging.LogRecord) -> bool:
        is_error = record.levelno >= logging.ERROR
        note = record.getMessage()
        if WRONG.search(note) and not is_error and note not in said:  # by another handler
            said.add(note)
            hint = " Flags of a tokenizer are keys of its tokenizer_config.json." if "flag" in note else ""
            ui.say(f"transformers: {note}{hint}")
        return is_error

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    handlers = list(logging.getLogger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(passes)
    has_bars = transformers_logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if has_bars:
            transformers_logging.enable_progress_bar()
        for handler in handlers:
            handler.removeFilter(passes)
        transformers_logging.set_verbosity(verbosity)
