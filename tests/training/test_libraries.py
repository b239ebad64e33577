"""What libraries say during training is in the run and not on the terminal."""

import logging
import warnings
from pathlib import Path

import pytest
from conftest import BUILTIN, small_recipe, train
from transformers import logging as transformers_logging

from pi_lora.training import training
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


def test_a_run_holds_what_was_said_in_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = training.set_seed

    def set_seed(number: int) -> None:
        logging.getLogger("transformers.trainer").warning("a library's complaint")
        seed(number)

    monkeypatch.setattr(training, "set_seed", set_seed)
    run = train(small_recipe(BUILTIN, context={"target": 512}, training={"steps": 1}), tmp_path / "run")
    assert "a library's complaint" in (run / LIBRARY_LOG).read_text()
