"""Samples of `model.data.data_prefix`: open and check the tokenized datasets, split them, and blend them.

A Megatron dataset does not store its tokenizer. `stoker preprocess` writes it to PREFIX.json; datasets of other tools
need `model.tokenizer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...config.blend_spec import Blend, is_per_split, parse_prefixes
from ...config.dataset_names import SPLITS, Split
from ...config.resolved_run import DataSpec
from ...config.schema.trainer_and_data import DataBlock
from ...config.suggest import closest
from ...utils.environment import user_path
from ...utils.errors import UserError
from ...utils.safetensors_io import DamagedFileError, read_json
from ...utils.text import pluralize
from ..sources.index_cache import IndexCache
from ..sources.indexed_tokens import MAX_METADATA_BYTES, IndexedReader, bin_path, idx_path
from ..sources.text_sources import parse_proportions
from ..tasks.task_samples import SampleFactory
from ..tokenizers.tokenizer import Tokenizer, is_same_tokenizer
from ..tokenizers.tokenizer_document import tokenizer_from_dict
from .blend import BlendedSamples
from .memory_mapped import DocumentRange, MappedDocuments, MappedEvaluation, MappedTraining, check_ids
from .samples import AnySamples, BatchT, DictSamples, Samples

_KEY = "model.data.data_prefix"
_NUM_SAMPLED_BLOCKS = 1024
_SAMPLED_BYTES = 4096
_MIN_CACHED_SIZE = 1 << 20
"""Documents and windows of an epoch from which its index is cached without being configured: 0.2 s to build."""


@dataclass(frozen=True)
class TokenizedDataset:
    """A tokenized dataset.

    Attributes:
        tokenizer_document: the tokenizer that made it, as in a checkpoint; None without PREFIX.json.
        fingerprint: SHA-256 over the index, the size of the ids, and 4 KiB at each of 1,024 positions spread evenly
            over them (all of them up to 4 MiB), in hexadecimal: a change of a few ids in place may go unnoticed.
    """

    reader: IndexedReader
    tokenizer_document: dict[str, Any] | None
    fingerprint: str


@dataclass(frozen=True)
class TokenizedSplits:
    """The datasets of `model.data.data_prefix`.

    Attributes:
        datasets: by path as written by the user.
        blends: of each split.
        fingerprint: of the datasets, weights and splits.
    """

    datasets: dict[str, TokenizedDataset]
    blends: dict[Split, Blend]
    fingerprint: str

    def tokenizer_document(self) -> dict[str, Any] | None:
        """Return the tokenizer document of the datasets; None if none of them has one.

        Raises:
            UserError: two datasets were made with different tokenizers.
        """
        known = [
            (path, found.tokenizer_document)
            for path, found in self.datasets.items()
            if found.tokenizer_document is not None
        ]
        for path, document in known[1:]:
            if not is_same_tokenizer(document, known[0][1]):
                raise UserError(
                    f"`{_KEY}`: {known[0][0]} and {path} were made with different tokenizers "
                    "(see their .json files); sets of one run need one tokenizer"
                )
        return known[0][1] if known else None


def open_splits(data: DataBlock) -> TokenizedSplits:
    """Open and check every dataset of `model.data.data_prefix`.

    Raises:
        UserError: a dataset is missing, damaged or empty.
    """
    if not data.data_prefix:
        raise UserError(f"`model.data.data_impl=mmap` needs `{_KEY}`: the path of a .bin/.idx pair, without its suffix")
    try:
        blends = parse_prefixes(data.data_prefix)
    except ValueError as error:
        raise UserError(f"`{_KEY}` {error}") from None
    sets = {path: _open(path) for path in dict.fromkeys(path for blend in blends.values() for path in blend.paths)}
    contents = {
        split: [[sets[path].fingerprint, weight] for path, weight in zip(blend.paths, blend.weights, strict=True)]
        for split, blend in blends.items()
    }
    weighted = {split: blend.has_weights for split, blend in blends.items()}
    identity = {
        "format": 1,
        "sets": contents,
        "weighted": weighted,
        "splits": None if is_per_split(data.data_prefix) else data.splits_string,
    }
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return TokenizedSplits(sets, blends, fingerprint)


def choose_tokenizer(
    splits: TokenizedSplits, named: Tokenizer | None, named_by: str, extended: Callable[[Tokenizer], Tokenizer]
) -> Tokenizer | None:
    """Return the tokenizer of the data: the one that made them, or else the configured one.

    Args:
        named: the configured tokenizer, if any.
        named_by: the origin of `named`, for messages.
        extended: adds the special tokens that the task needs.

    Raises:
        UserError: both are known and differ.
    """
    named = named and extended(named)
    document = splits.tokenizer_document()
    if document is None:
        return named
    try:
        data_tokenizer = extended(tokenizer_from_dict(document))
    except ValueError as error:
        raise UserError(f"`{_KEY}`: the tokenizer in the .json file of the data: {error}") from None
    if named is not None and not is_same_tokenizer(named.to_dict(), data_tokenizer.to_dict()):
        raise UserError(
            f"{named_by} is not the tokenizer that made the data of `{_KEY}` ({document.get('tokenizer')}, from their "
            ".json file); preprocess the text again, or use the tokenizer of the data"
        )
    return named or data_tokenizer


def split_samples(
    spec: DataSpec, splits: TokenizedSplits, tokenizer: Tokenizer, make: SampleFactory
) -> tuple[dict[Split, AnySamples | None], dict[Split, int]]:
    """Return the samples and the number of tokens of each split.

    Datasets are split by documents, as in Megatron. Training follows the weights; evaluation uses every token of every
    dataset once.

    Raises:
        UserError: a dataset has too few tokens for one training sample, or ids outside the vocabulary.
    """
    for found in splits.datasets.values():
        _check_sampled_ids(found.reader, tokenizer.vocab_size)
    data = spec.keys
    per_split = is_per_split(data.data_prefix)
    ranges: dict[Split, list[DocumentRange]] = {}
    for number, split in enumerate(SPLITS):
        blend = splits.blends.get(split)
        readers = [splits.datasets[path].reader for path in blend.paths] if blend else []
        bounds = (0.0, 1.0) if per_split else _split_bounds(data.splits_string)[number]
        ranges[split] = [
            DocumentRange(
                reader, round(bounds[0] * reader.documents), round(bounds[1] * reader.documents), tokenizer.vocab_size
            )
            for reader in readers
        ]
    tokens: dict[Split, int] = {split: sum(source.tokens for source in ranges[split]) for split in SPLITS}
    if make.uses_documents:
        return _document_samples(splits, ranges, tokenizer, make), tokens
    length = make.task.window
    blend = splits.blends["train"]
    parts: list[Samples] = []
    for number, (path, source) in enumerate(zip(blend.paths, ranges["train"], strict=True)):
        if source.tokens < length + 1:
            raise UserError(
                f"{path} has {pluralize(source.tokens, 'token')} in {pluralize(source.documents, 'document')} "
                "to train on"
                + ("" if per_split else f" (`model.data.splits_string={data.splits_string}`)")
                + f", which are too few for one sample of {length:,} + 1; use more data or a shorter "
                "`model.encoder_seq_length`"
            )
        found = splits.datasets[path]
        parts.append(
            MappedTraining(
                source,
                length,
                spec.seed,
                rng_stream=number,
                shuffle_documents=data.shuffle_documents,
                cache=_cache(data.index_mapping_dir, found.reader, source, length),
                cache_key=found.fingerprint,
            )
        )
    samples: dict[Split, AnySamples | None] = {"train": make.from_windows(_blended(blend, parts), training=True)}
    for split in SPLITS[1:]:
        sources = [source for source in ranges[split] if source.tokens > 1]
        windows = MappedEvaluation(sources, length, tokenizer.pad_id) if sources else None
        samples[split] = windows and make.from_windows(windows, training=False)
    return samples, tokens


def _document_samples(
    splits: TokenizedSplits, ranges: dict[Split, list[DocumentRange]], tokenizer: Tokenizer, make: SampleFactory
) -> dict[Split, AnySamples | None]:
    """Return samples made of single documents."""
    blend = splits.blends["train"]
    parts: list[DictSamples] = []
    for number, (path, source) in enumerate(zip(blend.paths, ranges["train"], strict=True)):
        part = make.from_documents(MappedDocuments([source], tokenizer.eos_id), training=True, rng_stream=number)
        if part is None:
            raise UserError(f"no document of the training split of {path} has two tokens; use more data")
        parts.append(part)
    samples: dict[Split, AnySamples | None] = {"train": _blended(blend, parts)}
    for split in SPLITS[1:]:
        samples[split] = make.from_documents(MappedDocuments(ranges[split], tokenizer.eos_id), training=False)
    return samples


def _blended(blend: Blend, parts: Sequence[AnySamples[BatchT]]) -> AnySamples[BatchT]:
    """Blend datasets; weights default to their sizes, as in Megatron: all tokens are equally frequent."""
    weights = blend.weights if blend.has_weights else [part.samples for part in parts]
    return parts[0] if len(parts) == 1 else BlendedSamples(parts, weights)


def _open(text: str) -> TokenizedDataset:
    prefix = user_path(text, _KEY)
    if prefix.suffix in (".bin", ".idx") and not idx_path(prefix).exists():
        raise UserError(f"`{_KEY}` ({text}) must be the path without its suffix; use {prefix.with_suffix('')}")
    missing = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if len(missing) == 1:
        raise UserError(f"`{_KEY}` ({text}): {missing[0]} is missing; a dataset needs both .bin and .idx")
    if missing:
        raise UserError(f"`{_KEY}` ({text}): there is no {prefix}.idx and .bin" + _suggest_prefix(prefix))
    try:
        reader = IndexedReader(prefix)
    except UserError as error:
        raise UserError(f"`{_KEY}`: {error}") from None
    if not reader.tokens:
        raise UserError(f"`{_KEY}`: {prefix} is empty: no token in {pluralize(reader.documents, 'document')}")
    return TokenizedDataset(reader, _tokenizer_document(prefix, reader), _fingerprint(reader))


def _suggest_prefix(prefix: Path) -> str:
    try:
        names = sorted(path.stem for path in prefix.parent.glob("*.idx"))
    except OSError:
        names = []
    match = closest(prefix.name, names) or (names[0] if len(names) == 1 else None)
    if match:
        return f"; did you mean {prefix.with_name(match)}?"
    return "" if prefix.parent.is_dir() else f"; the folder {prefix.parent} does not exist"


def _tokenizer_document(prefix: Path, reader: IndexedReader) -> dict[str, Any] | None:
    """Return the tokenizer in PREFIX.json, if `stoker preprocess` wrote that file."""
    path = prefix.with_name(prefix.name + ".json")
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"`{_KEY}`: cannot read {path}: {error.strerror or error}") from None
    if not head.lstrip(b"{ \t\r\n").startswith(b'"format"'):  # some other file of this name
        return None
    try:
        record = read_json(path, max_bytes=MAX_METADATA_BYTES)
    except DamagedFileError as error:
        raise UserError(f"`{_KEY}`: {path.parent / ''}{error}") from None
    document = record.get("tokenizer")
    if record.get("format") != 1 or not isinstance(document, dict):
        raise UserError(f"`{_KEY}`: {path} was not written by `stoker preprocess`: it needs format 1 and a tokenizer")
    counts = {"documents": reader.documents, "tokens": reader.tokens}
    for name, found in counts.items():
        if record.get(name) != found:
            raise UserError(
                f"`{_KEY}`: {path} lists {record.get(name)} {name}, but {prefix}.bin has {found}: "
                "the files do not belong together"
            )
    return document


def _fingerprint(reader: IndexedReader) -> str:
    total = hashlib.sha256()
    with idx_path(reader.prefix).open("rb") as file:
        while block := file.read(1 << 24):
            total.update(block)
    total.update(str(reader.ids.nbytes).encode())
    for begin, end in _sampled_blocks(reader):
        total.update(reader.ids[begin:end].tobytes())
    return total.hexdigest()


def _check_sampled_ids(reader: IndexedReader, vocab_size: int) -> None:
    """Detect most wrong tokenizers before the run starts; the other ids are checked when they are read."""
    for begin, end in _sampled_blocks(reader):
        check_ids(reader.ids[begin:end], vocab_size, reader, begin)


def _sampled_blocks(reader: IndexedReader) -> Sequence[tuple[int, int]]:
    """Return begin and end, in tokens, of the blocks to check."""
    size = _SAMPLED_BYTES // reader.dtype.itemsize
    if reader.tokens <= size * _NUM_SAMPLED_BLOCKS:
        return [(0, reader.tokens)]
    begins = np.linspace(0, reader.tokens - size, _NUM_SAMPLED_BLOCKS).astype(np.int64)
    return [(int(begin), int(begin) + size) for begin in begins]


def _split_bounds(splits_string: str) -> list[tuple[float, float]]:
    bounds = [0.0, *accumulate(parse_proportions(splits_string))]
    return list(pairwise(bounds))


def _cache(folder: str | None, reader: IndexedReader, source: DocumentRange, length: int) -> IndexCache:
    if folder is not None:
        return IndexCache(user_path(folder, "model.data.index_mapping_dir"), required=True)
    large = source.documents + source.tokens // length >= _MIN_CACHED_SIZE
    return IndexCache(reader.prefix.with_name(reader.prefix.name + "_index") if large else None)
