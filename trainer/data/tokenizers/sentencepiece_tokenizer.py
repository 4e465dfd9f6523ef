"""Tokenizers of SentencePiece `.model` files (Kudo and Richardson 2018, arXiv 1808.06226): Llama, Mistral, T5, Gemma.

The ids are those of SentencePiece, without BOS and EOS. As in SentencePiece, control symbols (`</s>`) in a text are
encoded as ordinary text. Tokens added by the user are control symbols too, with ids after the vocabulary.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UserError
from ...utils.text import one_line
from .special_tokens import SpecialTokenIds, find_special_tokens, special_token_ids_from_dict
from .token_bytes import piece_byte_counts
from .tokenizer import PieceTokenizer, TokenIds, check_words, encode_utf8

MAX_MODEL_BYTES = 32 << 20
"""Maximum size of a model file; that of mT5, with 250,100 pieces, has 4.3 MB."""
MAX_ADDED = 1 << 16

_BYTE_FALLBACK = 35
_SPACE_AS_SUFFIX = 24
"""Field numbers of TrainerSpec in sentencepiece_model.proto."""


class SentencePieceTokenizer(PieceTokenizer):
    """A tokenizer defined by a SentencePiece model; `build_sentencepiece_tokenizer` finds its special tokens.

    Args:
        added: additional tokens, with ids after the model's.

    Raises:
        ValueError: `model` is not a SentencePiece model, or already contains a token of `added`.
        UserError: the sentencepiece package is not installed.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, added: Sequence[str], special: SpecialTokenIds) -> None:
        processor = _processor(model)
        pieces = processor.get_piece_size()
        known = {processor.id_to_piece(id_): id_ for id_ in range(pieces)}
        if len(added) > MAX_ADDED or len(set(added)) < len(added) or known.keys() & set(added):
            raise ValueError(f"`added` ({len(added)} tokens) must be at most {MAX_ADDED} new tokens, each once")
        special_ids = special.ids()
        pieces_bytes = [b"" if id_ in special_ids else _piece(processor, id_) for id_ in range(pieces)]
        normalizer = _Normalizer(model)
        super().__init__(
            [*pieces_bytes, *(b"" for _ in added)],
            special,
            space_first=normalizer.space_first,
            space_last=normalizer.space_last,
        )
        self._processor = processor
        self._model = model
        self._added = tuple(added)
        self._ids = known | {token: pieces + number for number, token in enumerate(added)}
        self._lossless = normalizer.keeps_text and normalizer.byte_fallback
        self._names = {id_: token for token, id_ in self._ids.items() if id_ in special_ids}

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text`, [N].

        Raises:
            UserError: `text` contains a lone surrogate, or a word that is too long.
        """
        encode_utf8(text)
        check_words(text)
        return np.array(self._processor.encode(text, out_type=int), self._dtype)

    def document_start_ids(self) -> list[int]:
        """Return BOS, if the model has it."""
        return [] if self.special.bos is None else [self.special.bos]

    def token_id(self, token: str) -> int | None:
        """Return the id of a piece or an added token."""
        return self._ids.get(token)

    def token_name(self, id_: int) -> str | None:
        """Return the text of a special token."""
        return self._names.get(id_)

    def token_byte_counts(self) -> NDArray[np.int64]:
        """Return the number of UTF-8 bytes of each id, int64 [V]; all 0 if tokens do not add up to the text.

        They add up with byte fallback and without text normalization (Llama, Mistral, Gemma). EOS counts -1 for the
        space added before every text, see `piece_byte_counts`; a "▁" in the text counts as a space.
        """
        if not self._lossless:
            return np.zeros(self.vocab_size, np.int64)
        return piece_byte_counts(self._pieces, self.eos_id, adds_prefix_space=self._space_first or self._space_last)

    def to_dict(self) -> dict[str, Any]:
        """Return the model in base64, the added tokens, and the ids of the special tokens."""
        return {
            "tokenizer": self.kind,
            "model": base64.b64encode(self._model).decode("ascii"),
            "added": list(self._added),
            "special": self.special.to_dict(),
        }


def build_sentencepiece_tokenizer(
    model: bytes, named: Mapping[str, str], added: Sequence[str] = ()
) -> SentencePieceTokenizer:
    """Build a tokenizer and find its special tokens.

    Args:
        named: special token by kind (`eos`, `bos`, `pad`, `unk`); added if the model lacks it.
        added: further tokens to add, unless the model has them.

    Raises:
        ValueError: see `SentencePieceTokenizer`.
        UserError: the sentencepiece package is not installed.
    """
    processor = _processor(model)
    ids = {processor.id_to_piece(id_): id_ for id_ in range(processor.get_piece_size())}
    new = [token for token in dict.fromkeys([*named.values(), *added]) if token not in ids]
    ids |= {token: len(ids) + n for n, token in enumerate(new)}
    special = find_special_tokens(named, ids.get)
    model_ids = {
        "eos": processor.eos_id(),
        "bos": processor.bos_id(),
        "pad": processor.pad_id(),
        "unk": processor.unk_id(),
    }
    # The model defines its own control symbols, whatever their names; -1: it has none.
    ids_by_kind = {
        kind: id_ if kind not in named and id_ >= 0 else getattr(special, kind) for kind, id_ in model_ids.items()
    }
    return SentencePieceTokenizer(model, new, SpecialTokenIds(**ids_by_kind))


def sentencepiece_from_dict(document: Mapping[str, Any]) -> SentencePieceTokenizer:
    """Rebuild the tokenizer from `SentencePieceTokenizer.to_dict`, read back from JSON.

    Raises:
        ValueError: it is not such a document.
        UserError: the sentencepiece package is not installed.
    """
    if set(document) != {"tokenizer", "model", "added", "special"}:
        raise ValueError("a sentencepiece tokenizer document has `model`, `added` and `special`, nothing else")
    text, added = document["model"], document["added"]
    if not isinstance(added, list) or not all(isinstance(token, str) and token for token in added):
        raise ValueError("`added` must be a list of tokens")
    if not isinstance(text, str) or len(text) > MAX_MODEL_BYTES * 4 // 3 + 4:
        raise ValueError(f"`model` must be base64 of at most {MAX_MODEL_BYTES >> 20} MiB")
    try:
        model = base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("`model` must be base64") from None
    return SentencePieceTokenizer(model, added, special_token_ids_from_dict(document["special"]))


def _processor(model: bytes) -> Any:
    try:
        sentencepiece: Any = importlib.import_module("sentencepiece")
    except ImportError:
        raise UserError(
            "SentencePiece models need the sentencepiece package: pip install 'sentencepiece>=0.2.1'"
        ) from None
    if not 0 < len(model) <= MAX_MODEL_BYTES:
        raise ValueError(
            f"a SentencePiece model ({len(model):,} bytes) must have 1 byte to {MAX_MODEL_BYTES >> 20} MiB"
        )
    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = processor.load_from_serialized_proto(model)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"it is not a SentencePiece model: {one_line(error, 200)}") from None
    if not loaded or processor.get_piece_size() == 0:
        raise ValueError("it is not a SentencePiece model")
    return processor


def _piece(processor: Any, id_: int) -> bytes:
    piece = processor.id_to_piece(id_)
    if processor.is_control(id_) or processor.is_unknown(id_) or processor.is_unused(id_):
        return b""
    if processor.is_byte(id_):
        return bytes([int(piece[1:-1], 16)])
    return piece.replace("▁", " ").encode()


class _Normalizer:
    """Normalization settings of a model, parsed from the file, since the library does not expose them.

    Attributes:
        byte_fallback: characters outside the vocabulary are encoded as bytes.
        space_first: a space is added before every text.
        space_last: a space is added after every text.
        keeps_text: there is no other normalization.
    """

    def __init__(self, model: bytes) -> None:
        training: dict[int, int | bytes] = {}
        rules: dict[int, int | bytes] = {}
        for field, value in _fields(model):
            if field == 2 and isinstance(value, bytes):
                training.update(_fields(value))
            elif field == 3 and isinstance(value, bytes):
                rules.update(_fields(value))
        # Defaults of NormalizerSpec: 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces are true.
        adds_space = bool(rules.get(3, 1))
        self.byte_fallback = bool(training.get(_BYTE_FALLBACK, 0))
        self.space_last = adds_space and bool(training.get(_SPACE_AS_SUFFIX, 0))
        self.space_first = adds_space and not self.space_last
        self.keeps_text = not rules.get(2) and not rules.get(4, 1) and bool(rules.get(5, 1))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the field numbers and values of a protocol buffer (https://protobuf.dev/programming-guides/encoding).

    Raises:
        ValueError: it is not one.
    """
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        match key & 7:
            case 0:
                value, offset = _varint(message, offset)
                yield key >> 3, value
            case 2:
                length, offset = _varint(message, offset)
                if offset + length > len(message):
                    raise ValueError("it is not a SentencePiece model: a field is cut off")
                yield key >> 3, message[offset : offset + length]
                offset += length
            case 1 | 5 as kind:
                offset += 8 if kind == 1 else 4
            case _:
                raise ValueError("it is not a SentencePiece model: no protocol buffer")


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(message):
            break
        value |= (message[offset] & 0x7F) << shift
        offset += 1
        if message[offset - 1] < 0x80:
            return value, offset
    raise ValueError("it is not a SentencePiece model: a number is cut off")
