"""Read fine-tuning records from JSONL files, lists of them, or Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from ...config.dataset_names import SPLITS, Split
from ...config.schema.trainer_and_data import DataBlock
from ...utils.environment import user_path
from .hf_datasets import read_dataset
from .jsonl import RecordParser, RecordT, has_split_files, read_files, read_splits
from .text_sources import parse_proportions


@dataclass(frozen=True)
class RecordSource(Generic[RecordT]):
    """Records by split.

    Attributes:
        name: of the data, for messages.
        sets: the records of each file of each split; training files may have sampling probabilities.
        has_predefined_splits: the data come with their own splits; `model.data.splits_string` is ignored.
    """

    name: str
    sets: dict[Split, list[list[RecordT]]]
    has_predefined_splits: bool

    def merged(self) -> dict[Split, list[RecordT]]:
        """Return the records of each split, files concatenated."""
        return {split: [record for records in sets for record in records] for split, sets in self.sets.items()}


def read_source(
    data: DataBlock, read: RecordParser[RecordT], input_of: Callable[[RecordT], str]
) -> RecordSource[RecordT]:
    """Read the records of `model.data`, with `data_impl` jsonl or huggingface.

    Args:
        input_of: returns the part of a record whose hash determines its split.

    Raises:
        UserError: the data cannot be read, or an object is invalid.
    """
    proportions = parse_proportions(data.splits_string)
    if data.train_ds.file_names is None:
        assert data.path is not None  # a rule of the configuration
        if data.data_impl == "huggingface":
            records, predefined = read_dataset(data.path, data.dataset_kwargs, proportions, read, input_of)
            return RecordSource(data.path, {split: [records[split]] for split in SPLITS}, predefined)
        path = user_path(data.path, "model.data.path")
        records = read_splits(path, proportions, read, input_of, "`model.data.path`")
        return RecordSource(str(path), {split: [records[split]] for split in SPLITS}, has_split_files(path))
    named = {"train": data.train_ds, "validation": data.validation_ds, "test": data.test_ds}
    sets: dict[Split, list[list[RecordT]]] = {}
    for split in SPLITS:
        key = f"model.data.{split}_ds.file_names"
        paths = [user_path(name, key) for name in _as_list(named[split].file_names)]
        sets[split] = read_files(paths, read, f"`{key}`")
    return RecordSource(", ".join(_as_list(data.train_ds.file_names)), sets, has_predefined_splits=True)


def _as_list(names: str | list[str] | None) -> list[str]:
    """Return the names of a key that accepts one, several or none."""
    return [names] if isinstance(names, str) else names or []
