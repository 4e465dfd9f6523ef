"""From the configuration to samples: the one place that reads `model.data` and `model.tokenizer`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config.schema import RootBlock
from ..environment import user_path
from ..errors import UserError
from .documents import NumberedDocuments
from .installed import BUILT_IN, installed_datasets, installed_samples
from .samples import EndOfDocumentMasked, EvaluationWindows, MockSamples, Samples, TrainingWindows
from .sources import SPLITS, Corpus, Split, parse_proportions, read_pystd, read_text
from .tokenized import choose_tokenizer, open_splits, split_samples
from .tokenizers import ByteTokenizer, CharTokenizer, Tokenizer

MOCK_TRAINING_SAMPLES = 1 << 40
MOCK_EVALUATION_SAMPLES = 1024


@dataclass(frozen=True)
class Data:
    """What a run trains and evaluates on.

    Attributes:
        tokenizer: text to token ids, saved with every checkpoint.
        vocab_size: vocabulary of the model: the tokenizer's, or `model.override_vocab_size`.
        train: training samples, endless.
        validation: held-out samples that end, or None where the split is empty.
        test: the same, of the third split.
        fingerprint: SHA-256 of the text (or a name for mock data): equal data have equal fingerprints. Of tokenized
            data only places spread over them are read for it.
        description: one paragraph for the reader of a log.
        token_bytes: UTF-8 bytes each token id stands for, int64 [vocab_size]: what turns nats per token into bits per
            byte.
        corpus: the text itself, by split; None for tokenized, mock and installed data.
    """

    tokenizer: Tokenizer
    vocab_size: int
    train: Samples
    validation: Samples | None
    test: Samples | None
    fingerprint: str
    description: str
    token_bytes: NDArray[np.int64]
    corpus: Corpus | None

    @property
    def validation_bytes(self) -> int:
        """UTF-8 bytes of the validation text; 0 where there is none."""
        return len(self.corpus.text("validation")) if self.corpus else 0

    def split(self, name: Split) -> Samples | None:
        """The samples of a split by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]


def build_data(root: RootBlock, tokenizer: Tokenizer | None = None) -> Data:
    """Read the text, tokenize it and cut it into samples.

    With `reset_position_ids` or `reset_attention_mask` batches tell which document each token belongs to.

    Args:
        root: the configuration.
        tokenizer: the one of a checkpoint, to go on with; None builds what `model.tokenizer` asks for.

    Raises:
        UserError: text that cannot be read or tokenized, a split too short for the sequence length, a vocabulary too
            small for the tokenizer, or documents to be told apart by a tokenizer that does not end them.
    """
    data = _data(root, tokenizer)
    return replace(
        data,
        train=_numbered(root, data.train, data.tokenizer),
        validation=data.validation and _numbered(root, data.validation, data.tokenizer),
        test=data.test and _numbered(root, data.test, data.tokenizer),
    )


def _data(root: RootBlock, tokenizer: Tokenizer | None) -> Data:
    keys = root.model
    if keys.data.data_impl == "mock":
        return _mock(root, tokenizer or ByteTokenizer())
    if keys.data.data_impl == "mmap":
        return _mapped(root, tokenizer)
    if keys.data.data_impl not in BUILT_IN:
        return _installed(root, tokenizer or _named_tokenizer(root) or ByteTokenizer())
    corpus = read_corpus(root)
    tokenizer = tokenizer or build_tokenizer(root, corpus)
    vocab_size = _model_vocabulary(root, tokenizer)
    streams: dict[Split, NDArray[Any]] = {split: token_stream(corpus, split, tokenizer) for split in corpus.documents}
    length = sequence_length(root)
    if len(streams["train"]) < length + 1:
        key = "model.data.seq_length" if keys.data.seq_length else "model.encoder_seq_length"
        raise UserError(
            f"`{key}` ({length}) must be below the {len(streams['train']):,} tokens of the training split of "
            f"{corpus.name} (`model.data.splits_string={keys.data.splits_string}`); "
            + (
                f"use at most {len(streams['train']) - 1}, or more text"
                if len(streams["train"]) > 1
                else "use more text"
            )
        )
    if len(streams["validation"]) < 2 and root.trainer.limit_val_batches:
        raise UserError(
            f"the validation split of {corpus.name} is empty: {corpus.files} file(s), "
            f"`model.data.splits_string={keys.data.splits_string}`; give it more files or a larger share, or set "
            "`trainer.limit_val_batches=0`"
        )
    samples: dict[Split, Samples | None] = {
        "train": TrainingWindows(streams["train"], length, keys.seed),
        "validation": evaluation_windows(streams["validation"], length, tokenizer),
        "test": evaluation_windows(streams["test"], length, tokenizer),
    }
    return Data(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        **_masked(root, samples, tokenizer),
        fingerprint=corpus.fingerprint,
        description=_describe(corpus, streams, tokenizer, length),
        token_bytes=_padded(tokenizer.token_bytes(), vocab_size),
        corpus=corpus,
    )


def read_corpus(root: RootBlock) -> Corpus:
    """The text that `model.data` names, split."""
    data = root.model.data
    proportions = parse_proportions(data.splits_string)
    if data.data_impl == "pystd":
        return read_pystd(proportions)
    if data.path is None:
        raise UserError("`model.data.data_impl=text` needs `model.data.path`: a UTF-8 text file or a folder of them")
    return read_text(user_path(data.path, "model.data.path"), proportions)


def build_tokenizer(root: RootBlock, corpus: Corpus) -> Tokenizer:
    """The tokenizer that `model.tokenizer` asks for; the characters are those of all splits."""
    match root.model.tokenizer.library:
        case "byte-level":
            return ByteTokenizer()
        case "char":
            return CharTokenizer.of_texts([text for texts in corpus.documents.values() for text in texts])
        case _:
            from .tokenizer_files import tokenizer_of_keys

            return tokenizer_of_keys(root.model.tokenizer)


def sequence_length(root: RootBlock) -> int:
    """Tokens in a sample: `model.data.seq_length`, or else `model.encoder_seq_length`."""
    return root.model.data.seq_length or root.model.encoder_seq_length


def token_stream(corpus: Corpus, split: Split, tokenizer: Tokenizer) -> NDArray[Any]:
    """All tokens of a split in one row, [n]; with an eos token before, between and after the documents if there is one.

    The leading eos makes the first token of the first document a label too, so every byte of the text is predicted.
    """
    pieces: list[NDArray[Any]] = []
    for number, text in enumerate(corpus.documents[split]):
        try:
            pieces.append(tokenizer.encode(text))
        except UserError as error:
            raise UserError(
                [f"{split} document {number + 1} of {corpus.name}: {error.lines[0]}", *error.lines[1:]]
            ) from None
    if not pieces:
        return np.empty(0, np.uint16)
    if tokenizer.eos_id is None:
        return np.concatenate(pieces)
    eos = np.array([tokenizer.eos_id], pieces[0].dtype)
    return np.concatenate([eos, *(part for piece in pieces for part in (piece, eos))])


def evaluation_data(path: Path, root: RootBlock, tokenizer: Tokenizer) -> tuple[Samples, NDArray[np.int64]]:
    """Windows over a whole text file or folder, for a trained model, and the bytes of each token id.

    Their documents are kept apart as those of the run's own data were.

    Raises:
        UserError: the text cannot be read or tokenized, or is too short to predict anything.
    """
    corpus = read_text(path, (0.0, 1.0, 0.0), named_by="--data-path")
    windows = evaluation_windows(token_stream(corpus, "validation", tokenizer), sequence_length(root), tokenizer)
    if windows is None:
        raise UserError(f"{path} holds a single token: there is nothing to predict; use a longer text")
    return _numbered(root, windows, tokenizer), _padded(tokenizer.token_bytes(), _model_vocabulary(root, tokenizer))


def evaluation_windows(stream: NDArray[Any], length: int, tokenizer: Tokenizer) -> EvaluationWindows | None:
    """Windows that cover a stream once, or None where there is nothing to predict."""
    return EvaluationWindows(stream, length, tokenizer.pad_id) if len(stream) > 1 else None


def _mapped(root: RootBlock, kept: Tokenizer | None) -> Data:
    """Tokenized data; `kept` is the tokenizer of a checkpoint."""
    splits = open_splits(root)
    named_by = "the tokenizer of the checkpoint" if kept else f"`model.tokenizer` ({root.model.tokenizer.library})"
    tokenizer = choose_tokenizer(splits, kept or _named_tokenizer(root), named_by) or ByteTokenizer()
    length = sequence_length(root)
    samples, tokens = split_samples(root, splits, tokenizer, length)
    prefix = root.model.data.data_prefix
    if samples["validation"] is None and root.trainer.limit_val_batches:
        raise UserError(
            f"`model.data.data_prefix`: the validation split is empty (`model.data.splits_string="
            f"{root.model.data.splits_string}` cuts between documents); give it a larger share or a set of its own "
            "(data_prefix.validation), or set `trainer.limit_val_batches=0`"
        )
    vocab_size = _model_vocabulary(root, tokenizer)
    documents = sum(found.reader.documents for found in splits.sets.values())
    return Data(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        **_masked(root, samples, tokenizer),
        fingerprint=splits.fingerprint,
        description=(
            f"{prefix if isinstance(prefix, str) else f'{len(splits.sets)} sets'}: {documents:,} documents; "
            + ", ".join(f"{split} {tokens[split]:,} tokens" for split in SPLITS)
            + f"; {tokenizer.to_document()['tokenizer']} tokenizer, vocabulary {tokenizer.vocab_size}; sequences of "
            f"{length:,}; fingerprint {splits.fingerprint[:12]}"
        ),
        token_bytes=_padded(tokenizer.token_bytes(), vocab_size),
        corpus=None,
    )


def _installed(root: RootBlock, tokenizer: Tokenizer) -> Data:
    """The data set of another package."""
    keys = root.model.data.model_dump(mode="json")
    name, length = root.model.data.data_impl, sequence_length(root)
    samples: dict[Split, Samples | None] = {
        split: installed_samples(keys, split, length, tokenizer, root.model.seed) for split in SPLITS
    }
    if samples["validation"] is None and root.trainer.limit_val_batches:
        raise UserError(f"`model.data.data_impl` ({name}) has no validation split; set `trainer.limit_val_batches=0`")
    source = installed_datasets()[name]
    version = source.dist.version if source.dist else ""
    told = json.dumps([source.value, version, keys["path"], keys["dataset_kwargs"]], sort_keys=True)
    vocab_size = _model_vocabulary(root, tokenizer)
    return Data(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        **_masked(root, samples, tokenizer),
        fingerprint=hashlib.sha256(told.encode()).hexdigest(),
        description=f"{name}: {source.value} {version}; vocabulary {tokenizer.vocab_size}; sequences of {length:,}",
        token_bytes=_padded(tokenizer.token_bytes(), vocab_size),
        corpus=None,
    )


def _named_tokenizer(root: RootBlock) -> Tokenizer | None:
    """The tokenizer that `model.tokenizer` names; None where it has its default, which says nothing about the data.

    Raises:
        UserError: it is made from the training text, and there is none.
    """
    match root.model.tokenizer.library:
        case "byte-level":
            return None
        case "char":
            raise UserError(
                f"`model.tokenizer.library` (char) is made from text, which `model.data.data_impl="
                f"{root.model.data.data_impl}` has none of; use the tokenizer that made the data"
            )
        case _:
            from .tokenizer_files import tokenizer_of_keys

            return tokenizer_of_keys(root.model.tokenizer)


def _masked(root: RootBlock, samples: dict[Split, Samples | None], tokenizer: Tokenizer) -> Any:
    """The samples by split, without the labels that `model.data.eod_mask_loss` leaves out.

    Raises:
        UserError: labels are to be left out after the end of a document, and the tokenizer has no such token.
    """
    eos = tokenizer.eos_id
    if not root.model.data.eod_mask_loss:
        return samples
    if eos is None:
        raise UserError(
            f"`model.data.eod_mask_loss` (true) needs a tokenizer with an end-of-document token, which the "
            f"{tokenizer.to_document()['tokenizer']} tokenizer has not; set it to false"
        )
    return {split: found and EndOfDocumentMasked(found, eos) for split, found in samples.items()}


def _numbered(root: RootBlock, samples: Samples, tokenizer: Tokenizer) -> Samples:
    """The samples, with the number of each token's document where the model is to keep documents apart.

    Raises:
        UserError: the tokenizer has no token that ends documents.
    """
    keys = root.model.data
    names = [name for name in ("reset_position_ids", "reset_attention_mask") if getattr(keys, name)]
    if not names:
        return samples
    if tokenizer.eos_id is None:
        raise UserError(
            f"`model.data.{names[0]}` (true) needs a tokenizer with an end-of-document token, which the "
            f"{tokenizer.to_document()['tokenizer']} tokenizer has not; set it to false"
        )
    return NumberedDocuments(samples, tokenizer.eos_id)


def _mock(root: RootBlock, tokenizer: Tokenizer) -> Data:
    vocab_size = _model_vocabulary(root, tokenizer)
    length = sequence_length(root)
    train, validation, test = (
        MockSamples(vocab_size, length, root.model.seed, samples, part)
        for part, samples in enumerate([MOCK_TRAINING_SAMPLES, MOCK_EVALUATION_SAMPLES, MOCK_EVALUATION_SAMPLES])
    )
    return Data(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        train=train,
        validation=validation,
        test=test,
        fingerprint=f"mock-{vocab_size}",
        description=f"mock: random tokens out of {vocab_size:,}, sequences of {length:,}; there is nothing to learn",
        token_bytes=_padded(tokenizer.token_bytes(), vocab_size),
        corpus=None,
    )


def _model_vocabulary(root: RootBlock, tokenizer: Tokenizer) -> int:
    override = root.model.override_vocab_size
    if override is not None and override < tokenizer.vocab_size:
        raise UserError(
            f"`model.override_vocab_size` ({override}) must not be below the {tokenizer.vocab_size} tokens of the "
            f"tokenizer; leave it null or use {tokenizer.vocab_size} or more"
        )
    return override or tokenizer.vocab_size


def _padded(token_bytes: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    return np.concatenate([token_bytes, np.zeros(vocab_size - len(token_bytes), np.int64)])


def _describe(corpus: Corpus, streams: dict[Split, NDArray[Any]], tokenizer: Tokenizer, length: int) -> str:
    parts = ", ".join(
        f"{split} {len(streams[split]):,} tokens in {len(texts):,} document{'s' * (len(texts) != 1)}"
        for split, texts in corpus.documents.items()
    )
    return (
        f"{corpus.name}: {corpus.files:,} file{'s' * (corpus.files != 1)}; {parts}; "
        f"{tokenizer.to_document()['tokenizer']} tokenizer, vocabulary {tokenizer.vocab_size}; "
        f"sequences of {length:,}; fingerprint {corpus.fingerprint[:12]}"
    )
