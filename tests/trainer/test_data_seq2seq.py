"""Batches of T5 and BERT: names, shapes, what counts, packing; each a pure function of the position."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from resolved import build_data, evaluation_data
from span_texts import restore
from tiers import cases, examples

from stoker.trainer.cli import main
from stoker.trainer.config.data_task import task_from_keys
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.data.build_datasets import Data
from stoker.trainer.data.datasets.blend import BlendedSamples
from stoker.trainer.data.datasets.packing import MIN_LANE_PAIRS, OPEN_ROWS, pack_pairs
from stoker.trainer.data.datasets.samples import IGNORE_INDEX, philox_generator
from stoker.trainer.data.datasets.seq2seq import Pair, PairShape, collate_packed, collate_padded
from stoker.trainer.data.sources.indexed_tokens import IndexedWriter
from stoker.trainer.data.tasks.sentinels import sentinel_ids
from stoker.trainer.data.tokenizers.token_bytes import unicode_to_bytes
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from stoker.trainer.data.tokenizers.tokenizer_json import build_json_tokenizer, canonical_json
from stoker.trainer.utils.errors import UserError

EOS, PAD = 1, 0  # of ByteTokenizer


def root(family: str = "t5", length: int = 64, seed: int = 7, **data: Any) -> RootBlock:
    key = "seq_length" if family == "t5" else "encoder_seq_length"
    return RootBlock.model_validate({"model": {"family": family, key: length, "seed": seed, "data": data}})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(24):
        (folder / f"{number}.txt").write_text(f"Document {number} says: " + f"{number} words, " * (number * 3))
    return folder


def text_data(folder: Path, **data: Any) -> dict[str, Any]:
    return {"data_impl": "text", "path": str(folder), "splits_string": "70,20,10", **data}


def mapped_data(folder: Path, **data: Any) -> dict[str, Any]:
    prefixes: list[str | float] = []
    for number in range(2):
        prefix = folder / f"set{number}"
        with IndexedWriter(prefix, np.uint16) as writer:
            for document in range(40):
                writer.add_document([*ByteTokenizer().encode(f"text {document} of set {number} " * document), EOS])
            writer.finish()
        prefixes += [1.0 + number, str(prefix)]
    return {"data_impl": "mmap", "data_prefix": prefixes, "splits_string": "70,20,10", **data}


def byte_level(*special: str) -> Tokenizer:
    """A tokenizer.json of the 256 bytes and some special tokens."""
    vocabulary = {byte: number for number, byte in enumerate(unicode_to_bytes())}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(list(special))
    return build_json_tokenizer(canonical_json(library.to_str()), {"eos": special[0]})


def rows_of(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """Return what the encoder reads and the decoder writes, row by row, without padding, of unpacked rows."""
    shown = batch.get("encoder_padding", torch.ones_like(batch["encoder_tokens"], dtype=torch.bool))
    return [
        (tokens[mask].tolist(), labels[labels != IGNORE_INDEX].tolist())
        for tokens, mask, labels in zip(batch["encoder_tokens"], shown, batch["labels"], strict=True)
    ]


def restored(data: Data, encoder: list[int], decoder: list[int]) -> str:
    assert encoder[-1] == decoder[-1] == EOS
    sentinels = sentinel_ids(data.tokenizer)
    return data.tokenizer.decode(restore(np.array(encoder[:-1]), np.array(decoder[:-1]), sentinels))


def check_shifted(batch: dict[str, torch.Tensor]) -> None:
    """The decoder reads what it has written so far; each sample begins with padding."""
    labels, tokens = batch["labels"], batch["decoder_tokens"]
    numbers = batch.get("decoder_documents", torch.zeros_like(labels))
    for row in range(len(labels)):
        for place in range(labels.shape[1]):
            begins = place == 0 or numbers[row, place] != numbers[row, place - 1]
            if labels[row, place] != IGNORE_INDEX:
                assert tokens[row, place] == (PAD if begins else labels[row, place - 1])


CASES: dict[str, dict[str, Any]] = {
    "t5": {},
    "ngrams": {"geometric_dist": True},
    "tokens": {"geometric_dist": False, "whole_word_masking": False, "favor_longer_ngrams": True},
    "pieces": {"respect_document_boundaries": True},
    "packed": {"respect_document_boundaries": True, "packed_sequence": True},
    "short": {"respect_document_boundaries": True, "packed_sequence": True, "short_seq_prob": 0.5},
    "prefix": {"dataset_type": "t5_prefix_lm", "seq_length_dec": 48},
}


@pytest.mark.parametrize("source", cases(["text", "mmap"], fast=1))
@pytest.mark.parametrize("case", CASES)
def test_batches_are_whole_and_functions_of_the_position(case: str, source: str, texts: Path, tmp_path: Path) -> None:
    make = text_data if source == "text" else mapped_data
    configuration = root(**make(texts if source == "text" else tmp_path, **CASES[case]))
    task = task_from_keys(configuration.model)
    data, again = build_data(configuration), build_data(configuration)
    for samples, other in ((data.train, again.train), (data.validation, again.validation)):
        assert samples is not None
        assert other is not None
        batch = samples.batch(0, 9)
        assert batch["encoder_tokens"].shape == (9, task.length)
        assert batch["labels"].shape == batch["decoder_tokens"].shape == (9, task.decoder_length)
        assert ("encoder_padding" in batch) == task.padded
        assert ("encoder_documents" in batch) == ("decoder_documents" in batch) == task.packed
        assert int(batch["encoder_tokens"].max()) < data.vocab_size
        check_shifted(batch)
        # Any way to ask for them, from any copy, gives the same samples.
        copy = pickle.loads(pickle.dumps(other))
        for first in (5, 0, 8):
            single = copy.batch(first, 1)
            assert set(single) == set(batch)
            for name, tensor in single.items():
                torch.testing.assert_close(tensor[0], batch[name][first], msg=f"{name} {first}")
    epoch = data.train.samples
    first, second = data.train.batch(0, epoch), data.train.batch(epoch, epoch)
    assert not torch.equal(first["encoder_tokens"], second["encoder_tokens"])


@pytest.mark.parametrize("case", ["t5", "ngrams", "tokens", "pieces"])
def test_the_text_is_all_there(case: str, texts: Path) -> None:
    """Over one pass through the validation split every piece of text comes back, and as a whole it is the split."""
    data = build_data(root(**text_data(texts, **CASES[case])))
    assert data.validation is not None
    assert data.corpus is not None
    batch = data.validation.batch(0, data.validation.samples)
    pieces = [restored(data, *row) for row in rows_of(batch) if len(row[1]) > 0]
    if case == "pieces":
        whole = data.corpus.documents["validation"]
        assert all(any(piece in document for document in whole) for piece in pieces)
        assert sum(map(len, pieces)) in range(sum(map(len, whole)) - len(whole), sum(map(len, whole)) + 1)
    else:
        whole = "".join(data.corpus.documents["validation"])
        assert all(piece in whole for piece in pieces)
        window = task_from_keys(root(**CASES[case]).model).window
        assert len(whole) - window <= sum(map(len, pieces)) <= len(whole)
    again = data.validation.batch(data.validation.samples, 2)
    assert (again["labels"] == IGNORE_INDEX).all(), "past the end nothing counts"


def test_t5s_rows_have_no_empty_place(texts: Path) -> None:
    data = build_data(root(length=128, **text_data(texts)))
    batch = data.train.batch(0, 32)
    assert set(batch) == {"encoder_tokens", "decoder_tokens", "labels"}
    assert (batch["labels"] != IGNORE_INDEX).all()
    assert (batch["encoder_tokens"] != PAD).all()
    assert (batch["encoder_tokens"][:, -1] == EOS).all()


def test_packed_rows_hold_their_pieces_apart(texts: Path) -> None:
    configuration = text_data(texts, **CASES["packed"])
    packed_data = build_data(root(length=256, **configuration))
    configuration |= {"packed_sequence": False}
    plain = build_data(root(length=256, **configuration))
    assert packed_data.validation is not None
    assert plain.validation is not None
    assert packed_data.validation.samples < plain.validation.samples
    batch = packed_data.validation.batch(0, packed_data.validation.samples)
    found: list[tuple[list[int], list[int]]] = []
    for row in range(len(batch["labels"])):
        of_encoder, of_decoder = batch["encoder_documents"][row], batch["decoder_documents"][row]
        assert (of_encoder.diff() >= 0).all()
        assert (of_decoder.diff() >= 0).all()
        last = max(int(of_encoder[-1]), int(of_decoder[-1]))
        real = last if (batch["encoder_tokens"][row][of_encoder == last] == PAD).all() else last + 1
        for number in range(real):
            found.append(
                (
                    batch["encoder_tokens"][row][of_encoder == number].tolist(),
                    batch["labels"][row][of_decoder == number].tolist(),
                )
            )
        assert (batch["labels"][row][of_decoder == real] == IGNORE_INDEX).all()
    expected = rows_of(plain.validation.batch(0, plain.validation.samples))
    assert sorted(found) == sorted(expected), "packing changes no pair"


@pytest.mark.parametrize("source", ["text", "mmap"])
def test_pieces_have_one_end_and_new_spans_every_epoch(source: str, texts: Path, tmp_path: Path) -> None:
    make = text_data if source == "text" else mapped_data
    data = build_data(root(**make(texts if source == "text" else tmp_path, **CASES["pieces"])))
    rows = data.train.samples
    if source == "mmap":
        assert isinstance(data.train, BlendedSamples)
        rows = data.train.datasets[0].samples
        epochs = [rows_of(data.train.datasets[0].batch(epoch * rows, rows)) for epoch in range(2)]
    else:
        epochs = [rows_of(data.train.batch(epoch * rows, rows)) for epoch in range(2)]
    for encoder, written in epochs[0]:
        assert encoder.count(EOS) == written.count(EOS) == 1
    both = [{tuple(encoder) for encoder, _ in epoch} for epoch in epochs]
    assert len(both[0] & both[1]) < rows / 4
    assert sorted(len(encoder) for encoder in both[0]) == sorted(len(encoder) for encoder in both[1])


def test_evaluation_does_not_follow_the_seed_and_training_does(texts: Path) -> None:
    first, second = (build_data(root(seed=seed, **text_data(texts))) for seed in (1, 2))
    assert not torch.equal(first.train.batch(0, 4)["labels"], second.train.batch(0, 4)["labels"])
    assert first.validation is not None
    assert second.validation is not None
    assert torch.equal(first.validation.batch(0, 4)["labels"], second.validation.batch(0, 4)["labels"])


def test_a_prefix_and_what_follows_make_up_a_window(texts: Path) -> None:
    data = build_data(root(**text_data(texts, **CASES["prefix"])))
    places = set()
    for encoder, written in rows_of(data.train.batch(0, 60)):
        assert len(encoder) + len(written) == 64
        assert len(written) <= 48
        places.add(len(encoder))
    assert min(places) < 24
    assert max(places) > 56


@examples(60)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=3 * OPEN_ROWS),
    st.integers(20, 40),
    st.integers(10, 12),
)
def test_packing_loses_nothing_and_fits(sizes: list[tuple[int, int]], encoder: int, decoder: int) -> None:
    lengths = np.array(sizes)
    packing = pack_pairs(lengths[:, 0], lengths[:, 1], (encoder, decoder))
    assert sorted(packing.pair_indices.tolist()) == list(range(len(sizes)))
    for row in range(packing.rows):
        assert len(packing.row(row))
        assert (lengths[packing.row(row)].sum(axis=0) <= [encoder, decoder]).all()


def test_packing_in_lanes_loses_nothing_and_fits() -> None:
    lengths = np.random.default_rng(1).integers(1, 12, (3 * MIN_LANE_PAIRS + 1, 2))
    packing = pack_pairs(lengths[:, 0], lengths[:, 1], (30, 20))
    assert np.array_equal(np.sort(packing.pair_indices), np.arange(len(lengths)))
    held = np.add.reduceat(lengths[packing.pair_indices], packing.row_offsets[:-1])
    assert (held.max(axis=0) == [30, 20]).all()
    assert packing.rows < 1.1 * lengths[:, 0].sum() / 20


@pytest.mark.parametrize("pairs", [4000, 2 * MIN_LANE_PAIRS])
def test_packing_leaves_little_empty(pairs: int) -> None:
    draws = np.random.default_rng(0)
    encoder = np.minimum(draws.geometric(1 / 200, pairs) + 2, 512)  # texts of any length, cut to 512 tokens
    decoder = np.maximum(3, (0.2 * encoder).astype(np.int64))
    packing = pack_pairs(encoder, decoder, (512, 114))
    assert encoder.sum() / (512 * packing.rows) > 0.97


def test_sentinels_stand_for_no_bytes(texts: Path) -> None:
    """Bits per byte are of the text, not of `<extra_id_0>`."""
    data = build_data(root(**text_data(texts)), byte_level("</s>"))
    assert data.tokenizer.vocab_size == 357
    assert data.token_byte_counts.tolist() == [1] * 256 + [0] * 101


def test_packed_and_padded_rows_by_hand() -> None:
    pairs = [Pair(np.array([5, 6, 1]), np.array([7, 1])), Pair(np.array([8, 1]), np.array([9, 4, 1]))]
    shape = PairShape(encoder_length=6, decoder_length=6, pad_id=0)
    batch = collate_packed([pairs, []], shape)
    assert batch["encoder_tokens"].tolist() == [[5, 6, 1, 8, 1, 0], [0] * 6]
    assert batch["encoder_documents"].tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
    assert batch["decoder_tokens"].tolist() == [[0, 7, 0, 9, 4, 0], [0] * 6]
    assert batch["labels"].tolist() == [[7, 1, 9, 4, 1, -100], [-100] * 6]
    assert batch["decoder_documents"].tolist() == [[0, 0, 1, 1, 1, 2], [0] * 6]
    assert batch["encoder_documents"].dtype == batch["decoder_documents"].dtype == torch.int32
    batch = collate_padded([pairs[1], None], shape)
    assert batch["encoder_tokens"].tolist() == [[8, 1, 0, 0, 0, 0], [0] * 6]
    assert batch["encoder_padding"].tolist() == [[True, True] + 4 * [False], [True] + 5 * [False]]
    assert batch["decoder_tokens"].tolist() == [[0, 9, 4, 1, 0, 0], [0] * 6]
    assert batch["labels"].tolist() == [[9, 4, 1, -100, -100, -100], [-100] * 6]


@pytest.mark.parametrize(("family", "names"), [("gpt", None), ("t5", 3), ("bert", 2)])
def test_mock_data_are_there_for_every_family(family: str, names: int | None) -> None:
    data = build_data(root(family, data_impl="mock"))
    batch = data.train.batch(1 << 39, 4)
    if names is None:
        assert batch.tokens.shape == (4, 64)
    else:
        assert len(batch) == names
        assert all(int(tensor.max()) < data.vocab_size for tensor in batch.values())
    assert data.vocab_size == (259 if family == "gpt" else 384)
    assert data.validation is not None


def test_what_preprocess_wrote_is_read_with_sentinels_added(texts: Path, tmp_path: Path) -> None:
    """Its tokenizer has none; that of the run, and of its checkpoints, is the same with sentinels."""
    prefix = str(tmp_path / "set")
    assert main.main(["preprocess", str(texts), "--output-prefix", prefix, "--tokenizer", "byte-level"]) == 0
    configuration = root(data_impl="mmap", data_prefix=prefix, splits_string="70,20,10")
    data = build_data(configuration)
    assert data.tokenizer.to_dict() == {"tokenizer": "byte-level", "sentinels": 125}
    assert build_data(configuration, data.tokenizer).tokenizer.to_dict() == data.tokenizer.to_dict()
    pieces = [restored(data, *row) for row in rows_of(data.train.batch(0, 4))]
    whole = "".join(file.read_text() for file in sorted(texts.iterdir()))
    assert all(any(part in whole for part in piece.split("Document ") if part) for piece in pieces)
    with pytest.raises(UserError, match="the tokenizer of the checkpoint is not the tokenizer that made the data"):
        build_data(configuration, define_other())


def define_other() -> Tokenizer:
    """A tokenizer of a file, with an end token."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    return build_json_tokenizer(canonical_json(library.to_str()), {})


def test_evaluation_of_another_text(texts: Path) -> None:
    file = texts.parent / "other.txt"
    file.write_text("Nothing is known about this text. " * 30)
    for case in ("t5", "pieces"):
        configuration = root(**text_data(texts, **CASES[case]))
        data = build_data(configuration)
        samples, token_bytes, *_ = evaluation_data(file, configuration, data.tokenizer)[1:]
        pieces = [restored(data, *row) for row in rows_of(samples.batch(0, samples.samples)) if row[1]]
        assert all(piece in file.read_text() for piece in pieces)
        assert len(token_bytes) == 384


def test_too_few_sentinels_and_too_little_text_are_told(texts: Path, tmp_path: Path) -> None:
    document = root(length=256, **text_data(texts)).model_dump()
    document["model"]["tokenizer"]["num_sentinel_tokens"] = 3
    with pytest.raises(UserError, match=r"14 spans, and the tokenizer 3 sentinels"):
        build_data(RootBlock.model_validate(document))
    with pytest.raises(UserError, match=r"`model\.seq_length` \(40000\) needs .* tokens of text"):
        build_data(root(length=40000, **text_data(texts)))
    short = tmp_path / "short.txt"
    short.write_text("abcd")
    with pytest.raises(UserError, match="two tokens"):
        build_data(root(**text_data(short, respect_document_boundaries=True, splits_string="25,50,25")))


class TestBert:
    def data(self, texts: Path, **data: Any) -> Data:
        return build_data(root("bert", length=128, **text_data(texts, **data)))

    def test_eighty_ten_ten(self, texts: Path) -> None:
        data = self.data(texts)
        batch = data.train.batch(0, 200)
        chosen = batch["labels"] != IGNORE_INDEX
        shown, labels = batch["tokens"][chosen], batch["labels"][chosen]
        hidden = int(sentinel_ids(data.tokenizer)[0])
        assert chosen.float().mean() == pytest.approx(0.15, abs=0.003)
        assert (labels != EOS).all()
        assert (shown == hidden).float().mean() == pytest.approx(0.8, abs=0.03)
        others = shown[(shown != hidden) & (shown != labels)]
        assert len(others) / len(shown) == pytest.approx(0.1, abs=0.02)
        assert ((others >= 3) & (others < 259)).all()
        plain = build_data(root("gpt", length=128, **text_data(texts))).train.batch(0, 200).labels
        assert torch.equal(torch.where(chosen, batch["labels"], batch["tokens"]), plain)

    def test_pure_and_the_same_in_every_run(self, texts: Path) -> None:
        data, other = self.data(texts), build_data(root("bert", length=128, seed=8, **text_data(texts)))
        assert data.validation is not None
        assert other.validation is not None
        whole, single = data.train.batch(0, 4), data.train.batch(3, 1)
        assert torch.equal(whole["tokens"][3], single["tokens"][0])
        assert torch.equal(data.validation.batch(0, 3)["tokens"], other.validation.batch(0, 3)["tokens"])
        assert not torch.equal(data.train.batch(0, 3)["tokens"], other.train.batch(0, 3)["tokens"])

    def test_a_mask_of_its_own_is_enough(self, texts: Path) -> None:
        """No sentinels are added, and no special token is what another one is replaced with."""
        bert = root("bert", length=128, **text_data(texts))
        assert build_data(bert, byte_level("</s>", "[MASK]")).vocab_size == 258
        tokenizer = byte_level("</s>", "[MASK]", "<extra_id_0>")
        data = build_data(bert, tokenizer)
        batch = data.train.batch(0, 200)
        shown = batch["tokens"][batch["labels"] != IGNORE_INDEX]
        assert (shown == tokenizer.token_id("[MASK]")).float().mean() == pytest.approx(0.8, abs=0.03)
        assert not (shown == tokenizer.token_id("<extra_id_0>")).any()

    def test_words_are_hidden_whole(self, texts: Path) -> None:
        data = self.data(texts, geometric_dist=True, max_ngram_size=1)
        batch = data.train.batch(0, 20)
        text = torch.where(batch["labels"] != IGNORE_INDEX, batch["labels"], batch["tokens"])
        for row in range(20):
            letters = "".join(data.tokenizer.decode([token]) or "." for token in text[row].tolist())
            chosen = [False, *(batch["labels"][row] != IGNORE_INDEX).tolist(), False]
            assert 1 <= sum(chosen) <= round(0.15 * 128)
            for place in range(1, 128):
                if chosen[place] != chosen[place + 1]:
                    assert not (letters[place - 1].isalnum() and letters[place].isalnum()), letters[
                        place - 3 : place + 3
                    ]

    def test_documents_are_numbered_by_the_text_not_by_what_is_hidden(self, texts: Path) -> None:
        data = self.data(texts, reset_attention_mask=True)
        batch = data.train.batch(0, 20)
        text = torch.where(batch["labels"] != IGNORE_INDEX, batch["labels"], batch["tokens"])
        ends = (text == EOS).int()
        assert torch.equal(batch["documents"], (ends.cumsum(1) - ends).int())
        assert batch["documents"].max() > 0


def test_draws_are_words_of_the_raw_stream() -> None:
    """The draws of a position must never change: it is part of what a checkpoint resumes."""
    data = build_data(root(length=32, data_impl="mock", mean_ngram_size=3.0))
    assert data.train.batch(5, 1)["encoder_tokens"][0, :4].tolist() == [
        int(word % np.uint64(384)) for word in philox_generator(7, 5, 0).random_raw(4)
    ]
