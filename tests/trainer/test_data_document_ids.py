"""Document ids within samples: Megatron's rule, for every source of samples."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resolved import build_data
from tiers import examples

from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.data.datasets.blend import BlendedSamples
from stoker.trainer.data.datasets.document_ids import DocumentIdSamples, document_ids
from stoker.trainer.data.datasets.samples import (
    Batch,
    EodMaskedSamples,
    EvaluationWindows,
    MockSamples,
    Samples,
    TrainingWindows,
)
from stoker.trainer.data.sources.indexed_tokens import IndexedWriter
from stoker.trainer.data.sources.text_sources import read_text
from stoker.trainer.data.sources.text_tokens import token_stream
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer
from stoker.trainer.utils.errors import UserError

EOS = 1


def _numbers(batch: Batch) -> torch.Tensor:
    assert batch.documents is not None
    return batch.documents


def test_an_end_token_belongs_to_the_document_it_ends() -> None:
    tokens = torch.tensor([[7, 8, EOS, 9, EOS, 5], [EOS, EOS, 4, 4, 4, EOS], [3, 3, 3, 3, 3, 3]])
    numbers = document_ids(tokens, EOS)
    assert numbers.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2], [0] * 6]
    assert numbers.dtype == torch.int32
    assert numbers.is_contiguous()


@examples(50)
@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=4))
def test_numbers_restart_positions_where_megatron_does(rows: list[list[int]]) -> None:
    """Megatron's loop over the end tokens: positions after each of them begin at 0 again."""
    numbers = document_ids(torch.tensor(rows), EOS)
    for row, number in zip(rows, numbers.tolist(), strict=True):
        restarted, position, document = [], 0, 0
        for token in row:
            restarted.append((document, position))
            position += 1
            if token == EOS:
                position, document = 0, document + 1
        assert number == [document for document, _ in restarted]
        assert [number.index(document) for document in number] == [
            place - position for place, (_, position) in enumerate(restarted)
        ]


def _stream(folder: Path) -> np.ndarray:
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"text {number} " * (number + 1))
    return token_stream(read_text(folder, (1, 0, 0)), "train", ByteTokenizer())


@pytest.mark.parametrize("kind", ["training", "evaluation", "mock", "blend", "masked"])
def test_every_kind_of_samples_can_be_numbered(kind: str, tmp_path: Path) -> None:
    stream = _stream(tmp_path)
    training = TrainingWindows(stream, 40, seed=3)
    samples: Samples = {
        "training": training,
        "evaluation": EvaluationWindows(stream, 40),
        "mock": MockSamples(259, 40, seed=1, samples=99),
        "blend": BlendedSamples([training, MockSamples(9, 40, seed=1, samples=99)], [1, 2]),
        "masked": EodMaskedSamples(training, EOS),
    }[kind]
    numbered = DocumentIdSamples(samples, EOS)
    assert (numbered.sequence_length, numbered.samples) == (40, samples.samples)
    plain, batch = samples.batch(2, 6), numbered.batch(2, 6)
    assert torch.equal(batch.tokens, plain.tokens)
    assert torch.equal(batch.labels, plain.labels)
    assert plain.documents is None
    assert torch.equal(_numbers(batch), document_ids(batch.tokens, EOS))
    assert _numbers(batch).max() > 0  # the test has documents to number
    again = pickle.loads(pickle.dumps(numbered)).batch(3, 2)  # what a loader process gets
    assert torch.equal(_numbers(again), _numbers(batch)[1:3])


def test_masking_keeps_the_numbers() -> None:
    numbered = DocumentIdSamples(TrainingWindows(np.arange(90) % 7, 10, seed=0), EOS)
    before, after = numbered.batch(0, 4), EodMaskedSamples(numbered, EOS).batch(0, 4)
    assert torch.equal(_numbers(after), _numbers(before))
    assert torch.equal(after.labels == -100, before.tokens == EOS)


def _root(**model: object) -> RootBlock:
    return RootBlock.model_validate({"model": {"encoder_seq_length": 16, **model}})


def test_text_and_tokenized_data_are_numbered_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"text number {number}")
    with IndexedWriter(tmp_path / "set", np.uint16) as writer:
        for number in range(60):
            writer.add_document([*ByteTokenizer().encode(f"text {number}"), EOS])
        writer.finish()
    for data in (
        {"data_impl": "text", "path": str(folder), "splits_string": "1,1,1"},
        {"data_impl": "mmap", "data_prefix": str(tmp_path / "set"), "splits_string": "1,1,1"},
    ):
        apart = {**data, "reset_attention_mask": True}
        built = build_data(_root(data=apart))
        for samples in (built.train, built.validation, built.test):
            assert samples is not None
            batch = samples.batch(0, 3)
            assert torch.equal(_numbers(batch), document_ids(batch.tokens, EOS))
            assert _numbers(batch).max() > 0
        masked = build_data(_root(data={**apart, "eod_mask_loss": True})).train.batch(0, 9)
        assert torch.equal(masked.labels == -100, masked.tokens == EOS)
        positions = build_data(_root(data={**data, "reset_position_ids": True})).train.batch(0, 9)
        assert torch.equal(_numbers(positions), _numbers(masked))
        assert build_data(_root(data=data)).train.batch(0, 1).documents is None


def test_characters_do_not_end_documents(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 20)
    data = {"data_impl": "text", "path": str(tmp_path / "text.txt"), "splits_string": "8,1,1"}
    for key in ("reset_attention_mask", "reset_position_ids"):
        with pytest.raises(UserError, match=f"`model.data.{key}`.*end-of-document token; the char tokenizer"):
            build_data(_root(data=data | {key: True}, tokenizer={"library": "char"}))
