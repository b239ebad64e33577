"""The tables and the picture of SmolLM2 at 16k, from benchmarks/results/smollm2.json."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pages import made_on, table

from pi_lora.evaluation.intervals import wilson
from pi_lora.evaluation.suite import MEASUREMENTS
from pi_lora.report.card import comparison_picture

MODELS = {"base": "base", "pi": "PI, step 0", "tuned": "PI, tuned"}
SAME_BUDGET = {"direct": "direct", "yarn": "YaRN", "pi": "PI"}

Result = Mapping[str, Any]


def retrieved(scores: Result) -> str:
    """The passkeys that were retrieved, with the interval, and k_max."""
    successes = round(sum(depth["success_rate"] * depth["trials"] for depth in scores["depths"]))
    trials = sum(depth["trials"] for depth in scores["depths"])
    low, high = wilson(successes / trials, trials)
    return f"{successes} of {trials} ({low:.0%} to {high:.0%}), k_max {scores['k_max']:,}"


def perplexities(scores: Result) -> list[str]:
    """The cells of a sweep."""
    return [f"{row['perplexity']:.2f}" for row in scores["windows"]]


def table_of_perplexity(result: Result) -> Iterator[str]:
    """Perplexity by window, and passkeys at the longest, a model a row."""
    titles = [f"perplexity at {row['window'] // 1024}k" for row in result["perplexity base"]["windows"]]
    rows = [
        [title, *perplexities(result[f"perplexity {which}"]), retrieved(result[f"passkey {which}"])]
        for which, title in MODELS.items()
    ]
    yield f"{made_on(result['perplexity tuned']['machine'])}\n"
    yield from table(["model", *titles, "passkeys at 16k"], rows)


def tables(result: Result) -> Iterator[str]:
    """Perplexity, passkeys with intervals, the novels kept aside, a small budget, the short benchmarks, RULER."""
    yield from table_of_perplexity(result)
    scores = result["perplexity base"]
    yield f"\nPerplexity: {scores['windows'][-1]['tokens']:,} tokens, the same in every column: the first"
    yield f"{scores['truncate']:,} of {books(scores)}; stride {scores['stride']:,}, {scores['dtype']}.\n"
    windows = [f"{row['window'] // 1024}k" for row in scores["windows"]]
    aside = [(MODELS[which], *perplexities(result[f"test perplexity {which}"])) for which in ("base", "tuned")]
    yield from table(("kept aside while tunings were chosen", *windows), aside)
    unseen = result["test perplexity tuned"]
    yield f"\nPerplexity: the first {unseen['truncate']:,} tokens of each of {books(unseen)}.\n"
    few = [(title, *perplexities(result[f"perplexity {name}, same budget"])) for name, title in SAME_BUDGET.items()]
    yield from table(("tuned on 81,920 tokens", *windows), few)
    yield ""
    yield from short_benchmarks(result)
    yield ""
    yield from ruler(result)


def books(scores: Result) -> str:
    """The names of the measured novels."""
    return ", ".join(document["name"].rpartition("/")[2] for document in scores["per_document"])


def short_benchmarks(result: Result) -> Iterator[str]:
    """Accuracy in percent with a standard error, a task a row."""
    both = [result[f"short {which}"]["tasks"] for which in ("base", "tuned")]
    rows = []
    for name, base in both[0].items():
        cells = [f"{100 * tasks[name]['acc']:.1f} ± {100 * tasks[name]['stderr']:.1f}" for tasks in both]
        rows.append((name, base["examples"], *cells))
    yield from table(("task", "examples", "base", "PI, tuned"), rows)


def ruler(result: Result) -> Iterator[str]:
    """RULER's scores in percent with two standard errors, a model and window a row."""
    rows = []
    for name, where in (("base", "within"), ("tuned", "within"), ("base", "beyond"), ("tuned", "beyond")):
        scores = result[f"ruler {name} {where}"]
        for length in scores["lengths"]:
            tasks = {task: f"{100 * row['score']:.0f}" for task, row in length["tasks"].items()}
            mean = f"{100 * length['score']:.0f} ± {200 * length['stderr']:.0f}"
            rows.append((MODELS[name], f"{length['window']:,}", scores["samples"], *tasks.values(), mean))
    yield from table(("RULER", "window", "prompts of a task", *tasks, "mean"), rows)
    yield "\nRULER: % of the answers, greedily written, with two standard errors of the mean over these tasks."


def picture(result: Result, file: Path) -> None:
    """Perplexity and passkeys of the models of the first table."""
    panels = [
        {
            title: MEASUREMENTS[name].scores.model_validate({"options": {}, **result[f"{name} {which}"]})
            for which, title in MODELS.items()
        }
        for name in ("perplexity", "passkey")
    ]
    comparison_picture(panels, 8192, file)
