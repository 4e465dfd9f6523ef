"""Samples from memory-mapped tokens: every token once per epoch, and pure functions of their position."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples, extra
from torch.utils.data import DataLoader, Dataset

from stoker.trainer.data.datasets.blend import BlendedSamples
from stoker.trainer.data.datasets.memory_mapped import DocumentRange, MappedEvaluation, MappedTraining
from stoker.trainer.data.datasets.samples import IGNORE_INDEX, Batch, EodMaskedSamples
from stoker.trainer.data.sources.index_cache import IndexCache
from stoker.trainer.data.sources.indexed_tokens import IndexedReader, IndexedWriter
from stoker.trainer.utils.errors import EXIT_IO, UserError

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def reader_of(folder: Path, lengths: list[int], name: str = "data") -> IndexedReader:
    """Documents of these lengths whose tokens are 0, 1, 2, ... through the whole set."""
    with IndexedWriter(folder / name, np.int32) as writer:
        first = 0
        for length in lengths:
            writer.add_document(np.arange(first, first + length))
            first += length
        writer.finish()
    return IndexedReader(folder / name)


def everything(reader: IndexedReader, vocab_size: int = 1 << 20) -> DocumentRange:
    return DocumentRange(reader, 0, reader.documents, vocab_size)


def equal(a: Batch, b: Batch) -> bool:
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels)


@examples(60)
@given(lengths=LENGTHS, sequence=st.integers(1, 40), seed=st.integers(0, 3), shuffle=st.booleans())
def test_every_token_is_a_label_once_per_epoch(
    lengths: list[int], sequence: int, seed: int, shuffle: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader = reader_of(tmp_path_factory.mktemp("set"), lengths)
    samples = MappedTraining(everything(reader), sequence, seed, shuffle_documents=shuffle)
    tokens, epochs = reader.tokens, 3
    windows = -(-epochs * tokens // sequence)
    batch = samples.batch(0, windows)
    # The windows in the order of the endless row: of those of an epoch, the one that begins first comes first. Their
    # labels, and the tokens of the first window's first position, are the row.
    labels = Counter(batch.labels.flatten().tolist())
    surplus = windows * sequence + 1 - epochs * tokens
    assert sum(labels.values()) == windows * sequence
    for token in range(tokens):
        assert epochs - 1 <= labels[token] <= epochs + -(-surplus // tokens)
    inputs = Counter(batch.tokens.flatten().tolist())
    if surplus == 1:  # the windows end where the epochs do: each token is an input exactly once per epoch
        assert set(inputs.values()) == {epochs}
    joined = {(a, b) for a, b in zip(batch.tokens.flatten().tolist(), batch.labels.flatten().tolist(), strict=True)}
    ends = set(np.cumsum(lengths).tolist())
    assert all(b == a + 1 or a + 1 in ends for a, b in joined), "only the end of a document is followed by another"


def test_an_epoch_that_windows_fill_has_each_token_once(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, [3, 5, 0, 9, 1, 6])
    samples = MappedTraining(everything(reader), 8, seed=1)
    assert samples.samples == 3
    orders = []
    for epoch in range(4):
        inputs = samples.batch(3 * epoch, 3).tokens.flatten().tolist()
        assert sorted(inputs) == list(range(24))
        orders.append(tuple(inputs))
    assert len(set(orders)) == 4
    assert MappedTraining(everything(reader), 8, seed=2).batch(0, 3).tokens.flatten().tolist() != list(orders[0])


def test_documents_keep_their_order_without_shuffling(tmp_path: Path) -> None:
    samples = MappedTraining(everything(reader_of(tmp_path, [3] * 40)), 4, seed=1, shuffle_documents=False)
    rows = samples.batch(0, 30).tokens.tolist()
    assert sorted(rows) == [list(range(first, first + 4)) for first in range(0, 120, 4)]
    assert rows != sorted(rows), "samples are shuffled all the same"


@examples(40)
@given(
    lengths=LENGTHS,
    sequence=st.integers(1, 20),
    asked=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9)), min_size=1, max_size=6),
)
def test_a_position_has_one_sample_however_it_is_reached(
    lengths: list[int], sequence: int, asked: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader = reader_of(tmp_path_factory.mktemp("set"), lengths)
    whole = MappedTraining(everything(reader), sequence, 7).batch(0, 100)
    random = MappedTraining(everything(reader), sequence, 7)
    for first, count in asked:
        batch = random.batch(first, count)
        assert equal(batch, Batch(whole.tokens[first : first + count], whole.labels[first : first + count]))


def test_a_range_of_documents_never_leaves_it(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, [4, 6, 5, 7, 8])
    source = DocumentRange(reader, 1, 4, 100)
    assert (source.begin, source.tokens) == (4, 18)
    assert set(MappedTraining(source, 5, 0).batch(0, 40).labels.flatten().tolist()) == set(range(4, 22))
    evaluation = MappedEvaluation([source], 5)
    labels = evaluation.batch(0, evaluation.samples).labels
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == list(range(5, 22))


@examples(40)
@given(sets=st.lists(LENGTHS, min_size=1, max_size=4), sequence=st.integers(1, 20))
def test_evaluation_takes_each_token_once(
    sets: list[list[int]], sequence: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sets")
    ranges = [everything(reader_of(folder, lengths, str(number))) for number, lengths in enumerate(sets)]
    if not any(source.tokens > 1 for source in ranges):
        with pytest.raises(ValueError, match="at least 2 tokens"):
            MappedEvaluation(ranges, sequence)
        return
    samples = MappedEvaluation(ranges, sequence, pad_id=5)
    tokens, labels = samples.batch(0, samples.samples + 3)[:2]
    counted = labels != IGNORE_INDEX
    expected = Counter(label for source in ranges for label in range(1, source.tokens))
    assert Counter(labels[counted].tolist()) == expected
    assert torch.equal(tokens[counted] + 1, labels[counted])
    assert (tokens[~counted] == 5).all()
    assert not counted[-3:].any()
    one = [samples.batch(position, 1) for position in range(samples.samples + 3)]
    assert torch.equal(torch.cat([batch.labels for batch in one]), labels)


def test_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, [20])
    for samples in (MappedTraining(everything(reader, 15), 4, 0), MappedEvaluation([everything(reader, 15)], 4)):
        with pytest.raises(UserError, match=r"data\.bin holds token id 1\d at position 1\d, but the tokenizer has 15"):
            samples.batch(0, 5)


def test_sets_of_a_blend_have_orders_of_their_own(tmp_path: Path) -> None:
    source = everything(reader_of(tmp_path, [5] * 40))
    a, b = (MappedTraining(source, 5, 0, rng_stream=part).batch(0, 40) for part in (0, 1))
    assert not equal(a, b)


def test_labels_after_the_end_of_a_document_do_not_count(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for first in (10, 20, 30):
            writer.add_document([first, first + 1, 1])
        writer.finish()
    plain = MappedTraining(DocumentRange(IndexedReader(tmp_path / "data"), 0, 3, 100), 4, 0)
    masked = EodMaskedSamples(plain, eos_id=1)
    assert (masked.samples, masked.sequence_length) == (plain.samples, 4)
    before, after = plain.batch(0, 9), masked.batch(0, 9)
    assert torch.equal(before.tokens, after.tokens)
    at_eos = before.tokens == 1
    assert at_eos.any()
    assert (after.labels[at_eos] == IGNORE_INDEX).all()
    assert torch.equal(after.labels[~at_eos], before.labels[~at_eos])
    assert (after.labels == 1).any(), "the end itself is learnt"


# ---------------------------------------------------------------- index cache


def cached(reader: IndexedReader, folder: Path, **more: Any) -> MappedTraining:
    given: dict[str, Any] = {"cache": IndexCache(folder), "cache_key": "data"} | more
    return MappedTraining(everything(reader), 6, 3, **given)


def test_the_cache_is_used_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(tmp_path, [7, 8, 9, 10])
    expected = MappedTraining(everything(reader), 6, 3).batch(0, 12)
    folder = tmp_path / "cache"
    assert equal(cached(reader, folder).batch(0, 12), expected)
    names = sorted(path.name for path in folder.iterdir())
    assert {Path(name).suffix for name in names} == {".json", ".npy"}
    monkeypatch.setattr(MappedTraining, "_make_epoch", None)
    assert equal(cached(reader, folder).batch(0, 12), expected)
    with pytest.raises(TypeError):  # other data, other entries
        cached(reader, folder, cache_key="other").batch(0, 12)
    with pytest.raises(TypeError):
        cached(reader, folder, part=1).batch(0, 12)


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, [7, 8, 9, 10])
    folder = tmp_path / "cache"
    expected = cached(reader, folder).batch(0, 4)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    generator = np.random.default_rng(0)
    for path, content in whole.items():
        changed = bytearray(content)
        changed[generator.integers(len(content))] ^= 1 << int(generator.integers(8))
        for damage in (bytes(changed), content[:-1], b"", b"[]", content + b"\x80"):
            path.write_bytes(damage)
            assert equal(cached(reader, folder).batch(0, 4), expected)
            assert {p: p.read_bytes() for p in folder.iterdir()} == whole
        path.unlink()
        assert equal(cached(reader, folder).batch(0, 4), expected)
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text())
        assert all(len(digest) == 64 for digest in record.values())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, [7, 8, 9, 10])
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    expected = MappedTraining(everything(reader), 6, 3).batch(0, 4)
    assert equal(cached(reader, folder).batch(0, 4), expected)
    with pytest.raises(UserError, match=r"index_mapping_dir.*cannot write") as caught:
        cached(reader, folder, cache=IndexCache(folder, required=True)).batch(0, 4)
    assert caught.value.exit_code == EXIT_IO


# ---------------------------------------------------------------- workers


class _Batches(Dataset[Batch]):
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> Batch:
        return self.samples.batch(index, 2)


@pytest.mark.parametrize("processes", [0, *extra(1)])
def test_loader_processes_get_the_same_samples(tmp_path: Path, processes: int) -> None:
    """Which get them as bytes; a process takes seconds to start."""
    readers = [reader_of(tmp_path, [9] * 30, name) for name in ("a", "b")]
    parts = [MappedTraining(everything(reader), 6, 3, rng_stream=n) for n, reader in enumerate(readers)]
    samples = BlendedSamples(parts, [0.25, 0.75])
    expected = [samples.batch(first, 2) for first in range(0, 12, 2)]
    assert len(pickle.dumps(samples)) < 5000, "nothing large goes to a worker"
    assert len(pickle.dumps(MappedEvaluation([everything(readers[0])], 6))) < 2000
    copy = pickle.loads(pickle.dumps(_Batches(samples)))
    how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"} if processes else {}
    loader = DataLoader(copy, batch_size=None, sampler=range(0, 12, 2), **how)
    for batch, wanted in zip(loader, expected, strict=True):
        assert equal(Batch(*batch), wanted)
