import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pi_lora.data.packing import skip_positions


@given(st.integers(2, 64), st.integers(0, 500), st.integers(2, 8), st.integers(0, 10**6))
def test_positions_rise_within_the_target_and_skip_between_chunks(
    original: int, further: int, chunks: int, seed: int
) -> None:
    chunks = min(chunks, original)
    positions = skip_positions(random.Random(seed), original, original + further, chunks)
    assert len(positions) == original
    assert positions[0] == 0
    assert all(before < after for before, after in pairwise(positions))
    assert positions[-1] < original + further
    assert sum(after - before > 1 for before, after in pairwise(positions)) <= chunks - 1
    assert positions == skip_positions(random.Random(seed), original, original + further, chunks)


def test_biases_are_uniform_over_what_is_left() -> None:
    rng = random.Random(0)
    biases = [skip_positions(rng, 32, 132, 2)[-1] - 31 for _ in range(20000)]
    assert abs(sum(biases) / len(biases) - 50) < 1
    assert 150 < biases.count(0) < 250
    assert 150 < biases.count(100) < 250
