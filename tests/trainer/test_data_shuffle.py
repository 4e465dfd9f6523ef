"""Random orders generated in chunks: the order of random words, whatever the chunk size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiers import extra

from stoker.trainer.data.datasets import memory_mapped
from stoker.trainer.data.datasets.memory_mapped import DocumentRange, MappedTraining
from stoker.trainer.data.datasets.shuffle import sequential_indices, shuffled_indices
from stoker.trainer.data.sources.index_cache import IndexCache
from stoker.trainer.data.sources.indexed_tokens import IndexedReader, IndexedWriter


def _words() -> np.random.Philox:
    return np.random.Philox(key=np.array([3, 4], np.uint64))


@pytest.mark.parametrize(
    ("count", "piece"), [(1, 1), (1, 8), (7, 3), (1000, 64), (1000, 1000), *extra((2_300_000, 700_000))]
)
def test_the_order_is_that_of_the_words(count: int, piece: int) -> None:
    rows = list(shuffled_indices(_words, count, piece))
    assert len(rows) == -(-count // piece)
    np.testing.assert_array_equal(np.concatenate(rows), np.argsort(_words().random_raw(count), kind="stable"))
    if count > 100_000:
        assert max(map(len, rows)) < 1.01 * count / len(rows)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_does_not_depend_on_the_pieces_it_is_made_of(
    shuffle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.random.default_rng(0).integers(0, 30, 200)
    with IndexedWriter(tmp_path / "set", np.uint16) as writer:
        for number, length in enumerate(lengths):
            writer.add_document(np.full(length, number))
        writer.finish()
    reader = IndexedReader(tmp_path / "set")

    def samples(cache: IndexCache | None) -> MappedTraining:
        source = DocumentRange(reader, 3, reader.documents, 1000)
        return MappedTraining(source, 7, 5, shuffle_documents=shuffle, cache=cache)

    whole = samples(None)
    count = 3 * whole.samples
    expected = whole.batch(0, count).tokens
    monkeypatch.setattr(memory_mapped, "shuffled_indices", partial(shuffled_indices, chunk_size=11))
    monkeypatch.setattr(memory_mapped, "sequential_indices", partial(sequential_indices, chunk_size=11))
    for cache in (None, IndexCache(tmp_path / "cache")):
        assert torch.equal(samples(cache).batch(0, count).tokens, expected)


def test_nothing_is_left_of_an_index_that_cannot_be_made(tmp_path: Path) -> None:
    def pieces() -> Iterator[tuple[str, NDArray[Any]]]:
        yield "order", np.arange(4)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        IndexCache(tmp_path).arrays({}, {"order": (np.dtype(np.int32), (9,))}, pieces)
    assert not list(tmp_path.iterdir())


def test_in_order() -> None:
    assert [row.tolist() for row in sequential_indices(7, 3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_nothing_to_order() -> None:
    assert not list(shuffled_indices(_words, 0))
    assert not list(sequential_indices(0))
