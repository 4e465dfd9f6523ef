"""Where records of fine-tuning come from: JSONL files, lists of them, or data sets of Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from ...config.schema.trainer_and_data import DataBlock
from ...utils.environment import user_path
from .hf_datasets import read_dataset
from .jsonl import Reader, RecordT, has_own_splits, read_files, read_split
from .text_sources import SPLITS, Split, parse_proportions


@dataclass(frozen=True)
class Source(Generic[RecordT]):
    """Records by split.

    Attributes:
        name: what they are, for messages.
        sets: those of each split; training may have several files with proportions of their own.
        has_own_splits: what was read says itself what is held out, not `model.data.splits_string`.
    """

    name: str
    sets: dict[Split, list[list[RecordT]]]
    has_own_splits: bool

    def together(self) -> dict[Split, list[RecordT]]:
        """The records of each split, one file after the other."""
        return {split: [record for held in sets for record in held] for split, sets in self.sets.items()}


def read_source(data: DataBlock, read: Reader[RecordT], input_of: Callable[[RecordT], str]) -> Source[RecordT]:
    """The records that `model.data` names, with `data_impl` jsonl or huggingface.

    Args:
        data: the keys.
        read: makes a record of an object.
        input_of: what of it decides about the split that it belongs to.

    Raises:
        UserError: they cannot be read, or an object is refused.
    """
    proportions = parse_proportions(data.splits_string)
    if data.train_ds.file_names is None:
        assert data.path is not None  # a rule of the configuration
        if data.data_impl == "huggingface":
            found, own = read_dataset(data.path, data.dataset_kwargs, proportions, read, input_of)
            return Source(data.path, {split: [found[split]] for split in SPLITS}, own)
        path = user_path(data.path, "model.data.path")
        found = read_split(path, proportions, read, input_of, "`model.data.path`")
        return Source(str(path), {split: [found[split]] for split in SPLITS}, has_own_splits(path))
    named = {"train": data.train_ds, "validation": data.validation_ds, "test": data.test_ds}
    sets: dict[Split, list[list[RecordT]]] = {}
    for split in SPLITS:
        key = f"model.data.{split}_ds.file_names"
        paths = [user_path(name, key) for name in _listed(named[split].file_names)]
        sets[split] = read_files(paths, read, f"`{key}`")
    return Source(", ".join(_listed(data.train_ds.file_names)), sets, has_own_splits=True)


def _listed(names: str | list[str] | None) -> list[str]:
    """The names of a key that takes one or several, or none."""
    return [names] if isinstance(names, str) else names or []
