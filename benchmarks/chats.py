"""The effect of chats in the mixture on a model that people talk to: SmolLM2-135M-Instruct, 8k to 16k tokens, tuned on
novels alone and on novels with 15 % chats, the same number of tokens; and extended by the same scaling without tuning.

    python scripts/fetch_model.py smollm2_135m_instruct
    python scripts/make_chats.py models/smollm2_135m_instruct chats/train.jsonl --chats 96
    python scripts/make_chats.py models/smollm2_135m_instruct chats/test.jsonl --chats 32 --seed 1
    python benchmarks/chats.py

The novels are in 100_english_novels/corpus. A command whose result exists is left out.
"""

from collections.abc import Iterator
from pathlib import Path

import record  # noqa: F401  first: it finds scripts/
from experiment import (
    BASE,
    BOOKS,
    MIXTURE,
    NOVELS,
    STRIDE,
    TARGET,
    extension,
    run_missing,
    score,
    split_books,
    training,
    untuned,
)
from record import parser_of

RESULTS = Path("benchmarks/results/chats")
RUNS = Path("adapters/chats")
# Names of the rows, and the sources of the tuned ones.
MIXTURES = {
    "novels": MIXTURE,
    "novels_and_chats": '{"name":"books_16k/train","weight":0.65},{"name":"builtin:recall","weight":0.2},'
    '{"name":"chats/train.jsonl","column":"messages","weight":0.15}',
}
KEYS = f"model.name={BASE} {extension('yarn')} training.steps=24 training.precision=bfloat16"
# Two novels each of two authors who are not trained on.
MEASURED = "[FW]o[ro][ls]*_[AHLN]*"


def commands() -> Iterator[str]:
    """Yield the commands in order."""
    for name, sources in MIXTURES.items():
        yield training(RUNS / name, KEYS, sources)
    tuned = " ".join(f"{RUNS}/{name}" for name in MIXTURES)
    models = {"tuned": tuned, "untuned": untuned("yarn")}
    for row, model in models.items():
        yield score(
            "chat", row, model, f"--data chats/test.jsonl --divergence-from {BASE}", results=RESULTS, dtype="float32"
        )
    novels = f"--data {NOVELS / MEASURED} --windows {TARGET} --stride {STRIDE} --truncate {TARGET}"
    for row, model in models.items():
        yield score("perplexity", row, model, novels, results=RESULTS)
    few = f"--target {TARGET} --depths 8 --trials 1 --seed 7"
    yield score("passkey", "tuned", tuned, few, results=RESULTS)


def main() -> None:
    parser_of(__doc__).parse_args()
    if not BOOKS.is_dir():
        split_books(NOVELS)
    RESULTS.mkdir(exist_ok=True)
    run_missing(commands())


if __name__ == "__main__":
    main()
