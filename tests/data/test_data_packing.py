import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_lora.data.packing import Tokens, aligned, bfd_split, wrapped

Pack = Callable[[list[Tokens], int], Iterator[Tokens]]
lengths = st.lists(st.integers(0, 40), max_size=40)


def numbered(lengths: list[int]) -> list[Tokens]:
    """Documents of these lengths whose tokens are all different, rising by one within each."""
    return [list(range(1000 * index, 1000 * index + length)) for index, length in enumerate(lengths)]


def cut(documents: list[Tokens], sequences: list[Tokens], length: int) -> int:
    """How many documents that fit into a sequence do not stand in one piece."""
    places = {token: (number, at) for number, sequence in enumerate(sequences) for at, token in enumerate(sequence)}

    def whole(document: Tokens) -> bool:
        number, at = places.get(document[0], (0, length))
        return sequences[number][at : at + len(document)] == document

    return sum(not whole(document) for document in documents if 0 < len(document) <= length)


@given(lengths, st.integers(1, 12))
def test_wrapped_packing_loses_only_the_last_rest(lengths: list[int], length: int) -> None:
    sequences = list(wrapped(numbered(lengths), length))
    flat = list(itertools.chain.from_iterable(numbered(lengths)))
    assert list(itertools.chain.from_iterable(sequences)) == flat[: len(flat) // length * length]
    assert all(len(sequence) == length for sequence in sequences)


@given(lengths, st.integers(1, 12), st.integers(1, 200), st.integers(0, 3))
def test_bfd_split_loses_only_the_last_rest(lengths: list[int], length: int, buffer: int, seed: int) -> None:
    documents = numbered(lengths)
    sequences = list(bfd_split(documents, length, seed, buffer))
    given_back = list(itertools.chain.from_iterable(sequences))
    assert all(len(sequence) == length for sequence in sequences)
    assert set(given_back) <= set(itertools.chain.from_iterable(documents))
    assert len(set(given_back)) == len(given_back) == sum(lengths) // length * length
    assert sequences == list(bfd_split(documents, length, seed, buffer))


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(0, 3))
def test_bfd_split_cuts_at_most_once_a_sequence(lengths: list[int], seed: int) -> None:
    documents = numbered(lengths)
    sequences = list(bfd_split(documents, 12, seed))
    whole = {token for sequence in sequences for token in sequence}
    complete = [document for document in documents if whole.issuperset(document)]
    assert cut(complete, sequences, 12) <= len(sequences)


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda rng: rng.randint(1, 60), id="short"),
        pytest.param(lambda rng: int(rng.lognormvariate(4, 1.5)) + 1, id="some longer than a sequence"),
        pytest.param(lambda rng: rng.choice([70, 90, 110]), id="none that fit together"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_bfd_split_cuts_fewer_documents_than_wrapped(draw: Callable[[random.Random], int], seed: int) -> None:
    rng = random.Random(seed)
    documents = numbered([min(draw(rng), 900) for _ in range(600)])
    by_bfd, by_wrapping = (
        cut(documents, list(packed), 128) for packed in (bfd_split(documents, 128, seed), wrapped(documents, 128))
    )
    assert by_bfd < 0.6 * by_wrapping


def test_bfd_split_keeps_pieces_of_long_documents_contiguous() -> None:
    [first, second, *_] = sorted(bfd_split([list(range(25)), list(range(100, 105))], 10))
    assert first == list(range(10))
    assert second == list(range(10, 20))


def test_bfd_split_does_not_order_sequences_by_size() -> None:
    documents = numbered([20] * 50 + [10] * 100 + [5] * 200)
    sequences = list(bfd_split(documents, 20))
    assert len(sequences) == 150
    alone = [index for index, sequence in enumerate(sequences) if sequence[0] // 1000 < 50]
    assert min(alone) < 25
    assert max(alone) > 125


def test_trl_packs_sequences_of_uneven_length() -> None:
    from datasets import Dataset
    from trl import pack_dataset

    documents = numbered([7, 3, 5, 9, 2, 6, 4, 8])
    for strategy, ours in {"wrapped": wrapped, "bfd_split": bfd_split}.items():
        # As from a corpus of more than one batch; only whole in memory is it one.
        packed = pack_dataset(Dataset.from_dict({"input_ids": documents}), 8, strategy, {"batch_size": 3})
        assert len({len(sequence) for sequence in packed["input_ids"]}) > 2
        assert {len(sequence) for sequence in ours(documents, 8)} == {8}
        assert len(packed) > sum(map(len, documents)) // 8 + 1


def test_aligned_sequences_begin_with_a_document() -> None:
    documents = numbered([7, 5, 12, 3, 3, 3, 3])
    assert [sequence[0] for sequence in aligned(iter(documents), 10)] == [0, 2000, 3000]
