"""What measuring takes: counted again from the measurements themselves, and bounded in the recipes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import on_meta, plan_of
from hypothesis import given
from hypothesis import strategies as st
from test_plan_memory import LAYER, Allocations
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from pi_lora.evaluation.perplexity.losses import pieces
from pi_lora.models.adapter import prepare_for_tuning
from pi_lora.planning.counting import shape_of
from pi_lora.planning.evaluating import Measuring, forward_bytes, passes
from pi_lora.planning.memory import GIB, NF4
from pi_lora.planning.operations import layers_flops
from pi_lora.planning.planning import Plan
from pi_lora.planning.text import advice, plan_lines, planned
from pi_lora.recipe.files import load_recipe, recipe_paths
from pi_lora.recipe.schema import Recipe, Tuning

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA = "huggyllama/llama-7b"
HEADER = {"hardware": {"gpus": 1}, "data": {"source": "text"}, "model": {"name": LLAMA}}


def recipe(target: int, evaluation: dict[str, Any], **sections: Any) -> Recipe:
    return Recipe.model_validate({**HEADER, "context": {"target": target}, "evaluation": evaluation, **sections})


def measuring(plan: Plan) -> Measuring:
    assert plan.measuring
    return plan.measuring


@given(st.lists(st.integers(8, 64), min_size=1, max_size=3, unique=True), st.integers(1, 64), st.integers(64, 300))
def test_the_passes_of_a_sweep_are_those_that_it_makes(windows: list[int], stride: int, length: int) -> None:
    stride = min(stride, *windows)
    made = [piece.stop - piece.start for piece in pieces(length, windows, stride)]
    counted = [size for number, size in passes(length, windows, stride) for _ in range(number)]
    assert sorted(counted) == sorted(made)


def highest_forward(tuning: Tuning | None, dtype: torch.dtype, kind: type, tokens: int, **sizes: int) -> int:
    config = kind(**{**LAYER, **sizes}, head_dim=32)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    if tuning and tuning.method != "full":
        model = prepare_for_tuning(model, tuning, "small")
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.no_grad(), Allocations([ids, *model.parameters(), *model.buffers()]) as allocations:
        model.eval()(input_ids=ids, use_cache=False, logits_to_keep=1)
    return allocations.most


@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "tuning",
    [Tuning(method="full"), Tuning(rank=1), Tuning(rank=1, targets="attention"), Tuning(rank=1, dora=True)],
    ids=["full", "lora", "attention", "dora"],
)
@pytest.mark.parametrize(("kind", "width"), [(Qwen3Config, 1024), (LlamaConfig, 64)])
def test_a_forward_pass_takes_what_the_plan_says(kind: type, width: int, tuning: Tuning, wide: bool) -> None:
    dtype = torch.float32 if wide else torch.bfloat16
    # DoRA's norms of weights are the most there is with few tokens.
    lengths = (512, 1024) if tuning.dora else (256, 512)
    short, long = (highest_forward(tuning, dtype, kind, tokens, intermediate_size=width) for tokens in lengths)
    shape = shape_of(on_meta(kind(**{**LAYER, "intermediate_size": width}, head_dim=32)))
    planned_bytes = forward_bytes(shape, tuning, wide, gathered=False)
    assert 0.9 * planned_bytes <= (long - short) / (lengths[1] - lengths[0]) <= 1.03 * planned_bytes


def test_operations_of_a_forward_pass_are_those_that_torch_counts() -> None:
    config = LlamaConfig(**LAYER)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 64, dtype=torch.long), use_cache=False, logits_to_keep=1)
    shape = shape_of(on_meta(config))
    other_half = 4 * shape.layers * shape.queries * 64 * 64 / 2
    found = sum(layers_flops(shape, Tuning(method="full"), 64)) + 2 * shape.embedding + other_half
    assert found == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_two_windows_and_two_trials_cost_what_they_are() -> None:
    asked = {
        "every": 10,
        "perplexity": {"data": "pg19", "windows": [4096], "stride": 4096, "documents": 2, "truncate": 8192},
        "passkey": {"depths": 1, "trials": 3, "target": 4096},
    }
    plan = plan_of(recipe(4096, asked, training={"steps": 25, "global_batch_size": 1}), "H100")
    once = sum(layers_flops(plan.target.shape, plan.recipe.tuning, 4096))
    assert measuring(plan).times == 4, "steps 0, 10, 20, 25"
    assert measuring(plan).flops == pytest.approx(4 * (2 * 2 + 3) * once, rel=0.02)


def test_passkeys_of_7b_at_32k_share_keys_and_values_of_16_gib_twice() -> None:
    """Those of the prefix, 2 x 32 layers x 32768 tokens x 4096 numbers x 2 bytes, and as many of what follows."""
    asked = {"every": 100, "passkey": {}}
    plan = plan_of(recipe(32768, asked, tuning={"method": "qlora"}), "3090")
    assert measuring(plan).prefix == 2 * 16 * GIB
    assert measuring(plan).peak < plan.gpu.memory, "whole prompts fit"
    after = plan.afterwards
    assert after
    assert after.peak + after.prefix > plan.gpu.memory
    assert not any("share what they begin with" in line for line in plan_lines(plan))
    roomy = plan_of(recipe(32768, asked, tuning={"method": "qlora"}), "H100")
    assert any("share what they begin with" in line for line in plan_lines(roomy))


def test_a_sharded_model_shares_no_prefix_and_windows_none() -> None:
    asked = {"every": 100, "passkey": {}}
    several = plan_of(recipe(8192, asked, hardware={"gpus": 2}, tuning={"method": "lora"}), "H100")
    assert measuring(several).prefix == 0
    mistral = recipe(65536, asked, model={"name": "mistralai/Mistral-7B-v0.3"})
    assert measuring(plan_of(mistral, "H100")).prefix > 0


def test_what_is_measured_while_it_trains_must_fit_too() -> None:
    """PoSE trains on 2048 tokens of the 131072 that are measured."""
    skipping = {"source": "text", "positions": "skip"}
    asked = {"every": 100, "perplexity": {"data": "pg19", "truncate": 131072}}
    plan = plan_of(recipe(131072, asked, data=skipping, tuning={"method": "qlora"}), "A10G")
    assert plan.memory.peak < plan.gpu.memory < measuring(plan).peak
    assert not plan.fits
    assert advice(plan) == "evaluation.every=null"
    assert "it does not fit on A10G; the cheapest change that fits: evaluation.every=null" in plan_lines(plan)
    assert plan_of(recipe(131072, {**asked, "every": None}, data=skipping, tuning={"method": "qlora"}), "A10G").fits


def test_lengths_that_are_not_known_give_no_hours() -> None:
    asked = {"every": 100, "perplexity": {"data": "books", "documents": 2}}
    plan = plan_of(recipe(8192, asked), "H100")
    assert plan.hours_of(measuring(plan)) is None
    assert any("no hours, since the lengths of the documents are not known" in line for line in plan_lines(plan))
    cut = plan_of(recipe(8192, {**asked, "while_training": {"truncate": 16384}}), "H100")
    assert cut.hours_of(measuring(cut))


def test_ruler_takes_its_prompts_and_their_keys_and_values() -> None:
    """Of 7B 16,384 tokens, 8 GiB, in one prompt or four; those are padded, which takes a mask."""
    alone, together = (
        plan_of(recipe(16384, {"ruler": {"windows": [window], "samples": 10}}), "H100").afterwards
        for window in (16384, 4096)
    )
    assert alone
    assert together
    assert together.highest - alone.highest == 4 * 4096**2 * 3
    plan = plan_of(recipe(16384, {}), "H100")
    weights = 2 * plan.target.shape.parameters + 4 * plan.trained
    assert alone.highest == pytest.approx(weights + 8 * GIB + 16384 * (6.3 * 4096 + 6 * 11008) * 2, rel=1e-6)
    once, step = (sum(layers_flops(plan.target.shape, plan.recipe.tuning, tokens)) for tokens in (16384, 256))
    assert alone.flops == pytest.approx(13 * 10 * (once + 128 * step), rel=0.01)


def test_ruler_is_counted_beside_the_others_and_by_its_tasks_and_windows() -> None:
    passkey, perplexity = {"depths": 2, "trials": 1}, {"data": "books"}

    def flops(**asked: Any) -> float | None:
        after = plan_of(recipe(16384, asked), "H100").afterwards
        assert after
        return after.flops

    all_windows = flops(ruler={})
    each = [flops(ruler={"windows": [window]}) for window in (2048, 4096, 8192, 16384)]
    assert all_windows == pytest.approx(sum(filter(None, each)))
    assert flops(ruler={"tasks": ["ruler_vt"], "samples": 50}) == pytest.approx((all_windows or 0) / 26, rel=0.01)
    alone = flops(passkey=passkey)
    assert alone
    assert all_windows
    assert flops(ruler={}, passkey=passkey) == pytest.approx(all_windows + alone)
    assert flops(ruler={}, perplexity=perplexity) is None
    while_it_trains = plan_of(recipe(16384, {"every": 10, "ruler": {}}), "H100")
    assert while_it_trains.measuring is None
    assert any(line.startswith("evaluation afterwards") for line in plan_lines(while_it_trains))


def test_a_run_without_evaluation_has_none_planned() -> None:
    plan = plan_of(recipe(8192, {}), "H100")
    assert plan.measuring is None
    assert plan.afterwards is None
    assert not any(line.startswith("evaluation") for line in plan_lines(plan))


def test_summaries_take_the_keys_and_values_of_an_example() -> None:
    path = RECIPES / "govreport_7b_16k.yaml"
    examples, text = planned(path), planned(path, ["data.document=null", "data.summary=null"])
    assert examples.afterwards
    assert text.afterwards
    cache = 8 * GIB
    assert examples.afterwards.highest > text.afterwards.highest
    assert examples.afterwards.highest > cache + examples.target.shape.linear_weights * NF4


@pytest.mark.parametrize("path", recipe_paths(RECIPES), ids=str)
def test_measuring_takes_at_most_a_tenth_of_a_recipes_training(path: Path) -> None:
    if load_recipe(path).recipe.evaluation.every is None:
        assert planned(path).measuring is None
        return
    plan = planned(path)
    hours = plan.hours_of(measuring(plan))
    assert hours is not None
    assert plan.hours
    assert hours <= plan.hours / 10
    assert measuring(plan).peak <= plan.gpu.memory


def test_all_books_at_every_measurement_would_take_as_long_as_the_training() -> None:
    """What the recipes of the paper asked of every process: the books are not even dealt out."""
    path = RECIPES / "paper" / "7b_8k.yaml"
    whole = planned(path, ["evaluation.while_training={}"])
    hours = whole.hours_of(measuring(whole))
    assert hours
    assert whole.hours
    assert hours > 0.9 * whole.hours
    alone = whole.afterwards
    assert alone
    assert (whole.hours_of(alone) or 0) * measuring(whole).times > 20 * whole.hours
