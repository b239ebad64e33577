"""One of several processes that train a model in shards over gloo, on CPUs: jobs come as lines of JSON on standard
input, and each is answered by a line on standard output.

accelerate 1.15 shards on accelerators alone and trains copies on CPUs; `shard_on_cpus` removes this check. Everything
else is what a launched process does: the settings come from the environment, which the tests make from the launch line.
No fixture reaches a launched process, so it has a `MonkeyPatch` of its own.
"""

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoModelForCausalLM, TrainerCallback

from pi_lora import preflight
from pi_lora.distributed import is_main_process
from pi_lora.models.resolve import resolve_for_training
from pi_lora.recipe.schema import Recipe
from pi_lora.training import job, trainer
from pi_lora.training.job import TrainingJob, pack_data


def shard_on_cpus(patch: pytest.MonkeyPatch) -> None:
    """Let accelerate shard where `ACCELERATE_USE_FSDP` asks for it, whatever the device."""
    initialize = AcceleratorState.__init__

    def sharding(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        initialize(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    patch.setattr(AcceleratorState, "__init__", sharding)
    # A recipe asks for hardware that is not here.
    patch.setattr(preflight, "_machine_problems", lambda _recipe: iter(()))
    patch.setattr(TrainingJob, "plan", None)


class Killed(TrainerCallback):
    """Die as by `kill -9` at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Watched:
    """Record how a training shards, which no file shows."""

    def __init__(self, patch: pytest.MonkeyPatch, killed_at: int | None) -> None:
        self.unsharded: list[int] = []
        self.policies: set[tuple[str, ...]] = set()
        self.read = 0
        self.gathered_frozen = 0
        build, load = trainer.Trainer.__init__, AutoModelForCausalLM.from_pretrained
        step, gather = trainer.Trainer.training_step, get_model_state_dict
        watched = self

        def watch_building(self: Any, *arguments: Any, **options: Any) -> None:
            build(self, *arguments, **options)
            if killed_at:
                self.add_callback(Killed(killed_at))

        def watch_loading(*arguments: Any, **options: Any) -> Any:
            watched.read += 1
            return load(*arguments, **options)

        def watch_step(self: Any, model: Any, *arguments: Any, **options: Any) -> Any:
            loss = step(self, model, *arguments, **options)
            groups = sharded_groups(model)
            watched.unsharded.append(sum(map(unsharded_gradients, groups)))
            policies = [group.mp_policy for group in groups]
            watched.policies |= {(str(each.param_dtype), str(each.reduce_dtype), str(loss.dtype)) for each in policies}
            return loss

        def watch_gathering(model: Any, **options: Any) -> Any:
            gathered = gather(model, **options)
            watched.gathered_frozen += sum(
                name in gathered for name, weight in model.named_parameters() if not weight.requires_grad
            )
            return gathered

        patch.setattr(trainer.Trainer, "__init__", watch_building)
        patch.setattr(trainer.Trainer, "training_step", watch_step)
        patch.setattr(AutoModelForCausalLM, "from_pretrained", watch_loading)
        patch.setattr(job, "get_model_state_dict", watch_gathering)


def sharded_groups(model: torch.nn.Module) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together."""
    modules: Iterable[Any] = model.modules()
    states = [module._get_fsdp_state() for module in modules if hasattr(module, "_get_fsdp_state")]
    # torch 2.11 and 2.12 have at most one for each module.
    groups = [vars(state).get("_fsdp_param_groups", [vars(state).get("_fsdp_param_group")]) for state in states]
    return list({id(group): group for each in groups for group in each if group is not None}.values())


def unsharded_gradients(group: Any) -> int:
    """Numbers in gradients that FSDP2 keeps whole between two micro-batches."""
    held = [each.unsharded_accumulated_grad for each in group.fsdp_params]
    held += [each._unsharded_param.grad for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
    return sum(gradient.numel() for gradient in held if gradient is not None)


def run(job: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(job["environment"])
    recipe, output = Recipe.model_validate(job["recipe"]), Path(job["output"])
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch, job.get("killed_at"))
        resume = job.get("resume", False)
        model = preflight.check(recipe, output, resume=resume) if is_main_process() else resolve_for_training(recipe)
        training = TrainingJob(recipe, model, output, resume)
        training.run(pack_data(recipe, model), write_card=id)
    return {
        "unsharded": watched.unsharded,
        "read": watched.read,
        "gathered_frozen": watched.gathered_frozen,
        "policies": sorted(watched.policies),
    }


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # where one waits for the other in vain
    shard_on_cpus(pytest.MonkeyPatch())
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except BaseException:
            answer = {"failure": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
