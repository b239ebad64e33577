"""What libraries say during training is in the run and not on the terminal."""

import logging
import warnings
from pathlib import Path

import pytest
from transformers import logging as transformers_logging

from pi_lora.training.callbacks import LIBRARY_LOG, redirect_library_logs


def test_warnings_and_logs_go_to_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {name: logging.getLogger(name).handlers[:] for name in (None, "transformers", "datasets")}
    # As a program may have set it.
    transformers_logging.set_verbosity_error()
    with warnings.catch_warnings(), redirect_library_logs(tmp_path):
        warnings.simplefilter("always")
        logging.getLogger("transformers.trainer").warning("of transformers")
        logging.getLogger("datasets.table").error("of datasets")
        logging.getLogger("trl.trainer").warning("of TRL")
        logging.getLogger("trl.trainer").info("of no interest")
        warnings.warn(" ".join(["of", "torch"]), stacklevel=1)
    said = (tmp_path / LIBRARY_LOG).read_text()
    assert [said.count(f"of {name}") for name in ("transformers", "datasets", "TRL", "torch")] == [1] * 4
    assert "of no interest" not in said
    assert capfd.readouterr() == ("", "")
    assert {name: logging.getLogger(name).handlers for name in before} == before
    assert transformers_logging.get_verbosity() == logging.ERROR
    transformers_logging.set_verbosity_warning()
