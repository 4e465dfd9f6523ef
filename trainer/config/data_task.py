"""The training task and its sequence lengths: the part of `model.data` that is known without reading data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...models.config.batch_shape import BatchSpec
from ...models.config.families import sequence_length_of
from ...models.config.model import Family
from .dataset_names import BUILT_IN_DATASETS, PAIR_SOURCES
from .schema.root import AnyModelBlock, ModelBlock
from .schema.trainer_and_data import DataBlock
from .span_lengths import Corruption, corrupted_lengths, noise_counts, window_length

TaskName = Literal["gpt", "sft", "t5", "t5_prefix_lm", "seq2seq", "bert"]
PAIR_TASKS: dict[Family, TaskName] = {"gpt": "sft", "t5": "seq2seq"}
"""The task of each family that supports pairs of input and target."""
DEFAULT_DECODER_LENGTH = 128
"""NeMo's default `seq_length_dec`, used for pairs."""
DEFAULT_MEAN_SPAN, DEFAULT_MEAN_NGRAM = 3.0, 5.0
"""Defaults of T5, and of SpanBERT (1 / 0.2) and NeMo."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a run.

    Attributes:
        name: `model.data.dataset_type`.
        length: tokens in a sample; on the encoder side for encoder-decoder models.
        decoder_length: tokens on the decoder side; 0 without one.
        window: tokens of text in a sample.
        corruption: noise density and mean span length, for `t5` and `bert`.
        packed: samples hold several pairs or documents, separated by document indices.
        padded: samples may be shorter than the batch; batches have a padding mask, `encoder_padding`, or `padding` for
            a GPT with experts.
    """

    name: TaskName
    length: int
    decoder_length: int
    window: int
    corruption: Corruption | None
    packed: bool
    padded: bool

    @property
    def is_encoder_decoder(self) -> bool:
        """True if batches are for an encoder-decoder model."""
        return self.name in ("t5", "t5_prefix_lm", "seq2seq")


def task_name(model: AnyModelBlock) -> TaskName:
    """Return `model.data.dataset_type`, or the default task of the model family."""
    default = PAIR_TASKS.get(model.family, model.family) if model.data.data_impl in PAIR_SOURCES else model.family
    return model.data.dataset_type or default


def task_from_keys(model: AnyModelBlock) -> Task:
    """Return the task of a model's keys.

    Raises:
        ValueError: no text length gives the configured sequence lengths.
    """
    data = model.data
    name, length = task_name(model), sequence_length(model)
    mock = data.data_impl == "mock"
    ngrams = data.geometric_dist is not None and not (mock and name == "t5")
    corruption = Corruption(
        data.masked_lm_prob, data.mean_ngram_size or (DEFAULT_MEAN_NGRAM if ngrams else DEFAULT_MEAN_SPAN)
    )
    match name:
        case "t5":
            by_document = data.respect_document_boundaries and not mock
            # A NeMo span may be a single token, so replacing it with a sentinel shortens nothing; only EOS is added.
            window = length - 1 if ngrams else window_length(length, corruption, data.seq_length_dec)
            # Upper bound for NeMo's spans: each noise token may need its own sentinel.
            exact = 2 * noise_counts(window, corruption)[0] + 1 if ngrams else corrupted_lengths(window, corruption)[1]
            packed = by_document and data.packed_sequence
            padded = (by_document or ngrams) and not packed
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
            own_data = data.data_impl not in BUILT_IN_DATASETS  # whose items may be short
            experts = isinstance(model, ModelBlock) and model.num_moe_experts is not None
            return Task(name, length, 0, length, None, data.reset_attention_mask, padded=experts and own_data)


def batch_spec(task: Task, data: DataBlock) -> BatchSpec:
    """Return the shape of the samples of a task.

    Raises:
        ValueError: the sequence lengths are invalid; configuration rules report that earlier.
    """
    return BatchSpec(
        seq_length=task.length,
        decoder_seq_length=task.decoder_length,
        packed=task.packed,
        reset_position_ids=task.packed if task.is_encoder_decoder or task.name == "sft" else data.reset_position_ids,
        padded=task.padded,
    )


def sequence_length(model: AnyModelBlock) -> int:
    """Return the tokens in a sample: `model.data.seq_length`, or the model's own length."""
    return model.data.seq_length or sequence_length_of(model)
