"""Recipe files: what YAML, `extends` and overrides mean, every mistake with its place at once, and what is dumped."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_lora.api.inputs import as_words
from pi_lora.errors import RecipeError
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.recipe.files import dump_recipe, find_recipe, load_recipe
from pi_lora.recipe.schema import Recipe

GOOD = """# What it makes.
model: {name: builtin:tiny}
context: {target: 1024}
data: {source: builtin:stdlib}
"""


RECIPES = Path(__file__).parents[2] / "recipes"
CHATS = ["data.source={name: x, column: messages}"]


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return [line.replace(f"{path.parent}/", "") for line in caught.value.problems]


def test_a_rate_in_scientific_notation_is_a_number(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "training: {learning_rate: 2e-5}\n")
    assert load_recipe(path).recipe.training.learning_rate == 2e-5
    assert load_recipe(path, ["training.learning_rate=1E-3"]).recipe.training.learning_rate == 1e-3


def test_numbers_with_zeros_and_colons_are_not_those_of_yaml_1_1(tmp_path: Path) -> None:
    """There `0100` is 64, `16:00` is 960, and `2024-02-30` an error."""
    recipe = load_recipe(write(tmp_path, GOOD + "training: {steps: 0100, seed: 1_000}\npaper: 16:00\n")).recipe
    assert (recipe.training.steps, recipe.training.seed, recipe.paper) == (100, 1000, "16:00")
    assert load_recipe(write(tmp_path, GOOD + "paper: 2024-02-30\n")).recipe.paper == "2024-02-30"


@pytest.mark.parametrize("revision", ["12e4567", "0899123", "1_0", "16:00", "2024-01-01", "0x1", "1e5"])
def test_a_commit_that_looks_like_a_number_stays_text_in_the_recipe_of_a_run(tmp_path: Path, revision: str) -> None:
    path = write(tmp_path, GOOD.replace("builtin:tiny", f"a/b, revision: '{revision}'"))
    recipe = load_recipe(path).recipe
    assert load_recipe(write(tmp_path, dump_recipe(recipe))).recipe == recipe


def test_an_emoji_of_json_is_one_character(tmp_path: Path) -> None:
    """JSON, which is YAML, escapes its two halves one by one; Python's overrides are JSON."""
    path = write(tmp_path, GOOD.replace("builtin:stdlib", r'"\ud83e\udd8b.txt"'))
    assert [source.name for source in load_recipe(path).recipe.data.source] == ["🦋.txt"]
    [word] = as_words([{"data.source": "🦋/café.txt"}])
    recipe = load_recipe(path, [word]).recipe
    assert [source.name for source in recipe.data.source] == ["🦋/café.txt"]
    dump_recipe(recipe).encode()


def test_a_malformed_override_hides_no_other_mistake(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    found = problems(path, "steps", "training.steps=many", "scaling=[pi")
    assert [line.partition(":")[0] for line in found] == ["steps", "scaling=[pi", "command line"]
    assert len(problems(path, "steps", "scaling=[pi")) == 2


def test_all_mistakes_are_reported_together_with_their_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: {name: builtin:tiny}\n"
        "context: {target: 1024}\n"
        "data: {source: [{name: builtin:stdlib, wieght: 2}]}\n"
        "training:\n"
        "  learning_rat: 1\n"
        "  steps: many\n"
        "  seed: true\n"
        "paper: 2023\n",
    )
    named = [
        ("recipe.yaml:3: data.source.0.wieght: ", "weight?"),
        ("recipe.yaml:6: training.steps: ", "many"),
        ("recipe.yaml:7: training.seed: ", "true"),
        ("recipe.yaml:5: training.learning_rat: ", "learning_rate?"),
        ("recipe.yaml:8: paper: ", "2023"),
    ]
    for line, (where, value) in zip(problems(path), named, strict=True):
        assert line.startswith(where)
        assert line.endswith(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# only a comment\n", "recipe.yaml: holds no keys"),
        ("scaling: pi\nmodel: {name: x}\ndata: {source: x}\n", "recipe.yaml: context: missing"),
        ("just words\n", "recipe.yaml: holds no keys"),
        ("model: {name: x\n", "recipe.yaml:2: expected ',' or '}'"),
        ("scaling: pi\nscaling: direct\n", "recipe.yaml:2: scaling: given twice"),
        ("a: !!python/object:os.system {}\n", "recipe.yaml:1: could not determine a constructor"),
        ("a: \x00", "recipe.yaml: is not a text file"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    found = problems(write(tmp_path, text))
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_overrides_replace_values_of_the_file_and_are_named(tmp_path: Path) -> None:
    resolved = load_recipe(write(tmp_path, GOOD), ["scaling=direct", "training.steps=7"])
    assert (resolved.recipe.scaling, resolved.recipe.training.steps) == ("direct", 7)
    assert resolved.origins["training.steps"] == "command line"
    assert resolved.origins["context.target"].endswith("recipe.yaml:3")
    assert resolved.origins["training.seed"] == "default"


def test_overrides_reach_into_the_only_section_of_a_list(tmp_path: Path) -> None:
    """As `pi-lora new` writes the data of a recipe."""
    one = GOOD.replace("builtin:stdlib", "[{name: books, hold_out: 0.2}]")
    resolved = load_recipe(write(tmp_path, one), ["data.source.weight=2", "data.source.name=novels"])
    [source] = resolved.recipe.data.source
    assert (source.name, source.weight, source.hold_out) == ("novels", 2, 0.2)
    assert resolved.origins["data.source"].endswith(".yaml:4, command line")
    [line] = problems(write(tmp_path, one), "data.source.weigt=2")
    assert line.startswith("command line: data.source.0.weigt: ")
    assert "weight?" in line
    two = GOOD.replace("builtin:stdlib", "[{name: books}, {name: builtin:recall}]")
    [line] = problems(write(tmp_path, two), "data.source.weight=2")
    assert line.startswith("data.source.weight: data.source is a list of 2")
    for plain in ("books", "[books]"):
        [line] = problems(write(tmp_path, GOOD.replace("builtin:stdlib", plain)), "data.source.weight=2")
        assert line.startswith("data.source.weight: ")
        assert "books" in line
    [indexed] = load_recipe(write(tmp_path, one), ["data.source.0.weight=2"]).recipe.data.source
    assert (indexed.name, indexed.weight) == ("books", 2)


def test_the_origin_of_a_section_is_that_of_all_its_values(tmp_path: Path) -> None:
    text = GOOD + "evaluation: {passkey: {depths: 4}}\n"
    origins = load_recipe(write(tmp_path, text), ["evaluation.passkey.trials=2", "evaluation.chat.data=x"]).origins
    assert origins["evaluation.passkey"].endswith("recipe.yaml:5, command line")
    assert origins["evaluation.chat"] == "command line"


@pytest.mark.parametrize("override", ["scaling", "=pi", "scaling.pi=1", "model.name=["])
def test_a_bad_override_is_one_line(tmp_path: Path, override: str) -> None:
    [line] = problems(write(tmp_path, GOOD + "scaling: pi\n"), override)
    assert line.startswith(override.removesuffix("=1"))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("*.txt", "*.txt"),
        ("**/*.jsonl", "**/*.jsonl"),
        ("books #2", "books #2"),
        ("@home: old", "@home: old"),
        (" books ", "books"),
        ("'no'", "no"),
    ],
)
def test_a_text_of_an_override_is_taken_whole(tmp_path: Path, value: str, name: str) -> None:
    recipe = load_recipe(write(tmp_path, GOOD), [f"data.source={value}"]).recipe
    assert [source.name for source in recipe.data.source] == [name]


def test_a_section_mistyped_in_an_override_is_reported_as_the_override(tmp_path: Path) -> None:
    [line] = problems(write(tmp_path, GOOD), "trainin.steps=3")
    assert line.startswith("command line: trainin: ")
    assert "training?" in line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "training.activation_checkpointing=on and off",
            "training.activation_checkpointing: input should be a valid boolean or 'selective' or a valid integer, not "
            "on and off",
        ),
        (
            "tuning.target_modules=5",
            "tuning.target_modules: input should be 'attention' or 'all-linear' or a list, as in [a, b], not 5",
        ),
        (
            "training.schedule_options={a: b, c: d}",
            "training.schedule_options: input should be a valid number or a valid integer, not b",
        ),
        ("training.betas=0.9", "training.betas: input should be a list, as in [a, b], not 0.9"),
        (
            "evaluation.perplexity.windows=[512, many]",
            "evaluation.perplexity.windows.1: input should be a valid integer, ",
        ),
        ("data.source=[5]", "data.source.0: input should be a section with keys, not 5"),
        ("data.source=[{nam: a}]", "data.source.0.name: missing; add it"),
    ],
)
def test_a_value_of_another_type_is_one_line_in_plain_words(tmp_path: Path, override: str, said: str) -> None:
    """Also where several types are allowed; entries of a list that is replaced are not those of the file."""
    text = (
        GOOD.replace("builtin:stdlib", "[{name: builtin:stdlib}]")
        + "evaluation: {perplexity: {windows: [256, 1024]}}\n"
    )
    found = problems(write(tmp_path, text), override)
    assert found[0].startswith(f"command line: {said}")
    assert len(found) == 1 + override.count("nam:")


def test_a_child_recipe_states_only_its_differences(tmp_path: Path) -> None:
    write(tmp_path, GOOD + "training: {steps: 5, seed: 3}\n", "_parent.yaml")
    child = load_recipe(write(tmp_path, "extends: _parent.yaml\ntraining: {steps: 9}\n"))
    assert (child.recipe.training.steps, child.recipe.training.seed) == (9, 3)
    assert child.origins["training.steps"].endswith("recipe.yaml:2")
    assert child.origins["training.seed"].endswith("_parent.yaml:5")


def test_a_parent_recipe_with_a_parent_is_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "_other.yaml")
    write(tmp_path, "extends: _other.yaml\n", "_parent.yaml")
    assert problems(write(tmp_path, "extends: _parent.yaml\n"))[-1].startswith("_parent.yaml:1: extends: unknown key")
    assert problems(write(tmp_path, "extends: _gone.yaml\n"))[0].startswith("_gone.yaml: no such recipe")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("demo", RECIPES / "demo.yaml"),
        ("paper/7b_8k", RECIPES / "paper" / "7b_8k.yaml"),
        ("mine", Path("mine.yaml")),
        ("7b_8k", Path("7b_8k.yaml")),
        ("7b_16k", Path("7b_16k")),
    ],
)
def test_a_recipe_of_the_current_folder_comes_first(
    name: str, found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A folder of a recipe's name, as `make demo` makes one, is no recipe.
    Path("demo").mkdir()
    for own in ("mine.yaml", "7b_8k.yaml", "7b_16k"):
        Path(own).touch()
    assert find_recipe(Path(name)) == found


@settings(max_examples=30)
@given(
    st.builds(
        dict,
        steps=st.integers(1, 10**6),
        learning_rate=st.floats(1e-9, 1, allow_subnormal=False),
        seed=st.integers(0, 2**31),
        schedule=st.sampled_from(["constant", "linear", "cosine"]),
    ),
    st.sampled_from(["lora", "full"]),
    st.integers(2, 10**6),
)
def test_dump_then_load_is_the_same_recipe(
    tmp_path_factory: pytest.TempPathFactory, training: dict[str, object], method: str, target: int
) -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"name": "a/b"},
            "context": {"target": target, "original": 1},
            "tuning": {"method": method},
            "data": {"source": ["builtin:stdlib", {"name": "x.txt", "weight": 0.25}]},
            "training": training,
        }
    )
    path = write(tmp_path_factory.mktemp("dumped"), dump_recipe(recipe))
    assert load_recipe(path).recipe == recipe


TWO_GPUS = ["hardware.gpus=2", "hardware.context_parallel=2"]
SUMMARIES = ["data.document=a", "data.summary=b"]
HELD_OUT = "data.source={name: books, hold_out: 0.1}"


@pytest.mark.parametrize(
    ("overrides", "where", "names"),
    [
        (["hardware.gpus=3", "hardware.context_parallel=2"], "hardware.context_parallel: 2", "3 processes"),
        (["hardware.context_parallel=2"], "hardware.context_parallel: 2", "1 processes"),
        ([*TWO_GPUS, "context.target=1026"], "context.target: 1026", "4"),
        ([*TWO_GPUS, "data.positions=pose"], "hardware.context_parallel: ", "pose"),
        ([*TWO_GPUS, "evaluation.every=5"], "evaluation.every: ", "GPUs"),
        ([*TWO_GPUS, *CHATS], "hardware.context_parallel: ", "data.packing: wrapped"),
        ([*TWO_GPUS, "data.packing=isolated"], "hardware.context_parallel: ", "data.packing: wrapped"),
        ([*CHATS, "model.attention=eager"], "model.attention: ", "data.packing: wrapped"),
        (["context.original=2048"], "context: target 1024", "original 2048"),
        (
            ["training.global_batch_size=6", "training.per_device_batch_size=4"],
            "training.global_batch_size: 6",
            "per_device_batch_size 4",
        ),
        (["data.summary=b"], "data: summary: ", "template and completion"),
        (["data.document=a"], "data: document: ", "template and completion"),
        (["data.template=a {b}"], "data: template: ", "document and summary"),
        ([*SUMMARIES, "data.template=a {b}"], "data: document, summary, template: ", "give one"),
        ([*SUMMARIES, "data.completion_tokens=1023"], "data.completion_tokens: ", "1024"),
        ([*SUMMARIES, "data.positions=pose"], "data: positions: pose: ", "contiguous"),
        ([*SUMMARIES, "data.keep_short=0.1"], "data: keep_short: ", "text"),
        *(
            ([HELD_OUT, f"evaluation.{name}={{data: books, hold_out: 0.2}}"], f"evaluation.{name}.hold_out: ", "source")
            for name in ("perplexity", "summarization")
        ),
        (["data.positions=pose", "data.sequence_tokens=1025"], "data.sequence_tokens: 1025", "1024"),
        (["evaluation.perplexity.column=messages"], "evaluation.perplexity.column: messages", "chats"),
        (["evaluation.context.column=messages"], "evaluation.context.column: messages", "chats"),
        (["data.source=builtin:recall", "data.keep_short=0.1"], "data: keep_short: ", "text"),
        ([*CHATS, "data.source.hold_out=0.1"], "data: source: hold_out", "chats"),
        (
            [*CHATS, "data.keep_short=0.1", "training.per_device_batch_size=2"],
            "data.keep_short: ",
            "training.per_device_batch_size: 1",
        ),
        (["tuning.method=full", "model.dtype=bfloat16"], "model.dtype: bfloat16", "full"),
        (
            ["hardware.offload_activations=true", "training.activation_checkpointing=false"],
            "hardware.offload_activations: ",
            "training.activation_checkpointing",
        ),
    ],
)
def test_contradicting_sections_are_refused(tmp_path: Path, overrides: list[str], where: str, names: str) -> None:
    [line] = problems(write(tmp_path, GOOD), *overrides)
    assert re.sub(r"^(recipe.yaml(:\d+)?|command line): ", "", line).startswith(where)
    assert names in line


@pytest.mark.parametrize(("written", "tokens"), [("16k", 16384), ("128K", 131072), ("16384", 16384)])
def test_lengths_may_be_written_with_a_suffix(tmp_path: Path, written: str, tokens: int) -> None:
    assert load_recipe(write(tmp_path, GOOD), [f"context.target={written}"]).recipe.context.target == tokens
    [problem] = problems(write(tmp_path, GOOD), "context.target=16 thousand")
    assert "context.target" in problem


def test_all_conflicts_in_a_section_are_reported_together(tmp_path: Path) -> None:
    path = write(
        tmp_path, GOOD.replace("source: builtin:stdlib", "source: builtin:recall, sequence_tokens: 8, keep_short: 0.1")
    )
    sequences, short = problems(path)
    assert "data: sequence_tokens: " in sequences
    assert "data: keep_short: " in short


def test_measurements_while_training_are_those_of_the_run_in_less() -> None:
    whole = {"perplexity": {"data": "x", "documents": 9, "stride": 64}, "passkey": {"depths": 16, "seed": 3}}
    less = {"documents": 2, "truncate": 4096, "trials": 1}
    evaluation = Evaluation.model_validate({**whole, "benchmarks": {}, "while_training": less})
    assert evaluation.in_short() == Evaluation.model_validate(
        {
            "perplexity": {"data": "x", "documents": 2, "stride": 64, "truncate": 4096},
            "passkey": {"depths": 16, "trials": 1, "seed": 3},
        }
    )
    for name, options in whole.items():
        alone = Evaluation.model_validate({name: options, "every": 5})
        assert alone.in_short() == Evaluation.model_validate({name: options})
