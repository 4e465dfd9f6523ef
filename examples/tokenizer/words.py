"""A tokenizer of whole words: those of a text file, by frequency; others are `<unk>`."""

import re
from collections import Counter
from pathlib import Path

import stoker


@stoker.register("tokenizer", "words")
class Words:
    """The `size` most frequent words of the file `path`."""

    eos_id = 0

    def __init__(self, path: str = "", size: int = 200, words: tuple[str, ...] = ()):
        found = Counter(re.findall(r"\S+", Path(path).read_text())) if path else {}
        self.words = ["<eos>", "<unk>", *(words or sorted(found, key=lambda word: (-found[word], word))[:size])]
        self.ids = {word: number for number, word in enumerate(self.words)}
        self.vocab_size = len(self.words)

    def encode(self, text: str) -> list[int]:
        """Return the id of each word."""
        return [self.ids.get(word, 1) for word in re.findall(r"\S+", text)]

    def decode(self, ids: list[int]) -> str:
        """Return the words, with spaces between them."""
        return " ".join(self.words[number] for number in ids)

    def to_dict(self) -> dict:
        """Return what a checkpoint stores."""
        return {"words": self.words[2:]}

    @classmethod
    def from_dict(cls, state: dict) -> "Words":
        """Return the tokenizer of a checkpoint."""
        return cls(words=tuple(state["words"]))
