"""The tables and the picture of SmolLM2 at 16k, from benchmarks/results/smollm2.json."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pages import made_on, table

from pi_lora.drawing import BLUE, GREY, VERMILION, new_figure, plain, save

MODELS = {"base": "base", "pi": "PI, step 0", "tuned": "PI, tuned"}
SAME_BUDGET = {"direct": "direct", "yarn": "YaRN", "pi": "PI"}
STYLES = {"base": (VERMILION, "o"), "pi": (GREY, "s"), "tuned": (BLUE, "^")}

Result = Mapping[str, Any]


def interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a success rate.

    >>> [round(bound, 3) for bound in interval(24, 24)]
    [0.862, 1.0]
    """
    middle = (successes + z * z / 2) / (trials + z * z)
    half = z / (trials + z * z) * math.sqrt(successes * (trials - successes) / trials + z * z / 4)
    return middle - half, min(1.0, middle + half)


def share(successes: int, trials: int) -> str:
    """A number of successes with its interval."""
    low, high = interval(successes, trials)
    return f"{successes} of {trials} ({low:.0%} to {high:.0%})"


def retrieved(scores: Result) -> str:
    """The passkeys that were retrieved, with the interval, and k_max."""
    successes = round(sum(depth["success_rate"] * depth["trials"] for depth in scores["depths"]))
    return f"{share(successes, sum(depth['trials'] for depth in scores['depths']))}, k_max {scores['k_max']:,}"


def by_window(result: Result, prefix: str, models: Mapping[str, str], title: str) -> Iterator[str]:
    """A table of perplexities, a model a row; `prefix` begins the names of their results."""
    rows = {label: result[name] for which, label in models.items() if (name := prefix.format(which)) in result}
    windows = [f"{each['window'] // 1024}k" for each in next(iter(rows.values()))["windows"]]
    cells = [[label, *(f"{each['perplexity']:.2f}" for each in scores["windows"])] for label, scores in rows.items()]
    yield from table([title, *windows], cells)


def table_of_perplexity(result: Result) -> Iterator[str]:
    """Perplexity by window, and passkeys at the longest, a model a row."""
    titles = [f"perplexity at {each['window'] // 1024}k" for each in result["perplexity base"]["windows"]]
    rows = []
    for which, title in MODELS.items():
        perplexities = (f"{each['perplexity']:.2f}" for each in result[f"perplexity {which}"]["windows"])
        rows.append([title, *perplexities, retrieved(result[f"passkey {which}"])])
    yield f"{made_on(result['perplexity tuned']['machine'])}\n"
    yield from table(["model", *titles, "passkeys at 16k"], rows)


def books(scores: Result) -> str:
    """The names of the measured novels."""
    return ", ".join(document["name"].rpartition("/")[2] for document in scores["per_document"])


def tables(result: Result) -> Iterator[str]:
    """Perplexity, passkeys with intervals, the short benchmarks, RULER, and what the tuning took."""
    yield from table_of_perplexity(result)
    scores = result["perplexity base"]
    yield f"\nPerplexity: {scores['windows'][-1]['tokens']:,} tokens, the same in every column: the first"
    yield f"{scores['truncate']:,} of {books(scores)}; stride {scores['stride']:,}, {scores['dtype']}.\n"
    depths = result["passkey tuned"]["depths"]
    asked = [(f"{each['distance']:,}", share(sum(each["outcomes"]), each["trials"])) for each in depths]
    yield from table(("passkey's distance in 16,384 tokens", "PI, tuned"), asked)
    yield "\nThe untuned models were asked only until `k_max` was decided.\n"
    yield from by_window(result, "test perplexity {}", MODELS, "kept aside while tunings were chosen")
    unseen = result["test perplexity tuned"]
    yield f"\nPerplexity: the first {unseen['truncate']:,} tokens of each of {books(unseen)}."
    if passkeys := result.get("test passkey tuned"):
        yield f"Passkeys of another seed than those above, PI, tuned: {retrieved(passkeys)}."
    tokens = result["training pi, same budget"]["curve"][-1][0]
    yield ""
    yield from by_window(result, "perplexity {}, same budget", SAME_BUDGET, f"tuned on {tokens:,} tokens")
    yield ""
    yield from short_benchmarks(result)
    yield ""
    yield from ruler(result)
    took = result["training"]
    yield (
        f"\nTuning: {took['curve'][-1][0]:,} tokens, {took['trainable_parameters'] / 1e6:.2f} M trained parameters, "
        f"{took['seconds'] / 60:.0f} minutes, {took['peak_memory'] / 2**30:.1f} GiB at most."
    )


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
    for which in MODELS:
        for scores in (result.get(f"ruler {which} {where}", {}) for where in ("within", "beyond")):
            rows += [(which, window, scores["samples"]) for window in scores.get("lengths", ())]
    tasks = list(rows[0][1]["tasks"])
    cells = []
    for which, window, samples in sorted(rows, key=lambda row: row[1]["window"]):
        each = [f"{100 * window['tasks'][task]['score']:.0f}" for task in tasks]
        mean = f"{100 * window['score']:.0f} ± {200 * window['stderr']:.0f}"
        cells.append([MODELS[which], f"{window['window']:,}", samples, *each, mean])
    yield from table(("RULER", "window", "prompts of a task", *tasks, "mean"), cells)
    yield "\nRULER: % of the answers, greedily written, with two standard errors of the mean over these tasks."


def picture(result: Result, file: Path) -> None:
    """Perplexity against the window, and the training loss against the tokens trained."""
    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    for which, title in MODELS.items():
        colour, marker = STYLES[which]
        windows = result[f"perplexity {which}"]["windows"]
        at, values = zip(*((each["window"], each["perplexity"]) for each in windows), strict=True)
        left.plot(at, values, color=colour, marker=marker, label=title)
    left.set(xscale="log", xlabel="window in tokens", ylabel="perplexity of held-out novels")
    left.set_xticks(at, [f"{window // 1024}k" for window in at])
    left.minorticks_off()
    left.axvline(8192, color="0.55", linestyle=":", linewidth=1.2)
    plain(left, "SmolLM2-135M, trained on 8k", frameon=False, fontsize=9)
    tokens, losses = zip(*result["training"]["curve"], strict=True)
    right.plot([each / 1000 for each in tokens], losses, color=BLUE, marker="^", markersize=3)
    right.set(xlabel="thousand tokens trained", ylabel="training loss (nats a token)")
    plain(right, "Tuning with PI to 16k")
    save(figure, file)
