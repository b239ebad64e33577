"""What libraries log and warn of during training: kept in the run, off the terminal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import logging as transformers_logging

LIBRARY_LOG = "libraries.log"
# Their loggers have handlers of their own, which write to the terminal, and pass nothing on.
NON_PROPAGATING_LOGGERS = ("transformers", "datasets", "huggingface_hub")


@contextmanager
def redirect_library_logs(folder: Path) -> Iterator[None]:
    """Append warnings and what is logged from WARNING on to `libraries.log` in a folder, and show no progress bar but
    ours.
    """
    handler = logging.FileHandler(folder / LIBRARY_LOG, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    root, *others = loggers = [logging.getLogger(name) for name in (None, *NON_PROPAGATING_LOGGERS)]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    transformers_logging.disable_progress_bar()
    # What a program that calls `train` wants to hear as well goes through the root.
    root.addHandler(handler)
    for logger in others:
        logger.handlers[:] = [] if logger.propagate else [handler]
        logger.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, handlers, level in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)
        handler.close()
