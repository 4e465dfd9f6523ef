"""Names of dataset splits and of data sources, built in and from plugins."""

from __future__ import annotations

from typing import Literal

PAIR_SOURCES = ("jsonl", "huggingface", "pystd_docstring")
"""Values of `model.data.data_impl` that provide pairs of input and target."""
BUILT_IN_DATASETS = ("mmap", "pystd", "text", "mock", *PAIR_SOURCES)
"""Values of `model.data.data_impl` that need no plugin."""
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
