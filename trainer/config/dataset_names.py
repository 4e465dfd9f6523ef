"""Names of dataset splits and of data sources, built in and from plugins."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

ENTRY_POINT_GROUP = "stoker.datasets"


PAIR_SOURCES = ("jsonl", "huggingface", "pystd_docstring")
"""Values of `model.data.data_impl` that provide pairs of input and target."""


BUILT_IN_DATASETS = ("mmap", "pystd", "text", "mock", *PAIR_SOURCES)
"""Values of `model.data.data_impl` that need no plugin."""


registered_datasets: dict[str, importlib.metadata.EntryPoint] = {}


def dataset_plugins() -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points and registered datasets by name, without importing them."""
    points = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return MappingProxyType(points | registered_datasets)


def is_installed(data_impl: str) -> bool:
    """Return True if a value of `model.data.data_impl` is a plugin."""
    return data_impl not in BUILT_IN_DATASETS and data_impl in dataset_plugins()


Split = Literal["train", "validation", "test"]


SPLITS: tuple[Split, ...] = ("train", "validation", "test")
