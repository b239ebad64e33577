"""The built-in model and the released adapters read their windows; a short tuning beats interpolation alone."""

import json
from pathlib import Path

from safetensors.torch import load_file

import pi_lora
from conftest import small_recipe, train
from pi_lora.run import Run
from pi_lora.scaling.rope import Rope

ADAPTERS = Path(__file__).parent.parent / "adapters"
FOLDER = ADAPTERS / "smollm2_135m_16k"


def perplexities(model: pi_lora.LoadedModel, *windows: int) -> list[float]:
    scores = pi_lora.evaluate(model, "perplexity", windows=list(windows), stride=128, documents=1, truncate=2048)
    return [row.perplexity for row in scores.windows]


def test_the_released_demo_has_its_window() -> None:
    demo = pi_lora.load(str(ADAPTERS / "demo"))
    assert (demo.window, demo.scale) == (1024, 4)


def test_the_released_demo_reads_and_retrieves_in_its_window() -> None:
    demo = pi_lora.load(str(ADAPTERS / "demo"))
    inside, whole = perplexities(demo, 256, 1024)
    assert whole < 1.05 * inside
    assert whole < 12
    assert pi_lora.evaluate(demo, "passkey", depths=2, trials=2).k_max == 1024


def test_the_built_in_model_retrieves_every_passkey_inside_its_window() -> None:
    scores = pi_lora.evaluate("builtin:tiny", "passkey", target=256, depths=16, trials=4, seed=1)
    assert scores.k_max == 256
    assert all(depth.success_rate == 1 for depth in scores.depths)


def test_the_released_smollm2_adapter_is_complete() -> None:
    """Its base is not in the repository."""
    config = json.loads((FOLDER / "config.json").read_text())
    assert (Rope(config).window, Rope(config).scale) == (16384, 2)
    tensors = load_file(FOLDER / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 30  # A and B of seven linear layers in each of thirty
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert Run(FOLDER).metadata.tokens


def test_a_short_tuning_beats_step_0_at_the_target_window(tmp_path: Path) -> None:
    training = {
        "steps": 6,
        "learning_rate": 2.5e-3,
        "warmup_steps": 2,
        "global_batch_size": 2,
        "activation_checkpointing": False,
    }
    recipe = small_recipe("builtin:tiny", context={"target": 512}, data={"source": "builtin:stdlib"}, training=training)
    run = train(recipe, tmp_path / "run")
    untuned = pi_lora.ModelRef("builtin:tiny", extension=pi_lora.Extension(target=512))
    [before] = perplexities(pi_lora.load(untuned), 512)
    [after] = perplexities(pi_lora.load(str(run)), 512)
    assert after < 0.8 * before
