"""Vision-language checkpoints: the language model is tuned and measured, and the whole checkpoint is written."""

import functools
import json
import re
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import pi_lora
from architectures import small_config, small_model
from conftest import refused, reporting
from pi_lora.errors import Interrupted, ModelError
from pi_lora.evaluation.generation import generate_ids
from pi_lora.model_ref import ModelRef
from pi_lora.models.adapter import prepare_for_tuning, save_adapter, without_known_warnings
from pi_lora.models.files import BUILTIN_FOLDER, PROCESSOR_FILES, save_config
from pi_lora.models.loaded import load_base, load_model
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import Sampling
from pi_lora.recipe.schema import Tuning
from pi_lora.scaling.config import language_config, whole_config
from pi_lora.scaling.extension import Extension
from random_runs import TOKENIZER, stored
from small_composites import EXTRA, STEPS, WINDOW, add_extra, other_tensors, save_composite, tuned

FAMILIES = ["gemma3", "mistral3", "qwen3_vl", "qwen3_5"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small composite of a type, made once; no test changes it."""
    return functools.cache(lambda model_type: save_composite(model_type, tmp_path_factory.mktemp("base") / model_type))


@pytest.fixture(scope="module", params=FAMILIES)
def composite(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Path:
    return saved(request.param)


@pytest.fixture(scope="module")
def adapter(composite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run of a composite."""
    return tuned(composite, tmp_path_factory.mktemp("adapter") / "run")


@pytest.fixture(scope="module")
def full(composite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all weights of a composite."""
    return tuned(composite, tmp_path_factory.mktemp("full") / "run", "full")


def test_a_layer_of_the_language_model_that_the_config_lacks_is_refused(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Weights of the vision tower, which is left out, are no such mistake."""
    folder = shutil.copytree(saved("gemma3"), tmp_path / "base")
    tensors = stored(folder)
    last = next(name for name in tensors if "language_model" in name and "layers.1." in name)
    extra = {last.replace("layers.1.", "layers.9."): tensors[last].clone()}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    with refused(ModelError, str(folder), "layers.9."):
        load_model(resolve_model(str(folder)))


def random_adapter(base: Path, folder: Path, **tuning: Any) -> Path:
    """What a run leaves, with random numbers in the weights that would train."""
    source = resolve_model(str(base)).extended(Extension(2 * WINDOW))
    model = prepare_for_tuning(load_base(source, torch.float32), Tuning(rank=2, **tuning), str(base))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    folder.mkdir()
    save_adapter(model, folder)
    save_config(source.config, folder)
    return folder


def text_logits(model: Any) -> torch.Tensor:
    ids = torch.randint(2, 60, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return torch.as_tensor(model.eval()(input_ids=ids).logits)


def assert_others_as_they_were(written: Path, base: Path) -> None:
    """As files, and as transformers loads them."""
    loaded = AutoModelForImageTextToText.from_pretrained(written, dtype=torch.float32).state_dict()
    for name, tensor in AutoModelForImageTextToText.from_pretrained(base).state_dict().items():
        assert "language_model" in name or name == "lm_head.weight" or torch.equal(tensor, loaded[name]), name
    before = other_tensors(base)
    after = other_tensors(written)
    assert before
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    for name in PROCESSOR_FILES:
        assert (written / name).read_bytes() == (base / name).read_bytes()
    config = json.loads((written / "config.json").read_text())
    of_base = json.loads((base / "config.json").read_text())
    assert config["vision_config"] == of_base["vision_config"]
    assert config["architectures"] == of_base["architectures"]


def test_a_config_is_put_back_as_it_was() -> None:
    config = {
        "model_type": "gemma3",
        "dtype": "bfloat16",
        "vision_config": {"depth": 1},
        "text_config": {"vocab_size": 9},
    }
    language = language_config(config)
    assert (language["vocab_size"], language["dtype"]) == (9, "bfloat16")
    assert whole_config(language) == config
    assert whole_config({**language, "vocab_size": 7, "dtype": "float32"}) == {
        **config,
        "dtype": "float32",
        "text_config": {"vocab_size": 7},
    }


def run_card_code(folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the last code of a card with plain transformers and the path of the base, and return the card."""
    monkeypatch.chdir(folder)
    card = Path("README.md").read_text()
    code = [block for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "from_pretrained" in block][-1]
    names: dict[str, Any] = {}
    with warnings.catch_warnings(action="ignore"):  # PEFT warns of an entry that it does not know
        exec(code.replace(f'"{base.name}"', repr(str(base))), names)
    assert any("Vision" in type(part).__name__ for part in names["model"].modules())
    return card


def test_an_adapter_merges_into_the_whole_checkpoint(
    composite: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other_tensors(adapter) == {}
    merged = Path(pi_lora.merge(str(adapter), output=tmp_path / "merged", check="logits"))
    assert_others_as_they_were(merged, composite)
    for folder in (adapter, merged):
        assert "image-text-to-text" in run_card_code(folder, composite, monkeypatch)
    whole = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32)
    language = load_model(resolve_model(str(adapter))).module
    torch.testing.assert_close(text_logits(whole), text_logits(language), rtol=1e-4, atol=1e-4)
    untuned = load_model(resolve_model(str(composite))).module
    assert (text_logits(whole) - text_logits(untuned)).abs().max() > 0.01


def test_peft_finds_the_weights_of_an_adapter_in_the_whole_model(
    composite: Path, adapter: Path, tmp_path: Path
) -> None:
    """Also where its settings have last names of modules, which the towers have too."""
    whole_class = type(AutoModelForImageTextToText.from_pretrained(composite))
    for run in (adapter, random_adapter(composite, tmp_path / "run", target_modules="attention")):
        source = resolve_model(str(run))
        whole = whole_class.from_pretrained(composite, config=source.typed_config, dtype=torch.float32)
        with without_known_warnings():
            adapted = PeftModel.from_pretrained(whole, run)
        adapted_names = [name for name, _ in adapted.named_parameters() if "lora" in name]
        assert not [name for name in adapted_names if "vis" in name or "modal" in name]
        torch.testing.assert_close(text_logits(adapted), text_logits(load_model(source).module), rtol=1e-4, atol=1e-4)


def test_interrupted_full_tuning_goes_on_to_the_same_weights(composite: Path, full: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, note: str) -> None:
        if (done, total) == (1, STEPS):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted), reporting(interrupt):
        tuned(composite, tmp_path / "run", "full")
    weights = stored(tuned(composite, tmp_path / "run", "full", resume=True))
    for name, tensor in stored(full).items():
        assert torch.equal(tensor, weights[name]), name


def test_full_tuning_writes_the_whole_checkpoint(composite: Path, full: Path) -> None:
    assert_others_as_they_were(full, composite)
    whole = AutoModelForImageTextToText.from_pretrained(full, dtype=torch.float32)
    language = load_model(resolve_model(str(full))).module
    torch.testing.assert_close(text_logits(whole), text_logits(language), rtol=1e-4, atol=1e-4)


def test_experts_are_merged_as_the_checkpoint_stores_them(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Published ones of Qwen 3 have the inputs of experts in rows."""
    base = Path(shutil.copytree(saved("qwen3_vl_moe"), tmp_path / "base"))
    weights = {name: weight.mT.contiguous() if "experts" in name else weight for name, weight in stored(base).items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    run = random_adapter(base, tmp_path / "run")
    after = stored(Path(pi_lora.merge(run, output=tmp_path / "merged", check="logits")))
    for name, weight in weights.items():
        assert weight.shape == after[name].shape
        assert "experts" not in name or not torch.equal(weight, after[name])


def test_experts_whose_projections_are_stacked_apart_are_merged(saved: Callable[[str], Path], tmp_path: Path) -> None:
    base = saved("step3p7")
    run = random_adapter(base, tmp_path / "run")
    after = stored(Path(pi_lora.merge(run, output=tmp_path / "merged", check="logits")))
    before = stored(base)
    projections = [name for name in before if ".moe." in name and name.endswith("_proj.weight")]
    assert len(projections) == 3
    for name in projections:
        assert before[name].shape == after[name].shape
        assert not torch.equal(before[name], after[name])


def test_an_extension_writes_the_whole_checkpoint_and_keeps_short_positions(composite: Path, tmp_path: Path) -> None:
    written = Path(
        pi_lora.extend(
            ModelRef(str(composite), extension=Extension(2 * WINDOW, scaling="direct")), output=tmp_path / "extended"
        )
    )
    assert_others_as_they_were(written, composite)
    assert stored(written).keys() == stored(composite).keys()
    before = AutoModelForImageTextToText.from_pretrained(composite, dtype=torch.float32)
    after = AutoModelForImageTextToText.from_pretrained(written, dtype=torch.float32)
    assert torch.equal(text_logits(before), text_logits(after))
    assert resolve_model(str(written)).window == 2 * WINDOW


def test_towers_take_no_memory_and_are_not_counted(composite: Path) -> None:
    source = resolve_model(str(composite))
    language = load_model(source).module
    assert source.shape.parameters == language.num_parameters()
    whole = AutoModelForImageTextToText.from_pretrained(composite)
    assert language.num_parameters() < whole.num_parameters()


@pytest.mark.parametrize("twice", [False, True])
def test_entries_of_the_language_model_beside_the_towers_move_into_its_config(
    twice: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """As Qwen2.5-VL was published, and as transformers 4.52 wrote it, twice. Outside, the old window would contradict
    the extended one.
    """
    base = Path(shutil.copytree(saved("qwen2_5_vl"), tmp_path / "composite"))
    config = json.loads((base / "config.json").read_text())
    text = config.pop("text_config")
    inner = {"text_config": dict(text)} if twice else {}
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **config, **inner, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (base / "config.json").write_text(json.dumps(flat))
    pi_lora.extend(
        ModelRef(str(base), extension=Extension(2 * WINDOW, original=WINDOW, scaling="yarn")), tmp_path / "longer"
    )
    written = json.loads((tmp_path / "longer" / "config.json").read_text())
    inside = written["text_config"]
    assert inside["max_position_embeddings"] == 2 * WINDOW
    assert inside["rope_parameters"]["mrope_section"] == rope["mrope_section"]
    assert not written.keys() & {"rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"}
    assert twice or "hidden_size" not in written
    AutoModelForImageTextToText.from_pretrained(tmp_path / "longer")


def test_an_adapter_of_the_language_model_alone_is_loaded_and_merged(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """As made with a text class, which leaves the names of the composite out."""
    base = saved("mistral3")
    source = resolve_model(str(base)).extended(Extension(2 * WINDOW))
    alone = AutoModelForCausalLM.from_config(source.typed_config.get_text_config())
    with without_known_warnings():
        adapted = get_peft_model(alone, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]))
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.1)
    run = tmp_path / "run"
    adapted.save_pretrained(run)
    settings = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))
    save_config(source.config, run)
    merged = pi_lora.merge(str(run), output=tmp_path / "merged", check="logits")
    assert_others_as_they_were(Path(merged), base)
    adapted_logits = text_logits(load_model(resolve_model(str(run))).module)
    assert (adapted_logits - text_logits(load_model(source).module)).abs().max() > 0.001


def test_heads_that_predict_several_tokens_are_kept(tmp_path: Path) -> None:
    """transformers loads none of them, and engines do. Experts, which are stored one by one, are trained. Composites
    above.
    """
    base = tmp_path / "base"
    config = small_config("deepseek_v3")
    config.update({"vocab_size": 1024})
    small_model(type(config), config.to_dict()).save_pretrained(base)
    for name in TOKENIZER:
        shutil.copyfile(BUILTIN_FOLDER / "tiny" / name, base / name)
    add_extra("deepseek_v3", base)
    before = stored(base)
    full = tuned(base, tmp_path / "full", "full")
    extended = pi_lora.extend(
        ModelRef(str(base), extension=Extension(2 * WINDOW, scaling="pi")), output=tmp_path / "extended"
    )
    run = random_adapter(base, tmp_path / "run", target_modules="attention")
    merged = pi_lora.merge(str(run), output=tmp_path / "merged")
    experts = [name for name in before if ".experts." in name]
    assert all(not torch.equal(before[name], stored(full)[name]) for name in experts)
    for folder in (full, extended, merged):
        written = stored(Path(folder))
        assert torch.equal(written[EXTRA["deepseek_v3"]], before[EXTRA["deepseek_v3"]])
        assert written.keys() == before.keys()


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_texts_are_read_with_a_cache_after_a_batch_was_generated(model_type: str, saved: Callable[[str], Path]) -> None:
    """Such models keep offsets of positions of the last batch that they generated."""
    loaded = load_model(resolve_model(str(saved(model_type))))
    sampling = Sampling(temperature=0.0, max_new_tokens=3)
    ids = torch.randint(2, 60, (1, 40), generator=torch.Generator().manual_seed(1))
    [row] = ids.tolist()
    alone = generate_ids(loaded, [row], sampling)
    pair = generate_ids(loaded, [row, row[:9]], sampling)
    first = loaded.module(input_ids=ids[:, :25], use_cache=True)
    rest = loaded.module(input_ids=ids[:, 25:], past_key_values=first.past_key_values)
    whole = loaded.module(input_ids=ids, use_cache=False)
    torch.testing.assert_close(rest.logits, whole.logits[:, 25:], rtol=1e-3, atol=1e-3)
    assert torch.equal(pair[:1], alone)
    assert torch.equal(generate_ids(loaded, [row], sampling), alone)


def test_the_language_model_keeps_the_architecture_of_its_own_config() -> None:
    """vLLM builds the language model of a LLaVA by this entry, not by the model type."""
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    written = whole_config({**language_config(config), "dtype": "bfloat16"})
    assert written["architectures"] == ["LlavaForConditionalGeneration"]
    assert written["text_config"] == {**text, "dtype": "bfloat16"}
