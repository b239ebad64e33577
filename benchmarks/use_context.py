"""Does SmolLM2-135M-Instruct use 16k tokens after tuning on whole sequences? docs/experiments.md has the plan.

    python scripts/fetch_model.py smollm2_135m_instruct
    python scripts/fetch_model.py gemma3_270m
    python benchmarks/use_context.py smollm2
    python benchmarks/use_context.py gemma3

The second is Gemma 3 270M from 32k to 64k: untuned scalings, and the road from `probe` to `merge`. The novels are those
of experiment.py, and math/ holds long LaTeX files. The experiment is a list of `pi-lora` commands. A command whose
result exists is left out.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiment import BOOKS, Command, run_missing, score, to_target, training
from record import parser_of

SEEDS = (1, 2)
CONTROL = "control"
RELEASED = "adapters/smollm2_135m_16k"
# As chats.py makes them.
CHATS = "chats/test.jsonl"
NOVELS = f"name: {BOOKS}/train, weight: 0.75"
MIXTURE = f"{{{NOVELS}}}, {{name: builtin:recall, weight: 0.25}}"
CHOSEN = (
    f"{{{NOVELS}, select: {{by: gain, keep: 0.3}}}}, {{name: builtin:recall, weight: 0.1}}, "
    "{name: builtin:common_words, weight: 0.075}, {name: builtin:entities, weight: 0.075}"
)
TEXTS = ("novels", "mathematics")
# Rates to try, and the highest again doubled while it is the best.
RATES = ("1e-3", "2e-3", "4e-3", "8e-3")


@dataclass(frozen=True)
class Setting:
    """Models, text and sizes in tokens; the window that is near has at most the base's tokens."""

    base: str = "models/smollm2_135m_instruct"
    original: int = 8192
    target: int = 16384
    near: int = 6144
    stride: int = 2048
    windows: int = 3
    documents: int = 10


GEMMA3 = Setting(
    base="models/gemma3_270m",
    original=32768,
    target=65536,
    near=24576,
    stride=8192,
    windows=1,
    documents=7,
)


@dataclass(frozen=True)
class Experiment:
    """The commands of the plan, in a setting, with the folders of runs and results."""

    setting: Setting
    runs: Path
    results: Path

    def training(self, name: str, rate: str, sources: str = MIXTURE, *, seed: int = 0, steps: int = 26) -> Command:
        """Return the command that tunes on whole sequences, and the file that says that the run is complete."""
        original = self.setting.original
        target = self.setting.target
        extension = f"context.target={target} context.original={original} scaling=yarn training.global_batch_size=1"
        if name.startswith(CONTROL):
            sequences = target // original
            extension = (
                f"context.target={original} context.original=null scaling=keep training.global_batch_size={sequences}"
            )
        keys = (
            f"model.name={self.setting.base} {extension} "
            f"data.positions=contiguous data.sequence_tokens=null data.seed={seed} training.seed={seed} "
            f"training.steps={steps} training.learning_rate={rate} training.warmup_steps=2 "
            "training.precision=bfloat16 training.log_every=1 training.save_every=1000"
        )
        return training(self.runs / name, keys, sources)

    def score(self, measurement: str, row: str, model: str, options: str) -> Command:
        """Return the command that measures a model, and the file of the scores."""
        return score(measurement, row, model, options, results=self.results)

    def context(self, row: str, model: str, text: str) -> Command:
        """Return the command that measures the use of context on a text, on the key tokens of the evaluator."""
        setting = self.setting
        documents, windows = {
            "novels": (f"{BOOKS}/test/*[0-9].txt", setting.windows),
            "mathematics": ("math", 1),
        }[text]
        options = (
            f"--data {documents} --window {setting.target} --short-window {setting.near} --stride {setting.stride} "
            f"--documents {setting.documents} --truncate {windows * setting.target} --seed 0"
        )
        if row != "evaluator":
            options += f" --key-tokens {self.results}/context-evaluator-{text}.json"
        return self.score("context", f"{row} {text}", model, options)

    def untuned(self, scaling: str) -> str:
        """Return the base under a scaling without tuning."""
        setting = self.setting
        return f"{setting.base} --original {setting.original} --target {setting.target} --scaling {scaling}"

    def tuned(self, name: str) -> str:
        """Return the run of that name."""
        return str(self.runs / name)

    def validation(self, name: str) -> Command:
        """Return the command that measures the first tokens of the validation novels, of the control in its window."""
        window = self.setting.original if name.startswith(CONTROL) else self.setting.target
        options = f"--data {BOOKS}/validation --truncate {self.setting.target} --windows {window} --stride {window}"
        return self.score("perplexity", f"validation {name}", self.tuned(name), options)

    def rate(self, name: str, rates: tuple[str, ...]) -> Iterator[Command]:
        """Yield the commands that try rates; the best one is `best_rate`."""
        for rate in rates:
            yield self.training(f"{name}_{rate}", rate)
            yield self.validation(f"{name}_{rate}")

    def best_rate(self, name: str) -> str:
        """Return the rate with the lowest perplexity on the validation novels."""
        perplexities = {}
        for rate in RATES:
            file, _ = self.validation(f"{name}_{rate}")
            if file.exists():
                perplexities[rate] = measured(file)
        return min(perplexities, key=perplexities.__getitem__)

    def commands(self) -> Iterator[Command]:
        """Yield the commands, those that matter most first."""
        yield from self.rate("whole", RATES)
        yield from self.rate(CONTROL, RATES[:3])
        rates = {name: self.best_rate(name) for name in ("whole", CONTROL)}
        for name, rate in rates.items():
            yield self.training(name, rate)
        yield self.training("chosen", rates["whole"], CHOSEN)
        for text in TEXTS:
            yield self.context("evaluator", "models/gemma3_270m", text)
        whole = self.tuned("whole")
        control = self.tuned(CONTROL)
        base = self.setting.base
        yield from self.tests("untuned", self.untuned("yarn"))
        yield from self.tests("whole", whole)
        yield from self.tests(CONTROL, control)
        yield from self.tests("released", RELEASED)
        yield from self.tests("chosen", self.tuned("chosen"))
        yield from self.tests("base", base)
        chats = f"--data {CHATS} --base {base}"
        yield self.score("chat", "whole released control", f"{whole} {RELEASED} {control}", chats)
        for seed in SEEDS:
            for name, rate in rates.items():
                yield self.training(f"{name}_{seed}", rate, seed=seed)
            for name in rates:
                yield from self.tests(f"{name} seed {seed}", self.tuned(f"{name}_{seed}"))
        for name, rate in rates.items():
            yield self.training(f"{name}_more", rate, steps=208)
        for name in rates:
            yield from self.tests(f"{name} more", self.tuned(f"{name}_more"))

    def tests(self, row: str, model: str) -> Iterator[Command]:
        """Yield the commands whose results are published."""
        for text in TEXTS:
            yield self.context(row, model, text)
        yield self.score("passkey", row, to_target(model, self.setting.target), "--depths 8 --trials 5 --seed 11")

    def road(self) -> Iterator[Command]:
        """Yield the commands of a user with the base and novels, and the use of context under untuned scalings."""
        setting = self.setting
        base = setting.base
        to_extend = f"{base} --target {setting.target}"
        probe = self.results / "probe.json"
        words = f"probe {to_extend} --data {BOOKS}/validation --documents 1 --trials 3 --json {probe}"
        yield probe, words.split()
        recipe = self.results / "recipe.yaml"
        words = f"new {to_extend} --data {BOOKS}/train --gpu 80GB --output {recipe}"
        yield recipe, words.split()
        run = self.runs / "road"
        # Fewer prompts and passes than `new` asks for.
        fewer = (
            "evaluation.passkey={depths: 8, trials: 3}",
            f"evaluation.perplexity.stride={setting.stride}",
        )
        yield run / "run.json", ["train", str(recipe), *fewer, "--output", str(run)]
        comparison = self.results / "compare.json"
        words = f"compare {base} {run} --dtype bfloat16 --json {comparison}"
        yield comparison, words.split()
        merged = self.runs / "merged"
        words = f"merge {run} --check logits --output {merged}"
        yield merged / "config.json", words.split()
        rows = {"evaluator": self.untuned("pi"), "base": base, "tuned": str(run)}
        rows |= {scaling: self.untuned(scaling) for scaling in ("yarn", "theta")}
        for row, model in rows.items():
            yield self.context(row, model, "novels")


def measured(file: Path) -> float:
    """Return the perplexity of the longest window."""
    return float(json.loads(file.read_bytes())["windows"][-1]["perplexity"])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", choices=("smollm2", "gemma3"), default="smollm2")
    is_gemma3 = parser.parse_args().model == "gemma3"
    results = Path("benchmarks/results/gemma3_64k" if is_gemma3 else "benchmarks/results/use_context")
    results.mkdir(exist_ok=True)
    experiment = Experiment(GEMMA3 if is_gemma3 else Setting(), Path("adapters") / results.name, results)
    run_missing(experiment.road() if is_gemma3 else experiment.commands())


if __name__ == "__main__":
    main()
