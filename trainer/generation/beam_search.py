"""Beam search: the texts of the highest probability that a search of limited width finds.

Scores, length penalty and the ways to stop are those of `transformers`: a text that has ended counts with the sum of
its log-probabilities, divided by its length, end token included, to the power of the length penalty.
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


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """How texts are searched.

    Attributes:
        beams: texts that are followed at once.
        length_penalty: above 0 favours long texts, below 0 short ones.
        early_stopping: end when as many texts have ended as there are beams (True), when no text that goes on, as long
            as it is now, can become better (False), or when none can at any length (`never`).

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
class Found:
    """A text that has ended.

    Attributes:
        score: of it.
        tokens: without the end token.
        ended: by an end token, not for its length.
    """

    score: float
    tokens: tuple[int, ...]
    ended: bool


class _Search:
    """The beams of one text."""

    def __init__(self, search: BeamSearch, ends: Collection[int], most: int) -> None:
        self._search = search
        self._ends = ends
        self._most = most
        # all begin alike: only the first is followed, lest all become the same
        self.scores = [0.0] + [-math.inf] * (search.beams - 1)
        self._running: list[tuple[int, ...]] = [()] * search.beams
        self.found: list[Found] = []
        self._improvable = True

    @property
    def done(self) -> bool:
        """Whether nothing changes any more."""
        full = len(self.found) == self._search.beams
        return not self._improvable or (self._search.early_stopping is True and full)

    def take(self, scores: Sequence[float], places: Sequence[int], vocabulary: int) -> tuple[list[int], list[int]]:
        """Go on by one token.

        Args:
            scores: of the best continuations of all beams, best first, of which beams at least do not end.
            places: of each, beam * vocabulary + token.
            vocabulary: tokens there are.

        Returns:
            The beam that each beam goes on from, and its new token.
        """
        width, length = self._search.beams, len(self._running[0]) + 1
        done = self.done
        sources: list[int] = []
        running: list[tuple[int, ...]] = []
        kept: list[float] = []
        for rank, (score, place) in enumerate(zip(scores, places, strict=True)):
            beam, token = divmod(place, vocabulary)
            ends = token in self._ends
            if not ends and len(running) < width:
                sources.append(beam)
                running.append((*self._running[beam], token))
                kept.append(score)
            if (ends or length == self._most) and rank < width and not done and score > -math.inf:
                text = self._running[beam] if ends else (*self._running[beam], token)
                self.found.append(Found(score / length**self._search.length_penalty, text, ends))
        self.found = sorted(self.found, key=lambda found: -found.score)[:width]
        self._running, self.scores = running, kept
        never = self._search.early_stopping == "never" and self._search.length_penalty > 0
        best = kept[0] / (self._most if never else length) ** self._search.length_penalty
        self._improvable = self._improvable and (len(self.found) < width or best > self.found[-1].score)
        return sources, [text[-1] for text in running]


@torch.no_grad()
def search_texts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    search: BeamSearch,
    *,
    most: int,
    ends: Collection[int],
    device: torch.device,
    within: Callable[[], AbstractContextManager[object]],
    start: int | None,
) -> list[list[Found]]:
    """The best continuations of each text, or the best answers to it.

    Args:
        decoder: of `beams` rows for each prompt, one after the other.
        prompts: what is read, none empty.
        search: how.
        most: tokens of the longest text.
        ends: tokens that end one.
        device: of the decoder.
        within: makes the context of the arithmetic that a step runs in.
        start: as of `TokenLoop`.

    Returns:
        For each prompt what was found, best first, at least one text.
    """
    width = search.beams
    searches = [_Search(search, ends, most) for _ in prompts]
    read = [prompt for prompt in prompts for _ in range(width if start is None else 1)]
    longest = max(map(len, read))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in read], device=device)
    with within():
        logits = decoder.begin(tokens, torch.tensor([len(prompt) for prompt in read], device=device))
        if logits is None:
            assert start is not None
            logits = decoder.step(torch.full((decoder.rows,), start, device=device))
    for number in range(most):
        scores, places = _best(logits, searches, (1 + max(1, len(ends))) * width)
        gone_on = [
            one.take(score, place, logits.shape[1]) for one, score, place in zip(searches, scores, places, strict=True)
        ]
        if number + 1 == most or all(one.done for one in searches):
            break
        rows = [text * width + beam for text, (sources, _) in enumerate(gone_on) for beam in sources]
        if rows != list(range(decoder.rows)):
            decoder.reorder(torch.tensor(rows, device=device))
        following = torch.tensor([token for _, new in gone_on for token in new], device=device)
        with within():
            logits = decoder.step(following)
    return [one.found for one in searches]


def _best(logits: Tensor, searches: Sequence[_Search], count: int) -> tuple[list[list[float]], list[list[int]]]:
    """Scores and places of the best continuations of the beams of each text."""
    so_far = torch.tensor([score for one in searches for score in one.scores], device=logits.device)
    scores = logits.float().log_softmax(dim=-1) + so_far[:, None]
    best = scores.view(len(searches), -1).topk(count)
    return best.values.tolist(), best.indices.tolist()
