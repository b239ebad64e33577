"""Launching several processes, and their collective operations. Processes are started by `launch`, or by another
launcher that sets the variables of `torch.distributed`. torch is imported late, so that commands start at once.
"""

import atexit
import contextlib
import logging
import os
import select
import signal
import sys
import tempfile
import threading
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
# How long processes wait for one that works alone: that reads weights, scores the longest document or packs the data of
# another machine. The launcher notices a process that dies.
PROCESS_TIMEOUT = timedelta(days=7)
_patient_group: "dist.ProcessGroup | None" = None
# The variables of Kubeflow, Slurm, Open MPI and MVAPICH by which accelerate knows that there are other processes.
SET_BY_CLUSTERS = ("WORLD_SIZE", "LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def join_processes(cpu: bool) -> None:
    """Join the process group of this run, if there are several processes; `cpu` leaves GPUs alone. Training steps keep
    torch's timeout, so that a deadlock ends. The operations below have a group with a longer timeout.
    """
    global _patient_group
    import torch.distributed as dist
    from accelerate import PartialState

    if not is_launched():
        # Clusters set them for a pod or a job: accelerate 1.15 would wait for so many processes.
        for name in SET_BY_CLUSTERS:
            os.environ.pop(name, None)
    # Threads of torch's process group that outlive the interpreter abort the process (torch 2.13 with gloo).
    atexit.register(PartialState(cpu=cpu).destroy_process_group)
    if world_size() > 1 and _patient_group is None:
        _patient_group = dist.new_group(timeout=PROCESS_TIMEOUT, backend="gloo")


def enable_expandable_segments() -> None:
    """Let segments of GPU memory grow, because sequences of changing length leave gaps between allocations. torch reads
    the setting when it is imported, here and in launched processes. The user's setting has precedence.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def is_main_process() -> bool:
    """Whether this process is the one of rank 0, which writes files and prints."""
    return rank() == 0


def world_size() -> int:
    """Return the number of processes on all machines."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def wait_for_all_processes() -> None:
    """Wait until every process has called this."""
    all_gather_objects([None])


def shard(items: Sequence[T]) -> list[T]:
    """Return the items of this rank: every n-th, so that neighbouring items go to different ranks."""
    return list(items[rank() :: world_size()])


def all_gather_objects(items: Sequence[T]) -> list[T]:
    """Return the items of all processes, process by process. Every process must call it."""
    if world_size() == 1:
        return list(items)
    import torch.distributed as dist

    gathered: list[list[T]] = [[]] * world_size()
    dist.all_gather_object(gathered, list(items), group=_patient_group)
    return [item for part in gathered for item in part]


def any_process(flag: bool) -> bool:
    """Return whether any process has set a flag, so that all processes decide alike."""
    return any(all_gather_objects([flag]))


# The environment variable with the path of a file that the first failing process creates, or the launcher after a
# signal. The other processes then print no error.
FAILED_ENV = "PI_LORA_FAILED"
# A connection dropped; Windows has no such signal.
HANG_UP = getattr(signal, "SIGHUP", None)
# Also Ctrl-C, and the end of a job on a cluster.
STOP_SIGNALS = [number for number in (HANG_UP, signal.SIGINT, signal.SIGTERM) if number]


def is_launched() -> bool:
    """Whether torchrun or accelerate started this process as one of several. WORLD_SIZE and RANK alone do not show it:
    clusters set them for a pod, before processes are launched there. A single process has nobody to meet.
    """
    return {"WORLD_SIZE", "RANK", "LOCAL_RANK"} <= os.environ.keys() and os.environ["WORLD_SIZE"] != "1"


def rank() -> int:
    """Return the number of this process, from 0, over all machines."""
    return int(os.environ["RANK"]) if is_launched() else 0


def check_launched(recipe: "Recipe") -> None:
    """Raise RecipeError if the launcher started another number of processes than the recipe asks for."""
    started = world_size()
    wanted = recipe.hardware.processes
    if started != wanted:
        raise RecipeError([f"hardware: asks for {wanted} processes, the launcher started {started}; make them agree"])


def launch_arguments(
    recipe: "Recipe", command: Sequence[str], machine_rank: int = 0, address: str | None = None, port: int | None = None
) -> list[str]:
    """Return the arguments of `accelerate launch` that run `pi-lora COMMAND` on the hardware of `recipe`.

    Machine 0 listens at `address` and `port`. Without FSDP2 every process holds the whole model (plain data
    parallelism). Workers choose the precision for their hardware.
    """
    hardware = recipe.hardware
    several_machines = hardware.machines > 1
    if several_machines and address is None:
        raise RecipeError(["--main-process-ip: missing; give the address of machine 0, the same on all machines"])
    default_port = 29500 if several_machines else 0  # 0: any port that is free
    threads = max(1, (os.cpu_count() or 1) // hardware.processes_per_machine)
    flags = [
        f"--num_processes={hardware.processes}",
        f"--num_machines={hardware.machines}",
        f"--machine_rank={machine_rank}",
        f"--main_process_port={port or default_port}",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        f"--num_cpu_threads_per_process={threads}",
        "--use_fsdp" if recipe.sharded else "--multi_gpu",
    ]
    if several_machines:
        # Machines join when their data is packed; torch's launcher gives them ten minutes.
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
    """Run `accelerate launch COMMAND` without the user's config of accelerate, which may be for other trainings, and
    return the exit status. After a signal of `STOP_SIGNALS` the workers finish their step and write a checkpoint. A
    second Ctrl-C kills them.
    """
    from accelerate.commands.launch import launch_command_parser, multi_gpu_launcher
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_command_parser().parse_args(command)
    # Kubeflow sets arguments of torch's launcher for a pod: with PET_NNODES=2 it would wait for another machine.
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    # torch's own handlers of the other signals would kill the workers in the middle of a step.
    arguments.signals_to_handle = "SIGQUIT"
    failures: dict[int, Any] = {}
    # torch's launcher logs the end of a worker in dozens of lines. Only one is printed below.
    logging.disable()
    with tempfile.TemporaryDirectory() as folder, patch_environment(**{FAILED_ENV: Path(folder, "failed")}):
        arguments.log_dir = folder
        try:
            with handle_signals(_pass_on_to_workers) as received:
                multi_gpu_launcher(arguments)
            return 0
        except ChildFailedError as failed:
            failures = failed.failures
        except BaseException:
            if not received:
                raise
    if received:
        for failure in failures.values():
            if failure.exitcode > 0:
                return int(failure.exitcode)
        raise Interrupted("interrupted before a step was done; earlier checkpoints are kept: go on with --resume")
    failed_rank = min(failures, key=lambda number: _consequence(failures[number].exitcode))
    failure = failures[failed_rank]
    if failure.exitcode > 0:
        return int(failure.exitcode)
    print(f"process {failed_rank}: ended by {failure.signal_name()}; go on with --resume", file=sys.stderr)
    return 1


def _consequence(exitcode: int) -> tuple[bool, bool]:
    """Return how likely a worker failed because of another one: least if it was killed, more for an error, and most for
    SIGTERM.

    If a worker is killed, others may lose their connection and fail. The launcher ends the remaining ones by SIGTERM.
    """
    return exitcode == -signal.SIGTERM, exitcode > 0


def is_to_report(error: Exception) -> bool:
    """Whether this process reports an error. Of launched processes the first one that fails reports it, because others
    fail only when they lose their connection. An error that ends all of them is reported once per machine.
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
    """Redirect stdout and stderr to the null device if their terminal or reader is gone: writes would fail."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if poll.poll(0):  # errors and hang-ups are reported without being asked for
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextlib.contextmanager
def handle_signals(handler: Callable[[list[int]], None]) -> Iterator[list[int]]:
    """Call `handler` at every signal of `STOP_SIGNALS`, with the list of the signals received so far, the newest last.
    Yield this list. Signals that are ignored, as under nohup, stay ignored, and those of a program that trains in a
    thread, as web interfaces do, are its own.
    """
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        if number == HANG_UP:
            _leave_lost_terminals()
        handler(received)

    handlers_before = {}
    in_main_thread = threading.current_thread() is threading.main_thread()
    for number in STOP_SIGNALS:
        if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN:
            handlers_before[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler_before in handlers_before.items():
            signal.signal(number, handler_before)


def _pass_on_to_workers(received: list[int]) -> None:
    """Send SIGTERM to the workers, which end after their step; or SIGKILL after a second Ctrl-C."""
    Path(os.environ[FAILED_ENV]).touch()
    # torch's launcher starts every worker in a session of its own, which Ctrl-C on the terminal does not reach.
    workers = [child for child in psutil.Process().children() if os.getsid(child.pid) == child.pid]
    second_ctrl_c = received.count(signal.SIGINT) > 1
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGKILL if second_ctrl_c else signal.SIGTERM)
    if not workers:
        raise KeyboardInterrupt
