"""Dataset plugins: entry points of installed packages, and datasets registered by modules given with `--import`.

A package provides one in its pyproject.toml:

    [project.entry-points."stoker.datasets"]
    my_data = "my_package.data:samples"

and `model.data.data_impl=my_data` trains on it. Listing the names imports nothing; a dataset is imported when its
samples are needed. Without a package, `stoker train --import my_data model.data.data_impl=my_data` and

    @register_dataset("my_data")
    def samples(data, split, sequence_length, tokenizer, seed): ...

in my_data.py do the same. So a configuration can only run code that was installed, or given, on purpose.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..utils.errors import UserError

if TYPE_CHECKING:
    from ..data.datasets.samples import Samples
    from ..data.sources.text_sources import Split
    from ..data.tokenizers.tokenizer import Tokenizer

ENTRY_POINT_GROUP = "stoker.datasets"
PAIR_SOURCES = ("jsonl", "huggingface", "pystd_docstring")
"""Values of `model.data.data_impl` that provide pairs of input and target."""
BUILT_IN_DATASETS = ("mmap", "pystd", "text", "mock", *PAIR_SOURCES)
"""Values of `model.data.data_impl` that need no plugin."""
_registered: dict[str, importlib.metadata.EntryPoint] = {}


class DatasetPlugin(Protocol):
    """Interface of an entry point of the group `stoker.datasets`: a function that returns the samples of a split."""

    def __call__(
        self, data: Mapping[str, Any], split: Split, sequence_length: int, tokenizer: Tokenizer, seed: int
    ) -> Samples | None:
        """Return the samples of a split.

        The samples must be pure functions of their position: a resumed run, another rank or a dataloader worker reads a
        position from a new copy and must get the same tokens. They are pickled into dataloader workers. Token ids must
        be below `tokenizer.vocab_size`.

        Args:
            data: all keys below `model.data` and their values; `dataset_kwargs` is reserved for the plugin.
            split: `train`, whose samples must be endless; `validation` or `test`, which have a finite number `samples`
                and return rows of ignored labels past the end.
            sequence_length: S, tokens in a sample.
            tokenizer: the one of `model.tokenizer`.
            seed: `model.seed`, to be used in training.

        Returns:
            An object like `stoker.trainer.data.datasets.samples.Samples`; None if there is no such validation or
            test split.

        Raises:
            UserError, OSError, ValueError: the reason, in one line.
        """
        ...


DatasetT = TypeVar("DatasetT", bound=DatasetPlugin)


def register_dataset(name: str) -> Callable[[DatasetT], DatasetT]:
    """Register a dataset under a name, like an entry point: for a module that is given with `--import`.

    Args:
        name: a value of `model.data.data_impl`.

    Returns:
        A decorator for an `DatasetPlugin`: a function at the top level of its module.

    Raises:
        ValueError: (from the decorator) the name is taken, or the function cannot be imported from its module.
    """

    def register(make: DatasetT) -> DatasetT:
        place = f"{make.__module__}:{make.__qualname__}"  # type: ignore[attr-defined]
        known = dataset_plugins().get(name)
        if name in BUILT_IN_DATASETS or (known is not None and known.value != place):
            owner = known.value if known else "stoker"
            raise ValueError(f"the data set {name!r} is already provided by {owner}; choose another name")
        if "<" in place:
            raise ValueError(f"the data set {name!r} must be a function at the top of its module, not {place}")
        _registered[name] = importlib.metadata.EntryPoint(name, place, ENTRY_POINT_GROUP)
        return make

    return register


def dataset_plugins() -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points and registered datasets by name, without importing them."""
    points = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return MappingProxyType(points | _registered)


def is_installed(data_impl: str) -> bool:
    """Return True if a value of `model.data.data_impl` is a plugin."""
    return data_impl not in BUILT_IN_DATASETS and data_impl in dataset_plugins()


def plugin_samples(
    data: Mapping[str, Any], split: Split, sequence_length: int, tokenizer: Tokenizer, seed: int
) -> Samples | None:
    """Return the samples of the plugin `data["data_impl"]`.

    Raises:
        UserError: it is not installed, cannot be imported, or returns no samples of this length.
    """
    name = str(data["data_impl"])
    point = dataset_plugins().get(name)
    if point is None:
        raise UserError(f"`model.data.data_impl` ({name}): no installed package has a data set of this name")
    try:
        make: DatasetPlugin = point.load()
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
            f"`model.data.data_impl` ({name}): {point.value} returned {type(samples).__name__} for {split}, which is "
            f"not samples of `sequence_length` {sequence_length}"
        )
    return samples
