"""Special tokens: the ids of BOS, EOS, padding and unknown.

Tokenizer files seldom say which token ends a document. Sources, in order of precedence: the user
(`model.tokenizer.special_tokens`), the `tokenizer_config.json` in the same folder, and the usual names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

KINDS = ("eos", "bos", "pad", "unk")

_USUAL_NAMES = {
    "eos": (
        *("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<|eos|>", "<eod>", "[EOS]"),
        "[SEP]",  # the only separator in BERT's files
    ),
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|begin▁of▁sentence|>", "<|bos|>", "[BOS]", "[CLS]"),
    "pad": ("<pad>", "[PAD]", "<|padding|>", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
}
"""Names used by GPT-2, NeoX, OLMo, Qwen; Llama 1 and 2, Mistral, T5; Gemma; Llama 3; DeepSeek; Megatron."""


@dataclass(frozen=True, slots=True)
class SpecialTokenIds:
    """Ids of special tokens; None if the vocabulary has no such token.

    Attributes:
        eos: ends a document.
        bos: begins a document in some schemes; not used in stoker's token streams.
        pad: pads short sequences.
        unk: replaces tokens outside the vocabulary.
    """

    eos: int | None = None
    bos: int | None = None
    pad: int | None = None
    unk: int | None = None

    @property
    def fill(self) -> int:
        """The padding id: pad, else eos, else 0; its labels are masked."""
        return next((id_ for id_ in (self.pad, self.eos) if id_ is not None), 0)

    def ids(self) -> set[int]:
        """Return the ids of all special tokens."""
        return {id_ for id_ in (self.eos, self.bos, self.pad, self.unk) if id_ is not None}

    def check(self, vocab_size: int) -> None:
        """Check that all ids are in the vocabulary.

        Raises:
            ValueError: one is not.
        """
        for kind in KINDS:
            id_ = getattr(self, kind)
            if id_ is not None and not 0 <= id_ < vocab_size:
                raise ValueError(f"the id of the {kind} token ({str(id_)[:40]}) must be 0 to {vocab_size - 1}")

    def to_dict(self) -> dict[str, int | None]:
        """Return the four ids by name."""
        return {kind: getattr(self, kind) for kind in KINDS}


def find_special_tokens(named: Mapping[str, str], id_of: Callable[[str], int | None]) -> SpecialTokenIds:
    """Find the special tokens of a vocabulary.

    Args:
        named: token by kind, from the user or tokenizer_config.json; other kinds are found by their usual names.
        id_of: returns the id of a token, or None.

    Raises:
        ValueError: a named token is not in the vocabulary.
    """
    found: dict[str, int | None] = {}
    for kind in KINDS:
        if kind in named:
            found[kind] = id_of(named[kind])
            if found[kind] is None:
                raise ValueError(f"the {kind} token {named[kind]!r} is not in the vocabulary")
        else:
            ids = (id_of(token) for token in _USUAL_NAMES[kind])
            found[kind] = next((id_ for id_ in ids if id_ is not None), None)
    return SpecialTokenIds(**found)


def special_token_ids_from_dict(document: object) -> SpecialTokenIds:
    """Rebuild the ids from `SpecialTokenIds.to_dict`, read back from JSON; `SpecialTokenIds.check` compares them with a
    size.

    Raises:
        ValueError: it is not such a document.
    """
    if not isinstance(document, dict) or set(document) != set(KINDS):
        raise ValueError(f"`special` must be an object with the keys {', '.join(KINDS)}")
    for kind, id_ in document.items():
        if id_ is not None and type(id_) is not int:
            raise ValueError(f"`special.{kind}` must be null or an id, not {type(id_).__name__}")
    return SpecialTokenIds(**document)
