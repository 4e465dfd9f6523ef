"""Build the train, validation and test samples of a run from its configuration, for every data source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.config.extensions import extension_source
from ..config.data_task import Task
from ..config.dataset_names import BUILT_IN_DATASETS, PAIR_SOURCES, SPLITS, Split
from ..config.resolved_run import DataSpec
from ..config.schema.trainer_and_data import DataBlock
from ..utils.errors import UserError
from ..utils.text import pluralize
from .datasets.document_chunks import InMemoryDocuments
from .datasets.map_style import MapStyleSamples
from .datasets.samples import AnySamples, TrainingWindows
from .datasets.sft_examples import Examples
from .datasets.tokenized import choose_tokenizer, open_splits, split_samples
from .sources.dataset_plugins import own_samples
from .sources.docstrings import read_docstrings
from .sources.record_sources import read_source
from .sources.text_pairs import TextPairs, TokenPairs, pair_parser, pairs_fingerprint
from .sources.text_sources import Corpus, parse_proportions
from .sources.text_tokens import evaluation_windows, read_corpus, token_stream, tokenize_documents
from .tasks.sft import build_sft_data
from .tasks.task_samples import SampleFactory, tokenizer_for_task
from .tokenizers.tokenizer import ByteTokenizer, TokenIds, Tokenizer
from .tokenizers.vocabulary import (
    configured_tokenizer,
    model_vocab_size,
    padded_byte_counts,
    tokenizer_for_corpus,
    with_chat_template,
)

MOCK_TRAINING_SAMPLES = 1 << 40
MOCK_EVALUATION_SAMPLES = 1024


@dataclass(frozen=True)
class Data:
    """Train, validation and test samples of a run, with their tokenizer.

    Attributes:
        tokenizer: maps text to token ids; saved with every checkpoint.
        vocab_size: vocabulary size of the model: that of the tokenizer, or `model.override_vocab_size`.
        train: training samples, endless.
        validation: held-out samples, finite; None if the split is empty.
        test: the same for the third split.
        fingerprint: SHA-256 of the text (a name for mock data): equal data have equal fingerprints. Of tokenized data
            only blocks spread evenly over the ids are hashed.
        description: one paragraph for the log.
        token_byte_counts: number of UTF-8 bytes of each token id, int64 [V]; converts nats per token to bits per byte.
            All 0 for mock data, which are no text.
        corpus: the text by split; None for tokenized, mock, plugin and paired data.
        pairs: text pairs of an encoder-decoder model by split; None for all other data.
        examples: fine-tuning examples of a GPT by split; None for all other data.
        has_predefined_splits: the pairs or examples come with their own splits; `model.data.splits_string` is ignored.
    """

    tokenizer: Tokenizer
    vocab_size: int
    train: AnySamples
    validation: AnySamples | None
    test: AnySamples | None
    fingerprint: str
    description: str
    token_byte_counts: NDArray[np.int64]
    corpus: Corpus | None = None
    pairs: TextPairs | None = None
    examples: Mapping[Split, Sequence[Examples]] | None = None
    has_predefined_splits: bool = False

    def split(self, name: Split) -> AnySamples | None:
        """Return the samples of a split by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]


def build_data(spec: DataSpec, tokenizer: Tokenizer | None = None) -> Data:
    """Read and tokenize the data, and build the samples of all splits.

    The kind of batch depends on the task (`model.data.dataset_type`). With `reset_position_ids` or
    `reset_attention_mask`, GPT batches carry the document index of each token.

    Args:
        tokenizer: tokenizer restored from a checkpoint; None builds the one of `model.tokenizer`.

    Raises:
        UserError: the text cannot be read or tokenized, a split is shorter than the sequence length, the vocabulary is
            smaller than the tokenizer's, or the tokenizer lacks a token that the task needs.
    """
    if spec.keys.data_impl in PAIR_SOURCES:
        tokenizer = with_chat_template(spec, tokenizer or configured_tokenizer(spec))
        return _fine_tuning_data(spec, tokenizer) if spec.task.name == "sft" else _pair_data(spec, tokenizer)
    data = _stream_data(spec, tokenizer)
    with_chat_template(spec, data.tokenizer)
    return data


def _prepare_tokenizer(spec: DataSpec, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the tokens that the task needs; a vocabulary too small is refused before any text is
    tokenized.
    """
    extended = tokenizer_for_task(spec, tokenizer)
    model_vocab_size(spec.vocab_size, extended)
    return extended


def _assemble(
    spec: DataSpec,
    tokenizer: Tokenizer,
    samples: Mapping[Split, AnySamples | None],
    fingerprint: str,
    description: str,
    **contents: Any,
) -> Data:
    """Build `Data`; `contents` are its fields `corpus`, `pairs`, `examples` and `has_predefined_splits`."""
    train = samples["train"]
    assert train is not None
    vocab_size = model_vocab_size(spec.vocab_size, tokenizer)
    return Data(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        train=train,
        validation=samples["validation"],
        test=samples["test"],
        fingerprint=fingerprint,
        description=description,
        token_byte_counts=padded_byte_counts(tokenizer, vocab_size),
        **contents,
    )


def _stream_data(spec: DataSpec, tokenizer: Tokenizer | None) -> Data:
    source = spec.keys.data_impl
    if source == "mock":
        return _mock_data(spec, tokenizer or ByteTokenizer())
    if source == "mmap":
        return _tokenized_data(spec, tokenizer)
    if source not in BUILT_IN_DATASETS:
        return _plugin_data(spec, tokenizer or configured_tokenizer(spec))
    return _text_data(spec, tokenizer)


def _text_data(spec: DataSpec, tokenizer: Tokenizer | None) -> Data:
    """Build data from text files; `tokenizer` is restored from a checkpoint."""
    corpus = read_corpus(spec.keys)
    tokenizer = _prepare_tokenizer(spec, tokenizer or tokenizer_for_corpus(spec, corpus))
    samples, tokens = _text_samples(spec, SampleFactory(spec, tokenizer), corpus, tokenizer)
    if samples["validation"] is None and spec.limit_val_batches:
        raise UserError(
            f"the validation split of {corpus.name} is empty: {corpus.files} file(s), "
            f"`model.data.splits_string={spec.keys.splits_string}`; give it more files or a larger share, or set "
            "`trainer.limit_val_batches=0`"
        )
    description = _describe(corpus, tokens, tokenizer, spec.task)
    return _assemble(spec, tokenizer, samples, corpus.fingerprint, description, corpus=corpus)


def _text_samples(
    spec: DataSpec, make: SampleFactory, corpus: Corpus, tokenizer: Tokenizer
) -> tuple[dict[Split, AnySamples | None], dict[Split, int]]:
    """Return the samples and the number of tokens of each split.

    Raises:
        UserError: the training split is too short for one sample.
    """
    samples: dict[Split, AnySamples | None] = {}
    if make.uses_documents:
        documents: dict[Split, list[TokenIds]] = {
            split: tokenize_documents(corpus, split, tokenizer) for split in SPLITS
        }
        for split, ids in documents.items():
            samples[split] = make.from_documents(InMemoryDocuments(ids), training=split == "train")
        if samples["train"] is None:
            raise UserError(f"no document of the training split of {corpus.name} has two tokens; use more text")
        return samples, {split: sum(map(len, ids)) for split, ids in documents.items()}
    streams: dict[Split, NDArray[Any]] = {split: token_stream(corpus, split, tokenizer) for split in SPLITS}
    tokens: dict[Split, int] = {split: len(stream) for split, stream in streams.items()}
    length = make.task.window
    if tokens["train"] < length + 1:
        raise UserError(_too_short(spec, corpus, tokens["train"]))
    samples["train"] = make.from_windows(TrainingWindows(streams["train"], length, spec.seed), training=True)
    for split in SPLITS[1:]:
        windows = evaluation_windows(streams[split], length, tokenizer)
        samples[split] = windows and make.from_windows(windows, training=False)
    return samples, tokens


def _too_short(spec: DataSpec, corpus: Corpus, tokens: int) -> str:
    """Return the error message for a training split shorter than one window."""
    task, data, key = spec.task, spec.keys, spec.length_key
    text = f"{tokens:,} tokens of the training split of {corpus.name} (`model.data.splits_string={data.splits_string}`)"
    if task.window > task.length:
        return f"`{key}` ({task.length}) needs {task.window + 1:,} tokens of text, but there are {text}; use more text"
    fix = f"use at most {tokens - 1}, or more text" if tokens > 1 else "use more text"
    return f"`{key}` ({task.length}) must be below the {text}; {fix}"


def _tokenized_data(spec: DataSpec, checkpoint_tokenizer: Tokenizer | None) -> Data:
    """Build data from memory-mapped token ids; `checkpoint_tokenizer` is restored from a checkpoint."""
    splits = open_splits(spec.keys)
    named_by = f"`model.tokenizer` ({spec.tokenizer.library})"
    if checkpoint_tokenizer:
        named_by = "the tokenizer of the checkpoint"

    def extended(tokenizer: Tokenizer) -> Tokenizer:
        return tokenizer_for_task(spec, tokenizer)

    given = checkpoint_tokenizer
    if given is None and spec.tokenizer.library != "byte-level":  # the default does not describe existing token ids
        given = configured_tokenizer(spec)
    tokenizer = choose_tokenizer(splits, given, named_by, extended)
    tokenizer = tokenizer or extended(ByteTokenizer())
    make = SampleFactory(spec, tokenizer)
    samples, tokens = split_samples(spec, splits, tokenizer, make)
    prefix = spec.keys.data_prefix
    if samples["validation"] is None and spec.limit_val_batches:
        raise UserError(
            f"`model.data.data_prefix`: the validation split is empty (`model.data.splits_string="
            f"{spec.keys.splits_string}` cuts between documents); give it a larger share or a set of its own "
            "(data_prefix.validation), or set `trainer.limit_val_batches=0`"
        )
    documents = sum(found.reader.documents for found in splits.datasets.values())
    assumed = " (assumed; the data do not record theirs)" if splits.tokenizer_document() is None else ""
    description = (
        f"{prefix if isinstance(prefix, str) else pluralize(len(splits.datasets), 'set')}: "
        f"{pluralize(documents, 'document')}; "
        + ", ".join(f"{split} {pluralize(tokens[split], 'token')}" for split in SPLITS)
        + f"; {_vocabulary(tokenizer, assumed)}; {_sequence_lengths(spec.task)}; fingerprint {splits.fingerprint[:12]}"
    )
    return _assemble(spec, tokenizer, samples, splits.fingerprint, description)


def _plugin_data(spec: DataSpec, tokenizer: Tokenizer) -> Data:
    """Build data from a dataset plugin."""
    tokenizer = _prepare_tokenizer(spec, tokenizer)
    keys, name = spec.keys, spec.keys.data_impl
    make = SampleFactory(spec, tokenizer)
    windows = {split: own_samples(spec, split, tokenizer) for split in SPLITS}
    samples: Any = {
        split: found and make.from_windows(found, training=split == "train") for split, found in windows.items()
    }
    if samples["validation"] is None and spec.limit_val_batches:
        raise UserError(f"`model.data.data_impl` ({name}) has no validation split; set `trainer.limit_val_batches=0`")
    source = extension_source("dataset", name)
    sizes = {split: found.samples for split, found in windows.items() if isinstance(found, MapStyleSamples)}
    identity = json.dumps([source, keys.path, keys.dataset_kwargs, *([sizes] if sizes else [])], sort_keys=True)
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()
    description = f"{name}: {source}; vocabulary {tokenizer.vocab_size}; {_sequence_lengths(spec.task)}"
    return _assemble(spec, tokenizer, samples, fingerprint, description)


def read_pairs(data: DataBlock) -> TextPairs:
    """Read the text pairs of `model.data`, by split."""
    if data.data_impl == "pystd_docstring":
        return read_docstrings(parse_proportions(data.splits_string))
    source = read_source(data, pair_parser(data.context_key, data.label_key), lambda pair: pair.input)
    pairs = source.merged()
    return TextPairs(source.name, pairs, pairs_fingerprint(pairs), source.has_predefined_splits)


def _pair_data(spec: DataSpec, tokenizer: Tokenizer) -> Data:
    """Build data from text pairs for an encoder-decoder model."""
    texts = read_pairs(spec.keys)
    tokenizer = _prepare_tokenizer(spec, tokenizer)
    make = SampleFactory(spec, tokenizer)
    token_pairs = {split: TokenPairs(texts.pairs[split], tokenizer, make.shape) for split in SPLITS}
    samples: Any = {split: make.from_pairs(pairs, training=split == "train") for split, pairs in token_pairs.items()}
    _check_splits(spec, texts.name, samples, texts.inputs)
    truncated = [sum(pairs.num_truncated[side] for pairs in token_pairs.values()) for side in range(2)]
    description = (
        f"{texts.name}: "
        + ", ".join(f"{split} {pluralize(len(pairs), 'pair')}" for split, pairs in texts.pairs.items())
        + f"; {_vocabulary(tokenizer)}; {_sequence_lengths(spec.task)}; truncated: inputs {truncated[0]:,}, targets "
        f"{truncated[1]:,}; fingerprint {texts.fingerprint[:12]}"
    )
    predefined = texts.has_predefined_splits
    return _assemble(
        spec, tokenizer, samples, texts.fingerprint, description, pairs=texts, has_predefined_splits=predefined
    )


def _needed_splits(spec: DataSpec) -> tuple[Split, ...]:
    """Return the splits that must not be empty."""
    return ("train", "validation") if spec.limit_val_batches else ("train",)


def _check_splits(
    spec: DataSpec, name: str, samples: Mapping[Split, AnySamples | None], inputs: Callable[[], list[str]]
) -> None:
    """Check that the splits needed for training, and validation if enabled, are not empty.

    Args:
        name: of the data, for messages.
        samples: of each split.
        inputs: returns the inputs of the examples of all splits; equal inputs are assigned to one split.

    Raises:
        UserError: a needed split is empty.
    """
    data = spec.keys
    for split in _needed_splits(spec):
        if samples[split] is not None:
            continue
        without = ", or set `trainer.limit_val_batches=0`" if split == "validation" else ""
        if data.train_ds.file_names is not None:
            key = f"model.data.{split}_ds.file_names"
            raise UserError(f"the {split} split is empty: the files of `{key}` hold no example; name others{without}")
        examples = inputs()
        count = pluralize(len(examples), "example")
        distinct = pluralize(len(set(examples)), "distinct input")
        raise UserError(
            f"the {split} split of {name} is empty: {count}, {distinct}, and equal inputs stay together "
            f"(`model.data.splits_string={data.splits_string}`, or {split}.jsonl of a folder that holds train.jsonl); "
            f"give it more examples or a larger share{without}"
        )


def _fine_tuning_data(spec: DataSpec, tokenizer: Tokenizer) -> Data:
    """Build supervised fine-tuning data (prompts with answers, or conversations) for a GPT."""
    tokenizer = _prepare_tokenizer(spec, tokenizer)
    task = spec.task
    sft = build_sft_data(spec, tokenizer)
    for split in _needed_splits(spec):
        sft.check(split, task.length, spec.length_key)
    _check_splits(spec, sft.records.name, sft.samples, sft.records.inputs)
    fingerprint = sft.records.fingerprint()
    description = (
        f"{sft.records.name}: {sft.describe()}; {_vocabulary(tokenizer)}; {'packed ' * task.packed}"
        f"{_sequence_lengths(task)}; fingerprint {fingerprint[:12]}"
    )
    predefined = sft.records.has_predefined_splits
    return _assemble(
        spec, tokenizer, sft.samples, fingerprint, description, examples=sft.examples, has_predefined_splits=predefined
    )


def _mock_data(spec: DataSpec, tokenizer: Tokenizer) -> Data:
    tokenizer = _prepare_tokenizer(spec, tokenizer)
    vocab_size = model_vocab_size(spec.vocab_size, tokenizer)
    make = SampleFactory(spec, tokenizer)
    counts = (MOCK_TRAINING_SAMPLES, MOCK_EVALUATION_SAMPLES, MOCK_EVALUATION_SAMPLES)
    samples: Any = {split: make.mock(vocab_size, counts[part], part) for part, split in enumerate(SPLITS)}
    description = (
        f"mock: random tokens out of {vocab_size:,}, {_sequence_lengths(spec.task)}; there is nothing to learn"
    )
    data = _assemble(spec, tokenizer, samples, f"mock-{vocab_size}", description)
    return replace(data, token_byte_counts=np.zeros_like(data.token_byte_counts))  # random tokens are no text


def _sequence_lengths(task: Task) -> str:
    """Return the sequence lengths as text."""
    if not task.is_encoder_decoder:
        return f"sequences of {task.length:,}"
    return f"sequences of {task.length:,} and {task.decoder_length:,} (encoder, decoder)"


def _vocabulary(tokenizer: Tokenizer, note: str = "") -> str:
    return f"{tokenizer.kind} tokenizer{note}, vocabulary {tokenizer.vocab_size}"


def _describe(corpus: Corpus, tokens: dict[Split, int], tokenizer: Tokenizer, task: Task) -> str:
    counts = ", ".join(
        f"{split} {pluralize(tokens[split], 'token')} in {pluralize(len(texts), 'document')}"
        for split, texts in corpus.documents.items()
    )
    return (
        f"{corpus.name}: {pluralize(corpus.files, 'file')}"
        f"{f' ({corpus.skipped_files})' if corpus.skipped_files else ''}; {counts}; {_vocabulary(tokenizer)}; "
        f"{_sequence_lengths(task)}; fingerprint {corpus.fingerprint[:12]}"
    )
