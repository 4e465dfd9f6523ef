"""Datasets of users' own code (kind `dataset` of `models.config.extensions`), by `model.data.data_impl`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...config.dataset_names import Split
from ...config.own_components import load_component
from ...config.resolved_run import DataSpec
from ...utils.errors import UserError
from ..datasets.map_style import MapStyleSamples
from ..datasets.samples import Samples
from ..tokenizers.tokenizer import Tokenizer


def own_samples(spec: DataSpec, split: Split, tokenizer: Tokenizer) -> Samples | None:
    """Return the samples of a split of the dataset `model.data.data_impl`.

    The registered function or class is called for each split with those of these arguments that it takes, by name:
    `split` (train, validation or test), `tokenizer`, `sequence_length` (tokens in a sample), `seed` (`model.seed`) and
    `data` (all keys below `model.data`). Without `data` it also gets `model.data.dataset_kwargs`, by name. It returns
    a map-style dataset (`MapStyleSamples`); None or an empty one if there is no such validation or test split; or
    `Samples`, whose batches must be pure functions of their position: a resumed run, another rank or a dataloader
    worker reads a position from a new copy and must get the same tokens.

    Raises:
        UserError: it is not registered, cannot be imported or called, or returns no samples of this length.
    """
    name = spec.keys.data_impl
    make: Callable[..., Any] = load_component("dataset", name, "model.data.data_impl")
    at, length = f"`model.data.data_impl` ({name}), {split}", spec.task.window
    offered = {
        "split": split,
        "tokenizer": tokenizer,
        "sequence_length": length,
        "seed": spec.seed,
        "data": spec.keys.model_dump(mode="json"),
    }
    try:
        found: Any = make(**_arguments(make, offered, spec.keys.dataset_kwargs))
    except UserError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{at}: {error}") from error
    if found is None:
        if split != "train":
            return None
    elif callable(getattr(found, "batch", None)):
        if getattr(found, "sequence_length", None) == length:
            return found
    elif hasattr(found, "__getitem__") and _has_length(found, at) and not isinstance(found, Mapping | str):
        if not len(found):
            if split != "train":
                return None
            raise UserError(f"{at}: the dataset is empty")
        return MapStyleSamples(
            found,
            length,
            tokenizer,
            spec.vocab_size or tokenizer.vocab_size,
            spec.seed if split == "train" else None,
            full_rows=spec.task.name != "gpt",
            with_padding=spec.task.padded and spec.task.name == "gpt",
            name=at,
        )
    raise UserError(
        f"{at}: it returned {type(found).__name__}, which is neither a map-style dataset (__len__ and __getitem__) nor "
        f"samples of `sequence_length` {length}"
    )


def _has_length(found: Any, at: str) -> bool:
    """Return whether a dataset has a length.

    Raises:
        UserError: its length cannot be computed.
    """
    if not hasattr(found, "__len__"):
        return False
    try:
        return len(found) >= 0
    except (TypeError, NotImplementedError) as error:
        raise UserError(f"{at}: the dataset must have a length: {type(error).__name__} {error}") from None


def _arguments(make: Callable[..., Any], offered: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a function: those offered that it names, and `dataset_kwargs` unless it takes `data`."""
    parameters = inspect.signature(make).parameters
    taken = {name: value for name, value in offered.items() if name in parameters}
    return taken if "data" in taken else {**taken, **kwargs}
