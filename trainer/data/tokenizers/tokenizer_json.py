"""Tokenizers of Hugging Face `tokenizer.json` files, run by the `tokenizers` library: BPE, WordPiece, Unigram.

The ids are those of `transformers`' fast tokenizers with `add_special_tokens=False`: a token stream needs no BOS before
every text. As in `transformers`, a special token written in the text becomes that token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UserError
from ...utils.text import one_line
from .definition_bounds import unbounded_part
from .gpt2_pretokenizer import CachedWordTokenizer, uses_gpt2_pre_tokenizer
from .isolated_encoder import IsolatedEncoder
from .special_tokens import SpecialTokenIds, find_special_tokens, special_token_ids_from_dict
from .token_bytes import adds_prefix_space, is_byte_level, token_byte_counts, token_byte_strings
from .tokenizer import PieceTokenizer, TokenIds, check_words, encode_utf8

if TYPE_CHECKING:
    import tokenizers

MAX_DEFINITION_BYTES = 56 << 20
"""Maximum size of a definition as a JSON string; the tokenizer document of a checkpoint may have 64 MiB."""
MAX_VOCAB_SIZE = 1 << 22
"""Maximum number of token ids; the largest known vocabularies have 262,144. Tables of this size are allocated."""
_MAX_CACHED_ADDED_TOKENS = 2000
"""Maximum number of added tokens for `CachedWordTokenizer`: its regular expression grows with them."""


class _Library(NamedTuple):
    """A definition, loaded.

    Attributes:
        parsed: the parsed definition.
        tokenizer: the library's tokenizer; it has only tokens and model if the definition is run in another process.
        vocabulary: id by token, added tokens included.
        unbounded: the part of the definition without a known bound on its cost; None if there is none.
    """

    parsed: dict[str, Any]
    tokenizer: tokenizers.Tokenizer
    vocabulary: dict[str, int]
    unbounded: str | None


class JsonTokenizer(PieceTokenizer):
    """A tokenizer defined by a `tokenizer.json`; `build_json_tokenizer` finds its special tokens.

    Args:
        definition: the text of the file, as returned by `canonical_json`.
        library: the definition, if it is already loaded.

    Raises:
        ValueError: the definition is too large, invalid, or has a part that is not supported.
    """

    kind = "huggingface"

    def __init__(self, definition: str, special: SpecialTokenIds, library: _Library | None = None) -> None:
        library = library or _load(definition, _parse(definition))
        self._parsed, self._tokenizer, self._vocabulary, unbounded = library
        self._definition = definition
        added = {id_: token.content for id_, token in self._tokenizer.get_added_tokens_decoder().items()}
        pieces = token_byte_strings(self._parsed, self._vocabulary, added, special.ids())
        super().__init__(pieces, special, space_first=adds_prefix_space(self._parsed))
        has_fast_path = (
            len(added) <= _MAX_CACHED_ADDED_TOKENS
            and is_byte_level(self._parsed, self._vocabulary)
            and uses_gpt2_pre_tokenizer(self._parsed)
        )
        self._words = CachedWordTokenizer(self._tokenizer, self._dtype) if has_fast_path else None
        self._isolated = IsolatedEncoder(definition, unbounded) if unbounded else None
        if self._isolated is not None:
            self._isolated.check()

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text`, [N].

        Raises:
            UserError: `text` contains a lone surrogate, a word that is too long, or a character outside the vocabulary
                and there is no unknown token.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each text; batches use the library's threads if those are enabled.

        Raises:
            UserError: as `encode`.
        """
        for text in texts:
            check_words(text)
        try:
            if self._words is not None:
                return [self._words.encode(text) for text in texts]
            if self._isolated is not None:
                return [encoded.ids.astype(self._dtype) for encoded in self._isolated.encode(texts)]
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the Rust library is not an Exception
            for text in texts:
                encode_utf8(text)  # the library's error for invalid Unicode is unclear
            reason = one_line(error, 200)
            raise UserError(f"the tokenizer.json cannot tokenize this text: {reason}") from None
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]

    def document_start_ids(self) -> list[int]:
        """Return the tokens that the post-processor adds before a text: BOS for Llama and Gemma, none for GPT-2."""
        return self.post_processor_tokens()[0]

    def post_processor_tokens(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the post-processor adds before and after a text, as transformers does."""
        if self._isolated is not None:
            (encoded,) = self._isolated.encode(["a"], special=True)
            ids, is_special = encoded.ids.tolist(), encoded.places.reshape(-1).tolist()
        else:
            encoding = self._tokenizer.encode("a", add_special_tokens=True)
            ids, is_special = encoding.ids, encoding.special_tokens_mask
        positions = [place for place, special in enumerate(is_special) if not special]
        first, last = (positions[0], positions[-1] + 1) if positions else (len(ids), len(ids))
        return ids[:first], ids[last:]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text."""
        return self._vocabulary.get(token)

    def token_name(self, id_: int) -> str | None:
        """Return the text of a special token."""
        return self._tokenizer.id_to_token(id_) if id_ in self.special.ids() else None

    def encode_with_offsets(self, text: str) -> tuple[TokenIds, NDArray[np.int64]]:
        """Return the token ids of `text`, [N], and the character offsets of each token, [N, 2].

        The offsets are those of the library; they may exclude spaces that are part of a token.

        Raises:
            UserError: as `encode`.
        """
        ids = self.encode(text)
        if self._isolated is not None:
            return ids, self._isolated.encode([text], offsets=True)[0].places.astype(np.int64)
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return ids, np.array(offsets, np.int64).reshape(-1, 2)

    def token_byte_counts(self) -> NDArray[np.int64]:
        """Return the number of UTF-8 bytes of each id; 0 if tokens do not add up to the text, see
        `token_byte_counts`.
        """
        return token_byte_counts(self._parsed, self._pieces, self._vocabulary, self.eos_id)

    def to_dict(self) -> dict[str, Any]:
        """Return the definition as text, and the ids of the special tokens."""
        return {"tokenizer": self.kind, "definition": self._definition, "special": self.special.to_dict()}


def canonical_json(text: str) -> str:
    """Return a `tokenizer.json` in a form independent of white space, without truncation and padding.

    Raises:
        ValueError: it is not a JSON object.
    """
    parsed = _parse(text)
    parsed["truncation"] = parsed["padding"] = None
    return json_text(parsed)


def build_json_tokenizer(definition: str, named: Mapping[str, str], added: Sequence[str] = ()) -> JsonTokenizer:
    """Build a tokenizer and find its special tokens.

    Args:
        definition: output of `canonical_json`.
        named: special token by kind (`eos`, `bos`, `pad`, `unk`); added if the vocabulary lacks it, as in NeMo.
        added: further special tokens.

    Raises:
        ValueError: see `JsonTokenizer`.
    """
    parsed = _parse(definition)
    library = _load(definition, parsed)
    missing = [token for token in dict.fromkeys([*named.values(), *added]) if token not in library.vocabulary]
    if missing:
        definition = _with_special_tokens(library, missing)
        library = _load(definition, parsed)
    return JsonTokenizer(definition, find_special_tokens(named, library.vocabulary.get), library)


def with_added_tokens(document: Mapping[str, Any], tokens: Sequence[str]) -> JsonTokenizer:
    """Return the tokenizer of a document with additional special tokens; their ids follow its last, in the given order.

    Raises:
        ValueError: it is not the document of such a tokenizer.
    """
    definition = _with_special_tokens(_load(document["definition"], _parse(document["definition"])), tokens)
    return JsonTokenizer(definition, special_token_ids_from_dict(document["special"]))


def _with_special_tokens(library: _Library, tokens: Sequence[str]) -> str:
    """Return a definition with additional special tokens, which are also added to the parsed one."""
    first = max(library.vocabulary.values()) + 1
    new = [added_token(id_, token) for id_, token in enumerate(tokens, first)]
    parsed = library.parsed
    parsed["added_tokens"] = [*(parsed.get("added_tokens") or []), *new]
    return json_text(parsed)


def json_tokenizer_from_dict(document: Mapping[str, Any]) -> JsonTokenizer:
    """Rebuild the tokenizer from `JsonTokenizer.to_dict`, read back from JSON.

    Raises:
        ValueError: it is not such a document.
    """
    if set(document) != {"tokenizer", "definition", "special"} or not isinstance(document["definition"], str):
        raise ValueError("a huggingface tokenizer document has a text `definition` and `special`, nothing else")
    return JsonTokenizer(document["definition"], special_token_ids_from_dict(document["special"]))


def _load(definition: str, parsed: dict[str, Any]) -> _Library:
    """Load a definition; without the parts that transform a text if one of them has no known bound on its cost.

    Raises:
        ValueError: see `JsonTokenizer`.
    """
    import tokenizers

    # A character has at most 12 bytes in JSON, as two escapes.
    if 12 * len(definition) > MAX_DEFINITION_BYTES and len(json.dumps(definition)) > MAX_DEFINITION_BYTES:
        raise ValueError(f"it is larger than the {MAX_DEFINITION_BYTES >> 20} MiB that fit into a checkpoint")
    if isinstance(parsed.get("model"), dict) and parsed["model"].get("dropout"):
        raise ValueError("`model.dropout` makes tokens random; set it to null in the file")
    for part in ("truncation", "padding"):
        if parsed.get(part) is not None:
            raise ValueError(f"`{part}` must be null: it would change every text; remove it from the file")
    if not all(map(_keeps_text, _post_processors(parsed.get("post_processor")))):
        raise ValueError("its `post_processor` drops or repeats the text: `single` must hold the sequence A once")
    unbounded = unbounded_part(parsed)
    if unbounded is not None:
        transforms = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
        definition = json_text(parsed | dict.fromkeys(transforms))
    try:
        library = tokenizers.Tokenizer.from_str(definition)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        raise ValueError(f"the tokenizers library rejects it: {one_line(error, 200)}") from None
    vocabulary = library.get_vocab()
    ids = vocabulary.values()
    if not ids or max(ids) >= MAX_VOCAB_SIZE:
        raise ValueError(f"token ids (largest: {max(ids, default='none')}) must exist and be below {MAX_VOCAB_SIZE:,}")
    own = library.get_vocab(with_added_tokens=False)
    if len(set(own.values())) < len(own):
        id_ = next(id_ for id_, count in Counter(own.values()).items() if count > 1)
        first, second = sorted(token for token, other in own.items() if other == id_)[:2]
        raise ValueError(f"the tokens {first[:40]!r} and {second[:40]!r} have one id, {id_}; give each token its own")
    return _Library(parsed, library, vocabulary, unbounded)


def _post_processors(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a post-processor, or all of a sequence of them; the library checks their format."""
    if isinstance(part, dict):
        yield part
        inner = part.get("processors")
        for processor in inner if isinstance(inner, list) else ():
            yield from _post_processors(processor)


def _keeps_text(processor: dict[str, Any]) -> bool:
    """Return True unless a template leaves the text out or repeats it: no special token is asked for, but it acts."""
    single = processor.get("single")
    if processor.get("type") != "TemplateProcessing" or not isinstance(single, list):
        return True
    return sum(isinstance(piece, dict) and "Sequence" in piece for piece in single) == 1


def tokens_by_id(definition: str) -> dict[int, str]:
    """Return the tokens of a definition; without running any other part of it.

    Raises:
        ValueError: see `JsonTokenizer`.
    """
    return {id_: token for token, id_ in _load(definition, _parse(definition)).vocabulary.items()}


def _parse(definition: str) -> dict[str, Any]:
    try:
        parsed = json.loads(definition)
    except (ValueError, RecursionError) as error:
        if "int_max_str_digits" in str(error):
            raise ValueError("it holds an integer of thousands of digits") from None
        raise ValueError(f"it is not JSON: {one_line(error, 200)}") from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise ValueError("it is not a tokenizer.json: it has no object `model`")
    return parsed


def added_token(id_: int, content: str) -> dict[str, Any]:
    """Return the entry of a special token in `added_tokens`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id_, "content": content, **flags}


def json_text(parsed: Mapping[str, Any]) -> str:
    """Return a parsed `tokenizer.json` as text in its canonical form."""
    return json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))
