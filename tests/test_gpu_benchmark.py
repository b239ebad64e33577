"""benchmarks/gpu.py in its tiny shape: every part runs on a CPU, and becomes a table."""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
import gpu  # noqa: E402
import tables  # noqa: E402
from on_gpu import page, parts  # noqa: E402
from on_gpu.longest import lengths_to_try  # noqa: E402
from on_gpu.setting import setting_of  # noqa: E402
from pages import block  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny shape is for a CPU")
CEILING = {"product_side": 8192, "product": 8e14, "copy": 4e12, "attention": {"SDPA, flash": 5e14}}


def rows_of(part: str) -> list[dict[str, Any]]:
    options = argparse.Namespace(parts=[part], shape=parts.TINY, caps=[None], tries=2)
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        # The neighbour is called as its documentation says, by names that transformers is about to drop.
        warnings.filterwarnings("ignore", category=FutureWarning)
        for job in parts.jobs(options):
            parts.run(job, parts.TINY, lambda row, job=job: rows.append({**job, **row}))
    return json.loads(json.dumps(rows))


def table_of(part: str, rows: list[dict[str, Any]]) -> list[str]:
    return [line for line in page.tables({part: rows}) if line.startswith("| ")][1:]


@pytest.mark.parametrize(
    ("part", "first_cells"),
    [
        ("training", [f"| {method} | 2 |" for method in parts.METHODS for _ in range(2)]),
        (
            "neighbours",
            ["| pi-lora | lora |", "| TRL + PEFT | lora |", "| pi-lora | qlora |", "| TRL + PEFT | qlora |"],
        ),
        ("levers", ["| none |", "| `training.mlp_chunk_tokens: 32`", "| `training.activation_checkpointing: false`"]),
        ("evaluation", ["| perplexity at 64, stride 16 |", "| 2 x 1 passkeys in 256 tokens |"]),
    ],
)
def test_every_part_runs_and_becomes_a_table(part: str, first_cells: list[str]) -> None:
    if part != "evaluation":
        pytest.importorskip("bitsandbytes", reason="pip install pi-lora[qlora]")
    rows = rows_of(part)
    lines = table_of(part, rows)
    assert len(lines) >= len(first_cells)
    assert all(line.startswith(cells) for line, cells in zip(lines, first_cells, strict=False))
    assert all(row["tokens_per_second"] > 0 and row["steps"] == 3 for row in rows if "contender" in row)


def test_the_longest_part_tells_what_ran() -> None:
    pytest.importorskip("bitsandbytes", reason="pip install pi-lora[qlora]")
    rows = rows_of("longest")
    ran = max(row["tokens"] for row in rows)
    assert len(rows) == 2
    assert table_of("longest", rows) == [f"| the whole card | {ran:,} | not found |  |"]


@pytest.mark.slow
def test_the_ceilings_and_the_demo_run() -> None:
    assert rows_of("ceilings")[0]["product"] > 0
    assert "2 steps" in "".join(page.tables({"demo": rows_of("demo")}))


def test_a_table_shows_utilization_and_how_far_the_plan_was_off() -> None:
    """A step of one second that needs 3e14 operations where the card does 8e14, and 1e14 more for recomputation."""
    row = {
        "contender": "pi-lora",
        "method": "lora",
        "layers": 32,
        "tokens": 16384,
        "sequences": 1,
        "flops": {"forward": 1e14, "recomputation": 1e14, "backward": 2e14},
        "planned_bytes": 22 * 2**30,
        "peak_bytes": 20 * 2**30,
        "seconds_a_step": 1.0,
        "tokens_per_second": 16384.0,
    }
    gone = {**row, "tokens": 65536, "out_of_memory": True}
    lines = [
        line for line in page.tables({"ceilings": [CEILING], "training": [row, gone]}) if line.startswith("| lora")
    ]
    assert lines == [
        "| lora | 32 | 1 x 16,384 | 16,384 | 37.5% | 50.0% | 20.0 GiB | 22.0 GiB | +10% |",
        "| lora | 32 | 1 x 65,536 | out of memory |  |  |  | 22.0 GiB |  |",
    ]


def test_a_cap_stands_beside_what_is_published() -> None:
    rows = [{"cap": 24.0, "tokens": 90_112}, {"cap": 24.0, "tokens": 98_304, "out_of_memory": True}]
    assert table_of("longest", rows) == ["| 24 GB | 90,112 | 98,304 | 78,475 |"]


@given(st.integers(1, 10_000), st.integers(1, 12_000), st.integers(1, 12))
def test_the_search_ends_between_what_ran_and_what_did_not(first: int, capacity: int, tries: int) -> None:
    search, tried = lengths_to_try(first, 1, tries), []
    length = next(search)
    while True:
        tried.append(length)
        try:
            length = search.send(length <= capacity)
        except StopIteration:
            break
    assert len(tried) <= tries
    assert len(set(tried)) == len(tried)
    ran = [length for length in tried if length <= capacity]
    failed = [length for length in tried if length > capacity]
    assert not ran or not failed or max(ran) < min(failed)


def test_a_job_that_fails_is_a_row_that_says_so() -> None:
    """An unknown shape makes the process end with an error, and the others go on."""
    job = {"part": "levers", "changes": {}}
    (row,) = gpu.in_a_process(job, "no/such-model")
    assert "no/such-model" in row["failed"]
    assert any("Failed" in line for line in page.tables({"levers": [row]}))


def options_for(*named: str, resume: bool = False) -> argparse.Namespace:
    return argparse.Namespace(parts=list(named), shape=parts.TINY, caps=[None], tries=2, resume=resume)


def test_parts_are_kept_only_beside_those_of_the_same_card() -> None:
    demo = [{"seconds": 1.0}]
    first = {**gpu.begun({}, options_for("demo")), "demo": demo, "finished": [{"part": "demo"}]}
    both = gpu.begun(first, options_for("levers"))
    assert (both["demo"], both["levers"], both["finished"]) == (demo, [], first["finished"])
    again = gpu.begun(first, options_for("demo"))
    assert (again["demo"], again["finished"]) == ([], [])
    elsewhere = {**first, "machine": {**first["machine"], "gpu": "another"}}
    assert "demo" not in gpu.begun(elsewhere, options_for("levers"))


def test_rows_are_kept_as_they_come_and_an_interrupted_part_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    work = [job["method"] for job in parts.jobs(options_for("training"))]

    def rows_until(end: str | None) -> Any:
        def rows(job: dict[str, Any], shape: str) -> Any:
            asked.append(job["method"])
            for tokens in (64, 128):
                yield {"method": job["method"], "tokens": tokens}
                if job["method"] == end:
                    raise KeyboardInterrupt

        return rows

    written: list[str] = []
    monkeypatch.setattr(gpu, "in_a_process", rows_until(work[1]))
    options = options_for("training")
    with pytest.raises(KeyboardInterrupt):
        gpu.measure(options, gpu.begun({}, options), lambda found: written.append(json.dumps(found)))
    begun = json.loads(written[-1])
    assert [(row["method"], row["tokens"]) for row in begun["training"]] == [
        (work[0], 64),
        (work[0], 128),
        (work[1], 64),
    ]
    monkeypatch.setattr(gpu, "in_a_process", rows_until(None))
    options = options_for("training", resume=True)
    result = gpu.begun(begun, options)
    gpu.measure(options, result, lambda found: None)
    assert asked == [work[0], work[1], *work[1:]]
    assert [(row["method"], row["tokens"]) for row in result["training"]] == [
        (each, n) for each in work for n in (64, 128)
    ]


def test_shapes_grow_shallow_and_keep_their_widths() -> None:
    whole = setting_of("huggyllama/llama-7b")
    assert (whole.layers, whole.lengths[-1], whole.original) == (32, 65536, 2048)
    assert (whole.with_layers(8).layers, whole.with_layers(8).shape.hidden) == (8, whole.shape.hidden)


def test_pages_of_docs_are_current() -> None:
    for place, name, text in tables.blocks():
        assert block(place, name) == text, f"{place}: run: python benchmarks/tables.py"
