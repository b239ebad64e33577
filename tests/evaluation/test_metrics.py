"""What tables, cards and the hub are told of each measurement, and what is drawn, on made-up scores."""

import math
from typing import Any

import pytest
from matplotlib.figure import Figure

from pi_lora.evaluation.intervals import wilson
from pi_lora.evaluation.measurement import Metric
from pi_lora.evaluation.suite import MEASUREMENTS, metrics_of, setting_of

HEADER = {"model": "m", "options": {}}
PERPLEXITY: dict[str, Any] = {
    "options": {"data": "novels", "windows": [64, 1024], "stride": 32},
    "data": "novels",
    "bos": "each window",
    "windows": [{"window": 64, "perplexity": 12.5, "tokens": 300}, {"window": 1024, "perplexity": 1234.5, "tokens": 9}],
    "per_document": [
        {
            "name": "a.txt",
            "tokens": 2000,
            "windows": [
                {"window": 64, "perplexity": 12.0, "tokens": 100},
                {"window": 1024, "perplexity": 1200.0, "tokens": 9},
            ],
        },
        {"name": "b.txt", "tokens": 500, "windows": [{"window": 64, "perplexity": 13.0, "tokens": 200}]},
    ],
    "by_position": {
        "window": 1024,
        "bins": [
            {"first": 1, "last": 512, "loss": 2.5, "tokens": 511},
            {"first": 512, "last": 1024, "loss": 2.0, "tokens": 512},
        ],
    },
}
CONTEXT: dict[str, Any] = {
    "options": {"data": "novels", "window": 1024, "short_window": 256, "stride": 64, "key_tokens": "e.json"},
    "window": 1024,
    "documents": 2,
    "documents_too_short": 1,
    "short_window": 256,
    "evaluator": "models/other",
    "per_document": [
        {
            "name": "a.txt",
            "sha256": "",
            "tokens": 300_000,
            "loss": 3.0,
            "gain": 0.03,
            "key_tokens": 10,
            "key_loss": 0.0,
            "key_gain": 2.0,
            "spans": [],
        },
        {
            "name": "b.txt",
            "sha256": "",
            "tokens": 100_000,
            "loss": 3.0,
            "gain": -0.01,
            "key_tokens": 0,
            "key_loss": None,
            "key_gain": None,
            "spans": [],
        },
    ],
    "by_distance": [{"from": 320, "to": 1024, "gain": 0.02, "tokens": 704}],
    "excerpt": [("a", 3.0), (" word", -0.5)],
}
DEPTHS = [
    {"k": 512, "success_rate": 1.0, "trials": 2, "outcomes": [True, True]},
    {"k": 1024, "success_rate": 0.5, "trials": 2, "outcomes": [True, False]},
]
PASSKEY: dict[str, Any] = {
    "options": {"seed": 3, "targets": [512, 1024]},
    "seed": 3,
    "target": 1024,
    "k_max": 1024,
    "depths": DEPTHS,
    "lengths": [
        {"target": 512, "k_max": 0, "depths": [{"k": k, "success_rate": 0.0, "trials": 1} for k in (256, 512)]},
        {"target": 1024, "k_max": 1024, "depths": DEPTHS},
    ],
}
TASK = {"score": 0.75, "samples": 2, "length": 896, "tokens": 1000, "outcomes": [1.0, 0.5]}
RULER: dict[str, Any] = {
    "options": {"seed": 5},
    "lengths": [{"window": 1024, "score": 0.625, "tasks": {"vt": TASK, "cwe": {**TASK, "score": 0.5}}}],
    "effective_length": 0,
}
CHAT: dict[str, Any] = {
    "options": {"data": "chats.jsonl"},
    "chats": 2,
    "left_out": 0,
    "tokens": 40,
    "perplexity": 4.0,
    "divergence": 0.02,
    "per_chat": [
        {"name": "1", "tokens": 30, "perplexity": 4.5, "divergence": 0.01},
        {"name": "2", "tokens": 10, "perplexity": 3.0, "divergence": 0.05},
    ],
}
SUMMARIZATION: dict[str, Any] = {
    "options": {"data": "govreport"},
    "examples": 2,
    "left_out": {},
    "documents_cut": 0,
    "rouge1": 30.0,
    "rouge2": 10.0,
    "rougeL": 20.0,
    "per_example": {"rouge1": [29.0, 31.0], "rouge2": [10.0, 10.0], "rougeL": [19.0, 21.0]},
}
BENCHMARKS: dict[str, Any] = {
    "tasks": {
        "boolq": {"acc": 0.5, "examples": 4, "outcomes": [1, 0, 1, 0]},
        "jnli": {"acc": 0.5, "examples": 1000, "shots": 3},
    }
}
# Heading, text, dataset, name on the hub, and name, value, weight and group of every value.
Row = tuple[str, str, str, str, list[tuple[str, float, float, str]]]
EXPECTED: dict[str, tuple[dict[str, Any], list[Row]]] = {
    "perplexity": (
        PERPLEXITY,
        [
            (
                "perplexity at 64",
                "12.500",
                "novels",
                "perplexity",
                [
                    ("a.txt of 2000 tokens, BOS in each window", 12.0, 100, ""),
                    ("b.txt of 500 tokens, BOS in each window", 13.0, 200, ""),
                ],
            ),
            (
                "perplexity at 1,024",
                "1,234.500",
                "novels",
                "perplexity",
                [("a.txt of 2000 tokens, BOS in each window", 1200.0, 9, "")],
            ),
        ],
    ),
    "passkey": (
        PASSKEY,
        [
            ("k_max at 512", "0 tokens", "passkey retrieval in 512 tokens", "k_max", []),
            ("k_max at 1,024", "1,024 tokens", "passkey retrieval in 1024 tokens", "k_max", []),
            (
                "passkeys retrieved at 1,024",
                "75 % (30 to 95)",
                "passkey retrieval in 1024 tokens",
                "accuracy",
                [
                    ("key 3/0 at 512 of 1024", 1, 1, ""),
                    ("key 3/1 at 512 of 1024", 1, 1, ""),
                    ("key 3/0 at 1024 of 1024", 1, 1, ""),
                    ("key 3/1 at 1024 of 1024", 0, 1, ""),
                ],
            ),
        ],
    ),
    "ruler": (
        RULER,
        [
            (
                "RULER at 1,024",
                "62 % (22 to 91)",
                "RULER, 2 tasks at 1024 tokens",
                "score",
                [
                    ("vt 5 of 896 tokens: 0", 1.0, 1, "vt"),
                    ("vt 5 of 896 tokens: 1", 0.5, 1, "vt"),
                    ("cwe 5 of 896 tokens: 0", 1.0, 1, "cwe"),
                    ("cwe 5 of 896 tokens: 1", 0.5, 1, "cwe"),
                ],
            ),
            ("vt at 1,024", "75 % (20 to 97)", "", "", []),
            ("cwe at 1,024", "50 % (9 to 91)", "", "", []),
            ("effective length (85.6%, 2 of 13 tasks)", "0 tokens", "RULER", "effective length", []),
        ],
    ),
    "context": (
        CONTEXT,
        [
            (
                "gain from distant context at 1,024",
                "0.0200 nats (-0.1707 to 0.2107)",
                "novels",
                "gain from distant context",
                [("a.txt of 300000 tokens", 0.03, 300_000, ""), ("b.txt of 100000 tokens", -0.01, 100_000, "")],
            ),
            ("key tokens of other at 1,024", "0.0025 % (0.0000 to 0.0184)", "", "", []),
            (
                "LongPPL, key tokens of other at 1,024",
                "1.000",
                "novels",
                "LongPPL",
                [("a.txt, 10 key tokens of models/other", 1.0, 10, "")],
            ),
            (
                "LongPPL, key tokens of other at 256",
                "7.389",
                "novels",
                "LongPPL",
                [("a.txt, 10 key tokens of models/other", math.exp(2), 10, "")],
            ),
        ],
    ),
    "chat": (
        CHAT,
        [
            ("chat perplexity", "4.000", "chats.jsonl", "perplexity", [("1", 4.5, 30, ""), ("2", 3.0, 10, "")]),
            (
                "chat KL divergence from the base",
                "0.020 (-0.171 to 0.211)",
                "chats.jsonl",
                "KL divergence",
                [("1", 0.01, 30, ""), ("2", 0.05, 10, "")],
            ),
        ],
    ),
    "summarization": (
        SUMMARIZATION,
        [
            (
                "ROUGE-1",
                "30.00 (17.29 to 42.71)",
                "govreport",
                "rouge1",
                [("example 0", 29.0, 1, ""), ("example 1", 31.0, 1, "")],
            ),
            ("ROUGE-2", "10.00", "govreport", "rouge2", [("example 0", 10.0, 1, ""), ("example 1", 10.0, 1, "")]),
            (
                "ROUGE-L",
                "20.00 (7.29 to 32.71)",
                "govreport",
                "rougeL",
                [("example 0", 19.0, 1, ""), ("example 1", 21.0, 1, "")],
            ),
        ],
    ),
    "benchmarks": (
        BENCHMARKS,
        [
            (
                "boolq (0-shot)",
                "50 % (15 to 85)",
                "boolq",
                "accuracy",
                [(f"boolq {number}", outcome, 1, "") for number, outcome in enumerate((1, 0, 1, 0))],
            ),
            ("jnli (3-shot)", "50.0 % (46.9 to 53.1)", "jnli", "accuracy", []),
        ],
    ),
}
LOWER_IS_BETTER = {"LongPPL", "perplexity", "KL divergence"}


def made(name: str) -> Any:
    return MEASUREMENTS[name].scores.model_validate({**HEADER, **EXPECTED[name][0]})


def row_of(metric: Metric) -> Row:
    values = [(value.name, value.value, value.weight, value.group) for value in metric.values]
    return metric.heading, metric.text, metric.dataset, metric.hub_name, values


def test_every_measurement_has_expected_metrics() -> None:
    assert set(MEASUREMENTS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_metrics_are_named_rounded_and_weighted_alike_everywhere(name: str) -> None:
    metrics = metrics_of(made(name))
    assert [row_of(metric) for metric in metrics] == EXPECTED[name][1]
    for metric in metrics:
        assert metric.higher_is_better == (metric.hub_name not in LOWER_IS_BETTER)
        assert metric.is_ratio == (metric.hub_name in ("perplexity", "LongPPL"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "perplexity",
            "data novels, split test, column text, windows 64/1024, stride 32, BOS in each window, n = 2, n = 1",
        ),
        ("passkey", "targets 512/1024, depths 32, trials 10, seed 3, n = 4"),
        ("benchmarks", "n = 4"),
    ],
)
def test_a_setting_names_what_decides_the_numbers(name: str, words: str) -> None:
    assert setting_of(made(name)) == words


def curves(figure: Any) -> list[tuple[str, list[float], list[float]]]:
    [axes] = figure.axes
    return [
        (str(line.get_label()), [*map(float, line.get_xdata())], [*map(float, line.get_ydata())]) for line in axes.lines
    ]


def drawn(name: str, **labelled: Any) -> list[Any]:
    figures = []
    for panel in MEASUREMENTS[name].panels(labelled):
        figure = Figure()
        panel(figure.subplots())
        figures.append(figure)
    return figures


def test_perplexity_is_drawn_by_window_and_loss_by_position() -> None:
    windows, positions = drawn("perplexity", run=made("perplexity"))
    assert curves(windows) == [("run", [64, 1024], [12.5, 1234.5])]
    assert curves(positions) == [("run", [1, 512], [2.5, 2.0])]
    assert windows.axes[0].get_xlabel() == "window (tokens)"
    assert [tick.get_text() for tick in windows.axes[0].get_xticklabels()] == ["64", "1,024"]
    assert windows.axes[0].get_ylabel() == "perplexity (lower is better)"
    assert positions.axes[0].get_ylabel() == "loss (nats per token)"
    without = made("perplexity").model_copy(update={"by_position": None})
    assert len(drawn("perplexity", run=made("perplexity"), base=without)) == 1
    one = made("perplexity").model_copy(update={"windows": made("perplexity").windows[:1]})
    assert [curves(figure) for figure in drawn("perplexity", run=one)] == [curves(positions)]


def test_context_is_drawn_by_distance_and_as_a_marked_text() -> None:
    distances, text = drawn("context", run=made("context"))
    assert curves(distances) == [("run", [320], [0.02])]
    [axes] = text.axes
    assert "".join(each.get_text() for each in axes.texts) == "aword"
    marked = [(patch.get_x(), patch.get_alpha()) for patch in axes.patches]
    assert marked[:2] == [(0, 0.75), (2, 0.0)]


def test_passkeys_are_drawn_by_distance_and_by_length() -> None:
    distances, lengths = drawn("passkey", run=made("passkey"))
    assert curves(distances) == [
        ("run: k_max 1,024", [512, 1024], [100, 50]),
        ("required for k_max (20%)", [0, 1], [20, 20]),
    ]
    assert distances.axes[0].get_ylim() == (-4, 104)
    axes, bar = lengths.axes
    # The start of the text, which is the farthest key, is at the top.
    assert axes.images[0].get_array().tolist() == [[0, 0.5], [0, 1]]
    assert axes.images[0].get_extent() == [0, 2, 100, 0]
    assert axes.images[0].get_clim() == (0, 1)
    assert bar.get_ylabel() == "share retrieved by run"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["512", "1,024"]
    assert axes.get_xticks().tolist() == [0.5, 1.5]


def test_the_interval_of_a_share_contains_it() -> None:
    """In floats the bounds of 48 of 48 ended at 0.9999999999999999, and no scaling was the best of a probe."""
    for samples in range(1, 400):
        for found in {0, 1, samples // 2, samples}:
            low, high = wilson(found / samples, samples)
            assert 0 <= low <= found / samples <= high <= 1
