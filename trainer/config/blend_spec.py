"""Parse `model.data.data_prefix`: the tokenized datasets of each split, and their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .dataset_names import SPLITS, Split

PrefixList = str | Sequence[str | float]
Prefixes = PrefixList | Mapping[str, str | Sequence[str | float] | None]


@dataclass(frozen=True, slots=True)
class Blend:
    """Tokenized datasets and their weights.

    Attributes:
        paths: as written by the user.
        weights: one per path; all 1 if none were given.
        has_weights: weights were given.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...]
    has_weights: bool


def is_per_split(prefixes: Prefixes | None) -> bool:
    """Return True if each split has its own datasets, so that none is divided by `model.data.splits_string`."""
    return isinstance(prefixes, Mapping)


def parse_prefixes(prefixes: Prefixes) -> dict[Split, Blend]:
    """Return the blend of each split; without `train:` etc. all splits share one blend, whose datasets are divided.

    Raises:
        ValueError: neither a path, a list of paths, a list of alternating weights and paths, nor a mapping of those.
    """
    if not isinstance(prefixes, Mapping):
        shared = _blend(prefixes)
        return {"train": shared, "validation": shared, "test": shared}
    unknown = [name for name in prefixes if name not in SPLITS]
    if unknown:
        raise ValueError(f"has {', '.join(map(repr, unknown[:3]))}, but its splits are train, validation and test")
    given: dict[Split, PrefixList | None] = {split: prefixes.get(split) for split in SPLITS}
    if not given["train"]:
        raise ValueError("has no `train`")
    return {split: _blend(value) for split, value in given.items() if value}


def _blend(value: PrefixList) -> Blend:
    items = [value] if isinstance(value, str) else list(value)
    numbers = [_parse_weight(item) for item in items]
    if not items:
        raise ValueError("is empty")
    if all(number is None for number in numbers):
        paths = tuple(str(item) for item in items)
        weights: tuple[float, ...] = (1.0,) * len(items)
        weighted = False
    else:
        if len(items) % 2 or any((number is None) != bool(place % 2) for place, number in enumerate(numbers)):
            raise ValueError("must be paths only, or alternating weights and paths: [0.3, /data/a, 0.7, /data/b]")
        paths = tuple(str(item) for item in items[1::2])
        weights = tuple(number for number in numbers[::2] if number is not None)
        weighted = True
    for path, weight in zip(paths, weights, strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"gives {path} the weight {weight:g}, which must be positive; leave a set out by its path")
    if "" in paths:
        raise ValueError("holds an empty path")
    return Blend(paths, weights, weighted)


def _parse_weight(item: str | float) -> float | None:
    """Return a weight, also if it is written as a string; None for a path."""
    if not isinstance(item, str):
        return float(item)
    try:
        return float(item)
    except ValueError:
        return None
