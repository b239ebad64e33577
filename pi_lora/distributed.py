"""One process among several, started by `launch` or another launcher that sets the variables of `torch.distributed`:
which one leads, and what all agree on. torch is imported where it is used, so that the command line starts at once.
"""

import atexit
import contextlib
import logging
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from pi_lora.errors import Diverged, Interrupted, RecipeError

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
    if world_size() > 1 and _patient_group is None:
        _patient_group = dist.new_group(timeout=PROCESS_TIMEOUT, backend="gloo")


def enable_expandable_segments() -> None:
    """Let segments of GPU memory grow: sequences of changing length leave gaps that nothing fits into. torch reads this
    when it is imported, here and in launched processes; what the user says goes first.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def is_main_process() -> bool:
    """Whether this process writes files and prints: the one of rank 0."""
    return rank() == 0


def world_size() -> int:
    """Over all machines."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def wait_for_all_processes() -> None:
    """Wait until every process has called this."""
    all_gather_objects([None])


def shard(items: Sequence[T]) -> list[T]:
    """Return the items of this process: every n-th, so that neighbours are spread."""
    return list(items[rank() :: world_size()])


def all_gather_objects(items: Sequence[T]) -> list[T]:
    """Return the items of all processes, process by process; all of them must call it."""
    if world_size() == 1:
        return list(items)
    import torch.distributed as dist

    gathered: list[list[T]] = [[]] * world_size()
    dist.all_gather_object(gathered, list(items), group=_patient_group)
    return [item for part in gathered for item in part]


def any_process(*flags: bool) -> list[bool]:
    """Return for every flag whether any process raised it, so that all processes decide alike."""
    return [any(raised) for raised in zip(*all_gather_objects([flags]), strict=True)]


# Names a file that the first failing process creates, or the launcher after a signal. The others then print no error.
FAILED_ENV = "PI_LORA_FAILED"
# A connection that dropped, which Windows does not report; Ctrl-C, and a cluster's end of a job.
HANG_UP = getattr(signal, "SIGHUP", None)
STOP_SIGNALS = [each for each in (HANG_UP, signal.SIGINT, signal.SIGTERM) if each]


def is_launched() -> bool:
    """Whether torchrun or accelerate started this process as one of several. Clusters set WORLD_SIZE and RANK for each
    pod, in which nothing is launched yet.
    """
    return {"WORLD_SIZE", "RANK", "LOCAL_RANK"} <= os.environ.keys()


def rank() -> int:
    """Return the number of this process among all, from 0."""
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
    hardware, several = recipe.hardware, recipe.hardware.machines > 1
    if several and address is None:
        raise RecipeError(["--main-process-ip: missing; name the machine of rank 0, the same on all of them"])
    flags = [
        f"--num_processes={hardware.processes}",
        f"--num_machines={hardware.machines}",
        f"--machine_rank={rank}",
        # Port 0: any that is free.
        f"--main_process_port={port or (29500 if several else 0)}",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        f"--num_cpu_threads_per_process={max(1, (os.cpu_count() or 1) // hardware.processes_per_machine)}",
        "--use_fsdp" if recipe.sharded else "--multi_gpu",
    ]
    if several:
        # Machines come when their data is packed; torch's launcher gives them ten minutes.
        timeout = round(PROCESS_TIMEOUT.total_seconds())
        flags += [f"--main_process_ip={address}", f"--rdzv_conf=timeout={timeout}"]
    if recipe.sharded:
        flags += [
            "--fsdp_version=2",
            "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
            "--fsdp_state_dict_type=SHARDED_STATE_DICT",
            "--fsdp_cpu_ram_efficient_loading=true",  # the first process sends the weights
        ]
        if hardware.context_parallel > 1:
            flags += [
                "--use_parallelism_config",
                f"--parallelism_config_dp_shard_size={hardware.data_parallel}",
                f"--parallelism_config_cp_size={hardware.context_parallel}",
            ]
    return [*flags, "--module", "pi_lora", *command]


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
    # torch's launcher logs a worker's end in dozens of lines; those that matter are printed, a line each.
    logging.disable()
    with tempfile.TemporaryDirectory() as folder, patch_environment(**{FAILED_ENV: str(Path(folder, "failed"))}):
        arguments.log_dir = folder
        try:
            with handle_signals(_pass_on_to_workers) as received:
                launch_command(arguments)
            return 0
        except ChildFailedError as failed:
            failures = failed.failures
        except BaseException:
            if not received:
                raise
    if received:
        if reported := [each.exitcode for each in failures.values() if each.exitcode > 0]:
            return int(reported[0])
        raise Interrupted("interrupted before a step was done; earlier checkpoints are kept: go on with --resume")
    # The launcher ends those that are left by SIGTERM. Where one was killed, others may fail for want of a connection.
    rank, failure = min(failures.items(), key=lambda each: (each[1].exitcode == -signal.SIGTERM, each[1].exitcode > 0))
    if failure.exitcode > 0:
        return int(failure.exitcode)
    print(f"process {rank}: ended by {failure.signal_name()}; go on with --resume", file=sys.stderr)
    return 1


def is_to_report(error: Exception) -> bool:
    """Whether this process reports an error: of launched ones the first that fails, while others lose their connections
    to it; and of what ends all processes together, the first process of each machine.
    """
    if FAILED_ENV not in os.environ:
        return True
    if isinstance(error, (Interrupted, Diverged)):
        return os.environ["LOCAL_RANK"] == "0"
    with contextlib.suppress(FileExistsError):
        Path(os.environ[FAILED_ENV]).touch(exist_ok=False)
        return True
    return False


def _leave_lost_terminals() -> None:
    """Discard what is written to a terminal that hung up, or to a program that ended: every write would fail."""
    for number in (1, 2):
        watched = select.poll()
        watched.register(number, 0)
        if watched.poll(0):  # of an error or a hang-up, which are told unasked
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


@contextlib.contextmanager
def handle_signals(handler: Callable[[list[int]], None]) -> Iterator[list[int]]:
    """Call `handler` with the numbers of the signals of `STOP_SIGNALS` so far, the newest last, at each of them, and
    yield the list. Those that are ignored, as under nohup, stay so.
    """
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        if number == HANG_UP:
            _leave_lost_terminals()
        handler(received)

    heard = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, handle) for each in heard}
    try:
        yield received
    finally:
        for each, old in before.items():
            signal.signal(each, old)


def _pass_on_to_workers(received: list[int]) -> None:
    """End the workers after their step by SIGTERM, or at once after a second Ctrl-C."""
    Path(os.environ[FAILED_ENV]).touch()
    # torch's launcher starts each worker in a session of its own, which Ctrl-C on the terminal does not reach.
    workers = [each for each in psutil.Process().children() if os.getsid(each.pid) == each.pid]
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGKILL if received.count(signal.SIGINT) > 1 else signal.SIGTERM)
    if not workers:
        raise KeyboardInterrupt
