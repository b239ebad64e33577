"""Every key of a recipe reaches the training: what the model, the batches, the trainer or the launcher are with another
value, and that nothing else is. Keys that change different things are changed together.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args, get_origin
from unittest.mock import ANY

import datasets
import pytest
import torch
from huggingface_hub import constants
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import save_file
from transformers import TrainerCallback

from hub import forget_commits
from pi_lora.data import sources
from pi_lora.distributed import launch_arguments
from pi_lora.errors import DataError, ScalingError
from pi_lora.models.resolve import resolve_for_training
from pi_lora.planning.gpus import GPUS, device_for
from pi_lora.planning.training_plan import plan_training
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.recipe.schema import Recipe
from pi_lora.recipe.section import Section, sections_in
from pi_lora.report.card import write_card
from pi_lora.training import trainer as trainers
from pi_lora.training.callbacks import ScheduledMeasurements
from pi_lora.training.job import TrainingJob, pack_data
from pi_lora.training.trainer import Trainer
from random_runs import stored

Facts = dict[str, object]
# Dotted keys and values; those of `data.source` are keys of the first source.
Values = dict[str, Any]
PLAIN: Values = {
    "model.name": "./model",
    "context.target": 128,
    "tuning.rank": 4,
    "data.source": [{"name": "rows.jsonl"}],
    "training.steps": 4,
    "training.learning_rate": 1e-2,
    "training.global_batch_size": 8,
    "training.per_device_batch_size": 2,
    "training.schedule": "linear",
    "training.warmup_steps": 2,
    "training.precision": "float32",
    "training.activation_checkpointing": False,
}
POSE: Values = {"data.positions": "pose"}
SUMMARIES: Values = {
    "data.document": "text",
    "data.summary": "gist",
    "data.completion_tokens": 20,
    "training.per_device_batch_size": 8,
}
TEMPLATE: Values = {
    "data.template": "{gist} Where?",
    "data.completion": "gist",
    "data.completion_tokens": 20,
    "training.per_device_batch_size": 8,
}
CHATS: Values = {
    "model.name": "./chatty",
    "data.source.column": "messages",
    "data.epochs": 3,
    "training.per_device_batch_size": 1,
}
DIVIDED: Values = {"scaling": "factors", "context.factors": {"factors": [1.0] * 7 + [9.0], "attention_factor": 1.5}}
ON_HUB: Values = {"data.source.name": "owner/books", "data.source.subset": "a"}
OTHERS: Values = {
    "scaling": "theta",
    "context.theta": 6e4,
    "data.source": [{"name": "rows.jsonl"}, {"name": "others.jsonl"}],
    "training.schedule": "cosine_with_min_lr",
    "training.schedule_options": {"min_lr_rate": 0.0},
    "training.activation_checkpointing": True,
    "hardware.gpus": 2,
}
# Of a recipe that does not train, or of one without an adapter.
ALONE = {"refused", "adapted"}


@dataclass
class Case:
    """Another value of a key, what is different then, and the values of other keys before and after."""

    value: object
    differs: Facts
    given: Values = field(default_factory=dict)

    def is_shown_with(self, other: "Case") -> bool:
        """Whether one training shows both: they change different things, or each has something exact of its own."""
        if self.given != other.given or ALONE & (self.differs.keys() | other.differs.keys()):
            return False
        shared = self.differs.keys() & other.differs.keys()
        if any(case.differs[name] is not ANY for case in (self, other) for name in shared):
            return False
        return not shared or all(any(fact is not ANY for fact in case.differs.values()) for case in (self, other))


KEYS = {
    "model.name": Case("./other", {"base": ("./other", None), "recorded": ("./other", "main"), "weights": ANY}),
    "model.revision": Case("v2", {"recorded": ("./model", "v2")}),
    "model.dtype": Case("bfloat16", {"dtypes": ["torch.bfloat16", "torch.float32"], "weights": ANY, "initial": ANY}),
    "model.attention": Case("eager", {"attention": "eager"}),
    "model.kernels": Case("liger", {"kernels": "liger"}),
    "context.target": Case(192, {"window": 192, "rope": ("linear", 3.0, 500.0), "shape": (2, 192), "text": ANY}),
    "context.original": Case(32, {"rope": ("linear", 4.0, 500.0)}),
    "context.theta": Case(7e4, {"rope": ("default", None, 7e4)}, OTHERS),
    "context.factors.factors": Case([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0], {"divisors": ANY}, DIVIDED),
    "context.factors.attention_factor": Case(1.25, {"attention_factor": 1.25}, DIVIDED),
    "context.factors.searched": Case([64, 192], {"refused": ANY}, DIVIDED),
    "scaling": Case("yarn", {"rope": ("yarn", 2.0, 500.0)}),
    "tuning.method": Case(
        "full", {"adapter": None, "adapted": [], "saved": [], "trained": ANY, "initial": None, "recorded": None}
    ),
    "tuning.rank": Case(8, {"adapter": (8, 2.0, 0.0), "trained": ANY, "initial": ANY}),
    "tuning.alpha": Case(4, {"adapter": (4, 1.0, 0.0)}),
    "tuning.rank_stabilized": Case(True, {"adapter": (4, 4.0, 0.0)}),
    "tuning.dropout": Case(0.25, {"adapter": (4, 2.0, 0.25)}),
    "tuning.target_modules": Case(
        ["q_proj", "v_proj"], {"adapted": ["q_proj", "v_proj"], "trained": ANY, "initial": ANY}
    ),
    "tuning.modules_to_save": Case("nothing", {"saved": [], "trained": ANY}),
    "data.source.name": Case("others.jsonl", {"text": ANY}),
    "data.source.weight": Case(9.0, {"text": ANY}, OTHERS),
    "data.source.column": Case("body", {"text": ANY}),
    "data.source.subset": Case("b", {"subset": "b", "text": ANY}, ON_HUB),
    "data.source.split": Case("test", {"split": "test", "text": ANY}, ON_HUB),
    "data.source.revision": Case("v2", {"revision": "v2", "text": ANY}, ON_HUB),
    "data.source.streaming": Case(True, {"streaming": True, "text": ANY}, ON_HUB),
    "data.source.hold_out": Case(0.5, {"text": ANY}),
    "data.packing": Case("wrapped", {"text": ANY, "shape": (1, 128), "without_loss": ANY}, CHATS),
    "data.positions": Case("pose", {"shape": (2, 64), "text": ANY, "positions": ANY}),
    "data.sequence_tokens": Case(32, {"shape": (2, 32), "text": ANY, "positions": ANY}, POSE),
    "data.chunks": Case(5, {"positions": ANY}, POSE),
    "data.min_document_tokens": Case(100, {"text": ANY}),
    "data.document": Case("body", {"text": ANY}, SUMMARIES),
    "data.summary": Case("body", {"text": ANY}, SUMMARIES),
    "data.template": Case("{gist} When?", {"text": ANY}, TEMPLATE),
    "data.completion": Case("body", {"text": ANY}, TEMPLATE),
    "data.document_tokens": Case(9, {"text": ANY, "shape": ANY, "without_loss": ANY}, SUMMARIES),
    "data.completion_tokens": Case(3, {"text": ANY, "without_loss": ANY}, SUMMARIES),
    "data.loss": Case("all", {"without_loss": ANY}, SUMMARIES),
    "data.keep_short": Case(0.9, {"text": ANY, "shape": ANY}, CHATS),
    "data.epochs": Case(1, {"refused": ANY}, {"data.epochs": 2, "training.steps": 12}),
    "data.special_tokens": Case(True, {"text": ANY}),
    "data.seed": Case(1, {"text": ANY}),
    "training.steps": Case(6, {"steps": 6, "rates": [0.1, 0.55, 1, 0.75], "text": ANY, "rows": 48}),
    "training.learning_rate": Case(2e-2, {"learning_rate": 2e-2}),
    "training.global_batch_size": Case(4, {"accumulation": 2, "rows": 16, "text": ANY}),
    "training.per_device_batch_size": Case(1, {"accumulation": 8, "shape": (1, 128), "text": ANY}),
    "training.schedule": Case("constant", {"rates": [0.1, 0.55, 1, 1]}),
    "training.schedule_options": Case({"min_lr_rate": 0.5}, {"rates": [0.1, 0.55, 1, 0.75]}, OTHERS),
    "training.warmup_steps": Case(1, {"rates": [0.1, 1, 0.6667, 0.3333]}),
    "training.warmup_start": Case(0.3, {"rates": [0.3, 0.65, 1, 0.5]}),
    "training.optimizer": Case("paged_adamw_8bit", {"optimizer": "paged_adamw_8bit"}),
    "training.weight_decay": Case(0.1, {"weight_decay": 0.1}),
    "training.betas": Case([0.8, 0.99], {"betas": (0.8, 0.99)}),
    "training.max_grad_norm": Case(0.5, {"max_grad_norm": 0.5}),
    "training.precision": Case("bfloat16", {"autocast": True}),
    "training.activation_checkpointing": Case(2, {"checkpointing": (True, {"every_n_layers": 2})}),
    "training.mlp_chunk_tokens": Case(48, {"mlp_tokens": 48}),
    "training.save_every": Case(7, {"save_every": 7}),
    "training.log_every": Case(3, {"log_every": 3}),
    "training.tracking": Case(["trackio", "wandb"], {"trackers": ["trackio", "wandb"]}),
    "training.seed": Case(1, {"text": ANY, "initial": ANY}),
    "hardware.gpus": Case(2, {"launched": ANY, "accumulation": 2}),
    "hardware.gpu": Case("H100", {"planned_for": "H100"}),
    "hardware.cpu_processes": Case(2, {"launched": ANY, "accumulation": 2}),
    "hardware.machines": Case(2, {"launched": ANY, "accumulation": 1}, OTHERS),
    "hardware.context_parallel": Case(2, {"launched": ANY, "accumulation": 4, "attention": "sdpa"}, OTHERS),
    "hardware.offload_activations": Case(True, {"checkpointing": (True, {"offload": True})}, OTHERS),
    "evaluation": Case({"every": 2, "passkey": {"depths": 3}}, {"measured": ANY}),
    "paper": Case("table 5", {"paper": ["the paper has: table 5"]}),
}


def keys_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """The keys of the schema that have more than one value; `evaluation` is one, since measurements do not train."""
    for name, about in section.model_fields.items():
        inner = next(sections_in(about.annotation), None)
        if inner and inner is not Evaluation:
            yield from keys_of(inner, f"{prefix}{name}.")
        elif get_origin(about.annotation) is not Literal or len(get_args(about.annotation)) > 1:
            yield prefix + name


def recipe_of(values: Values) -> Recipe:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *outer, last = key.split(".")
        section = tree
        for name in outer:
            section = section.setdefault(name, {})
            section = section[0] if isinstance(section, list) else section
        section[last] = json.loads(json.dumps(value))
    return Recipe.model_validate(tree)


class Trained(Exception):
    """Raised where steps would begin."""


def tracker(name: str) -> TrainerCallback:
    """Stands for the callback of an experiment tracker."""
    callback = TrainerCallback()
    callback.tracks_for = name
    return callback


class Books(SimpleNamespace):
    """A data set of the hub whose texts say what was asked for."""

    last: ClassVar[Facts] = {}

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(40):
            yield {"text": f"{self.asked} {number} " * 20}

    def shuffle(self, seed: int) -> "Books":
        return self


def load_dataset(name: str, subset: str, **asked: Any) -> Books:
    Books.last = {"subset": subset, **asked}
    # The folder of the file is the commit, which is that of the revision.
    return Books(asked=f"{name} {subset} {asked}", cache_files=[{"filename": f"/{asked['revision']}/rows.arrow"}])


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and rows, which recipes name by relative paths."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("model", "other", "chatty"):
        shutil.copytree(small_model, folder / name)
    weights = {name: tensor + 1 for name, tensor in stored(small_model).items()}
    save_file(weights, folder / "other" / "model.safetensors", {"format": "pt"})
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (folder / "chatty" / "chat_template.jinja").write_text(template)
    for name, word in (("rows", "paper"), ("others", "stone")):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(40):
                text = f"{word} {number}</s> " * (10 + number)
                gist = f"The {word} of {number} is thin. " * 4
                turns = [{"role": "user", "content": f"{word}?"}, {"role": "assistant", "content": gist}]
                file.write(json.dumps({"text": text, "gist": gist, "body": text[::-1], "messages": turns}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "commit_of", lambda name, revision, kind: revision)
    forget_commits()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(trainers, "get_reporting_integration_callbacks", lambda names: [*map(tracker, names)])


def facts_of(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """What there is when the first step of a recipe would begin."""
    found: Facts = {"kernels": "transformers"}
    Books.last = {}

    def train(trainer: Trainer, checkpoint: object) -> None:
        found.update(_of_batch(trainer), **_of_trainer(trainer), **_of_model(trainer.model))
        raise Trained

    try:
        source = resolve_for_training(recipe)
    except ScalingError as error:
        return {"refused": str(error)}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", train)
        patch.setattr("pi_lora.models.device.use_liger", lambda model: found.update(kernels="liger"))
        job = TrainingJob(recipe, source, Path("run"))
        try:
            data = pack_data(recipe, source)
        except DataError as error:
            return {"refused": str(error)}
        with pytest.raises(Trained):
            job.run(data, write_card=write_card)
    arguments = launch_arguments(recipe, ["train"], address="10.0.0.1")
    plan = plan_training(recipe, source, device_for(recipe) if recipe.hardware.gpu else GPUS["4090"])
    return {
        **found,
        **Books.last,
        "base": (source.base.name, source.base.commit),
        "window": source.window,
        "rows": None if recipe.data.has_examples else len(data.rows),
        "launched": [each for each in arguments if "threads" not in each],
        "planned_for": plan.gpu.name,
        "paper": [line for line in plan.lines() if "paper" in line],
    }


def _of_model(model: Any) -> Facts:
    layers = {name.rpartition(".")[2]: each for name, each in model.named_modules() if isinstance(each, LoraLayer)}
    saved = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, ModulesToSaveWrapper)}
    rope = model.config.rope_parameters
    facts: Facts = {
        "rope": (rope["rope_type"], rope.get("factor"), rope["rope_theta"]),
        "divisors": rope.get("long_factor"),
        "attention_factor": rope.get("attention_factor"),
        "attention": model.config._attn_implementation,
        "dtypes": sorted({str(weight.dtype) for weight in model.parameters()}),
        "trained": model.num_parameters(only_trainable=True),
        "adapted": sorted(layers),
        "saved": sorted(saved),
        "weights": next(
            each.detach().float().sum().item() for name, each in model.named_parameters() if "q_proj" in name
        ),
    }
    facts |= dict.fromkeys(("adapter", "initial", "recorded"))
    if layers:
        layer = layers["q_proj"]
        dropout = getattr(layer.lora_dropout["default"], "p", 0.0)
        settings = model.peft_config["default"]
        facts["adapter"] = (layer.r["default"], layer.scaling["default"], dropout)
        facts["initial"] = layer.lora_A["default"].weight.detach().sum().item()
        facts["recorded"] = (settings.base_model_name_or_path, settings.revision)
    return facts


def _of_trainer(trainer: Trainer) -> Facts:
    asked = trainer.args
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=asked.learning_rate)
    [share] = trainer.create_scheduler(asked.max_steps, optimizer).lr_lambdas
    callbacks = trainer.callback_handler.callbacks
    [measured] = [each.evaluation for each in callbacks if isinstance(each, ScheduledMeasurements)]
    return {
        "steps": asked.max_steps,
        "learning_rate": asked.learning_rate,
        "rates": [round(share(step), 4) for step in range(4)],
        "accumulation": asked.gradient_accumulation_steps,
        "optimizer": asked.optim,
        "weight_decay": asked.weight_decay,
        "betas": (asked.adam_beta1, asked.adam_beta2),
        "max_grad_norm": asked.max_grad_norm,
        "autocast": asked.bf16,
        "checkpointing": (asked.gradient_checkpointing, asked.gradient_checkpointing_kwargs),
        "save_every": asked.save_steps,
        "log_every": asked.logging_steps,
        "trackers": [each.tracks_for for each in callbacks if hasattr(each, "tracks_for")],
        "measured": measured,
    }


def _of_batch(trainer: Trainer) -> Facts:
    """The first batch that a step takes, and the most tokens that an MLP computes of it at a time."""
    batch = next(iter(trainer.get_train_dataloader()))
    tokens = []
    projection = trainer.model.get_submodule(
        next(name for name, _ in trainer.model.named_modules() if name.endswith("gate_proj"))
    )
    hook = projection.register_forward_hook(lambda _, inputs, output: tokens.append(output[..., 0].numel()))
    trainer.model(**batch)
    hook.remove()
    return {
        "shape": tuple(batch["input_ids"].shape),
        "text": batch["input_ids"].tolist(),
        "without_loss": int(((batch["labels"] == -100) & (batch["attention_mask"] == 1)).sum()),
        "positions": batch["position_ids"].tolist() if "position_ids" in batch else None,
        "mlp_tokens": "all" if max(tokens) == batch["input_ids"].numel() else max(tokens),
    }


def in_groups() -> list[list[str]]:
    """The keys, those together whose changes one training shows."""
    groups: list[list[str]] = []
    for key, case in KEYS.items():
        for group in groups:
            if all(case.is_shown_with(KEYS[other]) for other in group):
                group.append(key)
                break
        else:
            groups.append([key])
    return groups


@pytest.fixture(scope="module")
def before() -> dict[str, Facts]:
    """The facts of recipes before a key is changed, which several groups share."""
    return {}


def test_every_key_of_the_schema_has_a_case() -> None:
    assert list(KEYS) == list(keys_of(Recipe))


@pytest.mark.parametrize("keys", in_groups(), ids=lambda keys: f"{keys[0]} and {len(keys) - 1} others")
def test_keys_change_what_they_say_and_nothing_else(
    keys: list[str], before: dict[str, Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = PLAIN | KEYS[keys[0]].given
    facts = before.get(str(values)) or facts_of(recipe_of(values), monkeypatch)
    before[str(values)] = facts
    assert "refused" not in facts
    changed = facts_of(recipe_of(values | {key: KEYS[key].value for key in keys}), monkeypatch)
    differing = {name: value for name, value in changed.items() if value != facts.get(name)}
    expected: Facts = {}
    for key in keys:
        expected |= KEYS[key].differs
    assert differing == expected
