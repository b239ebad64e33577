"""One process among several, started by `launch` or another launcher that sets the variables of `torch.distributed`:
which one leads, and what all agree on. torch is imported where it is used, so that the command line starts at once.
"""

import atexit
import contextlib
import json
import logging
import os
import select
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from pi_lora.errors import Diverged, Interrupted, PiLoraError, RecipeError

if TYPE_CHECKING:
    import torch.distributed as dist

    from pi_lora.recipe.schema import Recipe

T = TypeVar("T")
# How long processes wait where one may work alone: reading weights, the scores of the longest document, other machines
# that pack their data. A process that dies is noticed by the launcher.
PROCESS_TIMEOUT = timedelta(days=7)
_patient_group: "dist.ProcessGroup | None" = None


def join_processes(cpu: bool) -> None:
    """Meet the other processes of this run, if there are any; `cpu` leaves GPUs alone. Steps of training have torch's
    own timeout, so that a deadlock ends; what is waited for below has a group of its own.
    """
    global _patient_group
    import torch.distributed as dist
    from accelerate import PartialState

    # Threads of torch's process group that outlive the interpreter abort the process (torch 2.13 with gloo).
    atexit.register(PartialState(cpu=cpu).destroy_process_group)
    if number_of_processes() > 1 and _patient_group is None:
        _patient_group = dist.new_group(timeout=PROCESS_TIMEOUT, backend="gloo")


def let_segments_grow() -> None:
    """Let segments of GPU memory grow: sequences of changing length leave gaps that nothing fits into. torch reads this
    when it is imported, here and in launched processes; what the user says goes first.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def is_leader() -> bool:
    """Whether this process writes what all have made."""
    return _rank() == 0


def number_of_processes() -> int:
    """Over all machines."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def wait_for_all() -> None:
    """Continue when every process has come this far."""
    if number_of_processes() > 1:
        import torch.distributed as dist

        dist.barrier(group=_patient_group)


def share_of(items: Sequence[T]) -> list[T]:
    """Return the items of this process: every n-th, so that neighbours are spread."""
    return list(items[_rank() :: number_of_processes()])


def from_all(items: Sequence[T]) -> list[T]:
    """Return the items of all processes, process by process; all of them must call it."""
    if number_of_processes() == 1:
        return list(items)
    import torch.distributed as dist

    gathered: list[list[T]] = [[]] * number_of_processes()
    dist.all_gather_object(gathered, list(items), group=_patient_group)
    return [item for part in gathered for item in part]


def any_process(*flags: bool) -> list[bool]:
    """Return for each flag whether any process raised it: what must not be decided differently by two of them."""
    return [any(raised) for raised in zip(*from_all([flags]), strict=True)]


# The folder in which launched processes record how training ended, and its files.
RESULT_DIR_ENV, OUTCOME, SIGNALLED = "PI_LORA_RESULTS", "outcome.json", "signalled"
# A connection that dropped, Ctrl-C, and a cluster's end of a job. Windows has no SIGHUP.
STOP_SIGNALS = [each for each in signal.Signals if each.name in ("SIGHUP", "SIGINT", "SIGTERM")]
HANG_UP = next((each for each in STOP_SIGNALS if each.name == "SIGHUP"), None)


def is_launched() -> bool:
    """Whether torchrun or accelerate started this process as one of several. Clusters set WORLD_SIZE and RANK for each
    pod, in which nothing is launched yet.
    """
    return {"WORLD_SIZE", "RANK", "LOCAL_RANK"} <= os.environ.keys()


def _rank() -> int:
    return int(os.environ["RANK"]) if is_launched() else 0


def check_launched(recipe: "Recipe") -> None:
    """Raise RecipeError if the launcher started another number of processes than the recipe asks for."""
    started, wanted = int(os.environ["WORLD_SIZE"]), recipe.hardware.processes
    if started != wanted:
        raise RecipeError([f"hardware: asks for {wanted} processes, the launcher started {started}; make them agree"])


def launch_arguments(
    recipe: "Recipe", command: Sequence[str], rank: int = 0, address: str | None = None, port: int | None = None
) -> list[str]:
    """Return the arguments of `accelerate launch` that run `pi-lora COMMAND` as `recipe.hardware` says. `rank` is the
    number of this machine; machine 0 listens at `address` and `port`. Without FSDP2 every process holds the whole
    model: plain data parallelism. Workers choose their precision by their own hardware.
    """
    hardware = recipe.hardware
    if hardware.machines > 1 and address is None:
        raise RecipeError(["--main-process-ip: missing; name the machine of rank 0, the same on all of them"])
    flags: dict[str, object] = {
        "num_processes": hardware.processes,
        "num_machines": hardware.machines,
        "machine_rank": rank,
        # Port 0: any that is free.
        "main_process_port": port or (29500 if hardware.machines > 1 else 0),
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "num_cpu_threads_per_process": max(1, (os.cpu_count() or 1) // hardware.processes_per_machine),
        "use_fsdp" if recipe.sharded else "multi_gpu": None,
    }
    if hardware.machines > 1:
        # Machines come when their data is packed; torch's launcher gives them ten minutes.
        flags |= {"main_process_ip": address, "rdzv_conf": f"timeout={round(PROCESS_TIMEOUT.total_seconds())}"}
    if recipe.sharded:
        flags |= {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": "true",  # the first process sends the weights
        }
        if hardware.context_parallel > 1:
            flags |= {
                "use_parallelism_config": None,
                "parallelism_config_dp_shard_size": hardware.data_parallel,
                "parallelism_config_cp_size": hardware.context_parallel,
            }
    written = [part for name, value in flags.items() for part in (f"--{name}", value) if part is not None]
    return [*map(str, written), "--module", "pi_lora", *command]


def launch(command: Sequence[str]) -> int:
    """Run `accelerate launch COMMAND`; return the exit status. Signals of `STOP_SIGNALS` let the workers end their step
    and write a checkpoint; a second Ctrl-C kills them.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_command_parser().parse_args(command)
    # torch's own handlers of the other signals would kill the workers in the middle of a step.
    arguments.signals_to_handle = "SIGQUIT"
    failures = {}
    # torch's launcher logs a worker's end in dozens of lines; those that matter follow here, a line each.
    logging.disable()
    with tempfile.TemporaryDirectory() as folder, patch_environment(**{RESULT_DIR_ENV: folder}):
        arguments.log_dir = folder
        try:
            with _signals_go_to_workers() as received:
                launch_command(arguments)
            received.clear()
        except ChildFailedError as failed:
            failures = failed.failures
        except BaseException:
            if not received:
                raise
        if (outcome := Path(folder, OUTCOME)).is_file():
            ending = json.loads(outcome.read_text(encoding="utf-8"))
            raise (Interrupted if ending["interrupted"] else PiLoraError)(ending["message"])
    if received:
        raise Interrupted("interrupted before a step was done; earlier checkpoints are kept: go on with --resume")
    if not failures:
        return 0
    # The launcher ends those that are left by SIGTERM. Where one was killed, others may fail for want of a connection.
    rank, failure = min(failures.items(), key=lambda each: (each[1].exitcode == -signal.SIGTERM, each[1].exitcode > 0))
    if failure.exitcode < 0:
        print(f"process {rank}: ended by {failure.signal_name()}; go on with --resume", file=sys.stderr)
    return 1


def worker_exit_status(ending: BaseException) -> int | None:
    """Return the exit status of a worker of `launch`, and record the error for the launcher; None if not launched."""
    if RESULT_DIR_ENV not in os.environ:
        return None
    outcome, signalled = (Path(os.environ[RESULT_DIR_ENV], name) for name in (OUTCOME, SIGNALLED))
    if not isinstance(ending, PiLoraError):
        # When one process ends, its connections break in the others.
        return 1 if outcome.exists() or signalled.exists() else None
    with contextlib.suppress(FileExistsError), outcome.open("x", encoding="utf-8") as file:
        json.dump({"interrupted": isinstance(ending, Interrupted), "message": str(ending)}, file)
    # All processes end together in these; a mistake may be one's alone, and then the launcher has to end the others.
    return 0 if isinstance(ending, (Interrupted, Diverged)) else 1


def leave_lost_terminals() -> None:
    """Discard what is written to a terminal that hung up, or to a program that ended: every write would fail."""
    for number in (1, 2):
        watched = select.poll()
        watched.register(number, 0)
        if watched.poll(0):  # of an error or a hang-up, which are told unasked
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, types.FrameType | None], None]) -> Iterator[None]:
    """Call `handler` on the signals of `STOP_SIGNALS`, but those that are ignored, as under nohup."""
    heard = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, handler) for each in heard}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)


@contextlib.contextmanager
def _signals_go_to_workers() -> Iterator[list[int]]:
    received: list[int] = []

    def forward(number: int, frame: types.FrameType | None) -> None:
        received.append(number)
        if number == HANG_UP:
            leave_lost_terminals()
        Path(os.environ[RESULT_DIR_ENV], SIGNALLED).touch()
        # torch's launcher starts each worker in a session of its own, which Ctrl-C on the terminal does not reach.
        workers = [each for each in psutil.Process().children() if os.getsid(each.pid) == each.pid]
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGKILL if received.count(signal.SIGINT) > 1 else signal.SIGTERM)
        if not workers:
            raise KeyboardInterrupt

    with handle_signals(forward):
        yield received
