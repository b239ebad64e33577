"""Does SmolLM2-135M-Instruct use 16k tokens after tuning on whole sequences? docs/experiments.md has the plan.

    python scripts/fetch_model.py smollm2_135m_instruct
    python scripts/fetch_model.py gemma3_270m
    python benchmarks/use_context.py smollm2
    python benchmarks/use_context.py gemma3

The second is Gemma 3 270M from 32k to 64k: untuned scalings, and the road from `probe` to `merge`. The novels are those
of experiment.py, and math/ holds long LaTeX files. The experiment is a list of `pi-lora` commands. A command whose
result exists is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import record  # first: it finds scripts/
from experiment import (
    BASE,
    BOOKS,
    CONTROL,
    MIXTURE,
    Command,
    extension,
    run_missing,
    score,
    to_target,
    training,
    untuned,
)
from record import parser_of

SEEDS = (1, 2)
RELEASED = "adapters/smollm2_135m_16k"
GEMMA = "models/gemma3_270m"
# As chats.py makes them.
CHATS = "chats/test.jsonl"
# The documents of a text.
TEXTS = {"novels": f"{BOOKS}/test/*[0-9].txt", "mathematics": "math"}
# Rates to try, and the highest again doubled while it is the best.
RATES = ("1e-3", "2e-3", "4e-3", "8e-3")


@dataclass(frozen=True)
class Experiment:
    """The commands of the plan. `name` is that of the folders with runs and results; sizes are in tokens, and the
    window that is near has at most the base's tokens. So many `windows` are measured of a novel.
    """

    name: str
    base: str
    original: int
    target: int
    near: int
    stride: int
    windows: int
    documents: int

    @property
    def results(self) -> Path:
        """The folder of the results."""
        return Path("benchmarks/results") / self.name

    def run(self, name: str) -> Path:
        """Return the folder of a run."""
        return Path("adapters") / self.name / name

    def training(self, name: str, rate: str, seed: int = 0) -> Command:
        """Return the command that tunes on whole sequences, and the file that says that the run is complete."""
        scaling = "yarn"
        sequences = 1
        if name.startswith(CONTROL):
            scaling = CONTROL
            sequences = self.target // self.original
        keys = (
            f"model.name={self.base} {extension(scaling, self.original, self.target)} "
            f"training.global_batch_size={sequences} "
            f"data.positions=contiguous data.sequence_tokens=null data.seed={seed} training.seed={seed} "
            f"training.steps=26 training.learning_rate={rate} training.warmup_steps=2 "
            "training.precision=bfloat16 training.log_every=1 training.save_every=1000"
        )
        return training(self.run(name), keys, MIXTURE)

    def score(self, measurement: str, row: str, model: object, options: str) -> Command:
        """Return the command that measures a model, and the file of the scores."""
        return score(measurement, row, str(model), options, results=self.results)

    def context(self, row: str, model: object, text: str) -> Command:
        """Return the command that measures the use of context on a text, on the key tokens of the evaluator."""
        windows = self.windows if text == "novels" else 1
        options = (
            f"--data {TEXTS[text]} --window {self.target} --short-window {self.near} --stride {self.stride} "
            f"--documents {self.documents} --truncate {windows * self.target} --seed 0"
        )
        if row != "evaluator":
            options += f" --key-tokens {self.results}/context-evaluator-{text}.json"
        return self.score("context", f"{row} {text}", model, options)

    def untuned(self, scaling: str) -> str:
        """Return the base under a scaling without tuning."""
        return untuned(scaling, self.base, self.original, self.target)

    def validation(self, name: str) -> Command:
        """Return the command that measures the first tokens of the validation novels, of the control in its window."""
        window = self.original if name.startswith(CONTROL) else self.target
        options = f"--data {BOOKS}/validation --truncate {self.target} --windows {window} --stride {window}"
        return self.score("perplexity", f"validation {name}", self.run(name), options)

    def best_rate(self, name: str, rates: Sequence[str]) -> str:
        """Return the rate with the lowest perplexity on the validation novels."""
        perplexities = {}
        for rate in rates:
            [scores] = record.read_scores(f"{self.name}/perplexity-validation-{name}_{rate}")
            perplexities[rate] = scores.windows[-1].perplexity
        return min(rates, key=perplexities.__getitem__)

    def commands(self) -> Iterator[Command]:
        """Yield the commands: the rates, the runs at the best ones, and the tests."""
        tried = {"whole": RATES, CONTROL: RATES[:3]}
        for name, rates in tried.items():
            for rate in rates:
                yield self.training(f"{name}_{rate}", rate)
                yield self.validation(f"{name}_{rate}")
        best = {name: self.best_rate(name, rates) for name, rates in tried.items()}
        models: dict[str, object] = {"base": self.base, "untuned": self.untuned("yarn"), "released": RELEASED}
        for name, rate in best.items():
            yield self.training(name, rate)
            models[name] = self.run(name)
            for seed in SEEDS:
                yield self.training(f"{name}_{seed}", rate, seed=seed)
                models[f"{name} seed {seed}"] = self.run(f"{name}_{seed}")
        for text in TEXTS:
            yield self.context("evaluator", GEMMA, text)
        for row, model in models.items():
            for text in TEXTS:
                yield self.context(row, model, text)
            at_target = to_target(str(model), self.target)
            yield self.score("passkey", row, at_target, "--depths 8 --trials 5 --seed 11")
        talking = f"{self.run('whole')} {RELEASED} {self.run(CONTROL)}"
        yield self.score("chat", "whole released control", talking, f"--data {CHATS} --base {self.base}")

    def road(self) -> Iterator[Command]:
        """Yield the commands of a user with the base and novels, and the use of context under untuned scalings."""
        to_extend = f"{self.base} --target {self.target}"
        probe = self.results / "probe.json"
        words = f"probe {to_extend} --data {BOOKS}/validation --documents 1 --trials 3 --json {probe}"
        yield probe, words.split()
        recipe = self.results / "recipe.yaml"
        words = f"new {to_extend} --data {BOOKS}/train --gpu 80GB --output {recipe}"
        yield recipe, words.split()
        run = self.run("road")
        # Fewer prompts and passes than `new` asks for.
        fewer = ("evaluation.passkey={depths: 8, trials: 3}", f"evaluation.perplexity.stride={self.stride}")
        yield run / "run.json", ["train", str(recipe), *fewer, "--output", str(run)]
        comparison = self.results / "compare.json"
        words = f"compare {self.base} {run} --dtype bfloat16 --json {comparison}"
        yield comparison, words.split()
        merged = self.run("merged")
        words = f"merge {run} --check logits --output {merged}"
        yield merged / "config.json", words.split()
        rows = {"evaluator": self.untuned("pi"), "base": self.base, "tuned": run}
        rows |= {scaling: self.untuned(scaling) for scaling in ("yarn", "theta")}
        for row, model in rows.items():
            yield self.context(row, model, "novels")


SMOLLM2 = Experiment(
    name="use_context",
    base=BASE,
    original=8192,
    target=16384,
    near=6144,
    stride=2048,
    windows=3,
    documents=10,
)
GEMMA3 = Experiment(
    name="gemma3_64k",
    base=GEMMA,
    original=32768,
    target=65536,
    near=24576,
    stride=8192,
    windows=1,
    documents=7,
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", choices=("smollm2", "gemma3"))
    if parser.parse_args().model == "gemma3":
        run_missing(GEMMA3.road())
    else:
        run_missing(SMOLLM2.commands())


if __name__ == "__main__":
    main()
