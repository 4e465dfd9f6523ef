"""Special tokens: which ids end documents, fill up short sequences and stand for no text.

A tokenizer file seldom says which of its tokens ends a document. What says it, first to last: the user
(`model.tokenizer.special_tokens`), the `tokenizer_config.json` beside the file, and the names that everybody uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

KINDS = ("eos", "bos", "pad", "unk")

_USUAL = {
    "eos": (
        *("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<|eos|>", "<eod>", "[EOS]"),
        "[SEP]",  # BERT's files have no other
    ),
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|begin▁of▁sentence|>", "<|bos|>", "[BOS]", "[CLS]"),
    "pad": ("<pad>", "[PAD]", "<|padding|>", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
}
"""GPT-2, NeoX, OLMo, Qwen; Llama 1 and 2, Mistral, T5; Gemma; Llama 3; DeepSeek; Megatron."""


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of the tokens that stand for no text; None where the vocabulary has no such token.

    Attributes:
        eos: ends a document.
        bos: begins one in some schemes; stoker's streams do without.
        pad: fills up short sequences.
        unk: stands for what the vocabulary does not have.
    """

    eos: int | None = None
    bos: int | None = None
    pad: int | None = None
    unk: int | None = None

    @property
    def fill(self) -> int:
        """The id that fills up short sequences: pad, or else eos, or else 0; its labels are masked."""
        return next((id_ for id_ in (self.pad, self.eos) if id_ is not None), 0)

    def ids(self) -> set[int]:
        """All of them."""
        return {id_ for id_ in (self.eos, self.bos, self.pad, self.unk) if id_ is not None}

    def check(self, vocab_size: int) -> None:
        """Refuse ids outside a vocabulary.

        Raises:
            ValueError: there is one.
        """
        for kind in KINDS:
            id_ = getattr(self, kind)
            if id_ is not None and not 0 <= id_ < vocab_size:
                raise ValueError(f"the id of the {kind} token ({str(id_)[:40]}) must be 0 to {vocab_size - 1}")

    def to_document(self) -> dict[str, int | None]:
        """The four ids by name."""
        return {kind: getattr(self, kind) for kind in KINDS}


def find_special(named: Mapping[str, str], id_of: Callable[[str], int | None]) -> SpecialIds:
    """The special tokens of a vocabulary.

    Args:
        named: token by kind, from the user or the file's own configuration; the rest is found by its usual names.
        id_of: the id of a token, or None.

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
            ids = (id_of(token) for token in _USUAL[kind])
            found[kind] = next((id_ for id_ in ids if id_ is not None), None)
    return SpecialIds(**found)


def special_from_document(document: object) -> SpecialIds:
    """The ids that `SpecialIds.to_document` gave, read back from JSON; `SpecialIds.check` compares them with a size.

    Raises:
        ValueError: it is not such a document.
    """
    if not isinstance(document, dict) or set(document) != set(KINDS):
        raise ValueError(f"`special` must be an object with the keys {', '.join(KINDS)}")
    for kind, id_ in document.items():
        if id_ is not None and type(id_) is not int:
            raise ValueError(f"`special.{kind}` must be null or an id, not {type(id_).__name__}")
    return SpecialIds(**document)
