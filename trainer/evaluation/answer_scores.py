"""What a model that was trained on pairs or conversations answers, scored against what was wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

from ...models.t5 import T5
from ..config.data_task import task_of
from ..conversion.load_model import Restored
from ..data.datasets.samples import philox
from ..data.datasets.seq2seq import Shape
from ..data.datasets.sft_examples import Example
from ..data.sources.text_pairs import TextPair
from ..data.tasks.chats import end_of_answer
from ..generation.encoder_decoder import Writer
from ..generation.text_generator import generate_batch
from .baselines import copied_name
from .text_scores import TextScores, score_texts

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """Scores of a model, and of what it must beat.

    Attributes:
        model: of its answers.
        copied_name: of the words of a function's name, for docstrings; None for other pairs.
    """

    model: TextScores
    copied_name: TextScores | None

    def lines(self) -> Iterator[str]:
        """The figures for a terminal."""
        matches = f"{self.model.exact_match:.4f} over {self.model.texts:,} texts"
        yield f"exact match    {matches}{self._beside('exact_match')}"
        yield f"ROUGE-L        {self.model.rouge_l:.4f}{self._beside('rouge_l')}"

    def to_document(self) -> dict[str, float | dict[str, float] | None]:
        """All figures, for JSON."""
        return {**asdict(self.model), "copied_name": asdict(self.copied_name) if self.copied_name else None}

    def _beside(self, figure: str) -> str:
        if self.copied_name is None:
            return ""
        return f" (the words of the function's name: {getattr(self.copied_name, figure):.4f})"


def score_examples(
    restored: Restored, examples: Sequence[Example], batch_size: int, limit: int | None = None
) -> AnswerScores:
    """Let a GPT go on with prompts, greedily, and compare.

    An answer may be as long as the longest one that is wanted.

    Args:
        restored: a GPT that was trained on answers to prompts, or on conversations.
        examples: prompts and the texts that are wanted; of conversations the last answer.
        batch_size: prompts at once.
        limit: take so many examples, the same in all runs and a fair sample of all; None takes all.
    """
    chosen = _sample(examples, limit)
    prompts = [example.tokens[: example.prompt].tolist() for example in chosen]
    data = restored.config.root.model.data
    stop = [end] if data.chat and (end := end_of_answer(restored.tokenizer)) else []
    longest = max(len(example.tokens) - example.prompt for example in examples)
    written = generate_batch(restored, prompts, max_new_tokens=longest, stop=stop, batch_size=batch_size)
    targets = [example.answer for example in chosen]
    baseline = None
    if data.data_impl == "pystd_docstring":
        baseline = score_texts(targets, [copied_name(example.question) for example in chosen])
    return AnswerScores(score_texts(targets, [one.text for one in written]), baseline)


def _sample(every: Sequence[ItemT], limit: int | None) -> list[ItemT]:
    """So many, in an order that is the same for all runs."""
    order = np.argsort(philox(0, 0).random_raw(len(every)), kind="stable")[:limit]
    return [every[number] for number in order.tolist()]


def score_answers(
    restored: Restored, pairs: Sequence[TextPair], batch_size: int, limit: int | None = None
) -> AnswerScores:
    """Let a model answer to inputs, greedily, and compare.

    Args:
        restored: a T5 that was trained on pairs.
        pairs: inputs and the texts that are wanted.
        batch_size: inputs that are read at once.
        limit: take so many pairs, the same in all runs and a fair sample of all; None takes all.
    """
    assert isinstance(restored.model, T5)
    root = restored.config.root
    task = task_of(root)
    chosen = _sample(pairs, limit)
    shape = Shape(task.length, task.decoder_length, restored.tokenizer.pad_id)
    writer = Writer(restored.model, restored.tokenizer, shape, restored.precision, restored.device)
    inputs, targets = [pair.input for pair in chosen], [pair.target for pair in chosen]
    baseline = None
    if root.model.data.data_impl == "pystd_docstring":
        baseline = score_texts(targets, [copied_name(text) for text in inputs])
    return AnswerScores(score_texts(targets, writer.answers(inputs, batch_size)), baseline)
