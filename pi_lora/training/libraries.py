"""What libraries log and warn of during training: kept in the run, off the terminal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers import logging as transformers_logging

LIBRARY_LOG = "libraries.log"
# Their loggers have handlers of their own, which write to the terminal, and pass nothing on.
NON_PROPAGATING_LOGGERS = ("transformers", "datasets", "huggingface_hub")


class _LibraryLog(logging.FileHandler):
    """Writes each message once; a disk that is full ends no training."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if (message := record.getMessage()) not in self.said:
            self.said.add(message)
            with suppress(OSError):
                super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing of a line that could not be written."""


@contextmanager
def redirect_library_logs(folder: Path) -> Iterator[None]:
    """Append warnings and what is logged from WARNING on to `libraries.log` in a folder, if there is any, and show no
    progress bar but ours.
    """
    handler, root = _LibraryLog(folder / LIBRARY_LOG), logging.getLogger()
    aloof = [logging.getLogger(name) for name in NON_PROPAGATING_LOGGERS]
    before = {logger: (logger.handlers[:], logger.level) for logger in (root, *aloof)}
    transformers_logging.disable_progress_bar()
    # What a program that calls `train` wants to hear as well goes through the root.
    root.addHandler(handler)
    for logger in aloof:
        logger.handlers[:] = [handler]
        logger.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, (handlers, level) in before.items():
            logger.handlers[:] = handlers
            logger.setLevel(level)
        handler.close()
