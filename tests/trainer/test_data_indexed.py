"""Megatron's .bin/.idx: the layout byte for byte, what the reader refuses, and megatron-core's own class."""

import importlib.util
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from stoker.trainer.data.sources import indexed_tokens
from stoker.trainer.data.sources.indexed_tokens import IndexedReader, IndexedWriter, token_dtype
from stoker.trainer.utils.errors import EXIT_IO, UserError

MEGATRON = os.environ.get("STOKER_TEST_MEGATRON_CORE")
"""A folder into which megatron-core was installed (`pip install --no-deps --target FOLDER megatron-core`)."""

# Two documents, [1, 2, 3] and [515], then an empty one, as uint16; written out by hand from the format's description.
GOLDEN_BIN = b"\x01\x00\x02\x00\x03\x00\x03\x02"
GOLDEN_IDX = (
    b"MMIDIDX\x00\x00"
    b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version
    b"\x08"  # uint16
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # sequences
    b"\x04\x00\x00\x00\x00\x00\x00\x00"  # documents + 1
    b"\x03\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00"  # lengths
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00"  # pointers
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00"
    b"\x02\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00"  # documents
)


def write(prefix: Path, documents: list[list[int]], dtype: object = np.uint16) -> Path:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:  # pyrefly: ignore[no-matching-overload]
        for document in documents:
            writer.add_document(document)
        writer.finish()
    return prefix


def files(prefix: Path) -> tuple[bytes, bytes]:
    return indexed_tokens.bin_path(prefix).read_bytes(), indexed_tokens.idx_path(prefix).read_bytes()


def documents_of(reader: IndexedReader) -> list[list[int]]:
    starts = reader.document_starts(0, reader.documents)
    assert [reader.document_span(number) for number in range(reader.documents)] == list(pairwise(starts.tolist()))
    return [reader.ids[a:b].tolist() for a, b in pairwise(starts)]


def golden(tmp_path: Path) -> Path:
    prefix = tmp_path / "golden"
    indexed_tokens.bin_path(prefix).write_bytes(GOLDEN_BIN)
    indexed_tokens.idx_path(prefix).write_bytes(GOLDEN_IDX)
    return prefix


def test_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    prefix = write(tmp_path / "ours.v1", [[1, 2, 3], [515], []])
    assert files(prefix) == (GOLDEN_BIN, GOLDEN_IDX)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.v1.bin", "ours.v1.idx"]


def test_reading_hand_written_bytes(tmp_path: Path) -> None:
    reader = IndexedReader(golden(tmp_path))
    assert (reader.sequences, reader.documents, reader.tokens, reader.dtype) == (3, 3, 4, np.uint16)
    assert documents_of(reader) == [[1, 2, 3], [515], []]
    assert reader.document_starts(1, 2).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(259, "uint16"), (65499, "uint16"), (65500, "int32"), (151936, "int32")]
)
def test_dtype_follows_megatrons_rule(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


@examples(30)
@given(
    shards=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=5), min_size=1, max_size=4),
    chunk=st.sampled_from([1, 2, 1 << 20]),
)
def test_shards_merge_into_what_one_writer_writes(
    shards: list[list[list[int]]], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    whole = [document for shard in shards for document in shard]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_tokens, "_CHUNK", chunk)  # the borders of chunks are no borders of the data
        paths = [write(folder / f"{number}", shard) for number, shard in enumerate(shards)]
        one = write(folder / "one", whole)
        with IndexedWriter(folder / "merged", np.uint16) as writer:
            for path in paths:
                writer.add_index(path)
            assert (writer.documents, writer.tokens) == (len(whole), sum(map(len, whole)))
            writer.finish()
        assert files(folder / "merged") == files(one)
        assert documents_of(IndexedReader(one)) == whole


def test_documents_of_several_sequences_keep_them(tmp_path: Path) -> None:
    prefix = golden(tmp_path)
    index = bytearray(GOLDEN_IDX)
    index[26:34] = struct.pack("<Q", 3)  # two documents: sequences 0 and 1, then 2
    indexed_tokens.idx_path(prefix).write_bytes(bytes(index[:-32]) + struct.pack("<3q", 0, 2, 3))
    assert documents_of(IndexedReader(prefix)) == [[1, 2, 3, 515], []]
    with IndexedWriter(tmp_path / "more", np.uint16) as writer:
        writer.add_document([9])
        writer.add_index(prefix)
        writer.finish()
    reader = IndexedReader(tmp_path / "more")
    assert documents_of(reader) == [[9], [1, 2, 3, 515], []]
    assert reader.document_table.tolist() == [0, 1, 3, 4]


def test_nothing_has_its_name_before_it_is_finished(tmp_path: Path) -> None:
    old = write(tmp_path / "data", [[7]])
    with pytest.raises(RuntimeError), IndexedWriter(old, np.uint16) as writer:  # noqa: PT012
        writer.add_document([1])
        assert documents_of(IndexedReader(old)) == [[7]]
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
    assert documents_of(IndexedReader(old)) == [[7]]
    assert documents_of(IndexedReader(write(old, [[8, 9]]))) == [[8, 9]]


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for ids in ([65536], [-1], np.array([70000])):
            with pytest.raises(ValueError, match="must fit `dtype` uint16"):
                writer.add_document(ids)
        with pytest.raises(ValueError, match="row of integers"):
            writer.add_document(np.array([0.5]))
        writer.finish()
    assert IndexedReader(tmp_path / "data").documents == 0
    with pytest.raises(ValueError, match="integer type of the format"):
        IndexedWriter(tmp_path / "data", np.float32)


def test_a_shard_of_another_dtype_is_refused(tmp_path: Path) -> None:
    shard = write(tmp_path / "shard", [[1]], np.int32)
    with IndexedWriter(tmp_path / "data", np.uint16) as writer, pytest.raises(UserError, match="int32"):
        writer.add_index(shard)


def test_a_full_disk_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer = IndexedWriter(tmp_path / "data", np.uint16)
    writer.add_document([1])
    with pytest.raises(UserError, match=r"data\.bin/\.idx: No space left") as caught:
        writer.finish()
    assert caught.value.exit_code == EXIT_IO
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="No such file") as caught:
        IndexedWriter(tmp_path / "missing" / "data", np.uint16)
    assert caught.value.exit_code == EXIT_IO


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b, i: (b, b"not an index at all, whatever it may be"), "does not begin with MMIDIDX"),
        (lambda b, i: (b, i[:20]), "does not begin with MMIDIDX"),
        (lambda b, i: (b, i[:9] + b"\x02" + i[10:]), "version 2"),
        (lambda b, i: (b, i[:17] + b"\x07" + i[18:]), "dtype code 7"),
        (lambda b, i: (b, i[:-1]), "truncated"),
        (lambda b, i: (b, i + bytes(3)), "multimodal"),
        (lambda b, i: (b, i + bytes(5)), "damaged"),
        (lambda b, i: (b, i[:18] + b"\xff" * 8 + i[26:]), "truncated"),
        (lambda b, i: (b[:-1], i), "8: it is truncated"),
        (lambda b, i: (b + b"\x00", i), "do not belong together"),
        (lambda b, i: (b, i[:34] + b"\x04" + i[35:]), "sequence 1 does not begin"),
        (lambda b, i: (b, i[:34] + b"\xff\xff\xff\xff" + i[38:]), "sequence 0"),
        (lambda b, i: (b, i[:46] + b"\x02" + i[47:]), "sequence 0 does not begin"),
        (lambda b, i: (b, i[:70] + b"\x01" + i[71:]), "do not cover"),
        (lambda b, i: (b, i[:78] + b"\x03" + i[79:]), "do not follow"),
        (lambda b, i: (b, i[:94] + b"\x09" + i[95:]), "do not follow"),
        (lambda b, i: (b, i[:94] + b"\x02" + i[95:]), "do not cover"),
    ],
)
def test_what_is_damaged_is_refused_in_one_line(change: object, words: str, tmp_path: Path) -> None:
    prefix = golden(tmp_path)
    changed = change(GOLDEN_BIN, GOLDEN_IDX)  # pyrefly: ignore[not-callable]
    indexed_tokens.bin_path(prefix).write_bytes(changed[0])
    indexed_tokens.idx_path(prefix).write_bytes(changed[1])
    with pytest.raises(UserError, match=words) as caught:
        IndexedReader(prefix)
    assert len(caught.value.lines) == 1
    assert "golden.idx" in str(caught.value)


def test_no_index_that_is_accepted_reads_out_of_bounds(tmp_path: Path) -> None:
    """Every single-bit change is refused or leaves documents that lie within the ids."""
    prefix = golden(tmp_path)
    accepted = 0
    for bit in range(8 * len(GOLDEN_IDX)):
        index = bytearray(GOLDEN_IDX)
        index[bit // 8] ^= 1 << bit % 8
        indexed_tokens.idx_path(prefix).write_bytes(bytes(index))
        try:
            found = documents_of(IndexedReader(prefix))
        except UserError:
            continue
        accepted += 1
        assert [token for document in found for token in document] == [1, 2, 3, 515] or bit // 8 == 17
    assert accepted < 12


def test_missing_files_are_named(tmp_path: Path) -> None:
    prefix = golden(tmp_path)
    indexed_tokens.bin_path(prefix).unlink()
    with pytest.raises(UserError, match=r"cannot read .*golden\.bin: No such file"):
        IndexedReader(prefix)


def test_a_copy_in_another_process_is_small_and_checks_the_files(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [list(range(1000))] * 50)
    copy = pickle.dumps(IndexedReader(prefix))
    assert len(copy) < 500
    assert pickle.loads(copy).ids.tolist() == list(range(1000)) * 50
    write(prefix, [[1]])
    with pytest.raises(UserError, match="changed while they were in use"):
        pickle.loads(copy)


def test_memory_does_not_grow_with_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_tokens, "_CHUNK", 1024)
    monkeypatch.setattr(indexed_tokens, "_COPY_BYTES", 1 << 12)
    one = np.array([1], np.uint16)

    def peak(documents: int) -> int:
        tracemalloc.start()
        with IndexedWriter(tmp_path / "a", np.uint16) as writer:
            for _ in range(documents):
                writer.add_document(one)
            writer.finish()
        with IndexedWriter(tmp_path / "b", np.uint16) as writer:
            writer.add_index(tmp_path / "a")
            writer.finish()
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    peak(100)
    assert abs(peak(12_000) - peak(2_000)) < 50_000, "the index of 10,000 more documents has 200 kB"


@pytest.mark.skipif(
    MEGATRON is None and importlib.util.find_spec("megatron") is None,
    reason="needs megatron-core: set STOKER_TEST_MEGATRON_CORE to a folder it was installed into",
)
def test_megatron_core_reads_and_writes_the_same_bytes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for dtype, top in ((np.uint16, 65499), (np.int32, 200_000)):
        documents = [generator.integers(0, top, generator.integers(0, 50)).tolist() for _ in range(200)]
        name = np.dtype(dtype).name
        write(tmp_path / f"ours-{name}", documents, dtype)
        program = f"""
import json, warnings
warnings.simplefilter("ignore")
import numpy, torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
documents = json.loads(open("documents.json").read())
builder = IndexedDatasetBuilder("theirs-{name}.bin", dtype=numpy.{name})
for document in documents:
    builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
builder.finalize("theirs-{name}.idx")
merged = IndexedDatasetBuilder("theirs-merged-{name}.bin", dtype=numpy.{name})
merged.add_index("theirs-{name}")
merged.add_index("ours-{name}")
merged.finalize("theirs-merged-{name}.idx")
ours = IndexedDataset("ours-{name}")
assert [row.tolist() for row in ours] == documents
assert ours.document_indices.tolist() == list(range(len(documents) + 1))
assert [DType.optimal_dtype(n).__name__ for n in (259, 65499, 65500)] == ["uint16", "uint16", "int32"]
"""
        (tmp_path / "documents.json").write_text(repr(documents))
        environment = {**os.environ, **({"PYTHONPATH": MEGATRON} if MEGATRON else {})}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert files(tmp_path / f"ours-{name}") == files(tmp_path / f"theirs-{name}")
        assert documents_of(IndexedReader(tmp_path / f"theirs-{name}")) == documents
        with IndexedWriter(tmp_path / f"ours-merged-{name}", dtype) as writer:
            writer.add_index(tmp_path / f"theirs-{name}")
            writer.add_index(tmp_path / f"ours-{name}")
            writer.finish()
        assert files(tmp_path / f"ours-merged-{name}") == files(tmp_path / f"theirs-merged-{name}")
