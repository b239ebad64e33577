"""Two thousand steps: memory, the time of a step and what is on the disk stay as they were after a hundred."""

import itertools
import statistics
import time
from pathlib import Path

import psutil
import pytest
from conftest import small_recipe, train

from pi_lora.run import staging_path

STEPS, EVERY = 2000, 50
# Lines are added to them; what else a run holds does not grow.
LOGS = {"training.jsonl", "trainer_state.json"}


def held(folder: Path) -> tuple[int, int, int]:
    """How many checkpoints, how many files, and how many bytes there are, logs left out."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    checkpoints = len(list((folder / "checkpoints").glob("checkpoint-*")))
    return checkpoints, len(files), sum(path.stat().st_size for path in files if path.name not in LOGS)


@pytest.mark.slow
def test_two_thousand_steps_cost_what_the_first_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step's time is the processor's, which other work does not lengthen as it does the clock's; the median of a
    hundred leaves checkpoints out. The windows of the first hundred steps are not compared.
    """
    few = {"steps": STEPS, "global_batch_size": 1, "per_device_batch_size": 1, "activation_checkpointing": False}
    recipe = small_recipe(
        "builtin:tiny",
        context={"target": 512},
        tuning={"rank": 2},
        data={"source": "builtin:stdlib", "positions": "skip", "sequence_tokens": 64},
        training={**few, "learning_rate": 1e-4, "save_every": EVERY, "log_every": 10},
    )
    output, process, ended = tmp_path / "run", psutil.Process(), [time.process_time()]
    resident: list[int] = []
    holding: list[tuple[int, int, int]] = []

    def measure(done: int, total: int, note: str = "") -> None:
        if total == STEPS and done > len(resident):
            resident.append(process.memory_info().rss)
            # Between two checkpoints.
            if done % EVERY == EVERY // 2:
                holding.append(held(staging_path(output)))
            ended.append(time.process_time())

    train(recipe, output, progress=measure)
    assert len(resident) == STEPS
    seconds = [after - before for before, after in itertools.pairwise(ended)]
    windows = [slice(start, start + 100) for start in range(100, STEPS, 100)]
    step = [statistics.median(seconds[each]) for each in windows]
    memory = [statistics.median(resident[each]) for each in windows]
    slower = statistics.median(step[-5:]) / statistics.median(step[:5]) - 1
    grown = memory[-1] / memory[0] - 1
    with capsys.disabled():
        print(f"\n{STEPS} steps: {step[0] * 1e3:.1f} ms each at first, {slower:+.1%} at the end; ", end="")
        print(f"memory {memory[0] / 2**20:.0f} MiB, {grown:+.1%}; (checkpoints, files, bytes) {holding[-1]}")
    assert grown < 0.02
    assert slower < 0.05
    # From the third on there are two checkpoints.
    assert holding[3][0] == 2
    assert {found[:2] for found in holding[3:]} == {holding[3][:2]}
    assert max(found[2] for found in holding[3:]) <= 1.001 * holding[3][2]
