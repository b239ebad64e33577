"""Several processes: the same training as one, and what accelerate is asked for."""

import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from conftest import refused, run_captured, small_recipe, train
from pi_lora.distributed import (
    FAILED_ENV,
    SET_BY_CLUSTERS,
    STOP_SIGNALS,
    check_launched,
    is_launched,
    is_main_process,
    is_to_report,
    join_processes,
    launch,
    launch_arguments,
    world_size,
)
from pi_lora.errors import Diverged, Interrupted, RecipeError
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from processes import without_progress

CLUSTER = {"gpus": 8, "machines": 4}


def recipe_for(
    model: Path | str, hardware: dict[str, object], tuning: dict[str, object] | None = None, **training: object
) -> Recipe:
    base = small_recipe(model).training.model_dump()
    once = {**base, "steps": 5, "global_batch_size": 64, "per_device_batch_size": 1, "precision": "float32"}
    return small_recipe(model, hardware=hardware, tuning=tuning or {"rank": 4}, training={**once, **training})


def flags(recipe: Recipe, rank: int = 0, port: int | None = None) -> dict[str, object]:
    """What accelerate's own parser makes of the arguments."""
    arguments = launch_arguments(recipe, ["train", "r.yaml"], rank, "10.0.0.1", port)
    return vars(launch_command_parser().parse_args(arguments))


def test_full_tuning_on_a_cluster_is_sharded_by_fsdp2() -> None:
    recipe = recipe_for("m", CLUSTER, {"method": "full"}, precision="auto")
    asked = flags(recipe, 2, 1234)
    assert (asked["num_processes"], asked["num_machines"], asked["machine_rank"]) == (32, 4, 2)
    assert (asked["main_process_ip"], asked["main_process_port"]) == ("10.0.0.1", 1234)
    assert asked["rdzv_conf"] == "timeout=604800", "machines pack their data at their own pace"
    assert (asked["use_fsdp"], asked["use_parallelism_config"]) == (True, False)
    asked = flags(recipe_for("m", {"gpus": 8, "context_parallel": 4}))
    assert asked["use_parallelism_config"]
    assert (asked["parallelism_config_cp_size"], asked["parallelism_config_dp_shard_size"]) == (4, 2)


@pytest.mark.parametrize(
    ("hardware", "method", "arguments"),
    [
        (
            {"gpus": 2},
            "qlora",
            "--num_processes=2 --num_machines=1 --machine_rank=0 --main_process_port=0 --mixed_precision=no "
            "--dynamo_backend=no --num_cpu_threads_per_process=8 --multi_gpu",
        ),
        (
            {"gpus": 8, "machines": 4},
            "lora",
            "--num_processes=32 --num_machines=4 --machine_rank=0 --main_process_port=29500 --mixed_precision=no "
            "--dynamo_backend=no --num_cpu_threads_per_process=2 --use_fsdp --main_process_ip=10.0.0.1 "
            "--rdzv_conf=timeout=604800 --fsdp_version=2 --fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP "
            "--fsdp_state_dict_type=SHARDED_STATE_DICT --fsdp_cpu_ram_efficient_loading=true",
        ),
    ],
)
def test_accelerate_is_asked_for_these_processes_and_threads(
    hardware: dict[str, object], method: str, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 16 cores of a machine, each of its processes has as many."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    recipe = recipe_for("m", hardware, {"method": method})
    asked = launch_arguments(recipe, ["train", "r.yaml"], address="10.0.0.1")
    assert asked == [*arguments.split(), "--module", "pi_lora", "train", "r.yaml"]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert "--num_cpu_threads_per_process=1" in launch_arguments(recipe, [], address="10.0.0.1")


def test_a_launcher_with_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "16", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with refused(RecipeError, "hardware: ", 32, 16):
        check_launched(recipe_for("m", CLUSTER))


def test_rank_variables_of_a_cluster_are_not_taken_for_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow sets these for each pod, in which the launcher is to be started."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}.items():
        monkeypatch.setenv(name, value)
    assert not is_launched()
    assert (world_size(), is_main_process()) == (1, True)


@pytest.mark.parametrize("name", SET_BY_CLUSTERS)
def test_a_process_that_nobody_launched_has_no_variables_of_a_launcher(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and mpirun set them for every task of a job."""
    monkeypatch.setenv(name, "2")
    join_processes(cpu=True)
    assert name not in os.environ


def test_a_launched_process_that_is_alone_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert not is_launched()
    assert (world_size(), is_main_process()) == (1, True)


@pytest.mark.slow
def test_training_in_a_pod_of_several_waits_for_no_process(small_model: Path, tmp_path: Path, python: str) -> None:
    """On a CPU, accelerate takes WORLD_SIZE alone for a launcher."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(small_recipe(small_model)))
    pod = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "23457"}
    command = [python, "-m", "pi_lora", "train", str(recipe), "--output", str(tmp_path / "run")]
    subprocess.run(command, env={**os.environ, **pod}, check=True, timeout=120, capture_output=True)
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def start(interpreter: str, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """`pi-lora train recipe.yaml ARGUMENTS` in `folder`, as the foreground process group of a terminal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if interpreter == sys.executable:
        environment.pop("PYTHON_EXEC", None)
    command = [interpreter, "-m", "pi_lora", "train", "recipe.yaml", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, text=True, env=environment, start_new_session=True, **pipes)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "training.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and the run of it in one process."""
    folder = tmp_path_factory.mktemp("several")
    asked = {
        "perplexity": {"data": "builtin:stdlib", "windows": [64, 128], "documents": 3, "truncate": 512},
        "passkey": {"depths": 3, "trials": 1},
    }
    recipe = recipe_for(small_model, {}, global_batch_size=4)
    recipe = recipe.model_copy(update={"evaluation": Evaluation.model_validate({"every": 5, **asked})})
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    train(recipe, folder / "alone")
    return folder


def test_two_processes_train_like_one(alone: Path) -> None:
    """The one launch whose processes are all started as a user's are, imports and what they print included."""
    process = start(sys.executable, alone, "hardware.cpu_processes=2", "--output", "two")
    said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert without_progress(said[1]) == ""
    assert losses(alone / "two") == pytest.approx(losses(alone / "alone"), rel=1e-5)
    assert len({round(loss, 4) for loss in losses(alone / "two")}) == 5
    for name in ("perplexity", "passkey"):
        two, one = (
            json.loads((alone / run / "scores" / f"{name}-step-0.json").read_text()) for run in ("two", "alone")
        )
        assert {**two, "model": ""} == {**one, "model": ""}, "documents are dealt out, and the result is the same"


# What torch's launcher warns of on the machine that ends last, if the first one has closed its store by then.
STORE_CLOSED = re.compile(
    r"^\[W\S+ \S+ TCPStore\.cpp.*\n(Exception raised from .*\n|frame #.*\n|<omitting .*\n|\n)*", re.MULTILINE
)


def test_two_machines_train_like_one(python: str, alone: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = ["hardware.machines=2", "--main-process-ip", "127.0.0.1", "--main-process-port", port]
    machines = [start(python, alone, "--output", "machines", *where, "--machine-rank", rank) for rank in "01"]
    for machine in machines:
        said = machine.communicate(timeout=200)
        assert machine.returncode == 0, said
        assert STORE_CLOSED.sub("", without_progress(said[1])) == ""
    assert losses(alone / "machines") == pytest.approx(losses(alone / "alone"), rel=1e-5)


@pytest.fixture
def folder(alone: Path, tmp_path: Path) -> Path:
    """A new one with the same recipe."""
    (tmp_path / "recipe.yaml").write_text((alone / "recipe.yaml").read_text())
    return tmp_path


LONG = ["hardware.cpu_processes=2", "training.steps=400"]


def wait_for_steps(process: "subprocess.Popen[str]", run: Path, steps: int) -> None:
    log = run / "training.jsonl"
    deadline = time.monotonic() + 200
    while not (log.exists() and log.read_text().count("\n") >= steps):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def worker(folder: Path) -> psutil.Process:
    """One of those that the launching process, the first of this folder, has started."""
    here = [each for each in psutil.process_iter(["cwd", "cmdline"]) if each.info["cwd"] == str(folder)]
    forked = [each for each in here if any("processes.serve" in part for part in each.info["cmdline"])]
    return max(forked, key=lambda each: each.create_time())


def client_of(folder: Path) -> psutil.Process:
    """The client of a worker, which is what the launcher, the oldest of this folder, has started."""
    here = [each for each in psutil.process_iter(["cwd", "cmdline"]) if each.info["cwd"] == str(folder)]
    forked = [each for each in here if any("processes.serve" in part for part in each.info["cmdline"])]
    return min(forked, key=lambda each: each.create_time()).children()[0]


def one_line(process: "subprocess.Popen[str]", folder: Path) -> str:
    """The only line on stderr of a run that is interrupted; nothing of it goes on."""
    errors = without_progress(process.communicate(timeout=100)[1])
    assert (process.returncode, errors.count("\n")) == (130, 1), errors
    assert [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(folder)] == []
    return errors


# What these tests start inherits it.
heard = pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="SIGHUP is ignored here, as nohup does it"
)


@pytest.mark.parametrize("told", ["Ctrl-C", "SIGTERM", pytest.param("SIGHUP twice", marks=heard)])
def test_a_signal_ends_all_processes_after_one_checkpoint(python: str, folder: Path, told: str) -> None:
    """Both the shell and the kernel report a connection that drops; the second report kills no process."""
    process = start(python, folder, *LONG, "--output", "long")
    wait_for_steps(process, folder / ".long.partial", 3)
    if told == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        for _ in range(1 + told.endswith("twice")):
            process.send_signal(getattr(signal, told.split()[0]))
            time.sleep(0.05)
    assert "long: interrupted after step" in one_line(process, folder)
    checkpoints = list((folder / ".long.partial" / "checkpoints").glob("checkpoint-*"))
    assert [(path / "complete").is_file() for path in checkpoints] == [True]


def test_a_second_ctrl_c_ends_the_launch_at_once(python: str, folder: Path) -> None:
    process = start(python, folder, *LONG, "--output", "long")
    wait_for_steps(process, folder / ".long.partial", 3)
    worker(folder).suspend()
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.2)
    assert "interrupted" in one_line(process, folder)


def test_ctrl_c_at_any_moment_of_the_launch_is_one_line(python: str, folder: Path) -> None:
    process = start(python, folder, *LONG, "--output", "long")
    assert process.stdout
    assert process.stdout.readline()
    time.sleep(2 * random.random())
    os.killpg(process.pid, signal.SIGINT)
    assert "interrupted" in one_line(process, folder)


def test_a_process_that_is_killed_is_named_and_ends_the_others(python: str, folder: Path) -> None:
    process = start(python, folder, *LONG, "--output", "long")
    wait_for_steps(process, folder / ".long.partial", 3)
    # What the launcher has started: it sees the end of that at once, before the other loses its connection.
    client_of(folder).kill()
    errors = without_progress(process.communicate(timeout=100)[1])
    assert process.returncode == 1
    assert re.fullmatch(r"process [01]: ended by SIGKILL; go on with --resume", errors.splitlines()[-1])


def test_a_mistake_reported_by_workers_is_one_line(python: str, folder: Path) -> None:
    process = start(python, folder, *LONG, "training.learning_rate=1e12", "training.warmup_steps=0", "--output", "long")
    errors = without_progress(process.communicate(timeout=100)[1])
    assert process.returncode == 2
    assert errors.count("\n") == 1, errors
    assert errors.startswith("training.learning_rate: "), errors
    assert "1e+12" in errors


def test_the_first_launched_process_that_fails_reports_it_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher ends the others, or they lose their connection: their errors only follow from the first."""
    monkeypatch.setenv(FAILED_ENV, str(tmp_path / "failed"))
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    status, _, errors = run_captured(capsys, monkeypatch, "train", "nowhere.yaml")
    assert status == 2
    assert errors.startswith("nowhere.yaml: ")
    assert run_captured(capsys, monkeypatch, "train", "nowhere.yaml") == (0, "", "")


@pytest.mark.parametrize("error", [Interrupted("a signal"), Diverged("NaN")])
def test_an_error_of_all_processes_is_reported_by_the_first_of_each_machine(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILED_ENV, str(tmp_path / "failed"))
    reports = []
    for local_rank in ("1", "0", "0"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        reports.append(is_to_report(error))
    assert reports == [False, True, True]


@pytest.mark.parametrize(
    ("exit_codes", "status", "line"),
    [
        ({0: 1, 1: -9}, 1, "process 1: ended by SIGKILL; go on with --resume"),
        ({0: -15, 1: 1, 2: -11}, 1, "process 2: ended by SIGSEGV; go on with --resume"),
        ({0: -15, 1: -15}, 1, "process 0: ended by SIGTERM; go on with --resume"),
        ({0: -15, 1: 2}, 2, ""),
        ({0: 3, 1: -15}, 3, ""),
        (None, 0, ""),
    ],
)
def test_a_launch_ends_as_the_process_that_failed_first(
    exit_codes: dict[int, int] | None,
    status: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was killed makes others fail, and the launcher ends the rest by SIGTERM. Afterwards Ctrl-C, the log and
    the environment of this process are its own again.
    """
    failed = []

    def multi_gpu_launcher(arguments: object) -> None:
        failed.append(os.environ[FAILED_ENV])
        if exit_codes:
            failures = {rank: ProcessFailure(rank, 1, code, "") for rank, code in exit_codes.items()}
            raise ChildFailedError("pi_lora", failures)

    monkeypatch.setattr("accelerate.commands.launch.multi_gpu_launcher", multi_gpu_launcher)
    monkeypatch.setattr(logging.root.manager, "disable", 0)  # restored after the test
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    assert launch(launch_arguments(recipe_for("m", {"cpu_processes": 4}), ["train", "r.yaml"])) == status
    assert capsys.readouterr().err == (f"{line}\n" if line else "")
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    assert FAILED_ENV not in os.environ
    assert not Path(failed[0]).parent.exists()


def test_a_launch_does_not_read_settings_for_other_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate config` leaves a file in the cache, which may offload the weights of sharded trainings; Kubeflow sets
    arguments of torch's launcher for a pod.
    """
    left = tmp_path / "default_config.yaml"
    left.write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: FSDP, fsdp_config: {fsdp_offload_params: true}, "
        "debug: true, main_process_ip: 10.0.0.9, num_machines: 1, num_processes: 1, use_cpu: false}"
    )
    launched: list[Any] = []
    monkeypatch.setenv("PET_NNODES", "2")
    for module in ("launch", "config.config_args"):
        monkeypatch.setattr(f"accelerate.commands.{module}.default_config_file", str(left))
    monkeypatch.setattr("accelerate.commands.launch.multi_gpu_launcher", launched.append)
    monkeypatch.setattr(logging.root.manager, "disable", 0)
    assert launch(launch_arguments(recipe_for("m", {"gpus": 2}), ["train", "r.yaml"])) == 0
    [arguments] = launched
    assert (arguments.fsdp_offload_params, arguments.debug, arguments.main_process_ip) == ("false", None, None)
    assert "PET_NNODES" not in os.environ
