"""What a model is to learn, and how long its samples are: the part of `model.data` that is known without any data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..plugins.datasets import PAIR_SOURCES
from .schema.root import AnyModelBlock, ModelBlock, RootBlock, T5ModelBlock
from .span_lengths import Corruption, corrupted_lengths, noise_counts, window_length

TaskName = Literal["gpt", "sft", "t5", "t5_prefix_lm", "seq2seq", "bert"]
DEFAULT_DECODER_LENGTH = 128
"""NeMo's `seq_length_dec`, for pairs whose lengths nothing tells."""
MEAN_SPAN, MEAN_NGRAM = 3.0, 5.0
"""T5's; and SpanBERT's 1 / 0.2, which is NeMo's."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a run.

    Attributes:
        name: `model.data.dataset_type`.
        length: tokens in a sample; of the encoder where there are two sides.
        decoder_length: tokens on the decoder's side; 0 where there is none.
        window: tokens of text that a sample is made of.
        corruption: how much of the text is hidden, for `t5` and `bert`.
        packed: rows hold several pairs, told apart by the numbers of their documents.
        padded: rows may be shorter than they could be, and batches say where they end: `encoder_padding`, or `padding`
            for a GPT with experts.
    """

    name: TaskName
    length: int
    decoder_length: int
    window: int
    corruption: Corruption | None
    packed: bool
    padded: bool

    @property
    def has_two_sides(self) -> bool:
        """Whether batches are for an encoder and a decoder."""
        return self.name in ("t5", "t5_prefix_lm", "seq2seq")


def task_name(model: AnyModelBlock) -> TaskName:
    """`model.data.dataset_type`, or what the family of the model learns by default."""
    of_pairs: dict[str, TaskName] = {"gpt": "sft", "t5": "seq2seq"}
    by_default = of_pairs.get(model.family, model.family) if model.data.data_impl in PAIR_SOURCES else model.family
    return model.data.dataset_type or by_default


def task_of(root: RootBlock) -> Task:
    """The task that a configuration asks for.

    Raises:
        ValueError: lengths that no text fills.
    """
    model, data = root.model, root.model.data
    name, length = task_name(model), sequence_length(model)
    mock = data.data_impl == "mock"
    ngrams = data.geometric_dist is not None and not (mock and name == "t5")
    corruption = Corruption(data.masked_lm_prob, data.mean_ngram_size or (MEAN_NGRAM if ngrams else MEAN_SPAN))
    match name:
        case "t5":
            pieces = data.respect_document_boundaries and not mock
            # A span of NeMo's may be a single token, whose place its sentinel takes.
            window = length - 1 if ngrams else window_length(length, corruption, data.seq_length_dec)
            # Every draw of NeMo's has room: each hidden token may need a sentinel of its own.
            exact = 2 * noise_counts(window, corruption)[0] + 1 if ngrams else corrupted_lengths(window, corruption)[1]
            packed = pieces and data.packed_sequence
            padded = (pieces or ngrams) and not packed
            return Task(name, length, data.seq_length_dec or exact, window, corruption, packed, padded)
        case "t5_prefix_lm":
            return Task(name, length, data.seq_length_dec or length, length, None, packed=False, padded=not mock)
        case "seq2seq":
            decoder_length = data.seq_length_dec or DEFAULT_DECODER_LENGTH
            packed = data.packed_sequence and not mock
            return Task(name, length, decoder_length, length, None, packed, padded=not packed and not mock)
        case "bert":
            return Task(name, length, 0, length, corruption, data.reset_attention_mask, padded=False)
        case "sft":
            packed = data.packed_sequence and not mock
            experts = isinstance(model, ModelBlock) and model.num_moe_experts is not None
            return Task(name, length, 0, length, None, packed, padded=experts and not mock)
        case "gpt":
            return Task(name, length, 0, length, None, data.reset_attention_mask, padded=False)


def sequence_length(model: AnyModelBlock) -> int:
    """Tokens in a sample: `model.data.seq_length`, or else the model's own length."""
    if model.data.seq_length is not None:
        return model.data.seq_length
    return model.seq_length if isinstance(model, T5ModelBlock) else model.encoder_seq_length
