"""The loop of generation: step after step of one batch of texts, recorded as a CUDA graph where that is worth it.

On a GPU the host launches a step before it reads what the one before has chosen: the GPU never waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from ...models.incremental_decoding import Decoder
from ..utils.errors import UserError
from .sampling import DIVERGED, Sampling, uniforms

_EAGER_STEPS = 2
"""Before a step is recorded: they compile kernels, and let libraries take their memory."""
_WORTH_RECORDING = 24
"""Tokens; recording takes as long as some steps."""


class _Pending(NamedTuple):
    """Tokens on their way to the host."""

    tokens: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tokens.tolist()


class TokenLoop:
    """Goes on with batch after batch of texts.

    Args:
        decoder: the texts of a batch.
        sampling: how a token is chosen.
        most: tokens that a text goes on for, at most.
        vocabulary: logits of a row.
        device: of the decoder.
        within: makes the context of the arithmetic that a step runs in.
        start: token that every text begins with, where the decoder reads other texts than it writes; None where it goes
            on with what it reads. Then texts that fill its slots go on from their last half.
        recorded: a step may become a CUDA graph.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: Sampling,
        most: int,
        *,
        vocabulary: int,
        device: torch.device,
        within: Callable[[], AbstractContextManager[object]],
        start: int | None = None,
        recorded: bool = False,
    ) -> None:
        self._decoder = decoder
        self._sampling = sampling
        self._most = most
        self._device = device
        self._within = within
        self._start = start
        self._recorded = recorded and most >= _WORTH_RECORDING
        self._replay: Callable[[], None] | None = None
        self._steps = 0
        rows = decoder.rows
        # MPS knows no fp64, in which tokens are drawn
        self._chooser = torch.device("cpu") if device.type == "mps" else device
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=self._chooser)
        drawn = most if sampling.temperature > 0 else 1
        self._uniforms = torch.zeros(rows, drawn, dtype=torch.float64, device=self._chooser)
        penalty = sampling.repetition_penalty != 1
        self._seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=self._chooser) if penalty else None
        pinned = device.type == "cuda"
        self._on_host = [torch.zeros(rows, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._ended: set[int] = set()

    def end(self, row: int) -> None:
        """Nobody asks for further tokens of this row; what it gives until the others have ended is of no meaning."""
        self._ended.add(row)

    @torch.no_grad()
    def run(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[list[int]]:
        """The next token of every text, again and again, `most` times.

        Args:
            prompts: what is read, one for each row of the decoder at most, none empty.
            seeds: of the random numbers of each text.

        Yields:
            A token of each prompt.

        Raises:
            UserError: the model has diverged.
        """
        rows, blank = self._decoder.rows, [0]
        texts = [list(prompt) for prompt in prompts]
        self._ended = set()
        self._count.zero_()
        self._uniforms[: len(texts)] = uniforms(seeds, self._uniforms.shape[1]).to(self._chooser)
        if self._seen is not None:
            self._seen.zero_()
            for row, text in enumerate(texts):
                self._seen[row, text if self._start is None else [self._start]] = True
        pending: _Pending | None = None
        for number in range(self._most):
            if number == 0:
                self._begin([*texts, *[blank] * (rows - len(texts))])
            elif self._is_full(texts, 0 if pending is None else 1):
                if pending is not None:
                    yield self._taken(pending, texts)
                    pending = None
                texts = [self._kept(row, text) for row, text in enumerate(texts)]
                self._begin([*texts, *[blank] * (rows - len(texts))])
            else:
                self._advance()
            sent = self._send(number)
            if sent.arrived is None:
                yield self._taken(sent, texts)
            else:
                if pending is not None:
                    yield self._taken(pending, texts)
                pending = sent
        if pending is not None:
            yield self._taken(pending, texts)

    # ---------------------------------------------------------------- texts

    def _taken(self, pending: _Pending, texts: list[list[int]]) -> list[int]:
        """The tokens that have arrived, which the texts that the decoder sees take."""
        tokens = pending.read()[: len(texts)]
        for row, (token, text) in enumerate(zip(tokens, texts, strict=True)):
            if token == DIVERGED and row not in self._ended:
                raise UserError("the largest logit of the next token is not finite: the model has diverged")
            text.append(token)
        return tokens

    def _is_full(self, texts: Sequence[Sequence[int]], unread: int) -> bool:
        """Whether a text that goes on has no slot left for its last token."""
        if self._start is not None:
            return False
        return any(len(text) + unread > self._decoder.slots for row, text in enumerate(texts) if row not in self._ended)

    def _kept(self, row: int, text: list[int]) -> list[int]:
        """What is read again of a text when one is full."""
        if row in self._ended:
            return [0]
        slots = self._decoder.slots
        return text if len(text) <= slots else text[-max(1, slots // 2) :]

    # ---------------------------------------------------------------- steps

    def _begin(self, texts: Sequence[Sequence[int]]) -> None:
        """Read texts, and choose the token that follows each."""
        longest = max(map(len, texts))
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        lengths = torch.tensor([len(text) for text in texts])
        with self._within():
            logits = self._decoder.begin(tokens.to(self._device), lengths.to(self._device))
        if logits is None:
            assert self._start is not None
            self._tokens.fill_(self._start)
            self._advance()
        else:
            self._choose(logits)

    def _advance(self) -> None:
        if self._replay is not None:
            self._replay()
            return
        if self._recorded and self._steps >= _EAGER_STEPS:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
            self._replay = graph.replay
            self._replay()
            return
        self._steps += 1
        self._step()

    def _step(self) -> None:
        with self._within():
            logits = self._decoder.step(self._tokens.clamp(min=0))
        self._choose(logits)

    def _choose(self, logits: Tensor) -> None:
        """Choose tokens, where the next step finds them."""
        place = self._count.clamp(max=self._uniforms.shape[1] - 1)
        numbers = self._uniforms.index_select(1, place)[:, 0]
        chosen = self._sampling.choose(logits.to(self._chooser), numbers, self._seen)
        if self._seen is not None:
            self._seen.scatter_(1, chosen.clamp(min=0)[:, None], True)
        self._tokens.copy_(chosen)
        self._count.add_(1)

    def _send(self, number: int) -> _Pending:
        """Have the tokens copied to the host, where two copies lie in turns."""
        host = self._on_host[number % 2]
        if self._device.type != "cuda":
            host.copy_(self._tokens)
            return _Pending(host, None)
        host.copy_(self._tokens, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return _Pending(host, arrived)
