"""The memory of the host, under the limits of containers and batch systems; and the precision of a training."""

import importlib.util
import itertools
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch
from pydantic import ValidationError

from conftest import small_recipe
from pi_lora.models import device as devices
from pi_lora.models.host import host_memory
from pi_lora.run import Run
from pi_lora.training.trainer import trainer_arguments

GIB = 2**30


def freshly_imported() -> ModuleType:
    """The module `device` with nothing measured yet."""
    spec = importlib.util.find_spec(devices.__name__)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.parametrize(
    ("precision", "has_bfloat16", "dtype"),
    [("auto", True, "bfloat16"), ("auto", False, "float32"), ("float32", True, "float32")],
)
def test_qlora_computes_all_of_a_step_in_one_dtype_on_a_cpu(precision: str, has_bfloat16: bool, dtype: str) -> None:
    """Without instructions for it, products in bfloat16 take several times as long."""
    training = {"steps": 1, "warmup_steps": 0, "precision": precision}
    recipe = small_recipe("any", tuning={"method": "qlora"}, training=training)
    assert recipe.computes_in(on_cpu=True, has_bfloat16=has_bfloat16) == dtype
    assert recipe.dtype_of_base(on_cpu=True, has_bfloat16=has_bfloat16) == dtype


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")
def test_float16_training_uses_the_trainers_gradient_scaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = trainer_arguments(small_recipe("any"), Run(tmp_path), "run")
    assert not arguments.fp16
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda: False)
    monkeypatch.setattr(devices, "device", lambda: torch.device("cuda"))
    arguments = trainer_arguments(small_recipe("any"), Run(tmp_path), "run")
    assert (arguments.fp16, arguments.bf16) == (True, False)
    with pytest.raises(ValidationError, match=r"training\.precision: float16"):
        small_recipe("any", tuning={"method": "full"}, training={"precision": "float16"})


@pytest.mark.parametrize(
    ("speed", "instructions", "fast"), [(1.3, True, True), (1.1, True, False), (9.0, False, False)]
)
def test_a_processor_computes_in_bfloat16_where_that_is_a_fifth_faster(
    speed: float, instructions: bool, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Casts take some of the time that products gain."""
    monkeypatch.setattr(devices, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(devices, "has_bfloat16_instructions", lambda: instructions)
    monkeypatch.setattr(devices, "bfloat16_speed", lambda: speed)
    assert devices.has_fast_bfloat16() is fast


def test_the_speed_is_measured_on_one_thread_and_leaves_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 takes 3 seconds here, and bfloat16 2; a disturbed round takes longer."""
    asked: list[int] = []
    ticks = iter([0, 9, 0, 9] * 10 + [0, 3, 0, 2] * 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    fresh = freshly_imported()
    assert fresh.bfloat16_speed() == 1.5
    assert asked == [1, 5]
    assert fresh.bfloat16_speed() == 1.5  # measured once, or no tick were left


@pytest.mark.parametrize(("fast", "seconds"), [(False, 3), (True, 2)])
def test_the_peak_is_that_of_all_threads_in_the_dtype_of_trainings(
    fast: bool, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: set[torch.dtype] = set()
    ticks = itertools.cycle([0, seconds])
    fresh = freshly_imported()
    monkeypatch.setattr(fresh, "has_fast_bfloat16", lambda: fast)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda left, _: dtypes.add(left.dtype))
    assert fresh.processor_peak() == pytest.approx(5 * 2 * 256**3 / seconds)
    assert dtypes == {torch.bfloat16 if fast else torch.float32}


@pytest.mark.parametrize(
    ("place", "tuning", "precision", "autocast"),
    [
        ("cuda", {"method": "full"}, "bfloat16", True),
        ("cuda", {"method": "full"}, "float32", False),
        ("cuda", {"rank": 4}, "bfloat16", False),
        ("cpu", {"method": "full"}, "bfloat16", False),
    ],
)
def test_float32_weights_are_measured_under_autocast_on_a_gpu(
    place: str, tuning: dict[str, object], precision: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device", lambda: torch.device(place))
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda: True)
    recipe = small_recipe("any", tuning=tuning, training={"precision": precision})
    assert devices.measured_under_autocast(recipe) is autocast


def test_memory_that_torch_holds_unused_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: 30)
    assert devices.free_memory(torch.device("cuda")) == 140
    monkeypatch.setattr(devices, "host_memory", lambda: (9, 5))
    assert devices.free_memory(torch.device("cpu")) == 5


def test_facts_for_a_bug_report_name_every_gpu_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(devices, "host_memory", lambda: (64 * GIB, 3 * GIB // 2))
    monkeypatch.setattr(devices, "bfloat16_speed", lambda: 4.04)
    facts = devices.facts()
    assert facts["GPUs"] == "; ".join(["NVIDIA H100, 80.0 GiB, compute capability 9.0"] * 2)
    assert facts["memory"] == "64.0 GiB, 1.5 GiB available"
    assert "bfloat16 4.04 times as fast as float32; torch uses " in facts["processor"]
    assert facts["torch"] == torch.__version__
    assert "lm-eval" in facts
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices.facts()["GPUs"] == "none"
