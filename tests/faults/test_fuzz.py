"""Damaged and hostile files and command lines by the thousand: each is read, or refused in a line; none is a traceback.

`PI_LORA_FAULTS=100000 pytest tests/faults/test_fuzz.py` tries that many of each kind, other ones each time; a case that
fails is printed, and kept in .hypothesis. Without it a few are tried, always the same.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reported import benchmarks, make_run, passkey, perplexity, summarization

from pi_lora import cli
from pi_lora.cli.app import out
from pi_lora.errors import PiLoraError
from pi_lora.evaluation.benchmarks.local_data import FORMATS, read_examples
from pi_lora.evaluation.results import read_scores
from pi_lora.evaluation.suite import MEASUREMENTS
from pi_lora.merging.deltas import read_settings
from pi_lora.models.load import Stretch, adapter_base, find
from pi_lora.models.stored import read_index
from pi_lora.planning.planning import find_shape, plan_recipe, target_of
from pi_lora.planning.text import component_lines, plan_lines, planned
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.report.pages import write_report
from pi_lora.report.run import Run, measured_run, missing_baselines
from pi_lora.report.summary import eval_results, score_lines, side_by_side, summary
from pi_lora.run_folder import read_provenance, read_training_log
from pi_lora.theory.bounds import setting_of

MANY = int(os.environ.get("PI_LORA_FAULTS", "0"))


def examples(few: int, slow: int = 1) -> Callable[[Any], Any]:
    """A case may take ten seconds, on a busy machine too; of the `slow` ones there are so many times fewer."""
    return settings(
        max_examples=MANY // slow or few,
        derandomize=not MANY,
        deadline=10_000,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
        if MANY
        else [Phase.explicit, Phase.generate],
        print_blob=bool(MANY),
    )


# What others have written where something else belongs.
ODD_TEXT = st.sampled_from(
    ["", ".", "/", "..", "~x", "a/b", "[red]x", "[/]", "\x1b[2J", "\u2028", "x" * 5000, "nan", "1e400", "null", "-1"]
)
ODD_NUMBERS = st.sampled_from(
    [0, -1, 1, 2, 3, 7, 64, 2**31, 2**63, 10**12, 10**30, 10**400, -(10**400), 0.0, -0.5, 1e-300, 1e300, 0.999]
) | st.sampled_from([float("nan"), float("inf"), -float("inf")])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | ODD_TEXT | ODD_NUMBERS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | ODD_TEXT, inner, max_size=3),
    max_leaves=8,
)


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


@st.composite
def damaged(draw: st.DrawFn, trees: list[Any], values: st.SearchStrategy[Any] = VALUES) -> Any:
    """A valid tree in which one to three values are others, gone, or beside new ones."""
    tree = [deepcopy(draw(st.sampled_from(trees)))]
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(tree)[1:]))
        inner: Any = tree
        for key in path:
            inner = inner[key]
        how = draw(st.sampled_from(["other", "other", "other", "gone", "beside"]))
        if how == "gone" and len(path):
            del inner[last]
        elif how == "beside" and isinstance(inner, dict):
            inner[draw(st.text(max_size=8))] = draw(values)
        else:
            inner[last] = draw(values)
    return tree[0]


def refused_in_a_line(action: Callable[[], object]) -> None:
    """A PiLoraError is an answer; whatever else is raised is a defect."""
    with contextlib.suppress(PiLoraError):
        action()


@contextlib.contextmanager
def quietly() -> Any:
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")), contextlib.redirect_stderr(io.StringIO()):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
FULL, SLIDING = "full_attention", "sliding_attention"
CONFIGS = [
    {"model_type": "llama", **SIZES, "rope_theta": 1e4, "rope_scaling": None, "dtype": "bfloat16"},
    {"model_type": "llama", **SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    {
        "model_type": "qwen2",
        **SIZES,
        "sliding_window": 32,
        "use_sliding_window": True,
        "layer_types": [FULL, SLIDING],
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": [FULL, SLIDING],
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    {
        "model_type": "phi3",
        **SIZES,
        "pad_token_id": 0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [2.0] * 8, "long_factor": [2.0] * 8},
    },
    {"model_type": "gpt_neox", **SIZES, "rotary_pct": 0.25, "rotary_emb_base": 10000},
    {"model_type": "mixtral", **SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_theta": 1e4},
]


@examples(10, slow=5)
@given(
    config=damaged(CONFIGS), target=st.sampled_from([65, 128, 10**6]), method=st.sampled_from(["pi", "yarn", "dynamic"])
)
def test_model_configs(config: Any, target: int, method: Any, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    recipe = Recipe.model_validate(
        {
            "model": {"name": str(folder)},
            "context": {"target": target},
            "scaling": method,
            "data": {"source": "builtin:stdlib"},
        }
    )

    def planned() -> None:
        find_shape.cache_clear()
        assert plan_lines(plan_recipe(recipe, target_of(recipe)))

    with quietly():
        refused_in_a_line(lambda: (find(str(folder)).window, find(str(folder)).scale))
        refused_in_a_line(lambda: find(str(folder), Stretch(target, method=method)).window)
        refused_in_a_line(lambda: setting_of(find(str(folder)).config, None, target))
        refused_in_a_line(planned)


ADAPTERS = [
    {
        "peft_type": "LORA",
        "base_model_name_or_path": "builtin:tiny",
        "revision": None,
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": False,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["embed_tokens"],
        "alpha_pattern": {"q_proj": 4, r"layers\.1\..*up_proj": 3},
        "rank_pattern": {"q_proj": 2},
        "init_lora_weights": True,
    }
]


@examples(40)
@given(settings_=damaged(ADAPTERS, VALUES | st.from_regex(r"[a(.*+|)\\w]{1,12}", fullmatch=True)))
def test_adapter_settings(settings_: Any, folder: Path) -> None:
    run = folder / "adapter"
    run.mkdir(exist_ok=True)
    (run / "adapter_config.json").write_text(json.dumps(settings_))
    (run / "config.json").write_text(json.dumps(CONFIGS[0]))

    def read() -> None:
        read_settings(run).scaling("model.layers.11.self_attn.q_proj", 4)

    refused_in_a_line(read)
    refused_in_a_line(lambda: adapter_base(run))
    refused_in_a_line(lambda: Run(run).base)


SCORES = [
    ("perplexity", perplexity(9.0, 7.0)),
    ("passkey", passkey(96)),
    ("benchmarks", benchmarks(0.5, None)),
    ("summarization", summarization(40.0, 20.0, 30.0)),
]


@pytest.fixture(scope="module")
def run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(small_model, tmp_path_factory.mktemp("run") / "run")


@examples(40)
@given(named=st.sampled_from(SCORES).flatmap(lambda each: st.tuples(st.just(each[0]), damaged([each[1]]))))
def test_scores(named: tuple[str, Any], run: Path) -> None:
    name, content = named
    for file in (run / "scores").iterdir():
        file.unlink()
    (run / "scores" / f"{name}.json").write_text(json.dumps(content))

    def shown() -> None:
        found = measured_run(run)
        list(missing_baselines(found))
        list(score_lines(found))
        eval_results(found)
        scores = read_scores(run / "scores" / f"{name}.json")
        if scores is not None:
            assert summary(scores)[0]
            assert side_by_side(name, {"a": scores, "b": scores})
            # As `eval all` prints them.
            if name in MEASUREMENTS and isinstance(scores, MEASUREMENTS[name].kind):
                out.print(MEASUREMENTS[name].table(scores))

    with quietly():
        refused_in_a_line(shown)


@examples(3, slow=50)
@given(named=st.sampled_from(SCORES[:2]).flatmap(lambda each: st.tuples(st.just(each[0]), damaged([each[1]]))))
def test_pictures(named: tuple[str, Any], run: Path) -> None:
    name, content = named
    for file in (run / "scores").iterdir():
        file.unlink()
    (run / "scores" / f"{name}.json").write_text(json.dumps(content))
    refused_in_a_line(lambda: write_report([Run(run)], html=True))


@examples(30)
@given(
    made=damaged([{"original": 64, "tokens": 9, "seconds": 2.5, "peak_memory": 3, "loss": 1.0, "versions": {"a": "1"}}])
)
def test_what_a_run_says_of_itself(made: Any, folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps(made))
    refused_in_a_line(lambda: read_provenance(folder))
    (folder / "training.jsonl").write_text(
        "\n".join(json.dumps(each) for each in (made, {"step": 1, "loss": 1})) + "\n{"
    )
    refused_in_a_line(lambda: read_training_log(folder / "training.jsonl"))
    (folder / "index.json").write_text(json.dumps({"weight_map": made}))
    refused_in_a_line(lambda: read_index(folder / "index.json"))


RECIPE = Recipe.model_validate(
    {
        "model": {"name": "builtin:tiny"},
        "context": {"target": 1024},
        "data": {"source": ["builtin:stdlib", {"name": "a.txt", "weight": 2}]},
        "evaluation": {"perplexity": {}, "passkey": {}},
    }
)


@examples(40)
@given(tree=damaged([yaml.safe_load(dump_recipe(RECIPE))]))
def test_recipes(tree: Any, folder: Path) -> None:
    try:
        text = yaml.safe_dump(tree)
    except ValueError:  # a number that Python does not write
        return
    (folder / "r.yaml").write_text(text, encoding="utf-8", errors="ignore")

    def shown() -> None:
        load_recipe(folder / "r.yaml")
        plan = planned(folder / "r.yaml")
        assert plan_lines(plan) + [str(row) for row in component_lines(plan)]
        assert json.dumps(plan.as_json())

    refused_in_a_line(shown)


YAML = st.text(st.sampled_from("ab:{}[]&*!<>-?|'\"#%@,. \n\t0129exob_\0\x85\u2028é"), max_size=60)
TAGS = st.sampled_from("!!int !!timestamp !!bool !!float !!map !!set !!binary <<: extends:_x".split()).map("{} ".format)


@examples(40)
@given(parts=st.lists(YAML | TAGS, max_size=6))
def test_texts_that_are_hardly_yaml(parts: list[str], folder: Path) -> None:
    (folder / "t.yaml").write_text("".join(parts), encoding="utf-8")
    refused_in_a_line(lambda: load_recipe(folder / "t.yaml"))
    good = folder / "good.yaml"
    good.write_text(dump_recipe(RECIPE))
    refused_in_a_line(lambda: load_recipe(good, ["".join(parts), f"training.steps={''.join(parts)}"]))


ROWS = [
    {"question": "q", "passage": "p", "answer": True},
    {"goal": "g", "sol1": "a", "sol2": "b"},
    {"article": "a", "question": "q", "options": list("abcd"), "answer": "A"},
    {"article": "a", "questions": ["q"], "options": [list("abcd")], "answers": ["A"]},
    {"sentence": "a _ b", "option1": "a", "option2": "b", "answer": "1"},
]


@examples(30)
@given(row=damaged(ROWS), task=st.sampled_from(sorted(FORMATS)))
def test_benchmark_files(row: Any, task: str, folder: Path) -> None:
    (folder / "dev.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "dev-labels.lst").write_text("0\n")
    refused_in_a_line(lambda: read_examples(task, folder / "dev.jsonl"))


WORDS = st.sampled_from(
    "show plan recipes eval perplexity passkey all theory merge report push summarize train env r.yaml builtin:tiny . "
    "/ run --help --json --output --gpu H100 cpu --dry-run --target --original --seed --windows --base --html --keys "
    "--markdown training.steps=3 context.target=2048 model.name=. data.source=. =".split()
)
# Commands that only read: the fuzz writes nothing, and loads no weights.
COMMANDS = st.sampled_from(
    [
        ["show"],
        ["plan"],
        ["recipes"],
        ["train", "--dry-run"],
        ["merge"],
        ["report"],
        ["eval", "all"],
        ["eval"],
        ["push"],
    ]
)


@examples(20)
@given(command=COMMANDS, words=st.lists(WORDS | ODD_TEXT | st.text(max_size=8), max_size=5))
def test_command_lines(command: list[str], words: list[str], folder: Path) -> None:
    here = folder / "here"
    here.mkdir(exist_ok=True)
    (here / "r.yaml").write_text(dump_recipe(RECIPE))
    # The system passes no NUL and no half of a character.
    given_ = [word.replace("\0", "").encode("utf-8", "ignore").decode("utf-8") for word in (*command, *words)]
    written, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    printed = contextlib.redirect_stdout(written), contextlib.redirect_stderr(err)
    called = contextlib.chdir(here), patch.object(sys, "argv", ["pi-lora", *given_])
    with printed[0], printed[1], called[0], called[1], pytest.raises(SystemExit) as ending:
        cli.main()
    assert ending.value.code in (None, 0, 2), given_
    if ending.value.code == 2:
        assert err.getvalue().strip(), given_
    assert "Traceback" not in err.getvalue()
    assert not {"\x1b", "\x07", "\r"} & set(err.getvalue()), given_
