"""How probable a model finds a text after another one: sums of log-probabilities, many texts at once.

Texts of like length go through the model together, the longest first. Only the tokens that are scored go through the
head: the logits of all others, 200 kB a token with a vocabulary of 50,000, are never made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....models.build import LanguageModel
from ....models.gpt import GPT
from ....models.lm_head import token_logits
from ....models.t5 import T5
from ...data.tokenizers.tokenizer import Tokenizer
from ...device.precision import PrecisionPlan

TOKENS_AT_ONCE = {"cuda": 1 << 15, "mps": 1 << 13, "cpu": 1 << 11}
"""Tokens of a batch, with padding, where no batch size is given."""
_LOGITS_AT_ONCE = 1 << 27
"""Numbers; half a GiB in fp32."""


class Request(NamedTuple):
    """Tokens that are scored after others.

    Attributes:
        context: what is given, at least one token; of a T5 what the encoder reads.
        continuation: what is scored, at least one token.
    """

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """What a model makes of a request.

    Attributes:
        log_probability: of the whole continuation, in nats.
        is_greedy: each of its tokens is the most probable one.
    """

    log_probability: float
    is_greedy: bool


class _Row(NamedTuple):
    """What goes through the model once.

    Attributes:
        read: tokens of a GPT, or of a T5's encoder.
        written: tokens of a T5's decoder; empty for a GPT.
        scored: for each request that is answered by it, its number and its continuation, whose labels are those of the
            last positions.
    """

    read: Sequence[int]
    written: Sequence[int]
    scored: list[tuple[int, Sequence[int]]]

    @property
    def last(self) -> Sequence[int]:
        """The tokens whose positions the labels belong to."""
        return self.written or self.read

    @property
    def tokens(self) -> int:
        return len(self.read) + len(self.written)


class Scorer:
    """Scores continuations with a GPT or a T5.

    Args:
        model: in evaluation mode, built for calls of generation.
        tokenizer: its own.
        precision: arithmetic of the model.
        device: where the model is.
        longest: tokens that are read at most; of a longer request of a GPT the beginning is left out, and of a longer
            context of a T5.
        batch_size: requests at once; None takes as many as fit into `TOKENS_AT_ONCE`.

    Raises:
        ValueError: the model is neither, or a number is below 1.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        precision: PrecisionPlan,
        device: torch.device,
        *,
        longest: int,
        batch_size: int | None = None,
    ) -> None:
        if not isinstance(model, GPT | T5):
            raise ValueError(f"`model` ({type(model).__name__}) must be a GPT or a T5: others write no text.")
        if longest < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(f"`longest` ({longest}) and `batch_size` ({batch_size}) must be at least 1.")
        self._model = model
        self._start = tokenizer.pad_id
        self._precision = precision
        self._device = device
        self._longest = longest
        # What an expert with a capacity takes depends on the other texts of a batch: there every text goes alone.
        alone = any(getattr(module, "capacity_factor", None) is not None for module in model.modules())
        self._batch_size = 1 if alone else batch_size

    @torch.no_grad()
    def score(self, requests: Sequence[Request], progress: Callable[[int], object] = lambda count: None) -> list[Score]:
        """The score of each request.

        Args:
            requests: in any order. Those whose model inputs are the same, as answers of one token to one question are,
                go through the model once.
            progress: told how many more requests are done.

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
            with self._precision.context(self._device):
                hidden = self._hidden(batch)[self._tensor(rows), self._tensor(places)]
                logs, hits = self._of_labels(hidden, self._tensor(labels))
            for number, log, hit in zip(numbers, logs, hits, strict=True):
                before = found[number] or Score(0.0, True)
                found[number] = Score(before.log_probability + log, before.is_greedy and hit)
            progress(len(set(numbers)))
        return [score for score in found if score is not None]

    def _rows(self, requests: Sequence[Request]) -> list[_Row]:
        """What goes through the model, the longest first, so that what is too large for the memory is so at once."""
        rows: dict[object, _Row] = {}
        for number, (context, continuation) in enumerate(requests):
            if not context or not continuation:
                raise ValueError(f"the context and the continuation of request {number} must have a token each.")
            if isinstance(self._model, T5):
                written = [self._start, *continuation[:-1]]
                rows[number] = _Row(context[-self._longest :], written, [(number, continuation)])
                continue
            if len(continuation) > self._longest:
                raise ValueError(
                    f"the continuation of request {number} has {len(continuation):,} tokens, and the model reads "
                    f"{self._longest:,}; score it in windows."
                )
            read = [*context, *continuation][-self._longest - 1 : -1]
            rows.setdefault(tuple(read), _Row(read, [], [])).scored.append((number, continuation))
        return sorted(rows.values(), key=lambda row: -row.tokens)

    def _batches(self, rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
        first = 0
        while first < len(rows):
            size = self._batch_size or max(1, TOKENS_AT_ONCE[self._device.type] // rows[first].tokens)
            yield rows[first : first + size]
            first += size

    def _hidden(self, batch: Sequence[_Row]) -> Tensor:
        """What the head reads, (batch, tokens, hidden_size); padding is behind, where a causal model sees none."""
        read = self._padded([row.read for row in batch])
        if isinstance(self._model, GPT):
            return self._model.hidden_states(read)
        lengths = self._tensor([len(row.read) for row in batch])
        present = torch.arange(read.shape[1], device=self._device) < lengths[:, None]
        encoded = self._model.encode(read, None if present.all() else present)
        return self._model.decode(self._padded([row.written for row in batch]), encoded)

    def _of_labels(self, hidden: Tensor, labels: Tensor) -> tuple[list[float], list[bool]]:
        """Log-probabilities of labels, and whether each is the most probable token.

        Args:
            hidden: (n, hidden_size), from which each label is predicted.
            labels: int64 (n,).
        """
        step = max(1, _LOGITS_AT_ONCE // self._model.output_weight.shape[0])
        logs, hits = [], []
        for some, of in zip(hidden.split(step), labels.split(step), strict=True):
            logits = self._logits(some)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logs.append(wide.gather(-1, of[:, None])[:, 0] - wide.logsumexp(-1))
            hits.append(wide.argmax(-1) == of)
        return torch.cat(logs).tolist(), torch.cat(hits).tolist()

    def _logits(self, hidden: Tensor) -> Tensor:
        if isinstance(self._model, T5):
            return self._model.logits_of(hidden)
        weight, size = self._model.output_weight, self._model.vocab_size
        return token_logits(hidden, weight, vocab_size=size, softcap=self._model.logits_softcap)

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        return self._tensor([[*row, *[self._start] * (longest - len(row))] for row in rows])

    def _tensor(self, numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def rolling_windows(tokens: Sequence[int], first: int, longest: int) -> Iterator[Request]:
    """Windows in which every token of a text is scored once, each with as much of the text before it as there is room.

    Args:
        tokens: of the text.
        first: the token before the text.
        longest: tokens that are read at once. All windows but the first and the last score as many, after one token
            of context; the last one is filled up with context.
    """
    if tokens:
        yield Request([first], tokens[:longest])
    for start in range(longest, len(tokens), longest):
        end = min(start + longest, len(tokens))
        yield Request(tokens[max(end - longest - 1, 0) : start], tokens[start:end])
