"""Datasets of users' own code (kind `dataset` of `models.config.extensions`), by `model.data.data_impl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ....models.config.extensions import load_extension
from ...config.dataset_names import Split
from ...utils.errors import UserError
from ..datasets.samples import Samples
from ..tokenizers.tokenizer import Tokenizer


class DatasetPlugin(Protocol):
    """Interface of a dataset of a user's own: a function that returns the samples of a split."""

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


def plugin_samples(
    data: Mapping[str, Any], split: Split, sequence_length: int, tokenizer: Tokenizer, seed: int
) -> Samples | None:
    """Return the samples of the plugin `data["data_impl"]`.

    Raises:
        UserError: it is not installed, cannot be imported, or returns no samples of this length.
    """
    name = str(data["data_impl"])
    try:
        make: DatasetPlugin = load_extension("dataset", name)
    except (LookupError, ValueError) as error:
        raise UserError(f"`model.data.data_impl` ({name}): {error}") from None
    try:
        samples = make(data, split, sequence_length, tokenizer, seed)
    except (OSError, ValueError) as error:
        raise UserError(f"`model.data.data_impl` ({name}), {split}: {error}") from error
    if samples is None and split != "train":
        return None
    found = getattr(samples, "sequence_length", None)
    if samples is None or found != sequence_length or not callable(getattr(samples, "batch", None)):
        raise UserError(
            f"`model.data.data_impl` ({name}): it returned {type(samples).__name__} for {split}, which is "
            f"not samples of `sequence_length` {sequence_length}"
        )
    return samples
