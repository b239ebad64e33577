"""Files, names and options that were made to do harm: each is refused in a line, or shown for what it is."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import TOKENIZER
from conftest import BUILTIN, small_recipe
from reported import make_run, passkey, perplexity
from rich.table import Table

from pi_lora import cli
from pi_lora.cli.app import Terminal
from pi_lora.errors import ModelError, RecipeError, RunExistsError
from pi_lora.evaluation.results import write_json
from pi_lora.files.making import write_whole
from pi_lora.merging.shards import base_shards
from pi_lora.models.adapter import load_adapter
from pi_lora.models.base import find_base, load_model
from pi_lora.models.load import find
from pi_lora.models.stored import AdapterSettings, check_pattern, read_adapter_settings, read_index
from pi_lora.preflight import check
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.report import upload
from pi_lora.report.pages import html_page, write_report
from pi_lora.report.run import Run
from pi_lora.run_folder import read_training_log, staged, staging_path

GOOD = "model: {name: builtin:tiny}\ncontext: {target: 1024}\ndata: {source: builtin:stdlib}\n"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["pi-lora", *arguments])
    with pytest.raises(SystemExit) as ending:
        cli.main()
    captured = capsys.readouterr()
    return int(ending.value.code or 0), captured.out, captured.err


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, "more than 1,000 keys and values"),
        ("a: &a [*a]\n", "more than 1,000 keys and values"),
        ("a: " + "[" * 30 + "]" * 30, "nested deeper than 20"),
        ("a: [" + "x, " * 2000 + "]", "more than 1,000 keys and values"),
        ("a: '" + "x" * 1_000_001 + "'", "it has more than 1,000,000 bytes"),
        ("1: x\n", "a key is not text; quote it"),
        ("[a, b]: x\n", "a key is not text; quote it"),
        ("a: !!int x\n", "a value is not what it says"),
        ("a: !!timestamp x\n", "could not determine a constructor"),
        ("a: !!bool x\n", "a value is not what it says"),
        ("a: 0b_\n", "a value is not what it says"),
        ("a: " + "9" * 5000 + "\n", "a value is not what it says"),
        ("<<: {extends: 3}\n", "extends: 3: a parent's file name begins with _"),
        (GOOD + "paper: 2001-99-99\n", ""),
        (GOOD + "training: {learning_rate: .inf}\n", "training: learning_rate: is more than 1,000,000,000,000"),
        (GOOD + "training: {steps: 1000000000000000000000}\n", "training: steps: is more than 1,000,000,000,000"),
        (GOOD + "training: {seed: -1}\n", "training.seed: input should be greater than or equal to 0"),
        (GOOD.replace("builtin:tiny", '"a\\0b"'), "model: name: has characters that no name"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_hostile_recipe_is_a_line_at_once(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    started = time.process_time()
    if problem:
        with pytest.raises(RecipeError) as refusal:
            load_recipe(file)
        assert problem in refusal.value.problems[0]
        assert all(len(line) < 600 and "\n" not in line for line in refusal.value.problems)
    else:
        assert load_recipe(file).recipe.paper == "2001-99-99"
    assert time.process_time() - started < 5


def test_an_alias_that_repeats_little_is_read(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD.replace("1024", "&n 1024") + "evaluation: {passkey: {target: *n}}\n")
    recipe = load_recipe(tmp_path / "r.yaml").recipe
    assert recipe.evaluation.passkey
    assert recipe.evaluation.passkey.target == 1024


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match="cannot be read as a text file"):
        load_recipe(tmp_path / "recipe.yaml")
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match="has no config"):
        find(str(tmp_path))


HOSTILE = "[red]x[/] [/] :smile: \x1b[31mred\x9b2J\x07\u202etxt"
SHOWN = "[red]x[/] [/] :smile: [31mred2Jtxt"


def test_what_is_printed_is_what_was_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.out, "width", 300)
    recipe = small_recipe(BUILTIN, model={"name": HOSTILE}, paper=HOSTILE)
    Path("r.yaml").write_text(dump_recipe(recipe))
    status, out, _ = run(capsys, monkeypatch, "show", "r.yaml")
    assert status == 0
    assert out.count(SHOWN) == 2
    status, out, err = run(capsys, monkeypatch, "train", "r.yaml", "--dry-run")
    assert (status, out) == (2, "")
    assert SHOWN in err
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(err)


def test_a_terminal_obeys_rich_alone(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE, style="red")
    table.add_row(HOSTILE)
    terminal = Terminal()
    terminal._force_terminal, terminal._color_system = True, None
    terminal.width = 200
    terminal.print(table)
    terminal.print(HOSTILE, "\udc80")
    out = capsys.readouterr().out
    assert out.count(SHOWN) == 5
    assert "\x1b[31mred" not in out
    assert "\ufffd" in out


def test_a_line_of_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = run(capsys, monkeypatch, "eval", "perplexity", "./a\nb\x1b[2Jc")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("./a b[2Jc: no such folder")
    status, _, err = run(capsys, monkeypatch, "eval", "--a\nb\x1b")
    assert (status, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("name", [".", "/", "..", "a/..", ""])
def test_an_output_without_a_name_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(GOOD)
    status, out, err = run(capsys, monkeypatch, "train", "r.yaml", "--dry-run", "--output", name)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert "is not the name of a new folder" in err
    assert [each.name for each in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "LONG"],
        ["recipes", "LONG"],
        ["plan", "r.yaml", "model.name=LONG"],
        ["plan", "r.yaml", "model.name=./LONG"],
        ["plan", "r.yaml", "model.name=builtin:LONG"],
        ["plan", "r.yaml", "model.name=builtin:.."],
        ["plan", "r.yaml", "model.name=.."],
        ["plan", "r.yaml", "model.name=~nosuchuser/x"],
        ["plan", "r.yaml", "data.source.x=1"],
        ["plan", "r.yaml", "model.name.x.y=1"],
        ["train", "r.yaml", "--dry-run", "--output", "LONG"],
        ["train", "r.yaml", "--dry-run", "data.source=LONG"],
        ["train", "r.yaml", "--dry-run", "data.source=~nosuchuser/x"],
        ["train", "r.yaml", "--dry-run", "evaluation.perplexity.data=~nosuchuser/x"],
        ["train", "r.yaml", "--dry-run", "evaluation.benchmarks.data=[~nosuchuser/x]"],
        ["train", "r.yaml", "--main-process-port", "99999999"],
        ["merge", "LONG"],
        ["report", "LONG"],
        ["push", "LONG", "a/b"],
        ["summarize", BUILTIN, "LONG"],
        ["summarize", BUILTIN, "~nosuchuser/x"],
        ["eval", "all", "LONG"],
        ["eval", "perplexity", "LONG"],
        ["eval", "perplexity", "~nosuchuser"],
        ["eval", "perplexity", BUILTIN, "--windows", "1000000000000"],
        ["eval", "perplexity", BUILTIN, "--data", "LONG"],
        ["eval", "perplexity", BUILTIN, "--target", "0"],
        ["eval", "passkey", BUILTIN, "--seed", "-1"],
        ["eval", "passkey", BUILTIN, "--target", "-5"],
        ["theory", "--head-dim", "0"],
        ["theory", "--theta", "nan"],
        ["theory", "--theta", "1"],
        ["theory", "--original", "0"],
        ["theory", "--original", "9", "--target", "3"],
        ["merge", "x", "--shard-size", "-1GB"],
        ["merge", "x", "--shard-size", "nan"],
    ],
    ids=" ".join,
)
def test_a_silly_value_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(GOOD)
    given = [each.replace("LONG", "x" * 5000) for each in arguments]
    status, out, err = run(capsys, monkeypatch, *given)
    assert (status, out, err.count("\n")) == (2, "", 1), err[-2000:]
    assert [each.name for each in tmp_path.iterdir()] == ["r.yaml"]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "key").write_text("secret")
    (elsewhere / "key").chmod(0o600)
    output = tmp_path / "run"
    staging_path(output).symlink_to(elsewhere)
    with pytest.raises(RunExistsError, match=r"\.run\.partial: is a link"), staged(output):
        pytest.fail("was followed")
    staging_path(output).unlink()
    with staged(output) as staging:
        (staging / "link").symlink_to(elsewhere / "key")
    assert (elsewhere / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / ".scores.json.partial").symlink_to(elsewhere / "key")
    write_json({"a": 1}, tmp_path / "scores.json")
    assert (elsewhere / "key").read_text() == "secret"
    assert json.loads((tmp_path / "scores.json").read_text()) == {"a": 1}


@pytest.mark.parametrize("name", ["README.md", "report.html", "pictures", "pictures/perplexity.png"])
def test_a_report_writes_through_no_link(name: str, small_model: Path, tmp_path: Path) -> None:
    folder, elsewhere = make_run(small_model, tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "key").write_text("secret <!-- scores --> <!-- end of scores -->")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(elsewhere if name == "pictures" else elsewhere / "key")
    with pytest.raises(ModelError, match=rf"{name}: is a link, which is not written through; remove it"):
        write_report([Run(folder)], html=True)
    assert (elsewhere / "key").read_text().startswith("secret <!-- scores --> <!-- end")
    assert [each.name for each in elsewhere.iterdir()] == ["key"]


def test_a_planted_link_in_place_of_a_state_file_or_a_lock_is_not_followed(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    (tmp_path / ".run.json.part").symlink_to(key)
    write_whole(tmp_path / "run.json", "{}")
    assert ((tmp_path / "run.json").read_text(), key.read_text()) == ("{}", "secret")
    staging_path(tmp_path / "run").mkdir()
    (staging_path(tmp_path / "run") / "lock").symlink_to(key)
    with pytest.raises(RunExistsError, match="lock: is a link, where a lock was to be made"), staged(tmp_path / "run"):
        pytest.fail("was followed")
    assert key.read_text() == "secret"


PASTED = "a; touch PWNED; $(touch PWNED) `touch PWNED` 'x\" &"


def test_a_command_that_is_suggested_can_be_pasted(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the names of folders, data and models are."""
    monkeypatch.chdir(tmp_path)
    data = {"perplexity": perplexity(8.0, 9.0, data=PASTED), "passkey": passkey(96)}
    folder = make_run(small_model, tmp_path / PASTED, data, small_recipe(PASTED))
    status, _, err = run(capsys, monkeypatch, "report", PASTED)
    assert status == 0
    commands = [line for line in err.splitlines() if line.strip().startswith("pi-lora eval")]
    assert len(commands) == 4
    for file in (folder / "scores").iterdir():
        file.unlink()
    _, _, err = run(capsys, monkeypatch, "report", PASTED)
    commands.append(err.partition("measure it with: ")[2])
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    _, _, err = run(capsys, monkeypatch, "eval", "passkey", PASTED)
    commands.append(err.partition("or merge them: ")[2])
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "pi-lora"
        assert any(PASTED in word for word in words)
        # As a shell runs it.
        subprocess.run(["sh", "-c", command.strip().replace("pi-lora", "true", 1)], check=True)
    assert not Path("PWNED").exists()


def test_push_takes_what_it_knows_and_no_links(lora_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(lora_run, tmp_path / "run"))
    known = {path.name for path in folder.iterdir()}
    for name in ("a.PT", "b.pth.tar", "secrets.txt", "key.pem", ".env", "config.json.bak", "adapter_model.bin"):
        (folder / name).write_text("secret")
    assert set(upload._uploaded(folder)) == known
    (folder / "tokenizer.model").symlink_to(__file__)
    with pytest.raises(ModelError, match=r"tokenizer\.model: is a link, which is not followed"):
        upload.push(folder, "me/model")
    (folder / "tokenizer.model").unlink()
    (folder / "scores").symlink_to(tmp_path)
    (tmp_path / "a.json").write_text("secret")
    with pytest.raises(ModelError, match="is a link, which is not followed"):
        upload.push(folder, "me/model")


def test_a_page_loads_nothing_from_elsewhere() -> None:
    card = "# T\n\n![a](http://evil/x.png) ![b](pictures/gone.png) ![c][r]\n\n[r]: //evil/y.png\n\n<img src='//evil'>\n"
    page = html_page(card, {})
    body = page.partition("<body>")[2]
    assert "<img" not in body
    assert "src=" not in body.replace("&lt;img src=", "")
    assert "default-src 'none'" in page


def test_a_name_in_scores_is_text_in_the_card(small_model: Path, tmp_path: Path) -> None:
    name = "![x](http://evil/x.png)<img src=//evil>|\n# Title"
    tasks = {name: {"acc": 0.5, "stderr": None, "examples": 1}}
    scores = {"benchmarks-base": {"model": name, "tasks": tasks}, "benchmarks": {"model": name, "tasks": tasks}}
    folder = make_run(small_model, tmp_path / "run", scores)
    write_report([Run(folder)], html=True)
    text = (folder / "README.md").read_text().split("<!-- scores -->")[1]
    assert r"\!\[x\](http://evil/x.png)\<img src=//evil>\|" in text
    assert "\n# Title" not in text
    assert "<img src=//" not in (folder / "report.html").read_text()


CATASTROPHIC = [
    "(a+)+b",
    "(.*a){20}",
    "(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)",
    r"(x+x+)+y",
    ".*.*.*.*.*z",
    r"(\w+)\1",
    "a{9}",
]


@pytest.mark.parametrize("pattern", CATASTROPHIC)
@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern", "modules_to_save"])
def test_a_pattern_that_takes_long_is_refused(key: str, pattern: str, tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 2, key: [pattern] if key == "modules_to_save" else {pattern: 1}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=rf"adapter_config\.json: {key}: .* may take very long; write names"):
        read_adapter_settings(tmp_path)


def test_patterns_that_are_allowed_are_matched_at_once() -> None:
    worst = [f"(l|l)(a|a)(y|y).*.*{n}" for n in range(16)]
    settings = AdapterSettings(peft_type="LORA", alpha_pattern=dict.fromkeys(map(check_pattern, worst), 1.0))
    started = time.process_time()
    for layer in range(500):
        settings.scaling(f"model.language_model.layers.{layer}.self_attention.query_projection", 2)
    assert time.process_time() - started < 5
    with pytest.raises(ValueError, match="more than 16 regular expressions"):
        AdapterSettings(peft_type="LORA", alpha_pattern={f".*{n}": 1.0 for n in range(17)})
    AdapterSettings(peft_type="LORA", rank_pattern={f"model.layers.{n}.q_proj": 1 for n in range(1000)})


@torch.no_grad()
def test_a_regular_expression_of_targets_is_never_run(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    """PEFT would; the file of weights says which modules it chose."""
    folder = Path(shutil.copytree(lora_run, tmp_path / "run"))
    settings = json.loads((folder / "adapter_config.json").read_text())
    evil = {"target_modules": "(.*.*.*)+_proj|(.*)*x", "exclude_modules": "(.*)*y"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **evil}))
    found = find(str(lora_run))
    ids = torch.arange(2, 60)[None]
    expected, again = (
        load_adapter(load_model(found.base, found.config, torch.float32), each)(ids).logits
        for each in (lora_run, folder)
    )
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    recipe = small_recipe(folder, scaling="keep", tuning={"rank": 4})
    assert check(recipe, tmp_path / "further").adapter == folder


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: input should be less than or equal to"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: input should be a valid integer, not '2'"),
        ({"head_dim": 10**10}, "head_dim: input should be less than"),
        ({"num_key_value_heads": "longrope"}, "num_key_value_heads: input should be a valid integer, not 'longrope'"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok: input should be greater than 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings: input should be greater than 0"),
        ({"max_position_embeddings": [64]}, "max_position_embeddings: input should be a valid integer"),
        ({"rope_theta": "10000"}, "rope_theta: input should be a valid number"),
        ({"rope_theta": float("nan")}, "rope_theta: input should be"),
        ({"rope_scaling": "linear"}, "rope_scaling: input should be"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor: input should be greater than"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters.rope_type: input should be a valid string"),
        ({"layer_types": "full_attention"}, "layer_types: input should be"),
        ({"model_type": ["llama"]}, "model_type: input should be a valid string"),
    ],
    ids=str,
)
def test_a_field_of_a_config_is_named(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(ModelError) as refusal:
        find(str(tmp_path))
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}: {problem}")


@pytest.mark.parametrize("place", ["../x.safetensors", "/etc/x.safetensors", "x.bin", "..", ""])
def test_an_index_names_files_of_its_folder(place: str, small_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", *TOKENIZER):
        shutil.copyfile(small_model / name, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map\.a: .* is not the name of a safetensors file"):
        read_index(index)
    with pytest.raises(ModelError, match="is not the name of a safetensors file"):
        base_shards(find_base(str(tmp_path)))


def test_a_card_that_is_no_text_is_a_line(small_model: Path, tmp_path: Path) -> None:
    folder = make_run(small_model, tmp_path / "run")
    (folder / "README.md").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ModelError, match=r"README\.md: cannot be read \(it is not UTF-8 text\)"):
        write_report([Run(folder)])


def test_a_damaged_run_is_a_line_of_file_and_field(small_model: Path, tmp_path: Path) -> None:
    folder = make_run(small_model, tmp_path / "run")
    made = json.loads((folder / "run.json").read_text())
    for name, text, problem in (
        ("run.json", json.dumps({**made, "seconds": "many"}), r"run\.json: seconds: input should be a valid number"),
        ("run.json", "[" * 100_000, r"run\.json: is not JSON"),
        ("scores/passkey.json", '{"k_max": 1e400}', r"passkey\.json: has a number that is infinite"),
        ("scores/passkey.json", '{"k_max": NaN}', r"passkey\.json: has a number that is infinite"),
    ):
        kept = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(ModelError, match=problem):
            write_report([Run(folder)])
        (folder / name).write_text(kept)
    log = '{"step": 1, "loss": 2.0, "seconds": 1.0}\n{"step": 2}\n\0\0\n{"step": 3, "lo'
    (folder / "training.jsonl").write_text(log)
    assert [line["step"] for line in read_training_log(folder / "training.jsonl")] == [1]
    write_report([Run(folder)])
