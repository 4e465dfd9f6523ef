"""Masked language modelling: how many tokens of a window are hidden, and which."""

import numpy as np
import torch
from tiers import looped

from stoker.trainer.data.datasets.samples import IGNORE_INDEX, Batch
from stoker.trainer.data.tasks.masked_lm import MaskedWindows, MaskTokens
from stoker.trainer.data.tasks.noise_spans import SpanLengthDistribution
from stoker.trainer.data.tasks.span_corruption import NgramSpanConfig

MASK, EOS, PAD = 5, 1, 0
LENGTH, ROWS = 64, 200


class Texts:
    """Windows of which so many tokens, at random places, end documents; the last has no other."""

    sequence_length, samples = LENGTH, ROWS

    def __init__(self, ends: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(10, 60, (ROWS, LENGTH), generator=generator)
        self.tokens[torch.rand(ROWS, LENGTH, generator=generator) < ends] = EOS
        self.tokens[-1] = EOS

    def batch(self, first: int, count: int) -> Batch:
        rows = self.tokens[first : first + count]
        return Batch(rows, rows)


@looped("ends", [0.0, 0.05, 0.3, 0.9])
@looped(
    "ngrams",
    [
        None,
        NgramSpanConfig(SpanLengthDistribution.geometric(10, 5.0), None),
        NgramSpanConfig(SpanLengthDistribution.harmonic(3, longer_first=False), None),
    ],
)
def test_the_share_is_of_what_can_be_hidden(ngrams: NgramSpanConfig | None, ends: float) -> None:
    texts = Texts(ends)
    special = MaskTokens(MASK, EOS, PAD, np.arange(10, 60))
    batch = MaskedWindows(texts, 0.15, ngrams, special, seed=3).batch(0, ROWS)
    chosen, ended = batch["labels"] != IGNORE_INDEX, texts.tokens == EOS
    there = (~ended).sum(dim=1)
    expected = (there * 0.15).round().clamp(min=1).minimum(there)
    assert chosen.sum(dim=1).tolist() == expected.tolist()
    assert not (chosen & ended).any()
    assert torch.equal(batch["labels"][chosen], texts.tokens[chosen])
    assert torch.equal(batch["tokens"][~chosen], texts.tokens[~chosen])
