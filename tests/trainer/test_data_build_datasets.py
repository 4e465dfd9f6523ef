from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resolved import build_data, evaluation_data

from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.data.datasets.samples import IGNORE_INDEX, EvaluationWindows, Samples
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer
from stoker.trainer.utils.errors import UserError


def _root(trainer: dict[str, Any] | None = None, **model: Any) -> RootBlock:
    return RootBlock.model_validate({"model": {"encoder_seq_length": 8, **model}, "trainer": trainer or {}})


def _text(path: Path, **data: Any) -> dict[str, Any]:
    return {"data_impl": "text", "path": str(path), "splits_string": "80,10,10", **data}


def _labels(samples: Samples | None) -> list[int]:
    assert isinstance(samples, EvaluationWindows)
    labels = samples.batch(0, samples.samples).labels
    return labels[labels != IGNORE_INDEX].tolist()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox äöü. " * 20)
    return path


def test_byte_level_predicts_every_byte_of_the_split(file: Path) -> None:
    data = build_data(_root(data=_text(file)))
    assert isinstance(data.tokenizer, ByteTokenizer)
    assert data.vocab_size == 259
    assert data.corpus is not None
    labels = _labels(data.validation)
    decoded = np.array(sorted(labels))
    held_out = data.corpus.text("validation")
    assert data.token_byte_counts[labels].sum() == len(held_out)
    assert decoded[decoded >= 3].tolist() == sorted(byte + 3 for byte in held_out)
    assert labels.count(1) == 1, "one eos ends the one document"


def test_folder_documents_are_separated_by_eos(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    data = build_data(_root(data=_text(tmp_path, splits_string="1,1,1")))
    assert data.corpus is not None
    assert isinstance(data.test, EvaluationWindows)
    joined = "".join(data.tokenizer.decode([token]) or "|" for token in data.test.stream)
    assert joined == "|" + "".join(f"{text}|" for text in data.corpus.documents["test"])


def test_char_vocabulary_is_that_of_the_whole_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc" * 30 + "xyz")
    data = build_data(_root(data=_text(path), tokenizer={"library": "char"}))
    assert isinstance(data.tokenizer, CharTokenizer)
    assert data.tokenizer.characters == "abcxyz"
    assert data.vocab_size == 6


def test_a_checkpoints_tokenizer_is_kept(file: Path) -> None:
    tokenizer = CharTokenizer.from_texts([file.read_text(), "more characters: éè"])
    data = build_data(_root(data=_text(file), tokenizer={"library": "char"}), tokenizer)
    assert data.tokenizer is tokenizer
    with pytest.raises(UserError, match=r"train document 1 of .*text\.txt: character 'T'"):
        build_data(_root(data=_text(file)), CharTokenizer("abc"))


def test_training_samples_follow_the_seed(file: Path) -> None:
    first, same, other = (build_data(_root(data=_text(file), seed=seed)).train.batch(0, 4) for seed in (1, 1, 2))
    assert first.tokens.tolist() == same.tokens.tolist() != other.tokens.tolist()


def test_sequence_length_of_the_data_overrides_the_models(file: Path) -> None:
    assert build_data(_root(data=_text(file))).train.sequence_length == 8
    assert build_data(_root(data=_text(file, seq_length=5))).train.sequence_length == 5


def test_sequences_longer_than_the_text_name_key_and_figures(file: Path) -> None:
    tokens = len(file.read_text()[:400].encode()) + 2
    with pytest.raises(UserError) as caught:
        build_data(_root(data=_text(file), encoder_seq_length=1000))
    for word in ["`model.encoder_seq_length` (1000)", f"{tokens} tokens", str(file), f"at most {tokens - 1}"]:
        assert word in str(caught.value)
    build_data(_root(data=_text(file), encoder_seq_length=tokens - 1))
    with pytest.raises(UserError, match=f"at most {tokens - 1}"):
        build_data(_root(data=_text(file), encoder_seq_length=tokens))
    with pytest.raises(UserError, match=r"`model\.data\.seq_length` \(1000\)"):
        build_data(_root(data=_text(file, seq_length=1000)))


def test_empty_validation_split(file: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.limit_val_batches=0"):
        build_data(_root(data=_text(file, splits_string="1")))
    data = build_data(_root({"limit_val_batches": 0}, data=_text(file, splits_string="1")))
    assert data.validation is None
    assert data.test is None


def test_text_without_path(file: Path) -> None:
    with pytest.raises(UserError, match=r"needs `model\.data\.path`"):
        build_data(_root(data={"data_impl": "text"}))


def test_what_a_folder_leaves_out_is_described(file: Path) -> None:
    root = _root({"limit_val_batches": 0}, data=_text(file.parent))
    assert "left out" not in build_data(root).description
    file.with_name("more.jsonl").write_text("{}")
    assert "1 file (1 file skipped, not plain text by name: more.jsonl); train" in build_data(root).description


def test_override_vocab_size(file: Path) -> None:
    data = build_data(_root(data=_text(file), override_vocab_size=300))
    assert data.vocab_size == len(data.token_byte_counts) == 300
    with pytest.raises(UserError, match=r"`model\.override_vocab_size` \(100\) .* 259"):
        build_data(_root(data=_text(file), override_vocab_size=100))


def test_mock_data_fill_the_models_vocabulary() -> None:
    data = build_data(_root(data={"data_impl": "mock"}, override_vocab_size=32000))
    batch = data.train.batch(0, 64)
    assert data.vocab_size == 32000
    assert 31000 < int(batch.tokens.max()) < 32000
    assert data.validation is not None
    assert data.validation.samples > 0
    assert data.corpus is None
    assert not data.token_byte_counts.any()  # no bits per byte, as the rules of `monitor` say


def test_pystd_is_the_default_and_described() -> None:
    data = build_data(RootBlock())
    for word in ["pystd", "files", "train", "validation", "byte-level", data.fingerprint[:12]]:
        assert word in data.description


def test_evaluation_data_cover_a_whole_file(file: Path) -> None:
    found = evaluation_data(file, _root(override_vocab_size=300), ByteTokenizer())
    assert len(found.token_bytes) == 300
    assert found.token_bytes[_labels(found.samples)].sum() == len(file.read_bytes())
    with pytest.raises(UserError, match="--data-path"):
        evaluation_data(file.with_name("missing"), _root(), ByteTokenizer())
    single = file.with_name("single")
    single.write_text("T")
    with pytest.raises(UserError, match="single token"):
        evaluation_data(single, _root(), CharTokenizer("T"))
