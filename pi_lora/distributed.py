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
    from pi_lora.recipe.schema import Recipe

T = TypeVar("T")
# One process may work alone for long, on the scores of the longest document or a large cache; a process that dies is
# noticed by the launcher, not by waiting for it.
PATIENCE = timedelta(days=7)


def join_processes(cpu: bool) -> None:
    """Meet the other processes of this run, if there are any; `cpu` leaves GPUs alone."""
    from accelerate import PartialState

    # Threads of torch's process group that outlive the interpreter abort the process (torch 2.13 with gloo).
    atexit.register(PartialState(cpu=cpu, timeout=PATIENCE).destroy_process_group)


def is_leader() -> bool:
    """Whether this process writes what all have made."""
    return int(os.environ.get("RANK", "0")) == 0


def number_of_processes() -> int:
    """Over all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_all() -> None:
    """Continue when every process has come this far."""
    if number_of_processes() > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def share_of(items: Sequence[T]) -> list[T]:
    """What this process works on of what all are to work on: every n-th of `items`, so that neighbours are spread."""
    return list(items[int(os.environ.get("RANK", "0")) :: number_of_processes()])


def from_all(found: Sequence[T]) -> list[T]:
    """What every process has found, process by process; all of them must call it."""
    if number_of_processes() == 1:
        return list(found)
    from accelerate.utils import gather_object

    return list(gather_object(list(found)))


def any_process(*flags: bool) -> list[bool]:
    """Each flag, raised if it is in any process: what must not be decided differently by two of them."""
    return [any(each) for each in zip(*from_all([flags]), strict=True)]


# Of the folder where launched processes and the one that launched them leave word of how training ends.
WORD, OUTCOME, SIGNALLED = "PI_LORA_WORD", "outcome.json", "signalled"
# A connection that dropped, Ctrl-C, and a cluster's end of a job. Windows has no SIGHUP.
ENDING = [each for each in signal.Signals if each.name in ("SIGHUP", "SIGINT", "SIGTERM")]
HANG_UP = next((each for each in ENDING if each.name == "SIGHUP"), None)


def is_launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return "WORLD_SIZE" in os.environ


def check_launched(recipe: "Recipe") -> None:
    """Raise RecipeError if the launcher started another number of processes than the recipe asks for."""
    started, wanted = int(os.environ["WORLD_SIZE"]), recipe.hardware.processes
    if started != wanted:
        raise RecipeError([f"hardware: asks for {wanted} processes, the launcher started {started}; make them agree"])


def launch_arguments(
    recipe: "Recipe", command: Sequence[str], rank: int = 0, address: str | None = None, port: int | None = None
) -> list[str]:
    """Return the arguments of `accelerate launch` that run `pi-lora COMMAND` as `recipe.hardware` says. `rank` is this
    machine's among several, the first of which listens at `address` and `port`. What FSDP2 does not shard, each process
    holds whole: plain data parallelism. Workers choose their precision by the hardware that they find.
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
        flags |= {"main_process_ip": address, "rdzv_conf": f"timeout={round(PATIENCE.total_seconds())}"}
    if recipe.sharded:
        flags |= {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        flags |= {"fsdp_reshard_after_forward": "true", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
        flags |= {"fsdp_cpu_ram_efficient_loading": "true"}  # the first process sends them
    if recipe.sharded and hardware.context_parallel > 1:
        flags |= {"use_parallelism_config": None, "parallelism_config_dp_shard_size": hardware.data_parallel}
        flags |= {"parallelism_config_cp_size": hardware.context_parallel}
    written = [part for name, value in flags.items() for part in (f"--{name}", value) if part is not None]
    return [*map(str, written), "--module", "pi_lora", *command]


def launch(command: Sequence[str]) -> int:
    """Run `accelerate launch COMMAND`; return the exit status. The first signal of `ENDING` lets the workers end their
    step and write a checkpoint, the second kills them. Raise RecipeError on Windows, which lacks what that takes.
    """
    if sys.platform == "win32":
        where = "several processes are started on Linux and macOS only"
        raise RecipeError([f"hardware: {where}; leave hardware.gpus out, or use the Windows Subsystem for Linux"])
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_command_parser().parse_args(command)
    # torch's own handlers of the other signals would kill the workers in the middle of a step.
    arguments.signals_to_handle = "SIGQUIT"
    failures = {}
    # torch's launcher logs a worker's end in dozens of lines; those that matter follow here, a line each.
    logging.disable()
    with tempfile.TemporaryDirectory() as folder, patch_environment(**{WORD: folder}):
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
    # The launcher ends those that are left by SIGTERM. A process that ended by itself has shown its traceback.
    rank, failure = min(failures.items(), key=lambda each: each[1].exitcode == -signal.SIGTERM)
    if failure.exitcode < 0:
        print(f"process {rank}: ended by {failure.signal_name()}; go on with --resume", file=sys.stderr)
    return 1


def status_of(ending: BaseException) -> int | None:
    """Return the exit status of a worker of `launch`, and leave word of why it ends; None if nobody speaks for it."""
    if WORD not in os.environ:
        return None
    outcome, signalled = (Path(os.environ[WORD], name) for name in (OUTCOME, SIGNALLED))
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
def answered(answer: Callable[[int, types.FrameType | None], None]) -> Iterator[None]:
    """Call `answer` on the signals of `ENDING` that are not ignored, as under nohup or in the background of a shell."""
    heard = [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, answer) for each in heard}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def _signals_go_to_workers() -> Iterator[list[int]]:
    received: list[int] = []

    def forward(number: int, frame: types.FrameType | None) -> None:
        received.append(number)
        if number == HANG_UP:
            leave_lost_terminals()
        Path(os.environ[WORD], SIGNALLED).touch()
        # torch's launcher starts each worker in a session of its own, which Ctrl-C on the terminal does not reach.
        workers = [each for each in psutil.Process().children() if os.getsid(each.pid) == each.pid]
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGTERM if len(received) == 1 else signal.SIGKILL)
        if not workers:
            raise KeyboardInterrupt

    with answered(forward):
        yield received
