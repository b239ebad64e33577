"""One process among several: which one leads, and what all agree on. With a single process all of it is free.

The processes are started by `launch.py` or by any launcher that sets the variables of `torch.distributed`.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import distributed

T = TypeVar("T")


def join_processes(cpu: bool) -> None:
    """Meet the other processes of this run, if there are any; `cpu` leaves GPUs alone."""
    PartialState(cpu=cpu)


def is_leader() -> bool:
    """Whether this process writes what all have made."""
    return int(os.environ.get("RANK", "0")) == 0


def number_of_processes() -> int:
    """Over all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_all() -> None:
    """Go on when every process has come this far."""
    if number_of_processes() > 1:
        PartialState().wait_for_everyone()


def any_process(*flags: bool) -> list[bool]:
    """Each flag, raised if it is in any process: what must not be decided differently by two of them."""
    if number_of_processes() == 1:
        return list(flags)
    raised = torch.tensor(flags, dtype=torch.int32, device=PartialState().device)
    distributed.all_reduce(raised, distributed.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def share_of(items: Sequence[T]) -> list[T]:
    """What this process works on of what all are to work on: every n-th of `items`, so that neighbours are spread."""
    return list(items[int(os.environ.get("RANK", "0")) :: number_of_processes()])


def from_all(found: Sequence[T]) -> list[T]:
    """What every process has found, process by process; all of them must call it."""
    return list(gather_object(list(found))) if number_of_processes() > 1 else list(found)
