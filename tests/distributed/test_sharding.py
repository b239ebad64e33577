"""FSDP2 without GPUs: two processes over gloo train shards of a model as one process trains the whole."""

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import small_recipe, train
from pi_lora.distributed import launch_arguments
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.recipe.schema import Recipe

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 60


def launch_environment(recipe: Recipe) -> dict[str, str]:
    """What accelerate's launcher tells its processes."""
    asked = launch_command_parser().parse_args(launch_arguments(recipe, ["train"]))
    environment = prepare_multi_gpu_env(asked)
    return {key: value for key, value in environment.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


class Pair:
    """Two processes that train together, one job after the other; started again after one of them has died."""

    def __init__(self, python: str) -> None:
        self.python, self.processes = python, list[subprocess.Popen[str]]()

    def start(self, recipe: Recipe, output: Path, **more: Any) -> None:
        """Begin to train `recipe` in both."""
        if not self.processes:
            self._fork()
        job = {"recipe": recipe.model_dump(mode="json"), "output": str(output), **more}
        job["environment"] = launch_environment(recipe)
        for process in self.processes:
            assert process.stdin
            print(json.dumps(job), file=process.stdin, flush=True)

    def answers(self) -> list[dict[str, Any]]:
        """Return what each process says of the job that was started."""
        answers: dict[int, dict[str, Any]] = {}
        pipes = {process.stdout: rank for rank, process in enumerate(self.processes)}
        while len(answers) < len(pipes):
            # Where one fails, the other waits for it in vain.
            failed = any("failure" in answer for answer in answers.values())
            ready, _, _ = select.select(
                [pipe for pipe in pipes if pipes[pipe] not in answers], [], [], 2 if failed else PATIENCE
            )
            for pipe in ready:
                assert pipe
                line = pipe.readline()
                answers[pipes[pipe]] = json.loads(line) if line else {"failure": "ended"}
            if not ready:
                for process in self.processes:
                    process.send_signal(signal.SIGUSR1)
                time.sleep(1)
                break
        if len(answers) < len(pipes) or any("failure" in answer for answer in answers.values()):
            self.end()
            pytest.fail("\n".join(answer.get("failure", "") for answer in answers.values()) or "no answer")
        return [answers[rank] for rank in sorted(answers)]

    def train(self, recipe: Recipe, output: Path, **more: Any) -> list[dict[str, Any]]:
        self.start(recipe, output, **more)
        return self.answers()

    def wait(self) -> list[int]:
        """Return the exit statuses of processes that end by themselves."""
        statuses = [process.wait(timeout=PATIENCE) for process in self.processes]
        self.end()
        return statuses

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.processes = []

    def _fork(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        for rank in "01":
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            self.processes.append(
                subprocess.Popen(
                    [self.python, str(WORKER)],
                    env={**os.environ, **where, **ranks},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )


@pytest.fixture(scope="module")
def pair(python: str) -> Iterator[Pair]:
    both = Pair(python)
    yield both
    both.end()


ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "untied": {"model_type": "llama", "tie_word_embeddings": False},
    "layer norms": {"model_type": "stablelm", "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models of two layers, window 64, with the built-in model's tokenizer."""
    sizes = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    found = {}
    for name, own in ARCHITECTURES.items():
        folder = found[name] = tmp_path_factory.mktemp("models") / name.replace(", ", "-").replace(" ", "-")
        torch.manual_seed(0)
        config = AutoConfig.for_model(**own, **sizes, **heads, bos_token_id=0, eos_token_id=1, initializer_range=0.2)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((BUILTIN_FOLDER / "tiny" / file).read_bytes())
    return found


ALL: Mapping[str, Any] = {"method": "full"}
WHOLE: Mapping[str, Any] = {"method": "lora", "rank": 4}
ADAPTER: Mapping[str, Any] = {"method": "lora", "rank": 4, "modules_to_save": "nothing"}
TUNINGS = {"full": ALL, "lora": WHOLE, "adapter": ADAPTER}


def recipe_for(path: Path, tuning: Mapping[str, Any], precision: str = "float32", /, **changes: Any) -> Recipe:
    """Two micro-batches a step in each of two processes."""
    training = {
        **small_recipe(path).training.model_dump(),
        "steps": 3,
        "learning_rate": 1e-3,
        "global_batch_size": 4,
        "per_device_batch_size": 1,
        "precision": precision,
    }
    sections = {"hardware": {"gpus": 2}, "training": {**training, **changes.pop("training", {})}, **changes}
    return small_recipe(path, tuning=dict(tuning), **sections)


def in_one(recipe: Recipe, output: Path) -> Path:
    """Train a recipe in this process."""
    sections = recipe.model_dump(mode="json")
    training = {**sections["training"], "per_device_batch_size": 2 * recipe.training.per_device_batch_size}
    return train(Recipe.model_validate({**sections, "hardware": {}, "training": training}), output)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "training.jsonl").read_text().splitlines()]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(run.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same(sharded: Path, alone: Path) -> None:
    assert losses(sharded) == pytest.approx(losses(alone), rel=1e-5)
    assert len(set(losses(alone))) > 1
    found, expected = tensors(sharded), tensors(alone)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype == torch.float32
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda why, name=name: name + why)


@pytest.mark.parametrize(
    ("architecture", "tuning"),
    [("tied", "full"), ("tied", "lora"), ("untied", "full"), ("untied", "adapter"), ("layer norms", "lora")],
)
def test_sharded_training_equals_one_process(
    pair: Pair, models: dict[str, Path], tmp_path: Path, architecture: str, tuning: str
) -> None:
    recipe = recipe_for(models[architecture], TUNINGS[tuning])
    pair.start(recipe, tmp_path / "sharded")
    alone = in_one(recipe, tmp_path / "alone")
    answers = pair.answers()
    assert_same(tmp_path / "sharded", alone)
    assert [answer["unsharded"] for answer in answers] == [[0] * 6] * 2
    assert [answer["read"] for answer in answers] == [1, 0]
    assert [answer["gathered_frozen"] for answer in answers] == [0, 0]


@pytest.mark.parametrize(("architecture", "tuning"), [("tied", "full"), ("layer norms", "lora")])
def test_sharded_bfloat16_keeps_float32_weights_and_reductions(
    pair: Pair, models: dict[str, Path], tmp_path: Path, architecture: str, tuning: str
) -> None:
    """Gradients are summed, and losses returned, in float32; inputs fit the gathered weights, also while measuring."""
    model = {"name": str(models[architecture]), "dtype": None if tuning == "full" else "bfloat16"}
    recipe = recipe_for(
        models[architecture],
        TUNINGS[tuning],
        "bfloat16",
        model=model,
        evaluation={"every": 3, "perplexity": {"data": "builtin:stdlib", "windows": [128], "documents": 1}},
    )
    pair.start(recipe, tmp_path / "sharded")
    alone = in_one(recipe, tmp_path / "alone")
    answers = pair.answers()
    assert [answer["policies"] for answer in answers] == [[["torch.bfloat16", "torch.float32", "torch.float32"]]] * 2
    assert losses(tmp_path / "sharded") == pytest.approx(losses(alone), rel=2e-2)
    assert {tensor.dtype for tensor in tensors(tmp_path / "sharded").values()} == {torch.float32}
    assert perplexities(tmp_path / "sharded", 3) == pytest.approx(perplexities(alone, 3), rel=2e-2)


def perplexities(run: Path, step: int) -> list[float]:
    scores = json.loads((run / "scores" / f"perplexity-step-{step}.json").read_text())
    return [window["perplexity"] for window in scores["windows"]]


def test_measurements_of_a_sharded_model_equal_one_process(pair: Pair, models: dict[str, Path], tmp_path: Path) -> None:
    evaluation = {
        "every": 2,
        "perplexity": {"data": "builtin:stdlib", "windows": [64, 128], "documents": 8, "stride": 64},
        "passkey": {"depths": 3, "trials": 2},
        "while_training": {"documents": 3, "truncate": 512},
    }
    training = {"activation_checkpointing": True}
    recipe = recipe_for(models["tied"], WHOLE, context={"target": 256}, evaluation=evaluation, training=training)
    pair.start(recipe, tmp_path / "sharded")
    alone = in_one(recipe, tmp_path / "alone")
    # Documents and depths are dealt out, so unevenly; each process makes as many forward passes, or it would not end.
    pair.answers()
    assert_same(tmp_path / "sharded", alone)
    names = sorted(path.name for path in (alone / "scores").iterdir())
    assert names == [f"{kind}-step-{step}.json" for kind in ("passkey", "perplexity") for step in (0, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "sharded" / "scores").iterdir()) == names
    for step in (0, 2, 3):
        assert perplexities(tmp_path / "sharded", step) == pytest.approx(perplexities(alone, step), rel=1e-5)
        found, expected = (
            json.loads((run / "scores" / f"passkey-step-{step}.json").read_text())
            for run in (tmp_path / "sharded", alone)
        )
        assert found["depths"] == expected["depths"]


@pytest.fixture
def whole_pair(python: str) -> Iterator[Pair]:
    """Two processes that were never told to shard."""
    both = Pair(python)
    yield both
    both.end()


@pytest.fixture(scope="module")
def of_examples(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A recipe for two processes with two epochs of five steps, and the run of it in one."""
    folder = tmp_path_factory.mktemp("examples")
    rows = [{"text": "sea " * (2 + number), "answer": f"the {number} " * 3} for number in range(20)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {
        "source": str(folder / "rows.jsonl"),
        "template": "{text}",
        "completion": "answer",
        "completion_tokens": 20,
        "epochs": 2,
    }
    training = {"steps": 10, "save_every": 2}
    hardware = {"cpu_processes": 2}
    recipe = recipe_for(models["tied"], WHOLE, data=data, training=training, hardware=hardware)
    return recipe, in_one(recipe, folder / "alone")


def test_a_killed_run_of_two_processes_resumes_with_the_same_examples(
    whole_pair: Pair, of_examples: tuple[Recipe, Path], tmp_path: Path
) -> None:
    """In the second epoch; both processes have the whole model."""
    recipe, alone = of_examples
    whole_pair.start(recipe, tmp_path / "two", killed_at=8)
    assert whole_pair.wait() == [-signal.SIGKILL] * 2
    whole_pair.train(recipe, tmp_path / "two", resume=True)
    assert_same(tmp_path / "two", alone)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_killed_sharded_run_resumes_to_the_same_weights(
    pair: Pair, models: dict[str, Path], tmp_path: Path, tuning: str
) -> None:
    recipe = recipe_for(models["tied"], TUNINGS[tuning], training={"steps": 4, "save_every": 2})
    pair.start(recipe, tmp_path / "sharded", killed_at=3)
    alone = in_one(recipe, tmp_path / "alone")
    assert pair.wait() == [-signal.SIGKILL] * 2
    assert not (tmp_path / "sharded").exists()
    pair.train(recipe, tmp_path / "sharded", resume=True)
    assert_same(tmp_path / "sharded", alone)
