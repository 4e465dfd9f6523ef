"""Data sets of Hugging Face's: a folder that `save_to_disk` wrote, a folder of tables, or a name of the hub.

The `datasets` package reads them (extra `hf`). It runs no code of a data set; a name is downloaded once, and then taken
from its cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple

from ...utils.errors import UserError
from .jsonl import Placer, Reader, RecordT
from .text_sources import SPLITS, Proportions, Split

_KEY = "model.data.path"
_OPTIONS = ("name", "revision", "train", "validation", "test")
_SAVED = ("dataset_dict.json", "dataset_info.json")
"""Files that `save_to_disk` writes: of several splits, of one."""


class DatasetRecords(NamedTuple, Generic[RecordT]):
    """What was read.

    Attributes:
        records: by split.
        has_own_splits: the data set says itself what is held out; else the proportions do.
    """

    records: dict[Split, list[RecordT]]
    has_own_splits: bool


def read_dataset(
    path: str,
    options: Mapping[str, Any],
    proportions: Proportions,
    read: Reader[RecordT],
    input_of: Callable[[RecordT], str],
) -> DatasetRecords[RecordT]:
    """What a data set holds, by split.

    Its splits `train`, `validation` and `test` are those; where there is `train` alone, each row goes to a split by the
    hash of its input.

    Args:
        path: the folder, or the name.
        options: `model.data.dataset_kwargs`: `name` and `revision` of the data set, and `train`, `validation` and
            `test` for splits of other names.
        proportions: parts of train, validation and test.
        read: makes what is wanted of a row.
        input_of: what is hashed.

    Raises:
        UserError: it cannot be read, or a row is refused.
    """
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UserError(
            f"`model.data.dataset_kwargs` ({', '.join(unknown)}) must be of {', '.join(_OPTIONS)} with "
            "`data_impl: huggingface`"
        )
    splits = _splits(path, options)
    named: dict[Split, str] = {split: str(options.get(split, split)) for split in SPLITS}
    for split in SPLITS:
        if named[split] not in splits and (split == "train" or split in options):
            raise UserError(
                f"`{_KEY}`: {path} has no split `{named[split]}`; it has {', '.join(list(splits)[:10])}; "
                f"model.data.dataset_kwargs.{split} names it"
            )
    found: dict[Split, list[RecordT]] = {split: [] for split in SPLITS}
    place = Placer(proportions) if not any(named[split] in splits for split in SPLITS[1:]) else None
    for split in SPLITS:
        for number, row in enumerate(splits.get(named[split], ()), 1):
            try:
                record = read(row, f"row {number} of `{named[split]}` of {path}")
            except UserError as error:
                raise UserError(f"`{_KEY}`: {error}") from None
            found[split if place is None else place(input_of(record))].append(record)
    return DatasetRecords(found, place is None)


def _splits(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Rows by the name of their split."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise UserError("`data_impl: huggingface` needs the `datasets` package: pip install 'stoker[hf]'") from None
    folder = Path(path).expanduser()
    try:
        if any((folder / name).is_file() for name in _SAVED):
            loaded = datasets.load_from_disk(str(folder))
        else:
            source = str(folder) if folder.is_dir() else path
            loaded = datasets.load_dataset(source, options.get("name"), revision=options.get("revision"))
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # of the network, of the hub, of every reader there is
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"`{_KEY}`: the datasets package cannot read {path}: {reason}") from None
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
