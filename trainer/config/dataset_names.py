"""Names of dataset splits and of data sources, built in and from plugins."""

from __future__ import annotations

from typing import Literal

from ...models.config.extensions import extension_names

PAIR_SOURCES = ("jsonl", "huggingface", "pystd_docstring")
"""Values of `model.data.data_impl` that provide pairs of input and target."""


BUILT_IN_DATASETS = ("mmap", "pystd", "text", "mock", *PAIR_SOURCES)
"""Values of `model.data.data_impl` that need no plugin."""


def is_installed(data_impl: str) -> bool:
    """Return True if a value of `model.data.data_impl` is a plugin."""
    return data_impl not in BUILT_IN_DATASETS and data_impl in extension_names("dataset")


Split = Literal["train", "validation", "test"]


SPLITS: tuple[Split, ...] = ("train", "validation", "test")
