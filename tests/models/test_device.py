"""The memory of the host, under the limits of containers and batch systems; and the precision of a training."""

from pathlib import Path

import psutil
import pytest
import torch
from conftest import small_recipe
from pydantic import ValidationError

from pi_lora.models import device as devices
from pi_lora.models.host import host_memory
from pi_lora.run import Run
from pi_lora.training.trainer import trainer_arguments

GIB = 2**30


def limited(root: Path, group: str, limits: dict[str, str]) -> None:
    """Write the files of a system whose process is in `group`: limits by folder, of which 3 GiB are used, 1 of them by
    the cache of files.
    """
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    for folder, limit in limits.items():
        place = root / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{3 * GIB}\n")
        (place / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")


@pytest.mark.parametrize(
    ("group", "limits"),
    [
        ("/", {"": str(4 * GIB)}),
        ("/job/step", {"job/step": "max", "job": str(4 * GIB), "": "max"}),
        # In a container the path is the host's, whose folders are not there.
        ("/docker/0123", {"": str(4 * GIB)}),
    ],
)
def test_host_memory_respects_the_limits_of_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, limits: dict[str, str]
) -> None:
    machine = type(psutil.virtual_memory())
    sizes = dict.fromkeys(machine._fields, 0) | {"total": 64 * GIB, "available": 32 * GIB}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine(**sizes))
    limited(tmp_path, group, limits)
    assert host_memory(tmp_path) == (4 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("method", "gpus", "precision", "dtype"),
    [
        ("lora", 1, "float16", "float16"),
        ("qlora", 2, "float16", "float16"),
        ("lora", 2, "float32", "float32"),
        ("full", 1, "float32", "float32"),
    ],
)
def test_adapters_train_in_float16_on_gpus_without_bfloat16(method: str, gpus: int, precision: str, dtype: str) -> None:
    """But not those that FSDP2 shards, whose gradients accelerate does not scale."""
    recipe = small_recipe("any", tuning={"method": method}, hardware={"gpus": gpus}, training={"global_batch_size": 2})
    assert recipe.computes_in(on_cpu=False, has_bfloat16=False) == precision
    assert recipe.dtype_of_base(on_cpu=False, has_bfloat16=False) == dtype
    assert recipe.computes_in(on_cpu=True, has_bfloat16=False) == "float32"
    assert recipe.computes_in(on_cpu=False, has_bfloat16=True) == "bfloat16"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")
def test_float16_training_uses_the_trainers_gradient_scaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = trainer_arguments(small_recipe("any"), Run(tmp_path), "run")
    assert not arguments.fp16
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda: False)
    monkeypatch.setattr(devices, "device", lambda: torch.device("cuda"))
    arguments = trainer_arguments(small_recipe("any"), Run(tmp_path), "run")
    assert (arguments.fp16, arguments.bf16) == (True, False)
    with pytest.raises(ValidationError, match="float16 is for lora on one GPU and for qlora"):
        small_recipe("any", tuning={"method": "full"}, training={"precision": "float16"})
