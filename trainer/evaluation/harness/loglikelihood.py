"""Batched log-likelihoods of continuations given a context.

Requests are batched by length, the longest first. Logits are computed only for the scored tokens: 200 kB per token in
fp32 for a vocabulary of 50,000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....models.build import LanguageModel
from ....models.gpt import GPT
from ....models.t5 import T5
from ...config.run_precision import RunPrecision
from ...data.tokenizers.tokenizer import Tokenizer
from ...device.precision import autocast_context

TOKENS_PER_BATCH = {"cuda": 1 << 15, "mps": 1 << 13, "cpu": 1 << 11}
"""Tokens per batch including padding, if no batch size is given."""
_LOGITS_AT_ONCE = 1 << 27
"""Logits computed at once; half a GiB in fp32."""


class Request(NamedTuple):
    """A continuation to be scored given a context.

    Attributes:
        context: context tokens, at least one; the encoder input for a T5.
        continuation: tokens to be scored, at least one.
    """

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """Result of a request.

    Attributes:
        log_probability: log-probability of the continuation, in nats.
        is_greedy: each token of the continuation is the most probable one.
    """

    log_probability: float
    is_greedy: bool


class _Row(NamedTuple):
    """One row of a batch.

    Attributes:
        inputs: input tokens of a GPT, or of a T5's encoder.
        decoder_inputs: decoder input tokens of a T5; empty for a GPT.
        scored: (index, continuation) of each request computed by this row; the continuations are the labels of the
            last positions.
    """

    inputs: Sequence[int]
    decoder_inputs: Sequence[int]
    scored: list[tuple[int, Sequence[int]]]

    @property
    def last(self) -> Sequence[int]:
        """Input tokens at whose positions the labels are predicted."""
        return self.decoder_inputs or self.inputs

    @property
    def tokens(self) -> int:
        return len(self.inputs) + len(self.decoder_inputs)


class LoglikelihoodScorer:
    """Score continuations with a GPT or T5.

    Args:
        model: a GPT or T5 in evaluation mode, built for generation.
        longest: context length; longer requests of a GPT, and longer contexts of a T5, are truncated on the left.
        batch_size: requests per batch; None for as many as fit into `TOKENS_PER_BATCH`.

    Raises:
        ValueError: the model is neither GPT nor T5, or a number is below 1.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        precision: RunPrecision,
        device: torch.device,
        *,
        longest: int,
        batch_size: int | None = None,
    ) -> None:
        if not isinstance(model, GPT | T5):
            raise ValueError(f"`model` ({type(model).__name__}) must be a GPT or a T5.")
        if longest < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(f"`longest` ({longest}) and `batch_size` ({batch_size}) must be at least 1.")
        self._model = model
        self._start = tokenizer.pad_id
        self._precision = precision
        self._device = device
        self._longest = longest
        # With an expert capacity, token dropping depends on the other rows of a batch: use batches of one.
        alone = any(getattr(module, "capacity_factor", None) is not None for module in model.modules())
        self._batch_size = 1 if alone else batch_size

    @torch.no_grad()
    def score(self, requests: Sequence[Request], progress: Callable[[int], object] = lambda count: None) -> list[Score]:
        """Return the score of each request.

        Args:
            requests: in any order. Requests with equal model inputs, such as single-token answers to one question, are
                computed once.
            progress: called with the number of newly finished requests.

        Raises:
            ValueError: an empty context or continuation, or a continuation of a GPT longer than `longest`.
        """
        found: list[Score | None] = [None] * len(requests)
        for batch in self._batches(self._rows(requests)):
            labels, rows, places, numbers = [], [], [], []
            for row, one in enumerate(batch):
                for number, continuation in one.scored:
                    labels += continuation
                    rows += [row] * len(continuation)
                    places += range(len(one.last) - len(continuation), len(one.last))
                    numbers += [number] * len(continuation)
            with autocast_context(self._precision, self._device):
                hidden = self._hidden(batch)[self._tensor(rows), self._tensor(places)]
                logs, hits = self._score_labels(hidden, self._tensor(labels))
            for number, log, hit in zip(numbers, logs, hits, strict=True):
                before = found[number] or Score(0.0, True)
                found[number] = Score(before.log_probability + log, before.is_greedy and hit)
            progress(len(set(numbers)))
        return [score for score in found if score is not None]

    def _rows(self, requests: Sequence[Request]) -> list[_Row]:
        """Return the batch rows, the longest first, so that running out of memory happens at the start."""
        rows: dict[object, _Row] = {}
        for number, (context, continuation) in enumerate(requests):
            if not context or not continuation:
                raise ValueError(
                    f"the context and the continuation of request {number} must have at least one token each."
                )
            if isinstance(self._model, T5):
                decoder_inputs = [self._start, *continuation[:-1]]
                rows[number] = _Row(context[-self._longest :], decoder_inputs, [(number, continuation)])
                continue
            if len(continuation) > self._longest:
                raise ValueError(
                    f"the continuation of request {number} has {len(continuation):,} tokens, more than the context "
                    f"length {self._longest:,}; score it in windows."
                )
            inputs = [*context, *continuation][-self._longest - 1 : -1]
            rows.setdefault(tuple(inputs), _Row(inputs, [], [])).scored.append((number, continuation))
        return sorted(rows.values(), key=lambda row: -row.tokens)

    def _batches(self, rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
        first = 0
        while first < len(rows):
            size = self._batch_size or max(1, TOKENS_PER_BATCH[self._device.type] // rows[first].tokens)
            yield rows[first : first + size]
            first += size

    def _hidden(self, batch: Sequence[_Row]) -> Tensor:
        """Return the hidden states, [B, S, hidden_size]; padding is on the right, where causal attention ignores it."""
        inputs = self._padded([row.inputs for row in batch])
        if isinstance(self._model, GPT):
            return self._model.hidden_states(inputs)
        lengths = self._tensor([len(row.inputs) for row in batch])
        present = torch.arange(inputs.shape[1], device=self._device) < lengths[:, None]
        encoded = self._model.encode(inputs, None if present.all() else present)
        return self._model.decode(self._padded([row.decoder_inputs for row in batch]), encoded)

    def _score_labels(self, hidden: Tensor, labels: Tensor) -> tuple[list[float], list[bool]]:
        """Return the log-probability of each label, and whether it is the most probable token.

        Args:
            hidden: [N, hidden_size], the hidden state that predicts each label.
            labels: int64 [N].
        """
        step = max(1, _LOGITS_AT_ONCE // self._model.output_weight.shape[0])
        logs, hits = [], []
        for some, of in zip(hidden.split(step), labels.split(step), strict=True):
            logits = self._model.compute_logits(some)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logs.append(wide.gather(-1, of[:, None])[:, 0] - wide.logsumexp(-1))
            hits.append(wide.argmax(-1) == of)
        return torch.cat(logs).tolist(), torch.cat(hits).tolist()

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        return self._tensor([[*row, *[self._start] * (longest - len(row))] for row in rows])

    def _tensor(self, numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def rolling_windows(tokens: Sequence[int], prefix_token: int, max_length: int) -> Iterator[Request]:
    """Yield windows that score every token of a text once, with as much context as fits.

    Args:
        prefix_token: token id that precedes the text.
        max_length: context length. All windows but the last score this many tokens after one token of context; the last
            one is filled up with context.
    """
    if tokens:
        yield Request([prefix_token], tokens[:max_length])
    for start in range(max_length, len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        yield Request(tokens[max(end - max_length - 1, 0) : start], tokens[start:end])
