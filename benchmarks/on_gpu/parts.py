"""The parts of benchmarks/gpu.py: which jobs each is made of, and what one job does; heavy imports inside."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from on_gpu.setting import Setting

ROOT = Path(__file__).parents[2]
METHODS = ("lora", "qlora", "full")
LAYERS_OF_FULL = (32, 28, 24, 20, 16, 12, 8, 4)
TINY = "tiny"

Job = Mapping[str, Any]
Row = dict[str, Any]
Tell = Callable[[Row], None]


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """What is to be measured, each in a process of its own."""
    more: dict[str, list[Job]] = {
        "training": [{"method": method} for method in METHODS],
        "neighbours": [{"method": method} for method in METHODS[:2]],
        "levers": [{"changes": changes} for changes in levers(options.shape == TINY)],
        "longest": [{"cap": cap, "tries": options.tries} for cap in options.caps],
    }
    for part in options.parts:
        yield from ({"part": part, **job} for job in more.get(part, [{}]))


def levers(tiny: bool) -> list[dict[str, dict[str, Any]]]:
    """Changes to the recipe, each measured beside the first, which changes nothing; a CPU has not all of them."""
    pieces = {"training": {"mlp_chunk_tokens": 32 if tiny else 4096}}
    everywhere: list[dict[str, dict[str, Any]]] = [
        {},
        pieces,
        {"training": {"activation_checkpointing": False}},
        {"tuning": {"also_train": "nothing"}},
    ]
    if tiny:
        return [*everywhere, {"model": {"attention": "eager"}}]
    offload = {"hardware": {"offload_activations": True}}
    return [
        *everywhere,
        {"model": {"attention": "sdpa"}},
        {"model": {"attention": "flash_attention_2"}},
        offload,
        {**pieces, **offload},
        {"training": {"optimizer": "paged_adamw_8bit"}},
    ]


def run(job: Job, shape: str, tell: Tell) -> None:
    """Do one job in this process, and tell its rows as they come."""
    from on_gpu.setting import setting_of

    PARTS[job["part"]](setting_of(shape), job, tell)


def ceilings(setting: "Setting", job: Job, tell: Tell) -> None:
    """The card by itself."""
    from on_gpu.ceilings import ceilings

    tell(ceilings(setting))


def training(setting: "Setting", job: Job, tell: Tell) -> None:
    """Every length by one method."""
    from on_gpu.training import ours

    shape = full_setting(setting) if job["method"] == "full" else setting
    ours(shape, job["method"], list(setting.lengths), {}, tell)


def full_setting(setting: "Setting") -> "Setting":
    """As many layers of the shape as train in full at the compared length on this card, by the plan."""
    import torch

    from on_gpu.setting import planned

    if not torch.cuda.is_available():
        return setting
    room = torch.cuda.get_device_properties(0).total_memory
    shapes = [setting.with_layers(layers) for layers in LAYERS_OF_FULL if layers <= setting.layers]
    recipe = setting.recipe("full", setting.compared)
    return next((each for each in shapes if planned(each, recipe).peak <= room), shapes[-1])


def neighbours(setting: "Setting", job: Job, tell: Tell) -> None:
    """One length by pi-lora and by every neighbour that is installed."""
    from on_gpu.neighbours import ADAPTER_ALONE, neighbour, present
    from on_gpu.training import ours

    ours(setting, job["method"], [setting.compared], ADAPTER_ALONE, tell)
    for name in present():
        neighbour(name, setting, job["method"], setting.compared, tell)


def lever(setting: "Setting", job: Job, tell: Tell) -> None:
    """One length under one change of the recipe."""
    from on_gpu.training import ours

    ours(setting, "lora", [setting.compared], job["changes"], tell)


def evaluation(setting: "Setting", job: Job, tell: Tell) -> None:
    """Perplexity and passkeys."""
    from on_gpu.evaluation import Grid, evaluation

    if setting.name == TINY:
        tell(evaluation(setting, [64], Grid(target=256, depths=2, trials=1, seed=0), stride=16))
    else:
        tell(evaluation(setting, [8192, 32768], Grid(target=16384, depths=32, trials=10, seed=0)))


def demo(setting: "Setting", job: Job, tell: Tell) -> None:
    """Seconds of `pi-lora train recipes/demo.yaml`, start to finish, as a user runs it."""
    steps = 2 if setting.name == TINY else 760
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "train",
            str(ROOT / "recipes" / "demo.yaml"),
            f"training.steps={steps}",
            "--output",
            f"{folder}/demo",
        ]
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "pi_lora", *command], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        tell({"steps": steps, "seconds": time.perf_counter() - started})


def longest(setting: "Setting", job: Job, tell: Tell) -> None:
    """The longest sequence in so much memory."""
    from on_gpu.longest import longest

    longest(setting, "qlora", job["cap"], job["tries"], tell)


PARTS: dict[str, Callable[["Setting", Job, Tell], None]] = {
    "ceilings": ceilings,
    "training": training,
    "neighbours": neighbours,
    "levers": lever,
    "evaluation": evaluation,
    "demo": demo,
    "longest": longest,
}
