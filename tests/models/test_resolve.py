"""Models are found by name, folder or hub id, loaded with the scaling that their config says, or refused."""

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from architectures import small_config
from conftest import refused, small_recipe, train
from pi_lora.api import load, merge
from pi_lora.errors import Interrupted, ModelError, PiLoraError, ScalingError
from pi_lora.model_ref import ModelRef
from pi_lora.models.files import WARNING, read_adapter_settings, read_config, save_config
from pi_lora.models.loaded import load_base
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.files import dump_recipe
from pi_lora.run import Run
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.scalings import Method
from pi_lora.scaling.verify import build_on_meta, rotary_frequencies
from pi_lora.staging import resolve_run, staging_path
from random_runs import put_on_hub, save_run

IDS = torch.randint(2, 1024, (1, 128), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_step_0_equals_hand_scaled_positions(small_model: Path) -> None:
    """paper.tex, Eqn. 4: the interpolated model at position m is the plain one at position m L / L'."""
    plain = load(str(small_model)).module
    interpolated = load(ModelRef(str(small_model), extension=Extension(target=256))).module
    by_hand = plain(IDS, position_ids=torch.arange(128)[None] / 4).logits
    torch.testing.assert_close(interpolated(IDS).logits, by_hand, rtol=1e-5, atol=1e-5)
    assert (interpolated(IDS).logits - plain(IDS).logits).abs().max() > 0.01


@torch.no_grad()
def test_direct_gives_the_logits_of_the_base(small_model: Path) -> None:
    direct = load(ModelRef(str(small_model), extension=Extension(target=256, scaling="direct")))
    assert direct.window == 256
    assert direct.scale == 1
    assert direct.source.original == 64
    torch.testing.assert_close(direct.module(IDS).logits, load(str(small_model)).module(IDS).logits, rtol=0, atol=0)


@torch.no_grad()
def test_yarn_frequencies_are_the_papers(small_model: Path) -> None:
    """arXiv 2309.00071, section 3: a frequency that turns more than 32 times in L stays, one that turns less than once
    is divided by s, those between are mixed; cosines and sines, so queries and keys, are scaled by 0.1 ln(s) + 1."""
    loaded = load(ModelRef(str(small_model), extension=Extension(target=256, scaling="yarn")))
    assert (loaded.window, loaded.scale) == (256, 4)
    rotary = loaded.module.model.rotary_emb
    window, dim, theta = 64, 16, 500.0

    def index_of(turns: float) -> float:
        return dim * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index_of(32)), 0), min(math.ceil(index_of(1)), dim - 1)
    for index, got in enumerate(rotary.inv_freq.tolist()):
        plain = theta ** (-2 * index / dim)
        turns = window * plain / (2 * math.pi)
        ramp = min(max((index - low) / (high - low), 0), 1)
        assert got == pytest.approx(plain * (1 - ramp) + plain / 4 * ramp)
        if turns > 32 or turns < 1:
            assert got == pytest.approx(plain if turns > 32 else plain / 4)
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    assert (loaded.module(IDS).logits - load(str(small_model)).module(IDS).logits).abs().max() > 0.01


@torch.no_grad()
def test_dynamic_changes_theta_beyond_the_original_window(small_model: Path) -> None:
    """NTK by length: theta grows by (s n / L - (s - 1)) ^ (d / (d - 2)) for n > L tokens, and not up to there."""
    loaded = load(ModelRef(str(small_model), extension=Extension(target=256, scaling="dynamic")))
    assert (loaded.window, loaded.scale) == (256, 4)
    dim = 16
    for tokens in (32, 64, 65, 200, 256):
        loaded.module(torch.full((1, tokens), 5))
        theta = 500.0 * max(4 * tokens / 64 - 3, 1) ** (dim / (dim - 2))
        expected = [theta ** (-2 * index / dim) for index in range(dim // 2)]
        assert loaded.module.model.rotary_emb.inv_freq.tolist() == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("method", ["pi", "dynamic", "yarn", "factors"])
def test_every_reader_of_a_saved_config_gets_the_same_model(small_model: Path, tmp_path: Path, method: Method) -> None:
    """Plain transformers reads the file as it is, with the top level alone, and with `rope_parameters` alone."""
    base = resolve_model(str(small_model))
    factors = (1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 9.0) if method == "factors" else None
    found = base.extended(Extension(256, 64, method, factors=factors, attention_factor=1.1 if factors else 1.0))
    config, ours = found.config, load_base(found, torch.float32)(IDS).logits
    for left_out in ((), ("rope_parameters",), ("rope_scaling", "rope_theta")):
        folder = tmp_path / "-".join(left_out)
        shutil.copytree(small_model, folder, dirs_exist_ok=True)
        save_config(config, folder)
        written = json.loads((folder / "config.json").read_text())
        assert "_name_or_path" not in written
        kept = {key: value for key, value in written.items() if key not in left_out}
        (folder / "config.json").write_text(json.dumps(kept))
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(theirs(IDS).logits, ours, rtol=0, atol=0)
        assert Rope(read_config(folder)).window == 256


@torch.no_grad()
@pytest.mark.parametrize("method", ["dynamic", "yarn", "factors"])
def test_a_run_is_loaded_and_merged_with_its_method(lora_run: Path, tmp_path: Path, method: Method) -> None:
    run = tmp_path / "run"
    shutil.copytree(lora_run, run)
    base = resolve_model(str(read_adapter_settings(run).base_model_name_or_path))
    factors = (1.0,) * 7 + (4.0,) if method == "factors" else None
    save_config(base.extended(Extension(96, 64, method, factors=factors)).config, run)
    loaded, merged = load(str(run)), load(str(merge(run, tmp_path / "merged").folder))
    assert (loaded.window, loaded.scale) == (merged.window, merged.scale) == (96, 1.5)
    assert Rope(loaded.source.config).method == Rope(merged.source.config).method == method
    torch.testing.assert_close(merged.module(IDS).logits, loaded.module(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_run_whose_scaling_contradicts_its_base_is_refused(lora_run: Path, tmp_path: Path) -> None:
    """A base that is interpolated farther than the run, or to which the run adds another method."""
    run, base_folder = tmp_path / "run", tmp_path / "base"
    shutil.copytree(lora_run, run)
    base = resolve_model(str(read_adapter_settings(run).base_model_name_or_path))
    shutil.copytree(base.base.path, base_folder)
    save_config(base.extended(Extension(192, 64)).config, base_folder)
    with refused(ModelError, str(run), "own scale 3", "2"):
        resolve_model(ModelRef(str(run), base=str(base_folder)))


@pytest.mark.parametrize("model_type", ["stablelm", "gpt_neox", "glm", "phi3", "gemma3_text"])
def test_theta_and_partial_rotary_factor_survive_saving(tmp_path: Path, model_type: str) -> None:
    """Readers of the top level name them differently; what is lost falls back to a default without a word."""
    config = small_config(model_type)
    ropes = [config.rope_parameters] if "rope_theta" in config.rope_parameters else config.rope_parameters.values()
    for rope in ropes:
        rope["rope_theta"] = 777.0
        if model_type != "gemma3_text":
            rope["partial_rotary_factor"] = 0.75
    config.save_pretrained(tmp_path)
    base = resolve_model(str(tmp_path))
    save_config(base.extended(Extension(128, 64)).config, tmp_path)
    plain = rotary_frequencies(base.base.meta_model)
    written = rotary_frequencies(build_on_meta(type(config), read_config(tmp_path)))
    for name, values in plain.items():
        torch.testing.assert_close(written[name], values if "sliding" in name else values / 2)


def test_a_name_without_a_model_is_refused(tmp_path: Path) -> None:
    for name, remedy in {
        "builtin:huge": "builtin:tiny",
        "./nowhere": "no such model",
        str(tmp_path / "nowhere"): "no such model",
        str(tmp_path): "builtin:tiny",
        "some-user/not-cached": "HF_HUB_OFFLINE=1",
    }.items():
        with refused(ModelError, name, remedy):
            load(name)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            ("config.json", "rope_theta 10000", 500, "rope_parameters", "rope_scaling"),
        ),
        ({"max_position_embeddings": "64"}, ("max_position_embeddings", "expected int, got str")),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, ("config.json", "rope_scaling", "longrope")),
        ({"rope_scaling": "linear"}, ("config.json",)),
    ],
)
def test_a_config_that_was_edited_wrongly_is_one_line(
    changes: dict[str, Any], names: tuple[object, ...], small_model: Path, tmp_path: Path
) -> None:
    """To a file of transformers 5 the `rope_scaling` of a model card was added: transformers loses the theta, and
    does not read the old name of `longrope`.
    """
    folder = Path(shutil.copytree(small_model, tmp_path / "edited"))
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with refused(PiLoraError, str(folder), *names):
        resolve_model(str(folder))


@pytest.mark.parametrize("settings", [{"max_new_tokens": -1}, {"num_return_sequences": 4}, [1]])
def test_a_generation_config_that_transformers_refuses_is_named(
    settings: Any, small_model: Path, tmp_path: Path
) -> None:
    """It would refuse to load the weights, after the data is packed."""
    folder = Path(shutil.copytree(small_model, tmp_path / "edited"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(settings))
    with refused(ModelError, str(file)):
        resolve_model(str(folder))


@pytest.mark.parametrize("model_type", ["paligemma", "diffusion_gemma", "modernbert", "vit"])
def test_a_model_that_predicts_no_next_token_is_refused(tmp_path: Path, model_type: str) -> None:
    """Encoders, and decoders whose tokens see later ones."""
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with refused(ModelError, str(tmp_path), model_type):
        resolve_model(str(tmp_path))


def test_a_config_that_builds_no_model_is_not_blamed_on_the_scaling(small_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(small_model / name, tmp_path / name)
    save_config({**read_config(tmp_path), "pad_token_id": 1024}, tmp_path)
    with refused(ScalingError, "model of type llama", "config.json", "Padding_idx"):
        resolve_model(str(tmp_path)).extended(Extension(target=128))


def test_a_type_that_transformers_lacks_is_not_a_missing_config(small_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_model, tmp_path / "new"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "lampblack"}))
    with refused(ModelError, str(folder), "lampblack", "transformers") as raised:
        resolve_model(str(folder))
    assert "has no" not in str(raised.value)


def test_entries_that_transformers_fills_in_are_not_those_of_the_adapter(lora_run: Path, tmp_path: Path) -> None:
    """The defaults of LLaMA were called the numbers of the adapter."""
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    del config["vocab_size"], config["hidden_size"]
    (run / "config.json").write_text(json.dumps(config))
    with refused(ModelError, f"{run / 'config.json'}: ", "hidden_size", "vocab_size") as raised:
        resolve_model(str(run))
    assert "32000" not in str(raised.value)
    config |= {"hidden_size": 64, "vocab_size": 1024}
    (run / "config.json").write_text(json.dumps(config))
    with refused(ModelError, str(run), "hidden_size 32 instead of 64", "own base", "config.json"):
        resolve_model(str(run))


def test_pickled_weights_are_refused(small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(small_model, folder)
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with refused(ModelError, str(folder), "weights"):
        load(str(folder))


def test_a_recipe_file_of_another_tool_is_ignored(small_model: Path, tmp_path: Path) -> None:
    """llm-compressor writes such a file; trackers write a run.json."""
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    (folder / "run.json").write_text('{"id": 3, "state": "finished"}')
    assert (resolve_model(folder).texts, resolve_model(folder).original) == ([], 64)
    (folder / "run.json").unlink()
    (folder / "recipe.yaml").write_text("default_stage:\n  default_modifiers: {}\n")
    assert load(str(folder)).source.recipe is None


def test_a_pushed_adapter_is_loaded_and_merged_by_its_hub_id(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(lora_run, "you/run", tmp_path / "hub", monkeypatch)
    pushed, local = load("you/run"), load(str(lora_run))
    assert (pushed.name, pushed.window, pushed.scale) == ("you/run", local.window, local.scale)
    torch.testing.assert_close(pushed.module(IDS).logits, local.module(IDS).logits, rtol=0, atol=0)
    merged = merge(Path("you/run"), tmp_path / "merged").folder
    assert json.loads((merged / "merge.json").read_text())["run"] == "you/run"


def test_a_missing_base_is_named(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    run, gone = shutil.copytree(lora_run, tmp_path / "run"), str(tmp_path / "gone")
    for name, before in (("run.json", str(small_model.resolve())), ("adapter_config.json", str(small_model))):
        (run / name).write_text((run / name).read_text().replace(before, gone))
    with refused(ModelError, str(run), gone, "--base"):
        resolve_model(str(run))
    assert load(ModelRef(str(run), base=str(small_model))).scale == 2
    (run / "run.json").unlink()  # as an adapter from elsewhere
    with refused(ModelError, str(run), gone, "--base"):
        resolve_model(str(run))


def test_a_push_after_resolving_does_not_mix_two_commits(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(small_model, "someone/model", tmp_path, monkeypatch)
    source = resolve_model("someone/model")
    assert source.base.commit == "a" * 40
    digest, weights = source.base.weights_digest, load_base(source, torch.float32).state_dict()
    kept = tmp_path / "models--someone--model"
    pushed = shutil.copytree(kept / "snapshots" / ("a" * 40), kept / "snapshots" / ("b" * 40))
    other = load_file(pushed / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in other.items()}, pushed / "model.safetensors", {"format": "pt"})
    (kept / "refs" / "main").write_text("b" * 40)
    assert resolve_model("someone/model").base.weights_digest != digest
    again = resolve_model(ModelRef("someone/model", revision="a" * 40))
    for each in (source, again):
        assert each.base.path.name == "a" * 40
        assert each.base.fingerprint("0", "0").commit == "a" * 40
        for name, tensor in load_base(each, torch.float32).state_dict().items():
            assert torch.equal(tensor, weights[name])


def test_only_the_recorded_commit_is_the_base_of_a_run_without_reading_weights(
    lora_run: Path, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model of the hub has a commit too. Weights of another commit may be the same."""
    put_on_hub(small_model, "someone/model", tmp_path / "hub", monkeypatch)
    other = Path(shutil.copytree(small_model, tmp_path / "other"))
    weights = {name: tensor + 1 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    put_on_hub(other, "other/model", tmp_path / "hub", monkeypatch)
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    content = json.loads((run / "run.json").read_text())
    digest = content["origin"]["weights"]

    def load_recorded(commit: str, weights: str, base: str) -> None:
        origin = {**content["origin"], "path": None, "commit": commit, "weights": weights}
        (run / "run.json").write_text(json.dumps({**content, "origin": origin}))
        load(ModelRef(str(run), base=base))

    load_recorded("a" * 40, "unread", "someone/model")
    load_recorded("b" * 40, digest, "someone/model")
    with refused(ModelError, str(run), "other/model", "allow_mismatch"):
        load_recorded("b" * 40, digest, "other/model")


def test_the_number_of_experts_has_the_names_of_transformers_4_and_5(tmp_path: Path) -> None:
    small_config("qwen3_moe").save_pretrained(tmp_path)
    config = resolve_model(str(tmp_path)).config
    assert config["num_experts"] == config["num_local_experts"] == 4


def test_a_folder_inside_a_run_is_no_model_and_the_run_is_named(small_model: Path, tmp_path: Path) -> None:
    begun = tmp_path / ".tuned.partial"
    run = save_run(small_model, begun / "checkpoints" / "checkpoint-3")
    (begun / "recipe.yaml").write_text(dump_recipe(small_recipe(small_model)))
    (begun / "run.json").write_text("{}")
    (run / "complete").write_text("{}")
    (run / "config.json").unlink()
    resume = f"pi-lora train {tmp_path / 'tuned'} --resume"
    for inside in (run, run.parent, begun):
        with refused(ModelError, f"{inside}: ", resume):
            resolve_model(str(inside))
        with refused(ModelError, f"{inside}: ", resume):
            resolve_run(inside, [], None, resume=True)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    with refused(ModelError, f"{copy}: ", "checkpoint"):
        resolve_model(str(copy))
    # What the config of the base would make of it is no model that was tuned.
    shutil.copy(small_model / "config.json", copy)
    with refused(ModelError, f"{copy / 'config.json'}: "):
        resolve_model(str(copy))


def test_a_checkpoint_under_the_config_of_the_base_is_not_taken_for_unscaled(small_model: Path, tmp_path: Path) -> None:
    """A checkpoint has traces, also if it is copied without the marker; a copy of the adapter alone has the settings of
    an adapter that was tuned under a scaling.
    """
    training = {**small_recipe(small_model).training.model_dump(), "save_every": 2}

    def stop(done: int, total: int, note: str) -> None:
        if done == 2 and total == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(small_recipe(small_model, training=training), tmp_path / "run", progress=stop)
    checkpoint = Run(staging_path(tmp_path / "run")).checkpoints[0]
    unmarked = json.loads((checkpoint / "adapter_config.json").read_text())
    of_training = ("complete", "train*", "*.pt", "*.pth")
    for name, without in {"copy": of_training[:1], "checkpoint-3": of_training, "other": of_training}.items():
        ignored = shutil.ignore_patterns(*without)
        folder = Path(shutil.copytree(checkpoint, tmp_path / name, ignore=ignored))
        shutil.copy(small_model / "config.json", folder)
        with refused(ModelError, f"{folder / 'config.json'}: ", "scaling", "run"):
            resolve_model(folder)
        # Of a training that did not mark it.
        plain = {key: value for key, value in unmarked.items() if key not in (WARNING, "auto_mapping")}
        (folder / "adapter_config.json").write_text(json.dumps({**plain, "task_type": "CAUSAL_LM"}))
        if name != "other":
            with refused(ModelError, f"{folder / 'config.json'}: ", "scaling", "--allow-mismatch"):
                resolve_model(folder)
        assert resolve_model(ModelRef(folder, allow_mismatch=True)).scale == 1


def test_what_does_not_fit_is_told_by_its_cause(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    run, base = (Path(shutil.copytree(each, tmp_path / each.name)) for each in (lora_run, small_model))
    adapter = json.loads((run / "config.json").read_text())
    of_base = json.loads((base / "config.json").read_text())

    def told(adapter_changes: dict[str, Any], base_changes: dict[str, Any], *names: object) -> str:
        for folder, config, changes in ((run, adapter, adapter_changes), (base, of_base, base_changes)):
            changed = {key: value for key, value in {**config, **changes}.items() if value is not None}
            (folder / "config.json").write_text(json.dumps(changed))
        with refused(ModelError, str(run), *names) as raised:
            resolve_model(ModelRef(run, base=base))
        return str(raised.value)

    linear = {"rope_type": "linear", "factor": 2.0}
    without_theta = {"rope_parameters": linear, "rope_scaling": None, "rope_theta": None}
    assert "10000" not in told(without_theta, {}, "config.json", "has no rope_theta")
    assert "own base" not in told({"vocab_size": 1030}, {}, "vocab_size 1024", 1030, "resize_token_embeddings")
    scaled = {"rope_parameters": {**linear, "factor": 4.0, "rope_theta": 500.0}, "rope_scaling": None}
    assert "own base" not in told({}, scaled, "own scale 4", "2", "config.json")
    told({}, {"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, "rope_theta 10000.0 (a default", 500)
    told({"hidden_size": 64, "vocab_size": 1030}, {}, "hidden_size 32", "own base")


def test_an_adapter_that_lacks_tensors_is_not_blamed_on_the_base(lora_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    file = run / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if "lora_A" in name))
    save_file(tensors, file, {"format": "pt"})
    for use in (load, merge):
        with refused(ModelError, str(run), "download") as raised:
            use(run)
        assert "base that it was tuned from" not in str(raised.value)


def test_the_adapter_of_an_adapter_is_refused(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    file = run / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(lora_run)}))
    (run / "run.json").unlink()
    with refused(ModelError, f"{lora_run}: ", "merge"):
        resolve_model(str(run))
    with refused(ModelError, f"{lora_run}: ", "merge"):
        resolve_model(ModelRef(str(lora_run), base=str(lora_run)))


def test_a_config_that_was_lost_is_not_replaced_by_that_of_the_base(lora_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    (run / "config.json").unlink()
    with refused(ModelError, f"{run / 'config.json'}: ", "scaling"):
        resolve_model(str(run))
    shutil.copy(Path(resolve_model(str(lora_run)).base.path) / "config.json", run)
    with refused(ModelError, f"{run / 'config.json'}: "):
        resolve_model(str(run))


def test_a_folder_that_holds_models_names_one(small_model: Path, tmp_path: Path) -> None:
    """As the cache of the hub, and the folder of a model there."""
    kept = tmp_path / "hub" / "models--org--name"
    model = Path(shutil.copytree(small_model, kept / "snapshots" / "abc"))
    for folder in (tmp_path / "hub", kept, model.parent):
        with refused(ModelError, f"{folder}: ", model):
            resolve_model(str(folder))
    assert resolve_model(str(model)).window == 64
