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

from experiment import BOOKS, Command, run_missing, score
from record import parser_of

SEEDS = (1, 2)
CONTROL = "control"
RELEASED = "adapters/smollm2_135m_16k"
# As chats.py makes them.
CHATS = "chats/test.jsonl"
NOVELS = 0.75
MIXTURE = {"builtin:recall": 0.25}
AGGREGATION = {"builtin:recall": 0.1, "builtin:common_words": 0.075, "builtin:entities": 0.075}
SELECT = ", select: {by: gain, keep: 0.3}"
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

    def training(
        self, name: str, rate: str, mixture: dict[str, float], *, select: str = "", seed: int = 0, **keys: object
    ) -> Command:
        """Return the command that tunes on whole sequences, and the file that says that the run is complete."""
        setting = self.setting
        control = name.startswith(CONTROL)
        sources = [f"{{name: {BOOKS}/train, weight: {NOVELS}{select}}}"]
        sources += [f"{{name: {source}, weight: {weight}}}" for source, weight in mixture.items()]
        words = {
            "model.name": setting.base,
            "context.target": setting.original if control else setting.target,
            "context.original": "null" if control else setting.original,
            "scaling": "keep" if control else "yarn",
            "data.source": f"[{', '.join(sources)}]",
            "data.positions": "contiguous",
            "data.sequence_tokens": "null",
            "data.seed": seed,
            "training.seed": seed,
            "training.steps": 26,
            "training.learning_rate": rate,
            "training.global_batch_size": setting.target // setting.original if control else 1,
            "training.warmup_steps": 2,
            "training.precision": "bfloat16",
            "training.log_every": 1,
            "training.save_every": 1000,
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
        recipe = ["train", "smollm2_135m_16k_cpu", *(f"{key}={value}" for key, value in words.items())]
        return self.runs / name / "run.json", [*recipe, "--output", str(self.runs / name)]

    def score(self, measurement: str, row: str, model: list[str], *options: str) -> Command:
        """Return the command that measures a model, and the file of the scores."""
        return score(measurement, row, model, *options, results=self.results)

    def context(self, row: str, model: list[str], text: str) -> Command:
        """Return the command that measures the use of context on a text, on the key tokens of the evaluator."""
        setting = self.setting
        documents, windows = {
            "novels": (f"{BOOKS}/test/*[0-9].txt", setting.windows),
            "mathematics": ("math", 1),
        }[text]
        options = {
            "data": documents,
            "window": setting.target,
            "short-window": setting.near,
            "stride": setting.stride,
            "documents": setting.documents,
            "truncate": windows * setting.target,
            "seed": 0,
        }
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        if row != "evaluator":
            words += ["--key-tokens", str(self.results / f"context-evaluator-{text}.json")]
        return self.score("context", f"{row} {text}", model, *words)

    def untuned(self) -> list[str]:
        """Return the base under YaRN without tuning."""
        sizes = ["--original", str(self.setting.original), "--target", str(self.setting.target)]
        return [self.setting.base, *sizes, "--scaling", "yarn"]

    def tuned(self, name: str) -> list[str]:
        """Return the run of that name."""
        return [str(self.runs / name)]

    def validation(self, name: str) -> Command:
        """Return the command that measures the first tokens of the validation novels, of the control in its window."""
        window = self.setting.original if name.startswith(CONTROL) else self.setting.target
        text = ["--data", f"{BOOKS}/validation", "--truncate", str(self.setting.target)]
        sizes = ["--windows", str(window), "--stride", str(window)]
        return self.score("perplexity", f"validation {name}", self.tuned(name), *text, *sizes)

    def rate(self, name: str, rates: tuple[str, ...]) -> Iterator[Command]:
        """Yield the commands that try rates; the best one is `best_rate`."""
        for rate in rates:
            yield self.training(f"{name}_{rate}", rate, MIXTURE)
            yield self.validation(f"{name}_{rate}")

    def best_rate(self, name: str) -> str:
        """Return the rate with the lowest perplexity on the validation novels."""
        files = {rate: self.validation(f"{name}_{rate}")[0] for rate in RATES}
        return min((rate for rate, file in files.items() if file.exists()), key=lambda rate: measured(files[rate]))

    def commands(self) -> Iterator[Command]:
        """Yield the commands, those that matter most first."""
        yield from self.rate("whole", RATES)
        yield from self.rate(CONTROL, RATES[:3])
        whole = self.best_rate("whole")
        control = self.best_rate(CONTROL)
        yield self.training("whole", whole, MIXTURE)
        yield self.training(CONTROL, control, MIXTURE)
        yield self.training("chosen", whole, AGGREGATION, select=SELECT)
        for text in ("novels", "mathematics"):
            yield self.context("evaluator", ["models/gemma3_270m"], text)
        models = {
            "untuned": self.untuned(),
            "whole": self.tuned("whole"),
            CONTROL: self.tuned(CONTROL),
            "released": [RELEASED],
            "chosen": self.tuned("chosen"),
            "base": [self.setting.base],
        }
        yield from self.tests(models)
        tuned = [*self.tuned("whole"), RELEASED, *self.tuned(CONTROL)]
        yield self.score("chat", "whole released control", tuned, "--data", CHATS, "--base", self.setting.base)
        for seed in SEEDS:
            names = {f"whole seed {seed}": f"whole_{seed}", f"{CONTROL} seed {seed}": f"{CONTROL}_{seed}"}
            yield self.training(f"whole_{seed}", whole, MIXTURE, seed=seed)
            yield self.training(f"{CONTROL}_{seed}", control, MIXTURE, seed=seed)
            yield from self.tests({row: self.tuned(name) for row, name in names.items()})
        yield self.training("whole_more", whole, MIXTURE, training__steps=208)
        yield self.training(f"{CONTROL}_more", control, MIXTURE, training__steps=208)
        names = {"whole more": "whole_more", f"{CONTROL} more": f"{CONTROL}_more"}
        yield from self.tests({row: self.tuned(name) for row, name in names.items()})

    def tests(self, models: dict[str, list[str]]) -> Iterator[Command]:
        """Yield the commands whose results are published."""
        for row, model in models.items():
            for text in ("novels", "mathematics"):
                yield self.context(row, model, text)
            window = () if "--target" in model else ("--target", str(self.setting.target))
            trials = ("--depths", "8", "--trials", "5", "--seed", "11")
            yield self.score("passkey", row, model, *window, *trials)

    def road(self) -> Iterator[Command]:
        """Yield the commands of a user with the base and novels, and the use of context under untuned scalings."""
        setting = self.setting
        base = setting.base
        recipe = self.results / "recipe.yaml"
        run = self.runs / "road"
        target = ["--target", str(setting.target)]
        probe = self.results / "probe.json"
        few = ["--documents", "1", "--trials", "3", "--json", str(probe)]
        yield probe, ["probe", base, *target, "--data", f"{BOOKS}/validation", *few]
        written = ["--gpu", "80GB", "--output", str(recipe)]
        yield recipe, ["new", base, *target, "--data", f"{BOOKS}/train", *written]
        # Fewer prompts and passes than `new` asks for.
        fewer = (
            "evaluation.passkey={depths: 8, trials: 3}",
            f"evaluation.perplexity.stride={setting.stride}",
        )
        yield run / "run.json", ["train", str(recipe), *fewer, "--output", str(run)]
        comparison = self.results / "compare.json"
        yield comparison, ["compare", base, str(run), "--dtype", "bfloat16", "--json", str(comparison)]
        merged = self.runs / "merged"
        yield merged / "config.json", ["merge", str(run), "--check", "logits", "--output", str(merged)]
        sizes = [*target, "--original", str(setting.original)]
        rows = {"evaluator": [base, *sizes, "--scaling", "pi"], "base": [base], "tuned": [str(run)]}
        rows |= {scaling: [base, *sizes, "--scaling", scaling] for scaling in ("yarn", "theta")}
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
