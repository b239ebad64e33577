"""The cost of measuring a long window: pi-lora's way beside YaRN's (perplexity) and LongLoRA's (passkeys).

    python evaluation.py BASE STRIDE perplexity WINDOW
    python evaluation.py BASE STRIDE passkey TARGET DEPTHS TRIALS COMPARED

COMPARED is how many trials LongLoRA's way is timed on; 0: none.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from perplexity import ours, straightforward
from record import seconds_of

import pi_lora
from pi_lora.evaluation.passkey import PasskeyTest
from pi_lora.recipe.evaluation import PasskeyOptions

# Windows beyond the first one: enough to time.
WINDOWS_TIMED = 15


def perplexity(loaded: Any, stride: int, window: int) -> dict[str, Any]:
    """Tokens scored a second by both ways, on one document of random tokens."""
    length = window + WINDOWS_TIMED * stride
    vocabulary = loaded.module.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    document = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
    straightforward(loaded.module, [document[:window]], [window], stride)  # the first time chooses kernels
    plain = seconds_of(lambda: straightforward(loaded.module, [document], [window], stride))
    mine = seconds_of(lambda: ours(loaded.module, [document], [window], stride))
    # Beyond the first window, every one scores `stride` tokens.
    scored = window - 1 + WINDOWS_TIMED * stride
    return {"stride": stride, "pi_lora": scored / mine, "yarn": scored / plain}


def passkey(loaded: Any, target: int, depths: int, trials: int, compared: int) -> dict[str, Any]:
    """Seconds of the whole grid; LongLoRA's way, a full prefill for every token of the answer, from a few trials."""
    from oracle_passkey import generated

    def plain(prompts: list[Any]) -> None:
        for prompt in prompts:
            generated(loaded.module, loaded.tokenizer, prompt, use_cache=False)

    grid = {"depths": depths, "trials": trials}
    row: dict[str, Any] = {**grid}
    test = PasskeyTest(loaded, target, PasskeyOptions(**grid))
    prompts = [test.trials(depth)[0] for depth in range(compared)]
    if prompts:
        plain(prompts[:1])
        seconds = seconds_of(lambda: plain(prompts))
        row["longlora"] = seconds / compared * depths * trials
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    row["pi_lora"] = seconds_of(
        lambda: pi_lora.evaluate_passkey(loaded, target, depths=grid["depths"], trials=grid["trials"])
    )
    if torch.cuda.is_available():
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def main() -> None:
    base, stride, measure, length, *grid = sys.argv[1:]
    loaded = pi_lora.load(base, pi_lora.Extension(target=int(length)))
    if measure == "perplexity":
        row = perplexity(loaded, int(stride), int(length))
    else:
        depths, trials, compared = (int(number) for number in grid)
        row = passkey(loaded, int(length), depths, trials, compared)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
