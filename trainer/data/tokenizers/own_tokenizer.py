"""Tokenizers of the user's own (kind `tokenizer` of `models.config.extensions`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....models.config.extensions import load_extension
from ...utils.errors import UserError
from .special_tokens import SpecialTokenIds
from .tokenizer import TokenIds, Tokenizer, as_id_array, id_dtype


class OwnTokenizer(Tokenizer):
    """A tokenizer of the user's own, as stoker's.

    Args:
        name: `model.tokenizer.library`.
        inner: the user's object: `encode(text)`, `decode(ids)` and `vocab_size`; optionally `eos_id`, `bos_id`,
            `pad_id`, `token_id(text)`, `token_byte_counts()` and `to_dict()`.
        kwargs: the arguments that it was made with.

    Raises:
        ValueError: one of these is missing or invalid.
    """

    def __init__(self, name: str, inner: Any, kwargs: Mapping[str, Any]) -> None:
        for method in ("encode", "decode"):
            if not callable(getattr(inner, method, None)):
                raise ValueError(f"{type(inner).__name__} has no method {method}")
        size = getattr(inner, "vocab_size", None)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"`vocab_size` ({size}) must be a positive integer")
        self.kind = name
        self.inner = inner
        self.vocab_size = size
        ids = {kind: getattr(inner, f"{kind}_id", None) for kind in ("eos", "bos", "pad")}
        self.special = SpecialTokenIds(**ids)
        self.special.check(size)
        self.eos_id = self.special.eos
        self.pad_id = self.special.padding_id
        self._kwargs = dict(kwargs)
        self._dtype = id_dtype(size)

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text`.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        ids = np.asarray(self.inner.encode(text), np.int64).reshape(-1)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise UserError(
                f"the tokenizer {self.kind} returned the id {outside[0]}, which is not in its vocabulary of "
                f"{self.vocab_size}"
            )
        return ids.astype(self._dtype)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of ids, without special tokens."""
        array, special = as_id_array(ids), self.special.ids()
        return self.inner.decode([id_ for id_ in array.tolist() if id_ < self.vocab_size and id_ not in special])

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        """Return the text of ids in UTF-8."""
        return self.decode(ids).encode("utf-8", errors="replace")

    def continuation_bytes(self, before: Sequence[int], token: int) -> bytes:
        """Return what the text of `before` grows by, without the character that an incomplete one is shown as."""
        shown = self.decode(before).rstrip("\ufffd")
        return self.decode([*before, token]).rstrip("\ufffd")[len(shown) :].encode("utf-8", errors="replace")

    def document_start_ids(self) -> list[int]:
        """Return BOS, if there is one, else EOS."""
        return super().document_start_ids() if self.special.bos is None else [self.special.bos]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text, if the user's tokenizer can tell."""
        find = getattr(self.inner, "token_id", None)
        return None if find is None else find(token)

    def token_byte_counts(self) -> NDArray[np.int64]:
        """Return the bytes of each token that the user's tokenizer gives; otherwise 0.

        Raises:
            UserError: it gives another number of them.
        """
        count = getattr(self.inner, "token_byte_counts", None)
        counts = np.zeros(self.vocab_size, np.int64) if count is None else np.array(count(), np.int64)
        if counts.shape != (self.vocab_size,):
            raise UserError(f"the tokenizer {self.kind} must return {self.vocab_size} `token_byte_counts`")
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the state (`to_dict` of the user's tokenizer), or else the arguments.

        Raises:
            UserError: the state is not JSON.
        """
        state = getattr(self.inner, "to_dict", None)
        document = {"tokenizer": self.kind, **({"kwargs": self._kwargs} if state is None else {"state": state()})}
        try:
            return json.loads(json.dumps(document, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"the state of the tokenizer {self.kind} must be JSON: {error}") from None


def make_own_tokenizer(name: str, kwargs: Mapping[str, Any]) -> OwnTokenizer:
    """Return the user's tokenizer, made with these arguments.

    Raises:
        LookupError: it is not registered.
        ValueError: it cannot be imported or made, or is not a tokenizer.
    """
    make = load_extension("tokenizer", name)
    try:
        inner = make(**kwargs)
    except (TypeError, OSError) as error:
        raise ValueError(f"the tokenizer {name!r}: {type(error).__name__}: {error}") from error
    return OwnTokenizer(name, inner, kwargs)


def own_tokenizer_from_dict(document: Mapping[str, Any]) -> OwnTokenizer:
    """Return the user's tokenizer of a document of `OwnTokenizer.to_dict`.

    Raises:
        LookupError: it is not registered.
        ValueError: it is not such a document, or cannot be restored.
    """
    name, keys = document["tokenizer"], set(document) - {"tokenizer"}
    if keys == {"kwargs"} and isinstance(document["kwargs"], dict):
        return make_own_tokenizer(name, document["kwargs"])
    make = load_extension("tokenizer", name)
    if keys != {"state"} or not callable(getattr(make, "from_dict", None)):
        raise ValueError(
            f"the tokenizer {name!r} cannot be restored: it has `to_dict`, and needs a class method from_dict"
        )
    try:
        inner = make.from_dict(document["state"])
    except (TypeError, LookupError) as error:
        raise ValueError(f"the tokenizer {name!r} cannot be restored: {type(error).__name__}: {error}") from error
    return OwnTokenizer(name, inner, {})
