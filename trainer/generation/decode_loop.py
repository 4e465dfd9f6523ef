"""Decode loop: generates one token per step for a batch of sequences, with a CUDA graph for longer generations.

On a GPU the host launches a step before it reads the tokens of the previous one, so the GPU never waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from ...models.incremental_decoding import Decoder
from ..utils.errors import UserError
from .sampling import DIVERGED, SamplingParams, draw_uniforms

_EAGER_STEPS = 2
"""Warm-up steps before graph capture: they compile kernels and let libraries allocate workspaces."""
_WORTH_RECORDING = 24
"""Fewest tokens for which graph capture pays off; it takes as long as a few steps."""


class _Pending(NamedTuple):
    """Tokens being copied to the host."""

    tokens: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tokens.tolist()


def pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids padded on the right with 0, int64 [B, S], and their lengths, int64 [B]."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    return tokens.to(device), torch.tensor([len(prompt) for prompt in prompts]).to(device)


class DecodeLoop:
    """Generate tokens for batch after batch of sequences.

    Args:
        decoder: the model with the KV cache of a batch.
        vocab_size: number of logits per row.
        autocast: returns the autocast context of a step.
        decoder_start_id: decoder start token of an encoder-decoder; None for a decoder-only model, which continues its
            prompts. In that case sequences that fill the KV cache continue from their last half.
        cuda_graph: allow CUDA graph capture of a step.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: SamplingParams,
        max_new_tokens: int,
        *,
        vocab_size: int,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[object]],
        decoder_start_id: int | None = None,
        cuda_graph: bool = False,
    ) -> None:
        self._decoder = decoder
        self._sampling = sampling
        self._most = max_new_tokens
        self._device = device
        self._within = autocast
        self._start = decoder_start_id
        self._recorded = cuda_graph and max_new_tokens >= _WORTH_RECORDING
        self._replay: Callable[[], None] | None = None
        self._steps = 0
        rows = decoder.batch_size
        # MPS does not support fp64, which sampling uses
        self._sampling_device = torch.device("cpu") if device.type == "mps" else device
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=self._sampling_device)
        draws = max_new_tokens if sampling.temperature > 0 else 1
        self._uniforms = torch.zeros(rows, draws, dtype=torch.float64, device=self._sampling_device)
        penalty = sampling.repetition_penalty != 1
        self._seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=self._sampling_device) if penalty else None
        pinned = device.type == "cuda"
        self._on_host = [torch.zeros(rows, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._finished: set[int] = set()

    def finish_row(self, row: int) -> None:
        """Mark a row as finished; its tokens are meaningless from then on, until all rows have finished."""
        self._finished.add(row)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[list[int]]:
        """Generate `max_new_tokens` tokens for every prompt, a step at a time.

        Args:
            prompts: token ids, none empty, at most as many as the decoder has rows.
            seeds: random seed of each sequence.

        Yields:
            The next token of each sequence.

        Raises:
            UserError: the model has diverged.
        """
        rows, padding = self._decoder.batch_size, [0]
        sequences = [list(prompt) for prompt in prompts]
        self._finished = set()
        self._count.zero_()
        self._uniforms[: len(sequences)] = draw_uniforms(seeds, self._uniforms.shape[1]).to(self._sampling_device)
        if self._seen is not None:
            self._seen.zero_()
            for row, sequence in enumerate(sequences):
                self._seen[row, sequence if self._start is None else [self._start]] = True
        pending: _Pending | None = None
        for number in range(self._most):
            if number == 0:
                self._prefill([*sequences, *[padding] * (rows - len(sequences))])
            elif self._is_full(sequences, 0 if pending is None else 1):
                if pending is not None:
                    yield self._append(pending, sequences)
                    pending = None
                sequences = [self._truncate(row, sequence) for row, sequence in enumerate(sequences)]
                self._prefill([*sequences, *[padding] * (rows - len(sequences))])
            else:
                self._advance()
            sent = self._send(number)
            if sent.arrived is None:
                yield self._append(sent, sequences)
            else:
                if pending is not None:
                    yield self._append(pending, sequences)
                pending = sent
        if pending is not None:
            yield self._append(pending, sequences)

    # ---------------------------------------------------------------- sequences

    def _append(self, pending: _Pending, sequences: list[list[int]]) -> list[int]:
        """Wait for the pending tokens, append them to the sequences and return them."""
        tokens = pending.read()[: len(sequences)]
        for row, (token, sequence) in enumerate(zip(tokens, sequences, strict=True)):
            if token == DIVERGED and row not in self._finished:
                raise UserError("the largest logit of the next token is not finite: the model has diverged")
            sequence.append(token)
        return tokens

    def _is_full(self, sequences: Sequence[Sequence[int]], unread: int) -> bool:
        """Return True if the KV cache of an unfinished row has no slot left for its last token."""
        if self._start is not None:
            return False
        return any(
            len(sequence) + unread > self._decoder.max_length
            for row, sequence in enumerate(sequences)
            if row not in self._finished
        )

    def _truncate(self, row: int, sequence: list[int]) -> list[int]:
        """Return the tokens to prefill again when the KV cache is full: the last half of a row that does not fit."""
        if row in self._finished:
            return [0]
        slots = self._decoder.max_length
        return sequence if len(sequence) <= slots else sequence[-max(1, slots // 2) :]

    # ---------------------------------------------------------------- steps

    def _prefill(self, sequences: Sequence[Sequence[int]]) -> None:
        """Prefill the KV cache with the sequences and sample the next token of each."""
        with self._within():
            logits = self._decoder.prefill(*pad_prompts(sequences, self._device))
        if logits is None:
            assert self._start is not None
            self._tokens.fill_(self._start)
            self._advance()
        else:
            self._sample(logits)

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
        self._sample(logits)

    def _sample(self, logits: Tensor) -> None:
        """Sample tokens into the input buffer of the next step."""
        numbers = self._uniforms[:, 0]
        if self._sampling.temperature > 0:
            column = self._count.clamp(max=self._uniforms.shape[1] - 1)
            numbers = self._uniforms.index_select(1, column)[:, 0]
            self._count.add_(1)
        tokens = self._sampling.sample(logits.to(self._sampling_device), numbers, self._seen)
        if self._seen is not None:
            self._seen.scatter_(1, tokens.clamp(min=0)[:, None], True)
        self._tokens.copy_(tokens)

    def _send(self, number: int) -> _Pending:
        """Start copying the tokens to the host, alternating between two buffers."""
        host = self._on_host[number % 2]
        if self._device.type != "cuda":
            host.copy_(self._tokens)
            return _Pending(host, None)
        host.copy_(self._tokens, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return _Pending(host, arrived)
