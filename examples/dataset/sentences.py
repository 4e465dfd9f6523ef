"""Sentences of a text file, one a sample: a plain `torch.utils.data.Dataset` as the training data of stoker."""

import re
from pathlib import Path

import torch
from torch.utils.data import Dataset

import stoker

SPLITS = {8: "validation", 9: "test"}


@stoker.register("dataset", "sentences")
class Sentences(Dataset):
    """Token ids of the sentences of the file `path`; of ten, one is for validation and one for the test split."""

    def __init__(self, split, tokenizer, sequence_length, path):
        sentences = re.findall(r"\S[^.:]+[.:]", Path(path).read_text())
        self.texts = [text for number, text in enumerate(sentences) if SPLITS.get(number % 10, "train") == split]
        self.tokenizer = tokenizer
        self.longest = sequence_length + 1

    def __len__(self):
        """Return the number of sentences."""
        return len(self.texts)

    def __getitem__(self, index):
        """Return the ids of a sentence and EOS, int64 [up to sequence_length + 1]."""
        ids = [*self.tokenizer.encode(self.texts[index]), self.tokenizer.eos_id]
        return torch.tensor(ids[: self.longest], dtype=torch.int64)
