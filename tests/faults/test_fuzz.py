"""Damaged and hostile files and command lines: each is read, or refused in a line; none is a traceback, none takes ten
seconds or a gigabyte.

`PI_LORA_FAULTS=1000000 pytest tests/faults/test_fuzz.py` tries that many, of each kind its share, and prints how many
there were; without it a few of each are tried. A case is made from its number, and always the same:
`PI_LORA_FAULT=recipes:123` tries one again.
"""

import contextlib
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pyarrow.parquet
import pytest
import yaml
from damage import ODD_TEXT, as_json, damaged, damaged_bytes, text, value
from gguf_files import write_gguf
from reported import benchmarks, make_run, passkey, perplexity, summarization

from pi_lora import cli
from pi_lora.cli.app import out
from pi_lora.data.documents import read_document
from pi_lora.data.sources import find_corpus, find_table
from pi_lora.errors import PiLoraError
from pi_lora.evaluation.benchmarks.local_data import FORMATS, read_examples
from pi_lora.evaluation.journal import Journal
from pi_lora.evaluation.results import PasskeyDepth, read_scores
from pi_lora.evaluation.suite import MEASUREMENTS
from pi_lora.evaluation.summarization.measure import Predictions
from pi_lora.merging.deltas import read_adapter, read_settings
from pi_lora.merging.merging import merge
from pi_lora.merging.shards import base_shards
from pi_lora.models.base import find_base, load_tokenizer
from pi_lora.models.load import Stretch, adapter_base, find
from pi_lora.models.origin import read_origin, weights_digest
from pi_lora.models.stored import read_config, read_index
from pi_lora.planning.planning import find_shape, plan_recipe, target_of
from pi_lora.planning.text import component_lines, plan_lines, planned
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.recipe.schema import Recipe, Source
from pi_lora.report.pages import write_report
from pi_lora.report.run import Run, measured_run, missing_baselines
from pi_lora.report.summary import eval_results, score_lines, side_by_side, summary
from pi_lora.run_folder import checkpoint_to_resume, mark_complete, read_provenance, read_training_log
from pi_lora.scaling.config import in_both_dialects, method_of, scale_of, window_of
from pi_lora.theory.bounds import setting_of

MANY = int(os.environ.get("PI_LORA_FAULTS", "0"))
ONE = os.environ.get("PI_LORA_FAULT", "")
# A case may take no longer, in seconds of the processor, which others use as well, and on the clock; and all of them
# together no more memory, in bytes.
LONGEST, LONGEST_WAIT, MOST_MEMORY = 10, 60, 10**9
# The places of different defects that a test names before it gives up.
MOST_DEFECTS = 5


class Place(NamedTuple):
    """Where a case may write, and what it damages copies of: a model and a run of it."""

    folder: Path
    model: Path
    run: Path


Attempt = Callable[[random.Random, Place], None]


class Kind(NamedTuple):
    """Cases of one kind: how many of a million, and how many in `make test`."""

    share: int
    few: int
    attempt: Attempt


KINDS: dict[str, Kind] = {}


def kind(share: int, few: int) -> Callable[[Attempt], Attempt]:
    def register(attempt: Attempt) -> Attempt:
        KINDS[attempt.__name__.replace("_", " ")] = Kind(share, few, attempt)
        return attempt

    return register


def refused_in_a_line(action: Callable[[], object]) -> None:
    """A PiLoraError is an answer; whatever else is raised is a defect."""
    with contextlib.suppress(PiLoraError):
        action()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")), contextlib.redirect_stderr(io.StringIO()):
        yield


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
# What belongs in other fields of a config.
FIELDS = ("yarn", "dynamic", "longrope", "llama3", "linear", "default", FULL, SLIDING, "gemma3", "mamba", {}, [2.0] * 8)


@kind(share=150_000, few=100)
def configs_of_runs(case: random.Random, at: Place) -> None:
    (at.folder / "config.json").write_bytes(as_json(case, damaged(case, CONFIGS, FIELDS)))

    def read() -> None:
        config = read_config(at.folder)
        in_both_dialects(config), method_of(config), scale_of(config), window_of(config)

    refused_in_a_line(read)


@kind(share=1_000, few=10)
def models(case: random.Random, at: Place) -> None:
    """Found, extended, built on the meta device, and planned."""
    folder = at.folder / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(as_json(case, damaged(case, CONFIGS, FIELDS)))
    target, method = case.choice((65, 128, 10**6)), case.choice(("pi", "yarn", "dynamic"))
    recipe = Recipe.model_validate(
        {
            "model": {"name": str(folder)},
            "context": {"target": target},
            "scaling": method,
            "data": {"source": "builtin:stdlib"},
        }
    )

    def planned_model() -> None:
        find_shape.cache_clear()
        assert plan_lines(plan_recipe(recipe, target_of(recipe)))

    with quietly():
        refused_in_a_line(lambda: (find(str(folder)).window, find(str(folder)).scale))
        refused_in_a_line(lambda: find(str(folder), Stretch(target, method=method)).window)
        refused_in_a_line(lambda: setting_of(find(str(folder)).config, None, target))
        refused_in_a_line(planned_model)


ADAPTERS = [
    {
        "peft_type": "LORA",
        "base_model_name_or_path": "none/such",
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
PATTERN = "a(.*+|)\\w?[]{2}^$"


@kind(share=150_000, few=100)
def settings_of_adapters(case: random.Random, at: Place) -> None:
    folder = at.folder / "adapter"
    folder.mkdir(exist_ok=True)
    patterns = ["".join(case.choices(PATTERN, k=case.randrange(1, 12))) for _ in range(3)]
    tree = damaged(case, ADAPTERS, [*patterns, {patterns[0]: 1}])
    (folder / "adapter_config.json").write_bytes(as_json(case, tree))
    refused_in_a_line(lambda: read_settings(folder).scaling("model.layers.11.self_attn.q_proj", 4))
    refused_in_a_line(lambda: Run(folder).base)


RUN = {
    "original": 64,
    "tokens": 9,
    "seconds": 2.5,
    "peak_memory": 3,
    "loss": 1.0,
    "versions": {"a": "1"},
    "python": "3",
    "commit": None,
    "hardware": "h",
    "origin": {"place": "/x", "commit": None, "weights": "0", "tokenizer": "0", "data": "0"},
}
LINE = {"step": 1, "loss": 1.0, "learning_rate": 1e-3, "tokens": 8, "seconds": 1.0}


@kind(share=150_000, few=100)
def what_runs_say_of_themselves(case: random.Random, at: Place) -> None:
    (at.folder / "run.json").write_bytes(as_json(case, damaged(case, [RUN])))
    refused_in_a_line(lambda: read_provenance(at.folder))
    refused_in_a_line(lambda: read_origin(at.folder))
    lines = b"\n".join(as_json(case, each) for each in (LINE, damaged(case, [LINE]), {**LINE, "step": 3}))
    (at.folder / "training.jsonl").write_bytes(lines)
    refused_in_a_line(lambda: read_training_log(at.folder / "training.jsonl"))


INDEX = {"metadata": {"total_size": 9}, "weight_map": {"a.weight": "model.safetensors", "b": "m-1.safetensors"}}


@kind(share=120_000, few=100)
def indexes_of_weights(case: random.Random, at: Place) -> None:
    (at.folder / "index.json").write_bytes(as_json(case, damaged(case, [INDEX])))
    refused_in_a_line(lambda: read_index(at.folder / "index.json"))


HEADER = {
    "__metadata__": {"format": "pt"},
    "base_model.model.q_proj.lora_A.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "base_model.model.q_proj.lora_B.weight": {"dtype": "BF16", "shape": [3, 2], "data_offsets": [24, 36]},
    "base_model.model.embed_tokens.weight": {"dtype": "F32", "shape": [3], "data_offsets": [36, 48]},
}


@kind(share=60_000, few=50)
def headers_of_weights(case: random.Random, at: Place) -> None:
    folder = at.folder / "weights"
    if not folder.exists():
        folder.mkdir()
        shutil.copy(at.model / "config.json", folder)
        (folder / "adapter_config.json").write_text(json.dumps(ADAPTERS[0]))
    header = as_json(case, damaged(case, [HEADER], ("F64", "I64", "F8_E4M3", [0, 24], [48, 0], [2**62, 2**63])))
    size = case.choice([len(header)] * 9 + [0, 1, 2**31, 2**63 - 1, 2**64 - 1])
    content = size.to_bytes(8, "little") + header + bytes(48)
    for name in ("model.safetensors", "adapter_model.safetensors"):
        (folder / name).write_bytes(content)
    if "base" not in vars(headers_of_weights):
        headers_of_weights.base = find_base(str(folder))  # type: ignore[attr-defined]
    base = headers_of_weights.base  # type: ignore[attr-defined]
    refused_in_a_line(lambda: weights_digest(base))
    refused_in_a_line(lambda: base_shards(base))
    refused_in_a_line(lambda: read_adapter(folder, read_settings(folder)))


SCORES = [
    ("perplexity", perplexity(9.0, 7.0)),
    ("passkey", passkey(96)),
    ("benchmarks", benchmarks(0.5, None)),
    ("summarization", summarization(40.0, 20.0, 30.0)),
]


@kind(share=120_000, few=80)
def scores(case: random.Random, at: Place) -> None:
    name, content = case.choice(SCORES)
    file = at.folder / f"{name}.json"
    file.write_bytes(as_json(case, damaged(case, [content])))

    def read() -> None:
        if (found := read_scores(file)) is not None:
            assert summary(found)[0]
            assert side_by_side(name, {"a": found, "b": found})

    refused_in_a_line(read)


def one_result(case: random.Random, at: Place, names: int) -> str:
    name, content = case.choice(SCORES[:names])
    for file in (at.run / "scores").iterdir():
        file.unlink()
    (at.run / "scores" / f"{name}.json").write_bytes(as_json(case, damaged(case, [content])))
    return name


@kind(share=10_000, few=20)
def runs_with_scores(case: random.Random, at: Place) -> None:
    """As cards, comparisons and `eval all` show them."""
    name = one_result(case, at, len(SCORES))

    def shown() -> None:
        found = measured_run(at.run)
        list(missing_baselines(found))
        list(score_lines(found))
        eval_results(found)
        kept = read_scores(at.run / "scores" / f"{name}.json")
        if name in MEASUREMENTS and isinstance(kept, MEASUREMENTS[name].kind):
            out.print(MEASUREMENTS[name].table(kept))

    with quietly():
        refused_in_a_line(shown)


@kind(share=300, few=3)
def reports_and_pictures(case: random.Random, at: Place) -> None:
    one_result(case, at, 2)
    refused_in_a_line(lambda: write_report([Run(at.run)], html=True))


RECIPE = Recipe.model_validate(
    {
        "model": {"name": "builtin:tiny"},
        "context": {"target": 1024},
        "data": {"source": ["builtin:stdlib", {"name": "a.txt", "weight": 2}]},
        "evaluation": {"perplexity": {}, "passkey": {}},
    }
)
WHOLE = yaml.safe_load(dump_recipe(RECIPE))
SHORT = RECIPE.model_dump(mode="json", exclude_defaults=True)
SECTIONS = [{**SHORT, section: WHOLE[section]} for section in WHOLE if isinstance(WHOLE[section], dict)]


@kind(share=40_000, few=40)
def recipes(case: random.Random, at: Place) -> None:
    tree = damaged(case, [SHORT, *SECTIONS], ("keep", "direct", "full", "qlora", "builtin:recall"))
    written = json.dumps(tree, ensure_ascii=case.random() < 0.5).encode("utf-8", "ignore")
    (at.folder / "r.yaml").write_bytes(damaged_bytes(case, written) if case.random() < 0.1 else written)
    refused_in_a_line(lambda: load_recipe(at.folder / "r.yaml"))


@kind(share=4_000, few=20)
def plans(case: random.Random, at: Place) -> None:
    tree = damaged(case, [WHOLE])
    (at.folder / "p.yaml").write_bytes(json.dumps(tree).encode())

    def shown() -> None:
        plan = planned(at.folder / "p.yaml")
        assert plan_lines(plan) + [str(row) for row in component_lines(plan)]
        assert json.dumps(plan.as_json())

    refused_in_a_line(shown)


YAML = "ab:{}[]&*!<>-?|'\"#%@,. \n\t0129exob_\0\x85\u2028é"
TAGS = [f"{tag} " for tag in "!!int !!timestamp !!bool !!float !!map !!set !!binary <<: extends:_x a: &a *a".split()]


@kind(share=40_000, few=40)
def texts_that_are_hardly_yaml(case: random.Random, at: Place) -> None:
    parts = [
        case.choice(TAGS) if case.random() < 0.4 else "".join(case.choices(YAML, k=case.randrange(40)))
        for _ in range(case.randrange(1, 6))
    ]
    (at.folder / "t.yaml").write_text("".join(parts), encoding="utf-8")
    refused_in_a_line(lambda: load_recipe(at.folder / "t.yaml"))


@kind(share=20_000, few=40)
def changes_on_the_command_line(case: random.Random, at: Place) -> None:
    (at.folder / "good.yaml").write_text(json.dumps(SHORT))
    section = case.choice([each for each in WHOLE if isinstance(WHOLE[each], dict)])
    key = case.choice(
        (f"{section}.{case.choice(list(WHOLE[section]))}", section, text(case), f"{section}.{text(case)}")
    )
    given = case.choice((str(value(case)), "".join(case.choices(YAML, k=case.randrange(20))), case.choice(ODD_TEXT)))
    refused_in_a_line(lambda: load_recipe(at.folder / "good.yaml", [f"{key}={given}"]))


ROWS = [
    {"question": "q", "passage": "p", "answer": True},
    {"goal": "g", "sol1": "a", "sol2": "b"},
    {"article": "a", "question": "q", "options": list("abcd"), "answer": "A"},
    {"article": "a", "questions": ["q"], "options": [list("abcd")], "answers": ["A"]},
    {"sentence": "a _ b", "option1": "a", "option2": "b", "answer": "1"},
]


@kind(share=60_000, few=50)
def files_of_benchmarks(case: random.Random, at: Place) -> None:
    (at.folder / "dev.jsonl").write_bytes(as_json(case, damaged(case, ROWS)) + b"\n")
    (at.folder / "dev-labels.lst").write_text(case.choice(("0\n", "0\n", "1", "", "x\n", "0\n1\n", "-1\n", "\0")))
    task = case.choice(list(FORMATS))
    refused_in_a_line(lambda: read_examples(task, at.folder / "dev.jsonl"))


TEXTS = [{"text": "a b", "summary": "c"}, {"text": "\u2028 d", "id": 3}]
TABLE = b'text,summary\n"a b",c\n"d\ne","f"\n'


@kind(share=40_000, few=50)
def files_of_texts(case: random.Random, at: Place) -> None:
    suffix = case.choice((".jsonl", ".csv", ".txt"))
    lines = b"\n".join(as_json(case, tree) for tree in (TEXTS[0], damaged(case, TEXTS)))
    content = damaged_bytes(case, TABLE) if suffix == ".csv" else damaged_bytes(case, lines)
    file = at.folder / f"texts{suffix}"
    file.write_bytes(lines if suffix == ".jsonl" else content)
    source = Source(name=str(file))
    refused_in_a_line(lambda: list(find_corpus(source).documents()))
    if suffix != ".txt":
        refused_in_a_line(lambda: list(find_table(source).rows(["text", "summary"])))


def original(at: Place, name: str, make: Callable[[Path], object]) -> bytes:
    """The bytes of a file that is made once, to damage copies of."""
    file = at.folder / "whole" / name
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        make(file)
    return file.read_bytes()


def write_parquet(file: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a b", "c\n"] * 9, "number": list(range(18))}), file)


@kind(share=3_000, few=10)
def parquet_files(case: random.Random, at: Place) -> None:
    file = at.folder / "t.parquet"
    file.write_bytes(damaged_bytes(case, original(at, "t.parquet", write_parquet)))
    refused_in_a_line(lambda: list(find_corpus(Source(name=str(file))).documents()))


PDF = b"""%PDF-1.4
1 0 obj <</Type /Catalog /Pages 2 0 R>> endobj
2 0 obj <</Type /Pages /Kids [3 0 R] /Count 1>> endobj
3 0 obj <</Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Contents 4 0 R
  /Resources <</Font <</F <</Type /Font /Subtype /Type1 /BaseFont /Helvetica>>>>>>>> endobj
4 0 obj <</Length 30>> stream
BT /F 9 Tf (some text) Tj ET
endstream endobj
trailer <</Root 1 0 R>>
"""


@kind(share=3_000, few=10)
def pdf_files(case: random.Random, at: Place) -> None:
    pytest.importorskip("pypdf")
    (at.folder / "d.pdf").write_bytes(damaged_bytes(case, PDF))
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    refused_in_a_line(lambda: read_document(str(at.folder / "d.pdf")))


@kind(share=1_000, few=5)
def gguf_files(case: random.Random, at: Place) -> None:
    whole = original(at, "m.gguf", lambda file: write_gguf(at.model, file, "F32"))
    header = 12_000 if case.random() < 0.8 else len(whole)
    file = at.folder / "d.gguf"
    file.write_bytes(damaged_bytes(case, whole[:header]) + whole[header:])
    with quietly():
        refused_in_a_line(lambda: find_base(str(file)))


@kind(share=20_000, few=30)
def journals_and_predictions(case: random.Random, at: Place) -> None:
    folder = at.folder / "journal"
    shutil.rmtree(folder, ignore_errors=True)
    depth = PasskeyDepth(k=1, success_rate=1.0, trials=1)
    Journal(folder).add("a", depth.model_dump())
    [file] = folder.iterdir()
    file.write_bytes(damaged_bytes(case, file.read_bytes()) + as_json(case, damaged(case, [["b", {"k": 1}, 3]])))
    assert Journal(folder).measure(PasskeyDepth, ["a"], lambda _: depth) == {"a": depth}
    file = at.folder / "predictions.jsonl"
    file.unlink(missing_ok=True)
    Predictions(file, {}).add("a", prediction="b", reference="c", ended=True)
    file.write_bytes(damaged_bytes(case, file.read_bytes()) + as_json(case, damaged(case, [{"id": "b", "key": ""}])))
    refused_in_a_line(lambda: Predictions(file, {}))


@kind(share=4_000, few=10)
def checkpoints(case: random.Random, at: Place) -> None:
    staging = at.folder / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    names = ("checkpoint-1", "checkpoint-2")
    (staging / "checkpoints").mkdir(parents=True)
    (staging / "training.jsonl").write_text(json.dumps(LINE) + "\n")
    for name in names:
        folder = staging / "checkpoints" / name
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(range(64)))
        mark_complete(folder)
    file = staging / "checkpoints" / case.choice(names) / case.choice(("weights", "complete", "training.jsonl"))
    before = file.read_bytes()
    file.write_bytes(damaged_bytes(case, before))
    after = file.read_bytes()
    found, _ = checkpoint_to_resume(staging)
    assert found
    # An empty file is of an earlier version; sums may be written with other blanks.
    assert found != file.parent or after in (before, b"") or json.loads(after) == json.loads(before)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SPLIT = {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated", "invert": False}
PARTS: tuple[Any, ...] = (
    SPLIT,
    {**SPLIT, "pattern": {"Regex": "(a+)+$"}},
    {"type": "Replace", "pattern": {"String": ""}, "content": "a"},
    {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "a" * 99},
    {"type": "Sequence", "normalizers": []},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X", "type_id": 0}}], "pair": []},
    {"type": "Fuse"},
    {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]},
    {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "x", "continuing_subword_prefix": "##"},
    {"content": "</s>", "lstrip": True, "special": True},
    {"3": {"content": "</s>", "special": True}},
)  # fmt: skip


def small_tokenizer() -> dict[str, Any]:
    """A tokenizer of bytes with two merges, and the settings beside it."""
    vocab = {name: number for number, name in enumerate(["<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "ab", "abc"])}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    frame = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": name, **special} for number, name in enumerate(("<s>", "</s>"))],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, PARTS[5]]},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": frame},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "vocab": vocab,
            "merges": [["a", "b"], ["ab", "c"]],
        },
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {
        "model_max_length": 64,
        "add_bos_token": True,
        "added_tokens_decoder": {"1": tokenizer["added_tokens"][1]},
    }
    return dict(zip(TOKENIZER_FILES, (tokenizer, settings, {"bos_token": "<s>", "eos_token": "</s>"}), strict=True))


@kind(share=10_000, few=60)
def files_of_tokenizers(case: random.Random, at: Place) -> None:
    folder = at.folder / "tokenizer"
    if not folder.exists():
        folder.mkdir()
        shutil.copy(at.model / "config.json", folder)
    trees, which = small_tokenizer(), case.choice(TOKENIZER_FILES)
    for name, tree in trees.items():
        (folder / name).write_bytes(
            as_json(case, damaged(case, [tree], PARTS)) if name == which else json.dumps(tree).encode()
        )

    def read() -> None:
        tokenizer = load_tokenizer(folder, 64, vocabulary=1024)
        for each in ("a" * 300 + " abc </s> é\n\t", "\0\u2028x" * 40, ""):
            assert all(0 <= token < 1024 for token in tokenizer(each, verbose=False)["input_ids"])

    with quietly():
        refused_in_a_line(read)


@kind(share=600, few=8)
def merges(case: random.Random, at: Place) -> None:
    run, merged = at.folder / "to-merge", at.folder / "merged"
    for each in (run, merged):
        shutil.rmtree(each, ignore_errors=True)
    shutil.copytree(at.run, run)
    name = case.choice(("adapter_config.json", "adapter_model.safetensors", "config.json", "run.json", "recipe.yaml"))
    content = (run / name).read_bytes()
    by_key = name.endswith(".json") and case.random() < 0.7
    (run / name).write_bytes(
        json.dumps(damaged(case, [json.loads(content)])).encode() if by_key else damaged_bytes(case, content)
    )
    refused_in_a_line(lambda: merge(run, merged, verify=False))
    assert not merged.exists() or {"config.json", "model.safetensors"} <= {each.name for each in merged.iterdir()}
    assert not list(at.folder.glob(".merged*"))
    with quietly():
        refused_in_a_line(lambda: adapter_base(run))


WORDS = (
    "show plan recipes eval perplexity passkey all theory merge report push summarize train env r.yaml builtin:tiny . "
    "/ run --help --json --output --gpu H100 cpu --dry-run --target --original --seed --windows --base --html --keys "
    "--markdown training.steps=3 context.target=2048 model.name=. data.source=. =".split()
)
# Commands that only read: the fuzz writes nothing, and loads no weights.
COMMANDS = tuple(
    map(str.split, ("show", "plan", "recipes", "train --dry-run", "merge", "report", "eval all", "eval", "push"))
)


@kind(share=4_000, few=30)
def command_lines(case: random.Random, at: Place) -> None:
    here = at.folder / "here"
    here.mkdir(exist_ok=True)
    (here / "r.yaml").write_text(json.dumps(SHORT))
    words = [
        case.choice((case.choice(WORDS), case.choice(WORDS), case.choice(ODD_TEXT), text(case)))
        for _ in range(case.randrange(6))
    ]
    # The system passes no NUL and no half of a character.
    given = [
        word.replace("\0", "").encode("utf-8", "ignore").decode("utf-8") for word in (*case.choice(COMMANDS), *words)
    ]
    written, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    printed = contextlib.redirect_stdout(written), contextlib.redirect_stderr(err)
    called = contextlib.chdir(here), patch.object(sys, "argv", ["pi-lora", *given])
    with printed[0], printed[1], called[0], called[1], pytest.raises(SystemExit) as ending:
        cli.main()
    assert ending.value.code in (None, 0, 2), given
    if ending.value.code == 2:
        assert err.getvalue().strip(), given
    assert "Traceback" not in err.getvalue()
    assert not {"\x1b", "\x07", "\r"} & set(err.getvalue()), given


class TooLongError(BaseException):
    """Not an Exception, which a reader might take for its own."""


@pytest.fixture(scope="module")
def at(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    run = make_run(small_model, tmp_path_factory.mktemp("run") / "run")
    return Place(tmp_path_factory.mktemp("fuzz"), small_model, run)


@pytest.fixture
def limits() -> Iterator[None]:
    """A case that takes too long is interrupted, and none can take the machine's memory."""

    def too_long(*_: object) -> None:
        raise TooLongError(f"takes more than {LONGEST_WAIT} seconds")

    handler = signal.signal(signal.SIGALRM, too_long)
    data = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + 4 * MOST_MEMORY, limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limit)
    signal.signal(signal.SIGALRM, handler)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def numbers_of(name: str) -> range:
    which, _, number = ONE.partition(":")
    if number:
        return range(int(number), int(number) + 1) if which == name else range(0)
    return range(max(KINDS[name].few, KINDS[name].share * MANY // 1_000_000))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("limits")
def test_it_is_read_or_refused(name: str, at: Place, record_property: Callable[[str, Any], None]) -> None:
    defects: dict[str, str] = {}
    started, before, tried, longest = time.process_time(), peak(), 0, 0.0
    for number in numbers_of(name):
        began = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT)
        try:
            KINDS[name].attempt(random.Random(f"{name}:{number}"), at)
        except (KeyboardInterrupt, pytest.skip.Exception):
            raise
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = next(
                (f"{each.filename}:{each.lineno}" for each in reversed(frames) if "pi_lora" in each.filename), ""
            )
            defects.setdefault(where, f"{name}:{number}: {type(error).__name__}: {str(error)[:300]!r} at {where}")
            if len(defects) >= MOST_DEFECTS:
                break
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        tried, longest = tried + 1, max(longest, time.process_time() - began)
        assert longest < LONGEST, f"{name}:{number}: takes {longest:.0f} seconds"
        assert peak() - before < MOST_MEMORY, f"{name}:{number}: takes a gigabyte"
    record_property("tried", (f"fuzz: {name}", tried, time.process_time() - started, longest, peak() - before))
    assert not defects, "\n".join(defects.values())
