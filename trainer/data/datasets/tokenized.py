"""From `model.data.data_prefix` to samples: find and check the sets of tokens, cut them into splits, blend them.

A set does not hold its tokenizer. `stoker preprocess` writes PREFIX.json beside it, which does; data of other tools
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
from ...config.schema.root import RootBlock
from ...config.suggest import closest
from ...utils.environment import user_path
from ...utils.errors import UserError
from ...utils.safetensors_io import DamagedFileError, read_json
from ...utils.text import counted
from ..sources.index_cache import IndexCache
from ..sources.indexed_tokens import MAX_SIDE_FILE, IndexedReader, bin_path, idx_path
from ..sources.text_sources import SPLITS, Split, parse_proportions
from ..tasks.task_samples import TaskSamples
from ..tokenizers.tokenizer import Tokenizer, from_document, makes_same_tokens
from .blend import BlendedFields, BlendedSamples
from .memory_mapped import MappedDocuments, MappedEvaluation, MappedTraining, TokenRange, check_ids
from .samples import Samples
from .seq2seq import AnySamples, FieldSamples

_KEY = "model.data.data_prefix"
_SAMPLED_BLOCKS = 1024
_SAMPLED_BYTES = 4096
_CACHED_FROM = 1 << 20
"""Documents and windows of an epoch from which an index is worth a file that nobody asked for: 0.2 s to make."""


@dataclass(frozen=True)
class TokenizedSet:
    """One prefix.

    Attributes:
        reader: its files, mapped.
        document: the tokenizer that made it, as in a checkpoint; None where PREFIX.json is not there.
        fingerprint: SHA-256 over the index, the size of the ids, and 4 KiB at each of 1,024 places spread evenly over
            them (all of them up to 4 MiB), in hexadecimal: a change of a few ids in place may go unnoticed.
    """

    reader: IndexedReader
    document: dict[str, Any] | None
    fingerprint: str


@dataclass(frozen=True)
class TokenizedSplits:
    """What `model.data.data_prefix` gives.

    Attributes:
        sets: by path as the user wrote it.
        blends: of each split.
        fingerprint: of the sets, weights and splits.
    """

    sets: dict[str, TokenizedSet]
    blends: dict[Split, Blend]
    fingerprint: str

    def document(self) -> dict[str, Any] | None:
        """The tokenizer all sets agree on; None where none of them says.

        Raises:
            UserError: two sets were made with different tokenizers.
        """
        known = [(path, found.document) for path, found in self.sets.items() if found.document is not None]
        for path, document in known[1:]:
            if not makes_same_tokens(document, known[0][1]):
                raise UserError(
                    f"`{_KEY}`: {known[0][0]} and {path} were made with different tokenizers "
                    "(see their .json files); sets of one run need one tokenizer"
                )
        return known[0][1] if known else None


def open_splits(root: RootBlock) -> TokenizedSplits:
    """Open and check every set that `model.data.data_prefix` names.

    Raises:
        UserError: a set is missing, damaged or empty.
    """
    data = root.model.data
    if not data.data_prefix:
        raise UserError(f"`model.data.data_impl=mmap` needs `{_KEY}`: the path of a .bin/.idx pair, without its suffix")
    try:
        blends = parse_prefixes(data.data_prefix)
    except ValueError as error:
        raise UserError(f"`{_KEY}` {error}") from None
    sets = {path: _open(path) for path in dict.fromkeys(path for blend in blends.values() for path in blend.paths)}
    named = {
        split: [[sets[path].fingerprint, weight] for path, weight in zip(blend.paths, blend.weights, strict=True)]
        for split, blend in blends.items()
    }
    weighted = {split: blend.weighted for split, blend in blends.items()}
    whole = {
        "format": 1,
        "sets": named,
        "weighted": weighted,
        "splits": None if is_per_split(data.data_prefix) else data.splits_string,
    }
    fingerprint = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    return TokenizedSplits(sets, blends, fingerprint)


def choose_tokenizer(
    splits: TokenizedSplits, named: Tokenizer | None, named_by: str, extended: Callable[[Tokenizer], Tokenizer]
) -> Tokenizer | None:
    """The tokenizer of the data: the one they were made with, or else the one that was named.

    Args:
        splits: the data.
        named: the tokenizer that was named, if any.
        named_by: what named it, for messages.
        extended: adds the tokens that the task needs and text does not hold.

    Raises:
        UserError: both are known and differ.
    """
    named = named and extended(named)
    document = splits.document()
    if document is None:
        return named
    try:
        made_with = extended(from_document(document))
    except ValueError as error:
        raise UserError(f"`{_KEY}`: the tokenizer in the .json file beside the data: {error}") from None
    if named is not None and not makes_same_tokens(named.to_document(), made_with.to_document()):
        raise UserError(
            f"{named_by} is not the tokenizer that made the data of `{_KEY}` ({document.get('tokenizer')}, in the "
            ".json file beside them); preprocess the text again, or use the other tokenizer"
        )
    return named or made_with


def split_samples(
    root: RootBlock, splits: TokenizedSplits, tokenizer: Tokenizer, make: TaskSamples
) -> tuple[dict[Split, AnySamples | None], dict[Split, int]]:
    """The samples and the number of tokens of each split.

    Sets are cut by documents, as Megatron does. Training follows the weights; evaluation takes every token of every set
    once.

    Args:
        root: the configuration.
        splits: the data.
        tokenizer: what made them.
        make: makes the samples of the task.

    Raises:
        UserError: a set has too few tokens for one training sample, or ids that the tokenizer does not have.
    """
    for found in splits.sets.values():
        _check_sampled_ids(found.reader, tokenizer.vocab_size)
    data = root.model.data
    per_split = is_per_split(data.data_prefix)
    ranges: dict[Split, list[TokenRange]] = {}
    for number, split in enumerate(SPLITS):
        blend = splits.blends.get(split)
        readers = [splits.sets[path].reader for path in blend.paths] if blend else []
        shares = (0.0, 1.0) if per_split else _shares(data.splits_string)[number]
        ranges[split] = [
            TokenRange(
                reader, round(shares[0] * reader.documents), round(shares[1] * reader.documents), tokenizer.vocab_size
            )
            for reader in readers
        ]
    tokens: dict[Split, int] = {split: sum(source.tokens for source in ranges[split]) for split in SPLITS}
    if make.takes_documents:
        return _of_documents(splits, ranges, tokenizer, make), tokens
    length = make.task.window
    blend = splits.blends["train"]
    parts: list[Samples] = []
    for number, (path, source) in enumerate(zip(blend.paths, ranges["train"], strict=True)):
        if source.tokens < length + 1:
            raise UserError(
                f"{path} has {counted(source.tokens, 'token')} in {counted(source.documents, 'document')} to train on"
                + ("" if per_split else f" (`model.data.splits_string={data.splits_string}`)")
                + f", which are too few for one sample of {length:,} + 1; use more data or a shorter "
                "`model.encoder_seq_length`"
            )
        found = splits.sets[path]
        parts.append(
            MappedTraining(
                source,
                length,
                root.model.seed,
                part=number,
                shuffle_documents=data.shuffle_documents,
                cache=_cache(data.index_mapping_dir, found.reader, source, length),
                cache_key=found.fingerprint,
            )
        )
    train = parts[0] if len(parts) == 1 else BlendedSamples(parts, _weights(blend, parts))
    samples: dict[Split, AnySamples | None] = {"train": make.of_windows(train, training=True)}
    for split in SPLITS[1:]:
        sources = [source for source in ranges[split] if source.tokens > 1]
        windows = MappedEvaluation(sources, length, tokenizer.pad_id) if sources else None
        samples[split] = windows and make.of_windows(windows, training=False)
    return samples, tokens


def _of_documents(
    splits: TokenizedSplits, ranges: dict[Split, list[TokenRange]], tokenizer: Tokenizer, make: TaskSamples
) -> dict[Split, AnySamples | None]:
    """Samples that are made of documents."""
    blend = splits.blends["train"]
    parts: list[FieldSamples] = []
    for number, (path, source) in enumerate(zip(blend.paths, ranges["train"], strict=True)):
        part = make.of_documents(MappedDocuments([source], tokenizer.eos_id), training=True, part=number)
        if part is None:
            raise UserError(f"no document of {path} that is trained on has two tokens; use more data")
        parts.append(part)
    train = parts[0] if len(parts) == 1 else BlendedFields(parts, _weights(blend, parts))
    samples: dict[Split, AnySamples | None] = {"train": train}
    for split in SPLITS[1:]:
        samples[split] = make.of_documents(MappedDocuments(ranges[split], tokenizer.eos_id), training=False)
    return samples


def _weights(blend: Blend, parts: Sequence[AnySamples]) -> Sequence[float]:
    """Without weights each set counts by its size, as in Megatron: every token is seen equally often."""
    return blend.weights if blend.weighted else [part.samples for part in parts]


def _open(text: str) -> TokenizedSet:
    prefix = user_path(text, _KEY)
    if prefix.suffix in (".bin", ".idx") and not idx_path(prefix).exists():
        raise UserError(f"`{_KEY}` ({text}) must be the path without its suffix; use {prefix.with_suffix('')}")
    missing = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if len(missing) == 1:
        raise UserError(f"`{_KEY}` ({text}): {missing[0]} is missing beside its other half")
    if missing:
        raise UserError(f"`{_KEY}` ({text}): there is no {prefix}.idx and .bin" + _near(prefix))
    try:
        reader = IndexedReader(prefix)
    except UserError as error:
        raise UserError(f"`{_KEY}`: {error}") from None
    if not reader.tokens:
        raise UserError(f"`{_KEY}`: {prefix} is empty: no token in {counted(reader.documents, 'document')}")
    return TokenizedSet(reader, _tokenizer_document(prefix, reader), _fingerprint(reader))


def _near(prefix: Path) -> str:
    try:
        names = sorted(path.stem for path in prefix.parent.glob("*.idx"))
    except OSError:
        names = []
    near = closest(prefix.name, names) or (names[0] if len(names) == 1 else None)
    if near:
        return f"; did you mean {prefix.with_name(near)}?"
    return "" if prefix.parent.is_dir() else f"; the folder {prefix.parent} does not exist"


def _tokenizer_document(prefix: Path, reader: IndexedReader) -> dict[str, Any] | None:
    """The tokenizer in PREFIX.json, where `stoker preprocess` wrote that file."""
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
        record = read_json(path, largest=MAX_SIDE_FILE)
    except DamagedFileError as error:
        raise UserError(f"`{_KEY}`: {path.parent / ''}{error}") from None
    document = record.get("tokenizer")
    if record.get("format") != 1 or not isinstance(document, dict):
        raise UserError(f"`{_KEY}`: {path} is not what `stoker preprocess` writes: format 1 and a tokenizer")
    counts = {"documents": reader.documents, "tokens": reader.tokens}
    for name, found in counts.items():
        if record.get(name) != found:
            raise UserError(
                f"`{_KEY}`: {path} tells of {record.get(name)} {name}, but {prefix}.bin has {found}: "
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
    """A wrong tokenizer is nearly always found before the run begins; the rest is found as it is read."""
    for begin, end in _sampled_blocks(reader):
        check_ids(reader.ids[begin:end], vocab_size, reader, begin)


def _sampled_blocks(reader: IndexedReader) -> Sequence[tuple[int, int]]:
    """Begin and end, in tokens, of the places that are looked at."""
    size = _SAMPLED_BYTES // reader.dtype.itemsize
    if reader.tokens <= size * _SAMPLED_BLOCKS:
        return [(0, reader.tokens)]
    begins = np.linspace(0, reader.tokens - size, _SAMPLED_BLOCKS).astype(np.int64)
    return [(int(begin), int(begin) + size) for begin in begins]


def _shares(splits_string: str) -> list[tuple[float, float]]:
    bounds = [0.0, *accumulate(parse_proportions(splits_string))]
    return list(pairwise(bounds))


def _cache(folder: str | None, reader: IndexedReader, source: TokenRange, length: int) -> IndexCache:
    if folder is not None:
        return IndexCache(user_path(folder, "model.data.index_mapping_dir"), required=True)
    large = source.documents + source.tokens // length >= _CACHED_FROM
    return IndexCache(reader.prefix.with_name(reader.prefix.name + "_index") if large else None)
