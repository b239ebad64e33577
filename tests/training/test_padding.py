"""Batches of examples without a mask: padding on the right changes no loss and no gradient."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.models.bamba import modeling_bamba
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

import architectures
from conftest import refused, small_recipe, train
from pi_lora.data.batches import collate
from pi_lora.errors import RecipeError
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.resolve import resolve_model
from pi_lora.preflight import check
from pi_lora.run import Run
from pi_lora.training.job import pack_data

PADDING = 1
LENGTHS = ((30, 10), (15, 6), (20, 20))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 60, (40,), generator=torch.Generator().manual_seed(3))
    return collate([{"input_ids": ids[: n + m], "loss_mask": torch.arange(n + m) >= n} for n, m in LENGTHS], PADDING)


# Full attention, sliding windows shorter than the examples, LayerNorm and biases, state spaces, local and full layers.
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt_neox", "gemma3_text", "bamba"])
def test_right_padding_without_a_mask_changes_no_logits(model_type: str) -> None:
    config = architectures.small_config(model_type)
    if model_type == "mistral":
        config.sliding_window = 16
    model = architectures.small_model(type(config), config.to_dict()).double().train()
    found = []
    for mask in (batch()["attention_mask"], torch.ones_like(batch()["attention_mask"])):
        model.zero_grad()
        loss = model(**{**batch(), "attention_mask": mask}, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-12)


@pytest.fixture
def examples(tmp_path: Path) -> dict[str, object]:
    """Of lengths that differ in a batch."""
    rows = [{"text": "The cat sat on the mat. " * words, "gist": f"Cat {words}."} for words in (1, 2, 3, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": str(tmp_path / "rows.jsonl"), "document": "text", "summary": "gist", "completion_tokens": 20}
    return {**source, "epochs": 4}


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_only_eager_gets_a_mask(
    attention: str, examples: dict[str, object], lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"name": str(lora_run), "attention": attention}
    recipe = small_recipe(lora_run, scaling="keep", data=examples, model=model)
    masked = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(*tensors: torch.Tensor, attn_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        masked.append(attn_mask is not None)
        return plain(*tensors, attn_mask=attn_mask, **options)

    eager = modeling_llama.eager_attention_forward

    def watched_eager(*arguments: Any, **options: Any) -> Any:
        masked.append(arguments[4] is not None)
        return eager(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", watched_eager)
    run = train(recipe, tmp_path / "run")
    assert set(masked) == {attention == "eager"}
    log = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    # Two steps are an epoch, whose tokens are counted without the padding.
    tokens = sum(len(row["input_ids"]) for row in pack_data(recipe, resolve_model(str(lora_run))).rows)
    assert [log[1]["tokens"], log[3]["tokens"]] == [tokens, 2 * tokens]


def test_packed_examples_train_as_padded_ones(examples: dict[str, object], small_model: Path, tmp_path: Path) -> None:
    """The default kernel packs a batch; the others pad it."""
    logs = []
    for attention in ("auto", "sdpa", "eager"):
        model = {"name": str(small_model), "attention": attention}
        training = {**TWO_STEPS, "log_every": 1, "precision": "float32"}
        run = train(small_recipe(small_model, data=examples, model=model, training=training), tmp_path / attention)
        logs.append([line[key] for line in Run(run).log for key in ("loss", "gradient_norm", "tokens")])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    assert logs[0] == pytest.approx(logs[2], rel=1e-5)


def write_chats(model: Path, folder: Path) -> dict[str, Any]:
    """Give a model a chat template, and return the data of a recipe with chats."""
    (model / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    rows = []
    for number in range(90):
        turns = [("user", f"Name {number}."), ("assistant", "lamp " * (number % 9 + 1))]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": {"name": str(file), "column": "messages"}}


@pytest.mark.parametrize("positions", ["contiguous", "pose"])
def test_isolated_chats_train_alike_in_every_batch(positions: str, small_model: Path, tmp_path: Path) -> None:
    """And other than chats that attend to each other."""
    base = shutil.copytree(small_model, tmp_path / "model")
    data = {**write_chats(base, tmp_path), "positions": positions}
    losses = []
    for changes in ({"per_device_batch_size": 1}, {}, {"attention": "sdpa"}, {"packing": "wrapped"}):
        batch_size = {"per_device_batch_size": changes.get("per_device_batch_size", 2)}
        recipe = small_recipe(
            base,
            model={"name": str(base), "attention": changes.get("attention", "auto")},
            data={**data, "packing": changes.get("packing")},
            training={**TWO_STEPS, **batch_size, "log_every": 1, "precision": "float32"},
        )
        run = train(recipe, tmp_path / f"run {len(losses)}")
        losses.append([line["loss"] for line in Run(run).log])
        # `sdpa` would pad the chats of a sequence to the longest.
        assert json.loads((run / "run.json").read_text())["attention"] == "blockwise"
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
    assert losses[0] != pytest.approx(losses[3], rel=1e-3)


def test_chats_of_a_model_with_states_are_wrapped(small_model: Path, tmp_path: Path) -> None:
    base = save_experts("bamba", tmp_path / "model", small_model)
    data = write_chats(base, tmp_path)
    recipe = small_recipe(base, data=data, training={**TWO_STEPS, "steps": 1})
    source = check(recipe, tmp_path / "run")
    packed = pack_data(recipe, source)
    assert set(packed.tokens) == {128}
    assert any(message.startswith("data.packing: wrapped") for message in packed.messages)
    text = pack_data(small_recipe(base), source)
    assert not any(message.startswith("data.packing: ") for message in text.messages)
    with refused(RecipeError, "data.packing: ", "bamba"):
        check(small_recipe(base, data={**data, "packing": "isolated"}), tmp_path / "run")


@pytest.mark.parametrize("batch_size", [1, 2])
def test_jumps_of_pose_are_not_taken_for_packed_texts(
    batch_size: int, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers (5.23) looks for packed texts in the positions of a batch without a mask; no kernel would tell."""
    recipe = small_recipe(
        small_model,
        data={"source": "builtin:stdlib", "positions": "pose"},
        training={"steps": 2, "learning_rate": 1e-3, "global_batch_size": 2, "per_device_batch_size": batch_size},
    )
    positions = []
    forward = modeling_llama.LlamaModel.forward

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        positions.append(options["position_ids"])
        return forward(self, *arguments, **options)

    looked = []
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", watched)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", looked.append)
    train(recipe, tmp_path / "run")
    assert any((each is not None) and (each.diff() > 1).any() for each in positions)
    assert not looked


def watched_masks(model: type, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the masks that a model gets mark padding."""
    found = []
    forward = model.forward

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        found.append(not options["attention_mask"].all())
        return forward(self, *arguments, **options)

    monkeypatch.setattr(model, "forward", watched)
    return found


TWO_STEPS = {"steps": 2, "global_batch_size": 2, "per_device_batch_size": 2, "activation_checkpointing": False}


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_4", "blockwise"])
def test_flash_attention_is_told_the_bounds_of_packed_examples(
    kernel: str, examples: dict[str, object], small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none on this machine: only the name of the kernel is its."""
    bounds = []
    forward = modeling_llama.LlamaAttention.forward

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        names = ("cu_seq_lens_q", "cu_seq_lens_k")
        bounds.append([*(options[name].tolist() for name in names), options["max_length_q"], options["max_length_k"]])
        return forward(self, *arguments, **options)

    masked = watched_masks(modeling_llama.LlamaModel, monkeypatch)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", watched)
    monkeypatch.setattr(LoadedModel, "kernel", kernel)
    train(small_recipe(small_model, data=examples, training=TWO_STEPS), tmp_path / "run")
    assert set(masked) == {False}
    for queries, keys, *longest in bounds:
        assert queries == keys
        assert longest == [max(stop - start for start, stop in itertools.pairwise(keys))] * 2


@pytest.mark.parametrize("kernel", ["flash_attention_2", "blockwise"])
def test_flash_attention_is_told_the_padding_of_a_model_with_states(
    kernel: str, examples: dict[str, object], small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves padding out of its computation."""
    base = save_experts("bamba", tmp_path / "model", small_model)
    masked = watched_masks(modeling_bamba.BambaModel, monkeypatch)
    monkeypatch.setattr(LoadedModel, "kernel", kernel)
    train(small_recipe(base, data=examples, training=TWO_STEPS), tmp_path / "run")
    assert set(masked) == {kernel.startswith("flash")}


def save_experts(model_type: str, folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """Save a random mixture of experts with the tokenizer in another folder."""
    config = architectures.small_config(model_type)
    config.update({"vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 1, **changes})
    architectures.small_model(type(config), config.to_dict()).save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


ATTENTION = {"rank": 2, "target_modules": "attention", "modules_to_save": "nothing"}


def test_the_loss_that_balances_experts_is_added_where_the_config_adds_it_without_padding(
    examples: dict[str, object], small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL 1.16 adds it to the loss of every mixture of experts."""
    losses = {}
    for balanced, weight in ((False, 0.0), (False, 1.0), (True, 1.0)):
        changes = {"output_router_logits": balanced, "router_aux_loss_coef": weight}
        base = save_experts("mixtral", tmp_path / f"experts {balanced} {weight}", small_model, **changes)
        training = {**TWO_STEPS, "log_every": 1}
        recipe = small_recipe(base, tuning=ATTENTION, data=examples, training=training)
        with monkeypatch.context() as patch:
            masked = watched_masks(modeling_mixtral.MixtralModel, patch)
            run = train(recipe, tmp_path / f"run {balanced} {weight}")
        assert set(masked) == {False}
        losses[balanced, weight] = Run(run).log[0]["loss"]
    assert losses[False, 0.0] == losses[False, 1.0] != losses[True, 1.0]


@pytest.mark.parametrize("model_type", ["granitemoe", "deepseek_v3"])
def test_experts_whose_config_has_other_names_train(
    model_type: str, examples: dict[str, object], small_model: Path, tmp_path: Path
) -> None:
    """TRL 1.16 asks the config for `num_experts`."""
    base = save_experts(model_type, tmp_path / "experts", small_model)
    train(small_recipe(base, tuning=ATTENTION, data=examples, training={"steps": 1}), tmp_path / "run")
