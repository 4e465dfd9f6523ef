"""Hugging Face datasets: a folder written by `save_to_disk`, a folder of tables, or a name on the hub.

They are read by the `datasets` package (extra `hf`). No code of a dataset is executed; a hub dataset is downloaded once
and then read from the cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...config.dataset_names import SPLITS, Split
from ...utils.errors import UserError
from ...utils.text import one_line
from .jsonl import RecordParser, RecordT
from .text_sources import HashSplitter, Proportions

_KEY = "model.data.path"
_OPTION_NAMES = ("name", "revision", "train", "validation", "test")
_SAVED_FILES = ("dataset_dict.json", "dataset_info.json")
"""Files that `save_to_disk` writes for several splits, and for one."""


def read_dataset(
    path: str,
    options: Mapping[str, Any],
    proportions: Proportions,
    read: RecordParser[RecordT],
    input_of: Callable[[RecordT], str],
) -> tuple[dict[Split, list[RecordT]], bool]:
    """Read a dataset, by split.

    Its splits `train`, `validation` and `test` are used; if there is only `train`, each row is assigned to a split by
    the hash of its input.

    Args:
        path: the folder, or the name.
        options: `model.data.dataset_kwargs`: `name` and `revision` of the dataset, and `train`, `validation` and `test`
            for splits of other names.
        input_of: returns the text that is hashed.

    Returns:
        The records by split; and True if the dataset comes with its own splits, not those of the proportions.

    Raises:
        UserError: it cannot be read, or a row is invalid.
    """
    unknown = sorted(set(options) - set(_OPTION_NAMES))
    if unknown:
        raise UserError(
            f"`model.data.dataset_kwargs` ({', '.join(unknown)}) must be of {', '.join(_OPTION_NAMES)} with "
            "`data_impl: huggingface`"
        )
    splits = _splits(path, options)
    split_names: dict[Split, str] = {split: str(options.get(split, split)) for split in SPLITS}
    for split in SPLITS:
        if split_names[split] not in splits and (split == "train" or split in options):
            raise UserError(
                f"`{_KEY}`: {path} has no split `{split_names[split]}`; it has {', '.join(list(splits)[:10])}; "
                f"set model.data.dataset_kwargs.{split}"
            )
    records: dict[Split, list[RecordT]] = {split: [] for split in SPLITS}
    predefined = any(split_names[split] in splits for split in SPLITS[1:])
    splitter = HashSplitter(proportions)
    for split in SPLITS:
        for number, row in enumerate(splits.get(split_names[split], ()), 1):
            try:
                record = read(row, f"row {number} of `{split_names[split]}` of {path}")
            except UserError as error:
                raise UserError(f"`{_KEY}`: {error}") from None
            records[split if predefined else splitter.split_of(input_of(record))].append(record)
    return records, predefined


def _splits(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of each split by name."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise UserError("`data_impl: huggingface` needs the `datasets` package: pip install 'stoker[hf]'") from None
    folder = Path(path).expanduser()
    try:
        if any((folder / name).is_file() for name in _SAVED_FILES):
            loaded = datasets.load_from_disk(str(folder))
        else:
            source = str(folder) if folder.is_dir() else path
            loaded = datasets.load_dataset(source, options.get("name"), revision=options.get("revision"))
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # network, hub and file readers raise many types
        reason = one_line(error, 300) or type(error).__name__
        raise UserError(f"`{_KEY}`: the datasets package cannot read {path}: {reason}") from None
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
