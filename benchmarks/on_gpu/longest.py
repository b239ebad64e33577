"""The longest sequence that trains in so much memory: the plan says where to begin, and only what ran counts."""

from collections.abc import Callable, Generator

import torch
from transformers import set_seed

from on_gpu.setting import Changes, Setting, planned, random_model
from on_gpu.training import Row, about, measured, train_here
from pi_lora.models.adapter import prepare_for_tuning
from pi_lora.planning.memory import OVERHEAD

# As Unsloth's figures were made: an adapter alone, of rank 32. The levers are those that cost little time.
CHANGES: Changes = {
    "tuning": {"rank": 32, "also_train": "nothing"},
    "training": {"mlp_chunk_tokens": 4096, "optimizer": "paged_adamw_8bit"},
    "hardware": {"offload_activations": True},
}
# A paged optimizer and offloading need a GPU.
CHANGES_ON_CPU: Changes = {"tuning": CHANGES["tuning"], "training": {"mlp_chunk_tokens": 16}}
STEP = 1024
# Some hundred tokens of the tiny shape.
ROOM_ON_CPU = 2**22


def longest(setting: Setting, method: str, gigabytes: float | None, tries: int, tell: Callable[[Row], None]) -> None:
    """Tell a row for each length tried, the allocator capped to `gigabytes` (10^9 bytes), or with the whole card."""
    on_gpu = torch.cuda.is_available()
    changes = CHANGES if on_gpu else CHANGES_ON_CPU
    room = whole = torch.cuda.get_device_properties(0).total_memory if on_gpu else OVERHEAD + ROOM_ON_CPU
    if gigabytes:
        room = round(gigabytes * 1e9)
        if on_gpu:
            torch.cuda.set_per_process_memory_fraction(min(1.0, room / whole))
    step = STEP if on_gpu else setting.original
    first = fits_by_plan(setting, method, changes, room, step)
    search = lengths_to_try(first, step, tries)
    set_seed(0)
    tuning = setting.recipe(method, first, changes).tuning
    model = prepare_for_tuning(random_model(setting, first, method), tuning, setting.name)
    tokens = next(search)
    while True:
        recipe = setting.recipe(method, tokens, changes)
        found = measured(lambda clock, recipe=recipe: train_here(recipe, model, clock, steps=1), recipe, 1)
        tell(about(setting, recipe, "pi-lora", changes) | {"cap_gigabytes": gigabytes} | found)
        try:
            tokens = search.send(not found.get("out_of_memory"))
        except StopIteration:
            return


def fits_by_plan(setting: Setting, method: str, changes: Changes, room: int, step: int) -> int:
    """The longest multiple of `step` tokens whose planned peak is at most `room` bytes; one step if none is."""

    def fits(steps: int) -> bool:
        return planned(setting, setting.recipe(method, steps * step, changes)).highest + OVERHEAD <= room

    low, high = 2, 4
    while fits(high) and high * step < 2**22:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def lengths_to_try(first: int, step: int, tries: int) -> Generator[int, bool, None]:
    """A generator that is sent whether the last length ran: by a tenth up until one fails, or down until one runs, and
    then halfway between.

    >>> search = lengths_to_try(100, 1, tries=4)
    >>> [next(search), search.send(True), search.send(False), search.send(True)]
    [100, 110, 105, 107]
    """
    ran, failed, tokens = 0, 0, first
    for _ in range(tries):
        if (yield tokens):
            ran = tokens
            tokens = (ran + failed) // 2 if failed else round(ran * 1.1)
        else:
            failed = tokens
            tokens = (ran + failed) // 2 if ran else round(failed * 0.9)
        tokens = max(step, tokens // step * step)
        if tokens in (ran, failed):
            return
