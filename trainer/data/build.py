"""From the configuration to samples: the one place that reads `model.data` and `model.tokenizer`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config.schema import RootBlock
from ..environment import user_path
from ..errors import UserError
from .docstrings import read_docstrings
from .installed import BUILT_IN, PAIR_SOURCES, installed_datasets, installed_samples
from .pieces import TokenDocuments
from .samples import EvaluationWindows, TrainingWindows
from .seq2seq import AnySamples
from .sources import SPLITS, Corpus, Split, parse_proportions, read_pystd, read_text
from .task import Task, task_of
from .task import sequence_length as length_of
from .task_samples import TaskSamples, tokenizer_of_task
from .text_pairs import TextPairs, TokenPairs, read_jsonl
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
        corpus: the text itself, by split; None for tokenized, mock and installed data, and for pairs.
        pairs: pairs of texts, by split; None for everything else.
    """

    tokenizer: Tokenizer
    vocab_size: int
    train: AnySamples
    validation: AnySamples | None
    test: AnySamples | None
    fingerprint: str
    description: str
    token_bytes: NDArray[np.int64]
    corpus: Corpus | None
    pairs: TextPairs | None = None

    @property
    def validation_bytes(self) -> int:
        """UTF-8 bytes of the validation text; 0 where there is none."""
        return len(self.corpus.text("validation")) if self.corpus else 0

    def split(self, name: Split) -> AnySamples | None:
        """The samples of a split by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]


def build_data(root: RootBlock, tokenizer: Tokenizer | None = None) -> Data:
    """Read the text, tokenize it and cut it into samples.

    Batches are what the task of the run needs (`model.data.dataset_type`); with `reset_position_ids` or
    `reset_attention_mask` those of a GPT tell which document each token belongs to.

    Args:
        root: the configuration.
        tokenizer: the one of a checkpoint, to go on with; None builds what `model.tokenizer` asks for.

    Raises:
        UserError: text that cannot be read or tokenized, a split too short for the sequence length, a vocabulary too
            small for the tokenizer, or a tokenizer without a token that the task needs.
    """
    task = task_of(root)
    keys = root.model
    if keys.data.data_impl == "mock":
        return _mock(root, task, tokenizer or ByteTokenizer())
    if keys.data.data_impl == "mmap":
        return _mapped(root, task, tokenizer)
    if keys.data.data_impl in PAIR_SOURCES:
        return _paired(root, task, tokenizer or _named_tokenizer(root) or ByteTokenizer())
    if keys.data.data_impl not in BUILT_IN:
        return _installed(root, task, tokenizer or _named_tokenizer(root) or ByteTokenizer())
    return _text(root, task, tokenizer)


def _text(root: RootBlock, task: Task, tokenizer: Tokenizer | None) -> Data:
    """The text of files; `tokenizer` is that of a checkpoint."""
    keys = root.model
    corpus = read_corpus(root)
    tokenizer = tokenizer_of_task(root, task, tokenizer or build_tokenizer(root, corpus))
    vocab_size = _model_vocabulary(root, tokenizer)
    streams: dict[Split, NDArray[Any]] = {split: token_stream(corpus, split, tokenizer) for split in corpus.documents}
    if len(streams["validation"]) < 2 and root.trainer.limit_val_batches:
        raise UserError(
            f"the validation split of {corpus.name} is empty: {corpus.files} file(s), "
            f"`model.data.splits_string={keys.data.splits_string}`; give it more files or a larger share, or set "
            "`trainer.limit_val_batches=0`"
        )
    return Data(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        **_text_samples(root, task, corpus, streams, tokenizer),
        fingerprint=corpus.fingerprint,
        description=_describe(corpus, streams, tokenizer, task),
        token_bytes=_padded(tokenizer.token_bytes(), vocab_size),
        corpus=corpus,
    )


def _text_samples(
    root: RootBlock, task: Task, corpus: Corpus, streams: dict[Split, NDArray[Any]], tokenizer: Tokenizer
) -> dict[Any, Any]:
    """The samples of each split.

    Raises:
        UserError: the training split is too short for one.
    """
    make = TaskSamples(root, task, tokenizer)
    if make.takes_documents:
        found = {
            split: make.of_documents(_token_documents(corpus, split, tokenizer), training=split == "train")
            for split in SPLITS
        }
        if found["train"] is None:
            raise UserError(f"no document of the training split of {corpus.name} has two tokens; use more text")
        return found
    train, length = streams["train"], task.window
    if len(train) < length + 1:
        raise UserError(_too_short(root, task, corpus, len(train)))
    held_out = {split: evaluation_windows(streams[split], length, tokenizer) for split in SPLITS[1:]}
    return {
        "train": make.of_windows(TrainingWindows(train, length, root.model.seed), training=True),
        **{split: windows and make.of_windows(windows, training=False) for split, windows in held_out.items()},
    }


def _token_documents(corpus: Corpus, split: Split, tokenizer: Tokenizer) -> TokenDocuments:
    return TokenDocuments([tokenizer.encode(text) for text in corpus.documents[split]])


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
    """Tokens in a sample, of the encoder where there are two sides: `model.data.seq_length`, or the model's length."""
    return length_of(root.model)


def _too_short(root: RootBlock, task: Task, corpus: Corpus, tokens: int) -> str:
    """What to do about a training split that has no room for one window."""
    data = root.model.data
    if data.seq_length is not None:
        key = "model.data.seq_length"
    else:
        key = "model.seq_length" if root.model.family == "t5" else "model.encoder_seq_length"
    text = f"{tokens:,} tokens of the training split of {corpus.name} (`model.data.splits_string={data.splits_string}`)"
    if task.window > task.length:
        return f"`{key}` ({task.length}) takes {task.window + 1:,} tokens of text, but there are {text}; use more text"
    way_out = f"use at most {tokens - 1}, or more text" if tokens > 1 else "use more text"
    return f"`{key}` ({task.length}) must be below the {text}; {way_out}"


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


def evaluation_data(path: Path, root: RootBlock, tokenizer: Tokenizer) -> tuple[AnySamples, NDArray[np.int64]]:
    """Samples over a whole text file or folder, for a trained model, and the bytes of each token id.

    They are made as those of the run's own data were.

    Raises:
        UserError: the text cannot be read or tokenized, or is too short to predict anything.
    """
    corpus = read_text(path, (0.0, 1.0, 0.0), named_by="--data-path")
    task = task_of(root)
    make = TaskSamples(root, task, tokenizer)
    samples: AnySamples | None
    if make.takes_documents:
        samples = make.of_documents(_token_documents(corpus, "validation", tokenizer), training=False)
    else:
        windows = evaluation_windows(token_stream(corpus, "validation", tokenizer), task.window, tokenizer)
        samples = windows and make.of_windows(windows, training=False)
    if samples is None:
        raise UserError(f"{path} holds a single token: there is nothing to predict; use a longer text")
    return samples, _padded(tokenizer.token_bytes(), _model_vocabulary(root, tokenizer))


def evaluation_pairs(
    path: Path, root: RootBlock, tokenizer: Tokenizer
) -> tuple[AnySamples, NDArray[np.int64], TextPairs]:
    """Samples of all pairs of a JSONL file or folder, the bytes of each token id, and the pairs (as validation).

    Raises:
        UserError: it cannot be read, or holds no pair.
    """
    data = root.model.data
    texts = read_jsonl(path, (0.0, 1.0, 0.0), data.context_key, data.label_key, named_by="--data-path")
    make = TaskSamples(root, task_of(root), tokenizer)
    samples = make.of_pairs(TokenPairs(texts.pairs["validation"], tokenizer, make.shape), training=False)
    if samples is None:
        raise UserError(f"--data-path: {path} holds no pair to evaluate on")
    return samples, _padded(tokenizer.token_bytes(), _model_vocabulary(root, tokenizer)), texts


def evaluation_windows(stream: NDArray[Any], length: int, tokenizer: Tokenizer) -> EvaluationWindows | None:
    """Windows that cover a stream once, or None where there is nothing to predict."""
    return EvaluationWindows(stream, length, tokenizer.pad_id) if len(stream) > 1 else None


def _mapped(root: RootBlock, task: Task, kept: Tokenizer | None) -> Data:
    """Tokenized data; `kept` is the tokenizer of a checkpoint."""
    splits = open_splits(root)
    named_by = "the tokenizer of the checkpoint" if kept else f"`model.tokenizer` ({root.model.tokenizer.library})"

    def extended(tokenizer: Tokenizer) -> Tokenizer:
        return tokenizer_of_task(root, task, tokenizer)

    tokenizer = choose_tokenizer(splits, kept or _named_tokenizer(root), named_by, extended)
    tokenizer = tokenizer or extended(ByteTokenizer())
    make = TaskSamples(root, task, tokenizer)
    samples, tokens = split_samples(root, splits, tokenizer, make)
    prefix = root.model.data.data_prefix
    if samples["validation"] is None and root.trainer.limit_val_batches:
        raise UserError(
            f"`model.data.data_prefix`: the validation split is empty (`model.data.splits_string="
            f"{root.model.data.splits_string}` cuts between documents); give it a larger share or a set of its own "
            "(data_prefix.validation), or set `trainer.limit_val_batches=0`"
        )
    vocab_size = _model_vocabulary(root, tokenizer)
    documents = sum(found.reader.documents for found in splits.sets.values())
    held: Any = samples
    return Data(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        **held,
        fingerprint=splits.fingerprint,
        description=(
            f"{prefix if isinstance(prefix, str) else f'{len(splits.sets)} sets'}: {documents:,} documents; "
            + ", ".join(f"{split} {tokens[split]:,} tokens" for split in SPLITS)
            + f"; {tokenizer.to_document()['tokenizer']} tokenizer, vocabulary {tokenizer.vocab_size}; "
            f"{_sequences(task)}; fingerprint {splits.fingerprint[:12]}"
        ),
        token_bytes=_padded(tokenizer.token_bytes(), vocab_size),
        corpus=None,
    )


def _installed(root: RootBlock, task: Task, tokenizer: Tokenizer) -> Data:
    """The data set of another package."""
    tokenizer = tokenizer_of_task(root, task, tokenizer)
    keys = root.model.data.model_dump(mode="json")
    name = root.model.data.data_impl
    make = TaskSamples(root, task, tokenizer)
    windows = {split: installed_samples(keys, split, task.window, tokenizer, root.model.seed) for split in SPLITS}
    samples: Any = {
        split: found and make.of_windows(found, training=split == "train") for split, found in windows.items()
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
        **samples,
        fingerprint=hashlib.sha256(told.encode()).hexdigest(),
        description=f"{name}: {source.value} {version}; vocabulary {tokenizer.vocab_size}; {_sequences(task)}",
        token_bytes=_padded(tokenizer.token_bytes(), vocab_size),
        corpus=None,
    )


def read_pairs(root: RootBlock) -> TextPairs:
    """The pairs of texts that `model.data` names, split."""
    data = root.model.data
    proportions = parse_proportions(data.splits_string)
    if data.data_impl == "pystd_docstring":
        return read_docstrings(proportions)
    if data.path is None:
        raise UserError("`model.data.data_impl=jsonl` needs `model.data.path`: a JSONL file or a folder of them")
    return read_jsonl(user_path(data.path, "model.data.path"), proportions, data.context_key, data.label_key)


def _paired(root: RootBlock, task: Task, tokenizer: Tokenizer) -> Data:
    """Pairs of texts."""
    texts = read_pairs(root)
    tokenizer = tokenizer_of_task(root, task, tokenizer)
    vocab_size = _model_vocabulary(root, tokenizer)
    make = TaskSamples(root, task, tokenizer)
    found = {split: TokenPairs(texts.pairs[split], tokenizer, make.shape) for split in SPLITS}
    samples: Any = {split: make.of_pairs(pairs, training=split == "train") for split, pairs in found.items()}
    for split, wanted in (("train", True), ("validation", bool(root.trainer.limit_val_batches))):
        if samples[split] is None and wanted:
            raise UserError(
                f"the {split} split of {texts.name} is empty (`model.data.splits_string="
                f"{root.model.data.splits_string}`); give it more pairs or a larger share"
                + (", or set `trainer.limit_val_batches=0`" if split == "validation" else "")
            )
    cut = [sum(pairs.cut[side] for pairs in found.values()) for side in range(2)]
    return Data(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        **samples,
        fingerprint=texts.fingerprint,
        description=(
            f"{texts.name}: "
            + ", ".join(f"{split} {len(pairs):,} pairs" for split, pairs in texts.pairs.items())
            + f"; {tokenizer.to_document()['tokenizer']} tokenizer, vocabulary {tokenizer.vocab_size}; "
            f"{_sequences(task)}, to which {cut[0]:,} inputs and {cut[1]:,} targets are cut; fingerprint "
            f"{texts.fingerprint[:12]}"
        ),
        token_bytes=_padded(tokenizer.token_bytes(), vocab_size),
        corpus=None,
        pairs=texts,
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


def _mock(root: RootBlock, task: Task, tokenizer: Tokenizer) -> Data:
    tokenizer = tokenizer_of_task(root, task, tokenizer)
    vocab_size = _model_vocabulary(root, tokenizer)
    make = TaskSamples(root, task, tokenizer)
    train, validation, test = (
        make.mock(vocab_size, samples, part)
        for part, samples in enumerate([MOCK_TRAINING_SAMPLES, MOCK_EVALUATION_SAMPLES, MOCK_EVALUATION_SAMPLES])
    )
    return Data(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        train=train,
        validation=validation,
        test=test,
        fingerprint=f"mock-{vocab_size}",
        description=f"mock: random tokens out of {vocab_size:,}, {_sequences(task)}; there is nothing to learn",
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


def _sequences(task: Task) -> str:
    """How long the samples are, in words."""
    if not task.has_two_sides:
        return f"sequences of {task.length:,}"
    return f"sequences of {task.length:,} and {task.decoder_length:,} (encoder, decoder)"


def _describe(corpus: Corpus, streams: dict[Split, NDArray[Any]], tokenizer: Tokenizer, task: Task) -> str:
    parts = ", ".join(
        f"{split} {len(streams[split]):,} tokens in {len(texts):,} document{'s' * (len(texts) != 1)}"
        for split, texts in corpus.documents.items()
    )
    return (
        f"{corpus.name}: {corpus.files:,} file{'s' * (corpus.files != 1)}; {parts}; "
        f"{tokenizer.to_document()['tokenizer']} tokenizer, vocabulary {tokenizer.vocab_size}; "
        f"{_sequences(task)}; fingerprint {corpus.fingerprint[:12]}"
    )
