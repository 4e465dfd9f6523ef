"""Exact match and ROUGE-L of generated answers against references, for models trained on pairs or conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

from ...models.t5 import T5
from ..conversion.load_model import LoadedModel
from ..data.datasets.samples import philox_generator
from ..data.datasets.seq2seq import PairShape
from ..data.datasets.sft_examples import Example
from ..data.sources.text_pairs import TextPair
from ..data.tasks.chats import end_of_turn
from ..generation.text_generator import generate_batch
from .baselines import docstring_from_name
from .text_scores import TextScores, score_predictions

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """Scores of a model, and of a baseline.

    Attributes:
        model: scores of the generated answers.
        copied_name: for docstrings, scores of the words of the function's name; None for other data.
    """

    model: TextScores
    copied_name: TextScores | None

    def report_lines(self) -> Iterator[str]:
        """Yield report lines for the terminal."""
        matches = f"{self.model.exact_match:.4f} over {self.model.texts:,} texts"
        yield f"exact match    {matches}{self._baseline_suffix('exact_match')}"
        yield f"ROUGE-L        {self.model.rouge_l:.4f}{self._baseline_suffix('rouge_l')}"

    def to_dict(self) -> dict[str, float | dict[str, float] | None]:
        """Return all scores, for JSON."""
        return {**asdict(self.model), "copied_name": asdict(self.copied_name) if self.copied_name else None}

    def _baseline_suffix(self, figure: str) -> str:
        if self.copied_name is None:
            return ""
        return f" (the words of the function's name: {getattr(self.copied_name, figure):.4f})"


def score_examples(
    restored: LoadedModel, examples: Sequence[Example], batch_size: int, limit: int | None = None
) -> AnswerScores:
    """Decode answers to prompts greedily with a GPT and score them.

    At most as many tokens are generated as the longest reference has.

    Args:
        restored: a GPT trained on prompt/answer pairs or conversations.
        examples: prompts and references; of a conversation the last answer.
        limit: number of examples, a fixed random sample; None uses all.
    """
    chosen = _sample(examples, limit)
    prompts = [example.tokens[: example.prompt_length].tolist() for example in chosen]
    data = restored.run.data.keys
    stop = [end] if data.chat and (end := end_of_turn(restored.tokenizer)) else []
    longest = max(len(example.tokens) - example.prompt_length for example in examples)
    outputs = generate_batch(restored, prompts, max_new_tokens=longest, stop=stop, batch_size=batch_size)
    sources, targets = [example.prompt_text for example in chosen], [example.answer_text for example in chosen]
    return _scores(restored, sources, targets, [output.text for output in outputs])


def _sample(items: Sequence[ItemT], limit: int | None) -> list[ItemT]:
    """Return a random sample of `limit` items (None: all, shuffled) that is the same in all runs."""
    order = np.argsort(philox_generator(0, 0).random_raw(len(items)), kind="stable")[:limit]
    return [items[number] for number in order.tolist()]


def score_pairs(
    restored: LoadedModel, pairs: Sequence[TextPair], batch_size: int, limit: int | None = None
) -> AnswerScores:
    """Decode answers to inputs greedily with a T5 and score them.

    Args:
        restored: a T5 trained on pairs.
        pairs: inputs and references.
        limit: number of pairs, a fixed random sample; None uses all.
    """
    assert isinstance(restored.model, T5)
    task = restored.run.data.task
    chosen = _sample(pairs, limit)
    shape = PairShape(task.length, task.decoder_length, restored.tokenizer.pad_id)
    inputs, targets = [pair.input for pair in chosen], [pair.target for pair in chosen]
    return _scores(restored, inputs, targets, generate_answers(restored, inputs, shape, batch_size))


def _scores(
    restored: LoadedModel, inputs: Sequence[str], targets: Sequence[str], predictions: Sequence[str]
) -> AnswerScores:
    is_docstring = restored.run.data.keys.data_impl == "pystd_docstring"
    baseline = score_predictions(targets, list(map(docstring_from_name, inputs))) if is_docstring else None
    return AnswerScores(score_predictions(targets, predictions), baseline)


def generate_answers(restored: LoadedModel, inputs: Sequence[str], shape: PairShape, batch_size: int) -> list[str]:
    """Generate the output of a T5 for each input text greedily.

    Args:
        restored: a T5 whose tokenizer has an EOS token.
        shape: inputs are truncated to the encoder length, outputs to the decoder length.
        batch_size: number of inputs per batch; changes outputs by rounding only.
    """
    tokenizer = restored.tokenizer
    assert tokenizer.eos_id is not None
    ids = tokenizer.encode_batch(inputs)
    prompts = [[*row[: shape.encoder_length - 1].tolist(), tokenizer.eos_id] for row in ids]
    outputs = generate_batch(restored, prompts, max_new_tokens=shape.decoder_length, batch_size=batch_size)
    return [tokenizer.decode(output.tokens) for output in outputs]
