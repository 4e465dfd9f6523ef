"""Sampling of the next token (greedy, temperature, top-k, top-p) and streaming detokenization."""

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
"""Token id of a row whose largest logit is not finite (a diverged model returns NaN)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
        top_k: sample from the k most probable tokens; None for all.
        top_p: sample from the fewest tokens whose probabilities sum to at least this; None for all.
        repetition_penalty: positive logits of tokens already in the sequence are divided by it, negative ones
            multiplied (CTRL, arXiv 1909.05858); 1 is off.

    Raises:
        ValueError: a value is out of range.
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

    def sample(self, logits: Tensor, uniforms: Tensor, seen: Tensor | None = None) -> Tensor:
        """Sample one token per row, without a host sync.

        Args:
            logits: (B, V), any float dtype; masked tokens are -inf.
            uniforms: fp64 (B,), random numbers in [0, 1), one per row.
            seen: bool (B, V), the tokens already in the sequence; only for `repetition_penalty`.

        Returns:
            int64 (B,); `DIVERGED` in a row whose largest logit is not finite.
        """
        if seen is not None:
            logits = logits.float()
            penalized = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
            logits = torch.where(seen, penalized, logits)
        largest, token = logits.max(dim=-1)
        if self.temperature > 0:
            token = self._sample(logits, largest, uniforms)
        return torch.where(largest.abs() < math.inf, token, DIVERGED)  # fewer kernels than `isfinite`

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution that tokens are sampled from.

        Temperature is applied first, then top-k (Fan et al. 2018), then top-p (nucleus sampling, Holtzman et al. 2020)
        on the remaining tokens, renormalised: the order most libraries use. Equal logits are ranked by token id, so
        exactly k tokens remain.

        Args:
            logits: (..., V), the largest of each row finite.

        Returns:
            Probabilities of the shape of `logits`, in fp64.
        """
        probabilities, order = self._ranked(logits)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)

    def _sample(self, logits: Tensor, largest: Tensor, uniforms: Tensor) -> Tensor:
        """Inverse transform sampling: the first token whose cumulative probability exceeds the random number."""
        order = None
        if self.top_k is None and (self.top_p is None or self.top_p == 1):
            probabilities = torch.exp((logits.double() - largest.double()[:, None]) / self.temperature)
        else:
            probabilities, order = self._ranked(logits)
        sums = probabilities.cumsum(dim=-1)
        total = sums[:, -1:]
        # rounding must not reach the total: trailing tokens of probability 0 have that cumulative sum too
        threshold = (uniforms[:, None] * total).clamp(max=total * (1 - 2.0**-52))
        index = torch.searchsorted(sums, threshold, right=True).clamp(max=sums.shape[-1] - 1)
        return (index if order is None else order.gather(-1, index))[:, 0]

    def _ranked(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities in descending order, and their token ids."""
        scores, order = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
        rank = torch.arange(scores.shape[-1], device=scores.device)
        # Subtract the largest before dividing, or a tiny temperature overflows to inf - inf.
        scores = (scores - scores[..., :1]) / (self.temperature or 1.0)
        top_k = 1 if self.temperature == 0 else self.top_k
        if top_k is not None:
            scores = scores.masked_fill(rank >= top_k, float("-inf"))
        probabilities = torch.softmax(scores, -1)
        if self.top_p is not None and self.top_p < 1:
            # A token is kept if those before it sum to less than p; the first always is.
            before = probabilities.cumsum(-1).roll(1, -1)
            probabilities = probabilities.masked_fill((before >= self.top_p) & (rank > 0), 0.0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities, order


def draw_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Return the random numbers of each sequence, fp64 (len(seeds), count); each row depends on its seed alone."""
    return torch.stack(
        [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    )


class TextStreamer:
    """Incremental detokenization: tokens in, printable text out as soon as it is final.

    Incomplete UTF-8 characters are held back, and so is text that may be the start of a stop string.

    Args:
        tokenizer: decodes ids to bytes.
        stop_strings: strings that end the text; not included in it.
        token_names: text of tokens without text of their own, such as sentinels.
        before: the tokens that the text continues, such as a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        token_names: Mapping[int, str] = MappingProxyType({}),
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._names = token_names
        self._stop = [string for string in stop_strings if string]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._tokens = list(before)
        self.stopped = False

    def put(self, token: int) -> str:
        """Add a token and return the text that is final now; sets `stopped` when a stop string appears."""
        if token in self._names:
            text = self._decoder.decode(b"", final=True) + self._names[token]
        else:
            text = self._decoder.decode(self._tokenizer.continuation_bytes(self._tokens, token))
        self._tokens.append(token)
        return self._advance(text)

    def close(self) -> str:
        """Return the text held back, at the end of the sequence."""
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
        final = len(text) - held
        self._held = text[final:]
        return text[:final]


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `string`."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if string.startswith(text[-n:])), 0)
