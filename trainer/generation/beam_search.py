"""Beam search.

Scores, length penalty and stopping criteria are those of `transformers`: the score of a finished hypothesis is the sum
of its log-probabilities divided by its length (including the eos token) to the power of the length penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...models.incremental_decoding import Decoder
from .decode_loop import pad_prompts


@dataclass(frozen=True, slots=True)
class BeamSearchConfig:
    """Beam search settings.

    Attributes:
        length_penalty: above 0 favours long sequences, below 0 short ones.
        early_stopping: stop when `beams` hypotheses are finished (True), when no running beam scores better at its
            current length (False), or when none can become better at any length (`never`).

    Raises:
        ValueError: a number out of range.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"`beams` ({self.beams}) must be at least 1")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"`length_penalty` ({self.length_penalty}) must be finite")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished hypothesis.

    Attributes:
        score: length-normalized log-probability.
        tokens: token ids, without the eos token.
        ended_by_eos: finished by an eos token, not by the length limit.
    """

    score: float
    tokens: tuple[int, ...]
    ended_by_eos: bool


class _BeamState:
    """Beams and finished hypotheses of one prompt."""

    def __init__(self, search: BeamSearchConfig, ends: Collection[int], most: int) -> None:
        self._search = search
        self._ends = ends
        self._most = most
        # All beams start equal: only the first one is expanded, or all would stay the same.
        self.scores = [0.0] + [-math.inf] * (search.beams - 1)
        self._running: list[tuple[int, ...]] = [()] * search.beams
        self.found: list[Hypothesis] = []
        self._improvable = True

    @property
    def done(self) -> bool:
        """True if the search of this prompt is finished."""
        full = len(self.found) == self._search.beams
        return not self._improvable or (self._search.early_stopping is True and full)

    def extend(self, scores: Sequence[float], indices: Sequence[int], vocabulary: int) -> tuple[list[int], list[int]]:
        """Extend the beams by one token.

        Args:
            scores: scores of the best continuations of all beams, best first; at least `beams` of them are not eos.
            indices: index of each continuation, beam * vocabulary + token.

        Returns:
            For each new beam the index of the beam it extends, and its new token.
        """
        beams, length = self._search.beams, len(self._running[0]) + 1
        done = self.done
        sources: list[int] = []
        running: list[tuple[int, ...]] = []
        kept: list[float] = []
        for rank, (score, index) in enumerate(zip(scores, indices, strict=True)):
            beam, token = divmod(index, vocabulary)
            is_end = token in self._ends
            if not is_end and len(running) < beams:
                sources.append(beam)
                running.append((*self._running[beam], token))
                kept.append(score)
            if (is_end or length == self._most) and rank < beams and not done and score > -math.inf:
                tokens = self._running[beam] if is_end else (*self._running[beam], token)
                self.found.append(Hypothesis(score / length**self._search.length_penalty, tokens, is_end))
        self.found = sorted(self.found, key=lambda found: -found.score)[:beams]
        self._running, self.scores = running, kept
        to_any_length = self._search.early_stopping == "never" and self._search.length_penalty > 0
        best = kept[0] / (self._most if to_any_length else length) ** self._search.length_penalty
        self._improvable = self._improvable and (len(self.found) < beams or best > self.found[-1].score)
        return sources, [tokens[-1] for tokens in running]


@torch.no_grad()
def run_beam_search(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    search: BeamSearchConfig,
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
    decoder_start_id: int | None,
) -> list[list[Hypothesis]]:
    """Search the best continuations of each prompt (GPT) or answers to it (T5).

    Args:
        decoder: decoder with `beams` consecutive rows per prompt.
        prompts: token ids, none empty.
        autocast: returns the autocast context of a step.
        decoder_start_id: decoder start token of T5, as in `DecodeLoop`; None for GPT.

    Returns:
        The finished hypotheses of each prompt, best first, at least one each.
    """
    beams = search.beams
    searches = [_BeamState(search, eos_ids, max_new_tokens) for _ in prompts]
    read = [prompt for prompt in prompts for _ in range(beams if decoder_start_id is None else 1)]
    with autocast():
        logits = decoder.prefill(*pad_prompts(read, device))
        if logits is None:
            assert decoder_start_id is not None
            logits = decoder.step(torch.full((decoder.batch_size,), decoder_start_id, device=device))
    for number in range(max_new_tokens):
        scores, indices = _best(logits, searches, (1 + max(1, len(eos_ids))) * beams)
        extensions = [
            one.extend(score, index, logits.shape[1])
            for one, score, index in zip(searches, scores, indices, strict=True)
        ]
        if number + 1 == max_new_tokens or all(one.done for one in searches):
            break
        rows = [text * beams + beam for text, (sources, _) in enumerate(extensions) for beam in sources]
        if rows != list(range(decoder.batch_size)):
            decoder.reorder(torch.tensor(rows, device=device))
        next_tokens = torch.tensor([token for _, new in extensions for token in new], device=device)
        with autocast():
            logits = decoder.step(next_tokens)
    return [one.found for one in searches]


def _best(logits: Tensor, searches: Sequence[_BeamState], count: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return scores and indices (beam * vocabulary + token) of the `count` best continuations of each prompt."""
    beam_scores = torch.tensor([score for one in searches for score in one.scores], device=logits.device)
    scores = logits.float().log_softmax(dim=-1) + beam_scores[:, None]
    best = scores.view(len(searches), -1).topk(count)
    return best.values.tolist(), best.indices.tolist()
