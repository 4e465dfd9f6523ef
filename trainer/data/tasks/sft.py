"""Supervised fine-tuning of a GPT: from files of prompts with answers, or of conversations, to samples."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.data_task import Task
from ...config.prompt_template import template_of
from ...config.schema.root import ModelBlock, RootBlock
from ...utils.errors import UserError
from ..datasets.blend import BlendedFields
from ..datasets.seq2seq import FieldSamples
from ..datasets.sft_examples import Example, Examples, all_of, fitted
from ..datasets.sft_samples import ExampleSamples
from ..sources.docstrings import read_docstrings
from ..sources.jsonl import Reader, read_split
from ..sources.record_sources import read_source
from ..sources.text_sources import SPLITS, Split, parse_proportions
from ..tokenizers.bos import text_start
from ..tokenizers.tokenizer import Tokenizer
from .chat_files import chat_of
from .chat_template import Chat
from .chats import chat_examples, first_words, read_chat
from .prompts import PromptTokens, read_record

_TRAIN = "model.data.train_ds"


@dataclass(frozen=True)
class Records:
    """What files hold: conversations, or objects with texts.

    Attributes:
        name: what they are, for messages.
        sets: those of each split; training may have several, with proportions of their own.
        input_of: what of a record decides about the split that it belongs to.
        weights: these proportions; None takes the sets by their sizes.
        has_own_splits: what was read says itself what is held out.
    """

    name: str
    sets: dict[Split, list[list[Any]]]
    input_of: Callable[[Any], str]
    weights: Sequence[float] | None = None
    has_own_splits: bool = False

    def fingerprint(self) -> str:
        """SHA-256 over all of them, in hexadecimal."""
        total = hashlib.sha256()
        for split in SPLITS:
            for number, records in enumerate(self.sets[split]):
                for record in records:
                    said = (record.messages, record.tools) if isinstance(record, Chat) else record
                    total.update(json.dumps([split, number, said], sort_keys=True).encode("utf-8"))
        return total.hexdigest()

    def inputs(self) -> list[str]:
        """The input of each record of all splits."""
        return [self.input_of(record) for sets in self.sets.values() for records in sets for record in records]


@dataclass(frozen=True)
class FineTuning:
    """The samples of a fine-tuning run.

    Attributes:
        samples: of each split, or None where it is empty.
        examples: of each split.
        records: what they were made of.
    """

    samples: dict[Split, FieldSamples | None]
    examples: dict[Split, list[Examples]]
    records: Records

    def of(self, split: Split) -> list[Example]:
        """The examples of a split."""
        return all_of(self.examples[split])

    def check(self, split: Split, length: int, length_key: str) -> None:
        """Find out whether there is anything to learn, or to validate on.

        Args:
            split: the one in question.
            length: s, tokens of a row.
            length_key: the key that says so, for messages.

        Raises:
            UserError: not one example of the split has a token that counts.
        """
        sets = self.examples[split]
        left_out = sum(one.left_out for one in sets)
        if not left_out or any(map(len, sets)):
            return
        too_long = [tokens for one in sets for tokens in one.too_long]
        if too_long:
            why = (
                f"rows of {length:,} tokens (`{length_key}`) end before the answers; the examples have "
                f"{statistics.median_high(too_long):,} tokens in the median, {max(too_long):,} at most"
            )
        else:
            why = "the chat template marks no answers, or writes none" if self.chats else "no answer has a token"
        raise UserError(
            f"{self.records.name}: none of the examples of the {split} split ({left_out:,}) has anything to predict: "
            f"{why}"
        )

    @property
    def chats(self) -> bool:
        """Whether the records are conversations."""
        return any(isinstance(record, Chat) for sets in self.records.sets.values() for one in sets for record in one)

    def describe(self) -> str:
        """How many there are, and what did not fit."""
        every = [examples for sets in self.examples.values() for examples in sets]
        counts = {split: sum(map(len, sets)) for split, sets in self.examples.items()}
        parts = (f"{split} {count:,} example{'s' * (count != 1)}" for split, count in counts.items())
        cut, left_out = sum(one.cut for one in every), sum(one.left_out for one in every)
        told = f"; cut to the length of a row: {cut:,}; left out with nothing to learn: {left_out:,}"
        return ", ".join(parts) + (told if cut or left_out else "")


def fine_tuning(root: RootBlock, task: Task, tokenizer: Tokenizer) -> FineTuning:
    """What the configuration names, as samples.

    Raises:
        UserError: files that cannot be read or tokenized, or an empty split that is needed.
    """
    records = read_records(root, tokenizer)
    examples: dict[Split, list[Examples]] = {
        split: [_examples(root, task, tokenizer, one) for one in sets] for split, sets in records.sets.items()
    }
    samples: dict[Split, FieldSamples | None] = {
        split: _samples(root, task, tokenizer, sets, records.weights, training=split == "train")
        for split, sets in examples.items()
    }
    return FineTuning(samples, examples, records)


def held_out_examples(path: Path, root: RootBlock, task: Task, tokenizer: Tokenizer) -> FineTuning:
    """All that a file or folder holds, as validation; of a folder that holds `train.jsonl` its `validation.jsonl`.

    Raises:
        UserError: it cannot be read.
    """
    read, input_of = _reader(root, tokenizer)
    found = read_split(path, (0.0, 1.0, 0.0), read, input_of, "--data-path")
    records = Records(str(path), {split: [found[split]] for split in SPLITS}, input_of)
    examples: dict[Split, list[Examples]] = {
        split: [_examples(root, task, tokenizer, found[split])] for split in SPLITS
    }
    validation = _samples(root, task, tokenizer, examples["validation"], None, training=False)
    samples: dict[Split, FieldSamples | None] = {"train": None, "validation": validation, "test": None}
    return FineTuning(samples, examples, records)


# ---------------------------------------------------------------- what is read


def read_records(root: RootBlock, tokenizer: Tokenizer) -> Records:
    """The prompts with answers, or conversations, that `model.data` names.

    Args:
        root: the configuration.
        tokenizer: its chat template may name roles of its own.

    Raises:
        UserError: files that cannot be read, or an object that is none of these.
    """
    data = root.model.data
    read, input_of = _reader(root, tokenizer)
    if data.data_impl == "pystd_docstring":
        texts = read_docstrings(parse_proportions(data.splits_string))
        names = data.context_key, data.label_key
        return Records(
            texts.name,
            {split: [[dict(zip(names, pair, strict=True)) for pair in texts.pairs[split]]] for split in SPLITS},
            input_of,
        )
    source = read_source(data, read, input_of)
    weights = data.train_ds.concat_sampling_probabilities
    return Records(source.name, source.sets, input_of, weights, source.has_own_splits)


def _reader(root: RootBlock, tokenizer: Tokenizer) -> tuple[Reader[Any], Callable[[Any], str]]:
    """What reads an object, and what of it decides about the split that it belongs to."""
    if root.model.data.chat:
        source = chat_of(tokenizer).source
        return lambda found, where: read_chat(found, where, source), first_words
    template = template_of(root.model.data)
    names = sorted(set(template.names[:-1])) or list(template.names)

    def asked(record: dict[str, str]) -> str:
        """The texts before the answer, however the template puts them."""
        return record[names[0]] if len(names) == 1 else json.dumps([record[name] for name in names])

    named_by = f"{_TRAIN}.prompt_template" if root.model.data.train_ds.prompt_template else ""
    return lambda found, where: read_record(found, where, template.names, named_by), asked


# ---------------------------------------------------------------- what is made of it


def _examples(root: RootBlock, task: Task, tokenizer: Tokenizer, records: Sequence[Any]) -> Examples:
    model, keys = root.model, root.model.data.train_ds
    assert isinstance(model, ModelBlock)
    answer_only = model.answer_only_loss is not False
    if model.data.chat:
        return fitted(chat_examples(records, tokenizer, answer_only=answer_only), task.length)
    template = template_of(root.model.data)
    shortened = template.names[:-1]
    if keys.truncation_field is not None:
        shortened = tuple(name.strip() for name in keys.truncation_field.split(","))
    tokens = PromptTokens(
        template=template,
        tokenizer=tokenizer,
        start=_start(tokenizer, keys.add_bos),
        end=_end(tokenizer) if keys.add_eos else [],
        answer_only=answer_only,
        length=task.length,
        shortened=shortened,
        side=keys.truncation_method,
    )
    return fitted(tokens.examples(records), task.length)


def _start(tokenizer: Tokenizer, wanted: bool | None) -> list[int]:
    if wanted is None:
        return text_start(tokenizer)
    special = getattr(tokenizer, "special", None)
    if wanted and (special is None or special.bos is None):
        raise UserError(
            f"`{_TRAIN}.add_bos` (true) needs a tokenizer with a bos token, and this one has none; leave it out"
        )
    return [special.bos] if wanted and special is not None else []


def _end(tokenizer: Tokenizer) -> list[int]:
    if tokenizer.eos_id is None:
        raise UserError(
            f"`{_TRAIN}.add_eos` (true) needs a tokenizer with a token that ends a text, and this one has none; set it "
            "to false, or use tokenizer=byte"
        )
    return [tokenizer.eos_id]


def _samples(
    root: RootBlock,
    task: Task,
    tokenizer: Tokenizer,
    sets: Sequence[Examples],
    weights: Sequence[float] | None,
    *,
    training: bool,
) -> FieldSamples | None:
    seed = root.model.seed if training else None

    def rows(examples: Examples, part: int = 0) -> ExampleSamples:
        told = task.padded
        pad = tokenizer.pad_id
        return ExampleSamples(examples, task.length, pad, seed, packs=task.packed, tells_padding=told, part=part)

    if training and weights is not None:
        if not all(map(len, sets)):
            raise UserError(f"`{_TRAIN}.concat_sampling_probabilities`: a file of `file_names` holds no example")
        return BlendedFields([rows(examples, part) for part, examples in enumerate(sets)], weights)
    together = Examples(
        all_of(sets),
        sum(examples.cut for examples in sets),
        sum(examples.left_out for examples in sets),
    )
    return rows(together) if len(together) else None
