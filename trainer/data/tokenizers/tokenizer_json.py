"""Tokenizers of Hugging Face's `tokenizer.json`, run by the `tokenizers` library: BPE, WordPiece, Unigram.

The ids are those of `transformers`' fast tokenizers without the tokens that a post-processor adds: a stream of text
needs no bos before every piece. A special token that is written in the text becomes that token, as it does there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UserError
from ..tasks.chat_template import ChatTemplate
from .gpt2_pretokenizer import WordTokenizer, has_gpt2_words
from .special_tokens import SpecialIds, find_special, special_from_document
from .token_bytes import is_byte_level, pieces_of, puts_space_first, token_lengths
from .tokenizer import TokenIds, ids_of, text_of, utf8

if TYPE_CHECKING:
    import tokenizers

MAX_DEFINITION_BYTES = 56 << 20
"""Of a definition written as a JSON string; the tokenizer document of a checkpoint may have 64 MiB."""
MAX_VOCABULARY = 1 << 22
"""Token ids; the largest vocabularies there are have 262,144. Larger ids would allocate tables of their size."""


class JsonTokenizer:
    """A tokenizer that a `tokenizer.json` defines; `define` finds its special tokens.

    Args:
        definition: the text of the file, as `canonical` gives it.
        special: ids that stand for no text.

    Raises:
        ValueError: the definition is too large, is none, or has a part that the library or stoker does not know.
    """

    def __init__(self, definition: str, special: SpecialIds) -> None:
        self._parsed = _parse(definition)
        self._tokenizer = _library_tokenizer(definition, self._parsed)
        self._definition = definition
        self._vocabulary = self._tokenizer.get_vocab()
        added = {id_: token.content for id_, token in self._tokenizer.get_added_tokens_decoder().items()}
        self._pieces = pieces_of(self._parsed, self._vocabulary, added, special.ids())
        self._space_first = puts_space_first(self._parsed)
        self._dtype = np.uint16 if len(self._pieces) <= 1 << 16 else np.int32
        self.special = special
        self.chat: ChatTemplate | None = None
        self.vocab_size = len(self._pieces)
        self.eos_id = special.eos
        self.pad_id = special.fill
        special.check(self.vocab_size)
        by_words = is_byte_level(self._parsed, self._vocabulary) and has_gpt2_words(self._parsed)
        self._words = WordTokenizer(self._tokenizer, self._dtype) if by_words else None

    def encode(self, text: str) -> TokenIds:
        """Token ids of `text`, [n].

        Raises:
            UserError: `text` has a lone surrogate, or a character for which the vocabulary has no token, nor one for
                unknown characters.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Token ids of each text; several at once keep the library's threads busy where those are on.

        Raises:
            UserError: as `encode`.
        """
        try:
            if self._words is not None:
                return [self._words.encode(text) for text in texts]
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            for text in texts:
                utf8(text)  # the library has no words for a string that is no Unicode
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"the tokenizer.json cannot tokenize this text: {reason}") from None
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]

    def encode_bytes(self, data: bytes) -> TokenIds:
        """Token ids of UTF-8 encoded text.

        Raises:
            UserError: `data` is no UTF-8.
        """
        return self.encode(text_of(data))

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of a document's ids; bytes that are no UTF-8 become U+FFFD.

        Where the scheme puts a space before a text, a space there is taken away again.
        """
        text = self.decode_bytes(ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._space_first else text

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        """The bytes of `ids`, one token after the other; special tokens and unknown ids give nothing."""
        return b"".join(self._pieces[id_] for id_ in ids_of(ids).tolist() if id_ < self.vocab_size)

    def added_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens that the file's post-processor puts before and behind a text, as transformers does."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        texts = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
        first, last = (texts[0], texts[-1] + 1) if texts else (len(encoding.ids), len(encoding.ids))
        return encoding.ids[:first], encoding.ids[last:]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text."""
        return self._vocabulary.get(token)

    def token_name(self, id_: int) -> str | None:
        """The name of a special token."""
        return self._tokenizer.id_to_token(id_) if id_ in self.special.ids() else None

    def encode_with_places(self, text: str) -> tuple[TokenIds, NDArray[np.int64]]:
        """Token ids of `text`, [n], and from where to where in it each token goes, in characters, [n, 2].

        The places are the library's: spaces that a token takes along may lie outside of it.

        Raises:
            UserError: as `encode`.
        """
        ids = self.encode(text)
        places = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return ids, np.array(places, np.int64).reshape(-1, 2)

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of text each id stands for, or zeros where ids do not tell; see `token_lengths`."""
        return token_lengths(self._parsed, self._pieces, self._vocabulary, self.eos_id)

    def to_document(self) -> dict[str, Any]:
        """The definition as text, and the ids that stand for no text."""
        return {"tokenizer": "huggingface", "definition": self._definition, "special": self.special.to_document()}


def canonical(text: str) -> str:
    """A `tokenizer.json` in one form whatever its white space, without truncation and padding.

    Raises:
        ValueError: it is not a JSON object.
    """
    parsed = _parse(text)
    parsed["truncation"] = parsed["padding"] = None
    return _text(parsed)


def define(definition: str, named: Mapping[str, str], added: Sequence[str] = ()) -> JsonTokenizer:
    """A tokenizer with its special tokens.

    Args:
        definition: what `canonical` gave.
        named: special token by kind (`eos`, `bos`, `pad`, `unk`); one that the vocabulary lacks is added, as in NeMo.
        added: further special tokens.

    Raises:
        ValueError: see `JsonTokenizer`.
    """
    parsed = _parse(definition)
    library = _library_tokenizer(definition, parsed)
    missing = [token for token in dict.fromkeys([*named.values(), *added]) if library.token_to_id(token) is None]
    if missing:
        definition = _added(parsed, library, missing)
        library = _library_tokenizer(definition, parsed)
    return JsonTokenizer(definition, find_special(named, library.token_to_id))


def extended(document: Mapping[str, Any], tokens: Sequence[str]) -> JsonTokenizer:
    """The tokenizer of a document with special tokens that it lacks; their ids follow its last, in the order given.

    Raises:
        ValueError: it is not the document of such a tokenizer.
    """
    parsed = _parse(document["definition"])
    definition = _added(parsed, _library_tokenizer(document["definition"], parsed), tokens)
    return JsonTokenizer(definition, special_from_document(document["special"]))


def _added(parsed: dict[str, Any], library: tokenizers.Tokenizer, tokens: Sequence[str]) -> str:
    """A definition with more special tokens."""
    first = max(library.get_vocab().values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    parsed["added_tokens"] = [
        *(parsed.get("added_tokens") or []),
        *({"id": first + n, "content": token, **flags} for n, token in enumerate(tokens)),
    ]
    return _text(parsed)


def json_from_document(document: Mapping[str, Any]) -> JsonTokenizer:
    """The tokenizer that `JsonTokenizer.to_document` describes, read back from JSON.

    Raises:
        ValueError: it is not such a document.
    """
    if set(document) != {"tokenizer", "definition", "special"} or not isinstance(document["definition"], str):
        raise ValueError("a huggingface tokenizer document has a text `definition` and `special`, nothing else")
    return JsonTokenizer(document["definition"], special_from_document(document["special"]))


def _library_tokenizer(definition: str, parsed: Mapping[str, Any]) -> tokenizers.Tokenizer:
    import tokenizers

    if len(json.dumps(definition)) > MAX_DEFINITION_BYTES:
        raise ValueError(f"it is larger than the {MAX_DEFINITION_BYTES >> 20} MiB that fit into a checkpoint")
    if isinstance(parsed.get("model"), dict) and parsed["model"].get("dropout"):
        raise ValueError("`model.dropout` makes tokens random; set it to null in the file")
    try:
        library = tokenizers.Tokenizer.from_str(definition)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ValueError(f"the tokenizers library refuses it: {' '.join(str(error).split())[:200]}") from None
    ids = library.get_vocab().values()
    if not ids or max(ids) >= MAX_VOCABULARY:
        raise ValueError(f"token ids ({max(ids, default='none')}) must be there and below {MAX_VOCABULARY:,}")
    return library


def _parse(definition: str) -> dict[str, Any]:
    try:
        parsed = json.loads(definition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise ValueError("it is no tokenizer.json: there is no object `model` in it")
    return parsed


def _text(parsed: Mapping[str, Any]) -> str:
    return json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))
