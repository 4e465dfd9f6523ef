"""Supervised fine-tuning data of a GPT: samples from files of prompts with answers, or of conversations."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.dataset_names import SPLITS, Split
from ...config.prompt_template import prompt_template_from_config
from ...config.resolved_run import DataSpec
from ...config.schema.trainer_and_data import DataBlock
from ...utils.errors import UserError
from ...utils.text import pluralize
from ..datasets.blend import BlendedSamples
from ..datasets.samples import DictSamples
from ..datasets.sft_examples import Example, Examples, flatten_examples, truncate_examples
from ..datasets.sft_samples import ExampleSamples
from ..sources.docstrings import read_docstrings
from ..sources.jsonl import RecordParser, read_splits
from ..sources.record_sources import RecordSource, read_source
from ..sources.text_sources import parse_proportions
from ..tokenizers.tokenizer import Tokenizer
from .chat_files import get_chat_template
from .chat_template import Chat
from .chats import conversation_start, encode_chats, parse_chat
from .prompts import PromptEncoder, read_record

_TRAIN = "model.data.train_ds"


@dataclass(frozen=True)
class Records(RecordSource[Any]):
    """Conversations, or prompts with answers.

    Attributes:
        input_of: returns the part of a record whose hash determines its split.
        weights: sampling probabilities of the training files; None samples in proportion to their sizes.
    """

    input_of: Callable[[Any], str]
    weights: Sequence[float] | None = None

    def fingerprint(self) -> str:
        """Return the SHA-256 of all records, in hexadecimal."""
        total = hashlib.sha256()
        for split in SPLITS:
            for number, records in enumerate(self.sets[split]):
                for record in records:
                    content = (record.messages, record.tools) if isinstance(record, Chat) else record
                    total.update(json.dumps([split, number, content], sort_keys=True).encode("utf-8"))
        return total.hexdigest()

    def inputs(self) -> list[str]:
        """Return the input of each record of all splits."""
        return [self.input_of(record) for sets in self.sets.values() for records in sets for record in records]


@dataclass(frozen=True)
class SFTData:
    """The samples of a fine-tuning run.

    Attributes:
        samples: of each split, or None if it is empty.
        examples: of each split.
        records: the records they were made of.
    """

    samples: dict[Split, DictSamples | None]
    examples: dict[Split, list[Examples]]
    records: Records

    def split_examples(self, split: Split) -> list[Example]:
        """Return the examples of a split."""
        return flatten_examples(self.examples[split])

    def check(self, split: Split, length: int, length_key: str) -> None:
        """Check that a split with examples has anything to predict.

        Args:
            length: S, tokens in a row.
            length_key: the key that sets it, for messages.

        Raises:
            UserError: no example of the split has a token to predict.
        """
        sets = self.examples[split]
        skipped = sum(one.num_skipped for one in sets)
        if not skipped or any(map(len, sets)):
            return
        too_long = [tokens for one in sets for tokens in one.skipped_lengths]
        if too_long:
            why = (
                f"rows of {length:,} tokens (`{length_key}`) end before the answers; the examples have "
                f"{statistics.median_high(too_long):,} tokens in the median, {max(too_long):,} at most"
            )
        else:
            why = "the chat template renders no answers" if self.is_chat else "no answer has a token"
        raise UserError(
            f"{self.records.name}: none of the examples of the {split} split ({skipped:,}) has anything to predict: "
            f"{why}"
        )

    @property
    def is_chat(self) -> bool:
        """True if the records are conversations."""
        return any(isinstance(record, Chat) for sets in self.records.sets.values() for one in sets for record in one)

    def describe(self) -> str:
        """Return the number of examples, and of those truncated or skipped."""
        example_sets = [examples for sets in self.examples.values() for examples in sets]
        counts = {split: sum(map(len, sets)) for split, sets in self.examples.items()}
        parts = (f"{split} {pluralize(count, 'example')}" for split, count in counts.items())
        truncated, skipped = (
            sum(one.num_truncated for one in example_sets),
            sum(one.num_skipped for one in example_sets),
        )
        note = f"; truncated to the length of a row: {truncated:,}; skipped with nothing to predict: {skipped:,}"
        return ", ".join(parts) + (note if truncated or skipped else "")


def build_sft_data(spec: DataSpec, tokenizer: Tokenizer) -> SFTData:
    """Build the fine-tuning samples of a configuration.

    Raises:
        UserError: files cannot be read or tokenized, or a needed split is empty.
    """
    return _sft_data(spec, tokenizer, read_records(spec.keys, tokenizer))


def build_sft_evaluation_data(path: Path, spec: DataSpec, tokenizer: Tokenizer) -> SFTData:
    """Build validation samples of a file or folder; of a folder with a `train.jsonl`, of its `validation.jsonl`.

    Raises:
        UserError: it cannot be read.
    """
    read, input_of = _reader(spec.keys, tokenizer)
    found = read_splits(path, (0.0, 1.0, 0.0), read, input_of, "--data-path")["validation"]
    sets: dict[Split, list[list[Any]]] = {"train": [], "validation": [found], "test": []}
    return _sft_data(spec, tokenizer, Records(str(path), sets, has_predefined_splits=True, input_of=input_of))


def _sft_data(spec: DataSpec, tokenizer: Tokenizer, records: Records) -> SFTData:
    examples: dict[Split, list[Examples]] = {
        split: [_examples(spec, tokenizer, one) for one in sets] for split, sets in records.sets.items()
    }
    samples: dict[Split, DictSamples | None] = {
        split: _samples(spec, tokenizer, sets, records.weights, training=split == "train")
        for split, sets in examples.items()
    }
    return SFTData(samples, examples, records)


# ---------------------------------------------------------------- records


def read_records(data: DataBlock, tokenizer: Tokenizer) -> Records:
    """Read the prompts with answers, or conversations, of `model.data`.

    Args:
        tokenizer: its chat template may define additional roles.

    Raises:
        UserError: a file cannot be read, or an object is invalid.
    """
    read, input_of = _reader(data, tokenizer)
    if data.data_impl == "pystd_docstring":
        texts = read_docstrings(parse_proportions(data.splits_string))
        names = data.context_key, data.label_key
        return Records(
            texts.name,
            {split: [[dict(zip(names, pair, strict=True)) for pair in texts.pairs[split]]] for split in SPLITS},
            texts.has_predefined_splits,
            input_of,
        )
    source = read_source(data, read, input_of)
    weights = data.train_ds.concat_sampling_probabilities
    return Records(source.name, source.sets, source.has_predefined_splits, input_of, weights)


def _reader(data: DataBlock, tokenizer: Tokenizer) -> tuple[RecordParser[Any], Callable[[Any], str]]:
    """Return the parser of an object, and the function that returns its input."""
    if data.chat:
        source = get_chat_template(tokenizer).source
        return lambda found, location: parse_chat(found, location, source), conversation_start
    template = prompt_template_from_config(data)
    names = sorted(set(template.fields[:-1])) or list(template.fields)

    def input_of(record: dict[str, str]) -> str:
        """Return the texts before the answer, regardless of their order in the template."""
        return record[names[0]] if len(names) == 1 else json.dumps([record[name] for name in names])

    named_by = f"{_TRAIN}.prompt_template" if data.train_ds.prompt_template else ""
    return lambda found, location: read_record(found, location, template.fields, named_by), input_of


# ---------------------------------------------------------------- examples and samples


def _examples(spec: DataSpec, tokenizer: Tokenizer, records: Sequence[Any]) -> Examples:
    keys, length, answer_only = spec.keys.train_ds, spec.task.length, spec.answer_only_loss
    if spec.keys.chat:
        return truncate_examples(encode_chats(records, tokenizer, answer_only=answer_only), length)
    template = prompt_template_from_config(spec.keys)
    shortened = template.fields[:-1]
    if keys.truncation_field is not None:
        shortened = tuple(name.strip() for name in keys.truncation_field.split(","))
    tokens = PromptEncoder(
        template=template,
        tokenizer=tokenizer,
        prefix_ids=_start(tokenizer, keys.add_bos),
        suffix_ids=_end(tokenizer) if keys.add_eos else [],
        answer_only=answer_only,
        length=length,
        truncation_fields=shortened,
        truncation_side=keys.truncation_method,
    )
    return truncate_examples(tokens.examples(records), length)


def _start(tokenizer: Tokenizer, add_bos: bool | None) -> list[int]:
    if add_bos is None:
        return tokenizer.document_start_ids()
    if not add_bos:
        return []
    if tokenizer.special.bos is None:
        raise UserError(
            f"`{_TRAIN}.add_bos` (true) needs a tokenizer with a BOS token, and this one has none; do not set it"
        )
    return [tokenizer.special.bos]


def _end(tokenizer: Tokenizer) -> list[int]:
    if tokenizer.eos_id is None:
        raise UserError(
            f"`{_TRAIN}.add_eos` (true) needs a tokenizer with an EOS token, and this one has none; set it to false, "
            "or use tokenizer=byte"
        )
    return [tokenizer.eos_id]


def _samples(
    spec: DataSpec,
    tokenizer: Tokenizer,
    sets: Sequence[Examples],
    weights: Sequence[float] | None,
    *,
    training: bool,
) -> DictSamples | None:
    task, seed = spec.task, spec.seed if training else None

    def rows(examples: Examples, part: int = 0) -> ExampleSamples:
        return ExampleSamples(
            examples,
            task.length,
            tokenizer.pad_id,
            seed,
            pack_rows=task.packed,
            with_padding_mask=task.padded,
            rng_stream=part,
        )

    if training and weights is not None:
        if not all(map(len, sets)):
            raise UserError(f"`{_TRAIN}.concat_sampling_probabilities`: a file of `file_names` holds no example")
        return BlendedSamples([rows(examples, part) for part, examples in enumerate(sets)], weights)
    merged = Examples(
        flatten_examples(sets),
        sum(examples.num_truncated for examples in sets),
        sum(examples.num_skipped for examples in sets),
    )
    return rows(merged) if len(merged) else None
