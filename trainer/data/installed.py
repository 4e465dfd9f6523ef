"""Data sets of other packages, found by name among the entry points of what is installed.

A package offers one in its pyproject.toml:

    [project.entry-points."stoker.datasets"]
    my_data = "my_package.data:samples"

and `model.data.data_impl=my_data` trains on it. Looking for names imports nothing; the one that is named is imported
when its samples are needed. What a configuration names is thus always code that was installed on purpose.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UserError

if TYPE_CHECKING:
    from .samples import Samples
    from .sources import Split
    from .tokenizers import Tokenizer

GROUP = "stoker.datasets"
BUILT_IN = ("mmap", "pystd", "text", "mock")
"""Values of `model.data.data_impl` that need no other package."""


class InstalledDataset(Protocol):
    """What an entry point of the group `stoker.datasets` must be: a function that makes the samples of a split."""

    def __call__(
        self, data: Mapping[str, Any], split: Split, sequence_length: int, tokenizer: Tokenizer, seed: int
    ) -> Samples | None:
        """Samples of a split.

        The samples must be pure functions of their position: a resumed run, another rank or a loader process asks a
        new copy for a position and must get the same tokens. They are pickled into loader processes. Token ids must
        be below `tokenizer.vocab_size`.

        Args:
            data: all keys below `model.data` and their values; `dataset_kwargs` is for you alone.
            split: `train`, whose samples must never end; `validation` or `test`, which have `samples` of them and
                give rows of ignored labels past the end.
            sequence_length: s, tokens in a sample.
            tokenizer: the one of `model.tokenizer`.
            seed: `model.seed`, to be followed in training.

        Returns:
            An object like `stoker.trainer.data.samples.Samples`; None for a validation or test split there is not.

        Raises:
            UserError, OSError, ValueError: what is wrong, told in one line.
        """
        ...


def installed_datasets() -> Mapping[str, importlib.metadata.EntryPoint]:
    """The entry points by name; nothing is imported."""
    return MappingProxyType({point.name: point for point in importlib.metadata.entry_points(group=GROUP)})


def is_installed(data_impl: str) -> bool:
    """Whether a value of `model.data.data_impl` is another package's."""
    return data_impl not in BUILT_IN and data_impl in installed_datasets()


def installed_samples(
    data: Mapping[str, Any], split: Split, sequence_length: int, tokenizer: Tokenizer, seed: int
) -> Samples | None:
    """The samples of `data["data_impl"]`, which another package makes.

    Raises:
        UserError: it is not installed, cannot be imported, or makes no samples of this length.
    """
    name = str(data["data_impl"])
    point = installed_datasets().get(name)
    if point is None:
        raise UserError(f"`model.data.data_impl` ({name}): no installed package has a data set of this name")
    try:
        make: InstalledDataset = point.load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"`model.data.data_impl` ({name}): {point.value} cannot be imported: {error}") from None
    try:
        samples = make(data, split, sequence_length, tokenizer, seed)
    except (OSError, ValueError) as error:
        raise UserError(f"`model.data.data_impl` ({name}), {split}: {error}") from error
    if samples is None and split != "train":
        return None
    found = getattr(samples, "sequence_length", None)
    if samples is None or found != sequence_length or not callable(getattr(samples, "batch", None)):
        raise UserError(
            f"`model.data.data_impl` ({name}): {point.value} made {type(samples).__name__} for {split}, which is not "
            f"samples of `sequence_length` {sequence_length}"
        )
    return samples
