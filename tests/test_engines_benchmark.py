"""benchmarks/engines.py with transformers as the engine: an answer is the model's, and one that fails is a row."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "in_engines")]
import ask  # noqa: E402
import engines  # noqa: E402
import tables  # noqa: E402

IDS = torch.randint(2, 1024, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def said(full_run: Path) -> dict[str, Any]:
    request = {"folder": str(full_run), "ids": IDS, "greedy": engines.GREEDY}
    reference = ask.transformers(request)
    return {**reference, "unscaled": ask.transformers({**request, "unscaled": True})["tokens"]}


@torch.no_grad()
def test_an_answer_is_what_the_model_computes(said: dict[str, Any], full_run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(full_run)
    ids = torch.tensor([IDS])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(said["logprobs"]), logprobs, rtol=1e-4, atol=1e-4)
    written = model.generate(ids, max_new_tokens=engines.GREEDY, do_sample=False, eos_token_id=-1)
    assert said["tokens"] == written[0, 100:].tolist()
    assert said["window"] == 128
    assert said["unscaled"] != said["tokens"]


def test_an_answer_beside_the_reference(said: dict[str, Any]) -> None:
    facts = {"versions": {"engine": "1"}, "seconds": 1.0, "date": "today"}
    same = engines.compared({**said, **facts}, said, 64)
    assert (same["greedy"], same["largest"], same["as_unscaled"]) == (engines.GREEDY, 0, False)
    assert same["perplexity"] == pytest.approx(math.exp(-sum(said["logprobs"][64:]) / 35))
    changed = [said["tokens"][0], list(said["choices"][1])[1], *said["tokens"][2:]]
    other = engines.compared({**said, **facts, "tokens": changed, "logprobs": None}, {**said, "unscaled": changed}, 64)
    best = sorted(said["choices"][1].values())
    assert (other["greedy"], other["as_unscaled"]) == (1, True)
    assert other["behind"] == pytest.approx(best[-1] - best[-2])
    model = {"original": 64, "target": 128, "tokens": 100, "text": "it.txt"}
    rows = {"a": {**same, "date": "today"}, "b": {**other, "date": "today"}, "c": {"failed": "why", "date": "today"}}
    table = "\n".join(tables.engine_tables({"models": {"small": {**model, "rows": rows}}}))
    assert "| a (engine 1) | 128 | 0.0e+00 nats |" in table
    assert "**1 of 24: those of the unscaled model**" in table
    assert "| c | **failed**: why |" in table


def test_an_engine_that_fails_says_why() -> None:
    assert engines.answer("no_such_engine", sys.executable, (), {}) == {"failed": "KeyError: 'no_such_engine'"}
