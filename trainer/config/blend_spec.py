"""What `model.data.data_prefix` may be: which sets of tokens each split is drawn from, and with what weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..data.sources.text_sources import SPLITS, Split

PrefixList = str | Sequence[str | float]
Prefixes = PrefixList | Mapping[str, str | Sequence[str | float] | None]


@dataclass(frozen=True, slots=True)
class Blend:
    """Sets of tokens and their weights.

    Attributes:
        paths: as the user wrote them.
        weights: one per path; all 1 where none were given.
        weighted: whether weights were given.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...]
    weighted: bool


def is_per_split(prefixes: Prefixes | None) -> bool:
    """Whether each split has sets of its own, so that none has to be cut."""
    return isinstance(prefixes, Mapping)


def parse_prefixes(prefixes: Prefixes) -> dict[Split, Blend]:
    """The blend of each split; without `train:` and so on all splits share one, and are cut from it.

    Raises:
        ValueError: neither a path, a list of paths, a list of weights and paths in turn, nor a block of those.
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
    numbers = [_number(item) for item in items]
    if not items:
        raise ValueError("is empty")
    if all(number is None for number in numbers):
        paths = tuple(str(item) for item in items)
        weights: tuple[float, ...] = (1.0,) * len(items)
        weighted = False
    else:
        if len(items) % 2 or any((number is None) != bool(place % 2) for place, number in enumerate(numbers)):
            raise ValueError("must be paths only, or weights and paths in turn: [0.3, /data/a, 0.7, /data/b]")
        paths = tuple(str(item) for item in items[1::2])
        weights = tuple(number for number in numbers[::2] if number is not None)
        weighted = True
    for path, weight in zip(paths, weights, strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"gives {path} the weight {weight:g}, which must be positive; leave a set out by its path")
    if "" in paths:
        raise ValueError("holds an empty path")
    return Blend(paths, weights, weighted)


def _number(item: str | float) -> float | None:
    """A weight, which other tools also write as text."""
    if not isinstance(item, str):
        return float(item)
    try:
        return float(item)
    except ValueError:
        return None
