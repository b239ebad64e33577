import itertools

from hypothesis import given
from hypothesis import strategies as st

from pi_lora.data.packing import Tokens, aligned, wrapped


def numbered(lengths: list[int]) -> list[Tokens]:
    """Documents of these lengths whose tokens are all different, rising by one within each."""
    return [list(range(1000 * index, 1000 * index + length)) for index, length in enumerate(lengths)]


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 12))
def test_packing_loses_only_the_last_rest(lengths: list[int], length: int) -> None:
    sequences = list(wrapped(numbered(lengths), length))
    flat = list(itertools.chain.from_iterable(numbered(lengths)))
    assert list(itertools.chain.from_iterable(sequences)) == flat[: len(flat) // length * length]
    assert all(len(sequence) == length for sequence in sequences)


def test_aligned_sequences_begin_with_a_document() -> None:
    documents = numbered([7, 5, 12, 3, 3, 3, 3])
    assert [sequence[0] for sequence in aligned(iter(documents), 10)] == [0, 2000, 3000]
