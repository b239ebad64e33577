"""`training.loss: key_tokens`: weights and gradients beside plain computations, and a run."""

import json
from pathlib import Path

import pytest
import torch
from conftest import run_captured
from torch.nn.functional import cross_entropy

from pi_lora.api import load
from pi_lora.training import key_tokens
from pi_lora.training.key_tokens import key_token_loss

TOKENS = 96
SHORT = 32


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    monkeypatch.setattr(key_tokens, "near_context", lambda _: SHORT)
    monkeypatch.setattr("pi_lora.evaluation.forward.LOGITS_ON_CPU", 40 * 8192)  # several parts
    module: torch.nn.Module = load("builtin:tiny").module
    return module.train()


def sequences() -> torch.Tensor:
    """Two sequences whose second half is the first one again."""
    half = torch.randint(5, 500, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    return torch.cat([half, half], dim=1)


def losses(model: torch.nn.Module, row: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="none")


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("bos", [None, 0])
def test_loss_and_gradients_are_those_of_weights_by_hand(model: torch.nn.Module, bos: int | None) -> None:
    ids = sequences()
    stride = SHORT // 2
    expected = torch.zeros(())
    greatest = 0.0
    for row in ids:
        far = losses(model, row)
        weights = torch.ones(TOKENS - 1)
        for token in range(SHORT + stride, TOKENS):
            start = (token - SHORT) // stride * stride
            context = row[start : token + 1].clone()
            if bos is not None:
                context[0] = bos
            with torch.no_grad():
                near = losses(model, context)[-1]
            weights[token - 1] = (near - far[token - 1]).exp().clamp(max=5).item()
        greatest = max(greatest, weights.max().item())
        expected = expected + (weights * far).sum()
    assert greatest == 5
    loss = key_token_loss(model, ids, bos=bos)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, by_hand in zip(gradients(model, loss), gradients(model, expected), strict=True):
        torch.testing.assert_close(ours, by_hand, rtol=1e-3, atol=1e-3)


def test_without_distant_context_it_is_the_plain_loss(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_tokens, "near_context", lambda _: TOKENS - 4)
    ids = sequences()
    plain = torch.stack([losses(model, row) for row in ids]).sum()
    loss = key_token_loss(model, ids, bos=None)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for ours, theirs in zip(gradients(model, loss), gradients(model, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_run_minimizes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The road is long, and the night is dark on page 17. " * 300)
    words = {
        "data.source": "text.txt",
        "data.positions": "contiguous",
        "data.sequence_tokens": "null",
        "context.target": 512,
        "training.steps": 2,
        "training.global_batch_size": 2,
        "training.log_every": 1,
        "evaluation.every": "null",
    }
    recipe = ["train", "demo", *(f"{key}={value}" for key, value in words.items())]
    logged = {}
    for loss in ("tokens", "key_tokens"):
        status, _, err = run_captured(capsys, monkeypatch, *recipe, f"training.loss={loss}", "--output", loss)
        assert status == 0, err
        logged[loss] = [json.loads(line)["loss"] for line in Path(loss, "training.jsonl").read_text().splitlines()]
    assert len(logged["key_tokens"]) == 2
    # As a mean over the same tokens, of which most weigh about 1.
    assert logged["key_tokens"][0] == pytest.approx(logged["tokens"][0], rel=0.3)
    assert logged["key_tokens"][0] != logged["tokens"][0]
    status, _, err = run_captured(
        capsys, monkeypatch, *recipe, "training.loss=key_tokens", "data.positions=pose", "--output", "pose"
    )
    assert (status, "training.loss: key_tokens is for whole sequences of text and one process" in err) == (2, True)
