"""Choosing the next token: greedily, or at random by temperature, top-k and nucleus (top-p); and text as it appears."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..data.tokenizers.tokenizer import Tokenizer

DIVERGED = -1
"""Stands for a token where no logit is the largest: a model that has diverged gives NaN."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: tokens to draw from, the most probable; None for all.
        top_p: draw from the fewest tokens whose probabilities sum to at least this; None for all.
        repetition_penalty: what makes tokens that are there already less probable: their positive logits are divided by
            it, their negative ones multiplied (CTRL, arXiv 1909.05858); 1 leaves them.

    Raises:
        ValueError: a number out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"`temperature` ({self.temperature}) must be a finite number of at least 0; use 0 for greedy choice"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"`top_k` ({self.top_k}) must be at least 1; use None to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` ({self.top_p}) must be above 0 and at most 1; use None to keep all tokens")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"`repetition_penalty` ({self.repetition_penalty}) must be above 0; use 1 for none")

    def choose(self, logits: Tensor, uniforms: Tensor, seen: Tensor | None = None) -> Tensor:
        """One token for each row, without a wait for the device.

        Args:
            logits: (rows, vocabulary), any float dtype; masked tokens are -inf.
            uniforms: fp64 (rows,), random numbers in [0, 1), one of which decides a row.
            seen: bool (rows, vocabulary), the tokens that are there already; for `repetition_penalty` only.

        Returns:
            int64 (rows,); `DIVERGED` in a row whose largest logit is not finite.
        """
        if seen is not None:
            wide = logits.float()
            less = torch.where(wide < 0, wide * self.repetition_penalty, wide / self.repetition_penalty)
            logits = torch.where(seen, less, wide)
        largest, best = logits.max(dim=-1)
        if self.temperature > 0:
            best = self._drawn(logits, largest, uniforms)
        return torch.where(torch.isfinite(largest), best, DIVERGED)

    def distribution(self, logits: Tensor) -> Tensor:
        """The distribution that a token is drawn from.

        Temperature comes first, then top-k (Fan et al. 2018), then top-p (nucleus sampling, Holtzman et al. 2020) on
        what top-k left, renormalised: the order most libraries use. Equal logits are ranked by token id, so exactly k
        tokens are left.

        Args:
            logits: (..., vocabulary), the largest of each row finite.

        Returns:
            Probabilities like `logits`, in fp64.
        """
        probabilities, order = self._ranked(logits)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)

    def _drawn(self, logits: Tensor, largest: Tensor, uniforms: Tensor) -> Tensor:
        """The first token with which the sum of the probabilities exceeds the random number."""
        order = None
        if self.top_k is None and (self.top_p is None or self.top_p == 1):
            probabilities = torch.exp((logits.double() - largest.double()[:, None]) / self.temperature)
        else:
            probabilities, order = self._ranked(logits)
        sums = probabilities.cumsum(dim=-1)
        total = sums[:, -1:]
        # rounding must not reach the total, which tokens of no probability have too
        wanted = (uniforms[:, None] * total).clamp(max=total * (1 - 2.0**-52))
        place = torch.searchsorted(sums, wanted, right=True).clamp(max=sums.shape[-1] - 1)
        return (place if order is None else order.gather(-1, place))[:, 0]

    def _ranked(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities from the largest to the smallest, and their tokens."""
        scores, order = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
        keep = torch.arange(scores.shape[-1], device=scores.device)
        # Subtracting the largest first keeps a tiny temperature from overflowing to inf - inf.
        scores = (scores - scores[..., :1]) / (self.temperature or 1.0)
        most = 1 if self.temperature == 0 else self.top_k
        if most is not None:
            scores = scores.masked_fill(keep >= most, float("-inf"))
        probabilities = torch.softmax(scores, -1)
        if self.top_p is not None and self.top_p < 1:
            # A token stays while those before it do not reach p; the first always does.
            before = probabilities.cumsum(-1).roll(1, -1)
            probabilities = probabilities.masked_fill((before >= self.top_p) & (keep > 0), 0.0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities, order


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """The random numbers of texts, fp64 (len(seeds), count): those of a text depend on its seed alone."""
    return torch.stack(
        [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    )


class TextStream:
    """Tokens in, printable text out as soon as it is certain.

    A character whose bytes are not all there yet is held back, and so is text that may turn out to begin a stop string.

    Args:
        tokenizer: turns ids into bytes.
        stop: strings that end the text, which does not include them.
        names: what is written for tokens that have no text, such as sentinels.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), names: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._stop = [string for string in stop if string]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain after one more token; sets `stopped` when a stop string has appeared."""
        if token in self._names:
            return self._advance(self._decoder.decode(b"", final=True) + self._names[token])
        return self._advance(self._decoder.decode(self._tokenizer.decode_bytes([token])))

    def close(self) -> str:
        """The text that was held back, once no more tokens come."""
        text = self._advance(self._decoder.decode(b"", final=True))
        if self.stopped:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def _advance(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        ends = [position for string in self._stop if (position := text.find(string)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)]
        held = max((_overlap(text, string) for string in self._stop), default=0)
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` without completing it."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if string.startswith(text[-n:])), 0)
