"""The tables and the picture of SmolLM2 at 16k, from benchmarks/results/smollm2.json."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pi_lora.drawing import BLUE, GREY, VERMILION, new_figure, plain, save

MODELS = {"base": "base", "pi": "PI, step 0", "tuned": "PI, tuned"}
SAME_BUDGET = {"direct": "direct", "yarn": "YaRN", "pi": "PI"}
STYLES = {"base": (VERMILION, "o"), "pi": (GREY, "s"), "tuned": (BLUE, "^")}
NOTHING = "Not run yet.\n"

Result = Mapping[str, Any]


def interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a success rate.

    >>> [round(bound, 3) for bound in interval(24, 24)]
    [0.862, 1.0]
    """
    middle = (successes + z * z / 2) / (trials + z * z)
    half = z / (trials + z * z) * math.sqrt(successes * (trials - successes) / trials + z * z / 4)
    return middle - half, min(1.0, middle + half)


def short_table(result: Result) -> Iterator[str]:
    """The README's: perplexity by window, and passkeys at the longest, a model a row."""
    windows = [each["window"] for each in result["perplexity base"]["windows"]]
    titles = [f"perplexity at {window // 1024}k" for window in windows]
    passkeys = [_retrieved(result.get(f"passkey {which}")) for which in MODELS] if "passkey tuned" in result else []
    head = ["model", *titles, *(["passkeys at 16k"] if passkeys else [])]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for index, (which, title) in enumerate(MODELS.items()):
        values = [f"{each['perplexity']:.2f}" for each in result[f"perplexity {which}"]["windows"]]
        yield "| " + " | ".join([title, *values, *passkeys[index : index + 1]]) + " |"


def tables(result: Result) -> Iterator[str]:
    """Perplexity, passkeys with intervals, the short benchmarks, and what the tuning took."""
    yield from short_table(result)
    scores = result["perplexity base"]
    books = ", ".join(document["name"].rpartition("/")[2] for document in scores["per_document"])
    tokens = scores["windows"][-1]["tokens"]
    yield f"\nPerplexity: {tokens:,} tokens, the same in every column: the first {scores['truncate']:,} of {books};"
    yield f"stride {scores['stride']:,}, {scores['dtype']}."
    if "bfloat16 over float32" in result:
        yield f"On 2,048 tokens of each, bfloat16 is {result['bfloat16 over float32']:+.2%} from float32."
    if tuned := result.get("passkey tuned"):
        yield "\n| passkey's distance in 16,384 tokens | PI, tuned |\n|---|---|"
        for depth in tuned["depths"]:
            low, high = interval(sum(depth["outcomes"]), depth["trials"])
            yield f"| {depth['distance']:,} | {sum(depth['outcomes'])} of {depth['trials']} ({low:.0%} to {high:.0%}) |"
        if "passkey base" in result:
            yield "\nThe untuned models were asked only until `k_max` was decided."
    yield from _unseen(result)
    if budget := {which: title for which, title in SAME_BUDGET.items() if f"perplexity {which}, same budget" in result}:
        tokens = result[f"training {next(iter(budget))}, same budget"]["curve"][-1][0]
        windows = " | ".join(f"{each['window'] // 1024}k" for each in scores["windows"])
        yield f"\n| tuned on {tokens:,} tokens | {windows} |\n|{'---|' * (1 + len(scores['windows']))}"
        for which, title in budget.items():
            found = result[f"perplexity {which}, same budget"]["windows"]
            yield f"| {title} | " + " | ".join(f"{each['perplexity']:.2f}" for each in found) + " |"
    if "short tuned" in result:
        yield "\n| task | examples | base | PI, tuned |\n|---|---|---|---|"
        for name, base in result["short base"]["tasks"].items():
            tuned = result["short tuned"]["tasks"][name]
            both = " | ".join(f"{100 * each['acc']:.1f} ± {100 * each['stderr']:.1f}" for each in (base, tuned))
            yield f"| {name} | {base['examples']} | {both} |"
    yield from _ruler(result)
    took = result["training"]
    yield (
        f"\nTuning: {took['curve'][-1][0]:,} tokens, {took['trainable_parameters'] / 1e6:.2f} M trained parameters, "
        f"{took['seconds'] / 60:.0f} minutes, {took['peak_memory'] / 2**30:.1f} GiB at most."
    )


def _unseen(result: Result) -> Iterator[str]:
    """What was measured on novels and passkeys that were kept aside while tunings were chosen."""
    rows = {title: result.get(f"test perplexity {which}") for which, title in MODELS.items()}
    if not (tuned := rows["PI, tuned"]):
        return
    windows = " | ".join(f"{each['window'] // 1024}k" for each in tuned["windows"])
    yield f"\n| kept aside while tunings were chosen | {windows} |\n|{'---|' * (1 + len(tuned['windows']))}"
    for title, found in rows.items():
        if found:
            yield f"| {title} | " + " | ".join(f"{each['perplexity']:.2f}" for each in found["windows"]) + " |"
    books = ", ".join(document["name"].rpartition("/")[2] for document in tuned["per_document"])
    yield f"\nPerplexity: the first {tuned['truncate']:,} tokens of each of {books}."
    if passkeys := result.get("test passkey tuned"):
        yield f"Passkeys of another seed than those above, PI, tuned: {_retrieved(passkeys)}."


def _ruler(result: Result) -> Iterator[str]:
    """RULER's scores in percent with two standard errors, a model and window a row."""
    rows = [
        (which, window, scores["samples"])
        for which in MODELS
        for where in ("within", "beyond")
        if (scores := result.get(f"ruler {which} {where}"))
        for window in scores["lengths"]
    ]
    if not rows:
        return
    tasks = list(rows[0][1]["tasks"])
    yield f"\n| RULER | window | prompts of a task | {' | '.join(tasks)} | mean |\n|{'---|' * (4 + len(tasks))}"
    for which, window, samples in sorted(rows, key=lambda row: row[1]["window"]):
        each = [f"{100 * window['tasks'][task]['score']:.0f}" for task in tasks]
        mean = f"{100 * window['score']:.0f} ± {200 * window['stderr']:.0f}"
        yield "| " + " | ".join([MODELS[which], f"{window['window']:,}", str(samples), *each, mean]) + " |"
    yield "\nRULER: % of the answers, greedily written, with two standard errors of the mean over these tasks."


def _retrieved(scores: Result | None) -> str:
    """How many passkeys were retrieved of how many, with the 95 % interval, and k_max."""
    if scores is None:
        return "not measured"
    trials = sum(depth["trials"] for depth in scores["depths"])
    found = round(sum(depth["success_rate"] * depth["trials"] for depth in scores["depths"]))
    low, high = interval(found, trials)
    return f"{found} of {trials} ({low:.0%} to {high:.0%}), k_max {scores['k_max']:,}"


def picture(result: Result, file: Path) -> None:
    """Perplexity against the window, and the training loss against the tokens trained."""
    figure = new_figure(9, 3.6)
    by_window, by_tokens = figure.subplots(1, 2)
    for which, title in MODELS.items():
        colour, marker = STYLES[which]
        windows = result[f"perplexity {which}"]["windows"]
        at, values = zip(*((each["window"], each["perplexity"]) for each in windows), strict=True)
        by_window.plot(at, values, color=colour, marker=marker, label=title)
    by_window.set(xscale="log", xlabel="window in tokens", ylabel="perplexity of held-out novels")
    by_window.set_xticks(at, [f"{window // 1024}k" for window in at])
    by_window.minorticks_off()
    by_window.axvline(8192, color="0.55", linestyle=":", linewidth=1.2)
    plain(by_window, "SmolLM2-135M, trained on 8k", frameon=False, fontsize=9)
    tokens, losses = zip(*result["training"]["curve"], strict=True)
    by_tokens.plot([each / 1000 for each in tokens], losses, color=BLUE, marker="^", markersize=3)
    by_tokens.set(xlabel="thousand tokens trained", ylabel="training loss (nats a token)")
    plain(by_tokens, "Tuning with PI to 16k")
    save(figure, file)
