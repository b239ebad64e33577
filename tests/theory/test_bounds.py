"""The bounds of the paper's section 2: its numbers, its claims on any coefficients, and where they fail."""

import math
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import refused
from pi_lora.errors import ScalingError
from pi_lora.theory import bounds
from pi_lora.theory.bounds import fit_noise

dims = st.integers(1, 32).map(lambda half: 2 * half)
bases = st.floats(1.5, 1e7)
seeds = st.integers(0, 2**32 - 1)
reach = st.floats(0, 4096)


def random_h(head_dim: int, seed: int) -> bounds.Complexes:
    random = np.random.default_rng(seed)
    size = head_dim // 2
    return random.standard_normal(size) + 1j * random.standard_normal(size)


def aligned(head_dim: int, theta: float, s: float, seed: int) -> bounds.Complexes:
    """Coefficients of size 1 that all point the same way at the distance `s`, so that the score peaks there."""
    sizes = np.sign(np.random.default_rng(seed).random(head_dim // 2) - 0.1)
    return sizes * np.exp(-1j * s * bounds.frequencies(head_dim, theta))


def test_the_sum_of_eqn_8_exceeds_head_dim_up_to_distance_4096() -> None:
    """At every whole distance and at eighths; not at 32,768, though the paper says it of every distance."""
    assert bounds.partial_sums(128, 1e4, np.arange(0, 4096.1, 1 / 8)).min() > 128
    assert bounds.partial_sums(128, 1e4, np.arange(32768)).min() < 0.63 * 128


def off_the_chord(h: bounds.Complexes, s: float, theta: float) -> float:
    """The difference of a score from the chord between the whole distances around `s` (Eqn. 6)."""
    below, share = math.floor(s), s % 1
    score, left, right = bounds.attention_score(h, [s, below, below + 1], theta)
    return float(abs(score - (1 - share) * left - share * right))


@given(dims, bases, reach, seeds)
@settings(max_examples=60, deadline=None)
def test_no_score_exceeds_its_bounds(head_dim: int, theta: float, s: float, seed: int) -> None:
    for h in (random_h(head_dim, seed), aligned(head_dim, theta, s, seed)):
        largest = abs(h).max()
        within = largest * bounds.interpolation_bound(head_dim, theta, s)
        assert off_the_chord(h, s, theta) <= within + 1e-9 * head_dim
        score = abs(bounds.attention_score(h, [s], theta))[0]
        assert score <= 2 * largest * bounds.partial_sums(head_dim, theta, s) * (1 + 1e-9)


@pytest.mark.parametrize(("head_dim", "theta"), [(128, 1e4), (64, 1e4), (128, 5e5), (32, 500.0)])
def test_the_papers_interpolation_bound_is_exceeded(head_dim: int, theta: float) -> None:
    """By coefficients whose score bends most between the distances 0 and 1, with its peak half-way."""
    h = np.exp(-0.5j * bounds.frequencies(head_dim, theta))
    difference = off_the_chord(h, 0.5, theta)
    papers = bounds.interpolation_bound(head_dim, theta, 0.5, papers=True)
    proven = bounds.interpolation_bound(head_dim, theta, 0.5)
    assert papers < difference < proven
    if (head_dim, theta) == (128, 1e4):
        assert (difference, papers, proven) == pytest.approx((0.4939, 0.4343, 0.4998), abs=5e-5)
    assert difference == pytest.approx(sum(1 - math.cos(each / 2) for each in bounds.frequencies(head_dim, theta)))


@given(dims, bases)
def test_the_curvature_equals_its_closed_form(head_dim: int, theta: float) -> None:
    assert bounds.curvature(head_dim, theta) == pytest.approx((1 - theta**-2) / (1 - theta ** (-4 / head_dim)))


@given(seeds, st.integers(0, 500), st.integers(0, 500))
@settings(deadline=None)
def test_the_attention_score_equals_the_product_of_rotated_vectors(seed: int, m: int, n: int) -> None:
    """Eqn. 2: rotated by the angles of the interpolation itself, only the distance counts."""
    query, key = np.random.default_rng(seed).standard_normal((2, 8))

    def rotated(vector: bounds.Reals, position: int) -> bounds.Complexes:
        return (vector[::2] + 1j * vector[1::2]) * np.exp(1j * position * 100.0 ** (-np.arange(0, 8, 2) / 8))

    score = (rotated(query, m) * rotated(key, n).conj()).sum().real
    h = rotated(query, 0) * rotated(key, 0).conj()
    assert bounds.attention_score(h, [m - n], 100.0)[0] == pytest.approx(score, abs=1e-9)


def test_a_fit_is_small_inside_its_window_and_explodes_beyond() -> None:
    inside, between = np.arange(2048.0), np.arange(25, 75, 1 / 8)
    beyond = np.arange(2048.0, 4096.0)
    for seed in range(3):
        score = partial(bounds.attention_score, fit_noise(128, 1e4, 2048, seed)[1], theta=1e4)
        assert abs(score(inside)).max() < 1.5
        assert abs(score(between)).max() < 1.5
        assert abs(score(beyond)).max() > 8000


@pytest.mark.parametrize(
    ("setting", "option"),
    [((3, 1e4, 16, 32), "--head-dim"), ((8, 1.0, 16, 32), "--theta"), ((8, 1e4, 32, 32), "--target")],
)
def test_a_setting_without_frequencies_or_extension_is_refused(setting: tuple[Any, ...], option: str) -> None:
    with refused(ScalingError, f"{option}: "):
        bounds.Setting(*setting)


def test_bounds_need_no_torch() -> None:
    """`pi-lora theory` answers in seconds."""
    modules = "pi_lora.theory.bounds, pi_lora.theory.figures"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
