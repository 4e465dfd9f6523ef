"""Rules of what is learnt (`model.data.dataset_type`): which model learns it, from which data, and which keys act."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ....models.config.key_block import Finding
from ...plugins.datasets import BUILT_IN, PAIR_SOURCES
from ..data_task import Task, task_name, task_of
from ..schema.trainer_and_data import DataBlock
from ..span_lengths import cut_mean, noise_counts
from .rule_context import Facts, Rule, no_effect

_AT = "model.data"
_TYPE = f"{_AT}.dataset_type"
_SENTINELS = "model.tokenizer.num_sentinel_tokens"
_FAMILIES = {"gpt": ("gpt", "sft"), "t5": ("t5", "t5_prefix_lm", "seq2seq"), "bert": ("bert",)}
_OF_PAIRS = {"gpt": "sft", "t5": "seq2seq"}
_PRESETS = {"gpt": "gpt_125m", "t5": "t5_small", "bert": "bert_base"}
_BYTE_SENTINELS = 125
_NGRAM_KEYS = ("max_ngram_size", "whole_word_masking", "favor_longer_ngrams")
_DRAWN_KEYS = ("geometric_dist", "respect_document_boundaries", "short_seq_prob", "packed_sequence")


def model_learns_the_task(facts: Facts) -> Iterator[Finding]:
    """Each family has its tasks."""
    model = facts.root.model
    possible = _FAMILIES[model.family]
    if task_name(model) not in possible:
        learners = [family for family, tasks in _FAMILIES.items() if task_name(model) in tasks]
        others = [f"model.family={family} (a preset: model={_PRESETS[family]})" for family in learners]
        yield Finding(
            "error",
            (_TYPE, "model.family"),
            f"a model of `family: {model.family}` learns {', '.join(possible)}, not `{task_name(model)}`",
            " or ".join(others),
        )


def pairs_are_for_their_tasks(facts: Facts) -> Iterator[Finding]:
    """`seq2seq` and `sft` need pairs, and nothing else can use them; random tokens are there for both too."""
    model = facts.root.model
    source, name = model.data.data_impl, task_name(model)
    of_pairs = name in _OF_PAIRS.values()
    if of_pairs == (source in PAIR_SOURCES) or (of_pairs and source == "mock"):
        return
    if of_pairs:
        yield Finding(
            "error",
            (_TYPE, f"{_AT}.data_impl"),
            f"`dataset_type: {name}` learns pairs, which `data_impl: {source}` has none of",
            f"{_AT}.data_impl=jsonl with {_AT}.path=FILE, or ~{_TYPE}",
        )
    else:
        yield Finding(
            "error",
            (f"{_AT}.data_impl", _TYPE),
            f"`data_impl: {source}` holds pairs, which `dataset_type: {name}` cannot learn",
            f"{_TYPE}={_OF_PAIRS[model.family]}, or another data_impl"
            if model.family in _OF_PAIRS
            else f"another data_impl, or a model that learns pairs (model={_PRESETS['t5']})",
        )


def sides_fit(facts: Facts) -> Iterator[Finding]:
    """A text of some length fills the encoder's side, and what is hidden in it fits on the decoder's."""
    model = facts.root.model
    data = model.data
    if task_name(model) not in _FAMILIES[model.family]:
        return
    keys = (f"{_AT}.seq_length_dec", f"{_AT}.masked_lm_prob", f"{_AT}.mean_ngram_size")
    try:
        task = task_of(facts.root)
    except ValueError as error:
        needed = str(error).rpartition("at least ")[2]
        if "`decoder_length`" in str(error):
            yield Finding(
                "error",
                keys,
                f"`seq_length_dec` ({data.seq_length_dec}) must be at least {needed}: the tokens that are hidden of a "
                "text that fills the encoder, their sentinels and the end",
                f"{keys[0]}={needed}, or ~{keys[0]}",
            )
        else:
            reason = str(error).replace("`encoder_length`", "the encoder's length")
            yield Finding("error", keys[1:], f"span corruption: {reason}", "a longer sequence, or a smaller share")
        return
    if task.name == "t5" and data.geometric_dist is None and data.seq_length_dec is not None:
        exact = _exact(facts)
        if task.decoder_length > exact:
            yield Finding(
                "info",
                keys,
                f"`seq_length_dec` ({task.decoder_length}) leaves {task.decoder_length - exact} places of every sample "
                f"empty: span corruption needs {exact}",
                f"~{keys[0]}",
            )
    shortest = 1
    if task.name == "t5" and task.corruption is not None and task.window > 1:
        shortest = noise_counts(task.window, task.corruption)[0] + 2  # a sentinel and the end
    if task.has_two_sides and task.decoder_length < shortest:
        yield Finding(
            "error",
            keys[:2],
            f"`seq_length_dec` ({task.decoder_length}) must be at least {shortest}: what is hidden "
            f"(`masked_lm_prob` {data.masked_lm_prob:g} of {task.window:,} tokens), a sentinel and the end",
            f"{keys[0]}={shortest}, or ~{keys[0]}",
        )
    if task.name not in ("gpt", "sft") and task.length < 4:
        yield Finding(
            "error", (_TYPE,), f"`dataset_type: {task.name}` needs samples of 4 tokens, not {task.length}", ""
        )


def spans_are_as_long_as_asked(facts: Facts) -> Iterator[Finding]:
    """NeMo cuts what its geometric distribution draws, and with it the mean."""
    data, name = facts.root.model.data, task_name(facts.root.model)
    mean, longest = data.mean_ngram_size, data.max_ngram_size
    drawn = name == "bert" or (name == "t5" and data.data_impl != "mock")
    if not drawn or not data.geometric_dist or mean is None or mean == 1:
        return
    left = cut_mean(mean, longest)
    if left < 0.9 * mean:
        enough = math.ceil(math.log(0.1, 1 - 1 / mean))
        path = f"{_AT}.max_ngram_size"
        yield Finding(
            "warning" if mean > longest else "info",
            (f"{_AT}.mean_ngram_size", path),
            f"`mean_ngram_size` ({mean:g}) is the mean before longer spans are cut to `max_ngram_size` ({longest}): "
            f"{left:.3g} is left of it",
            f"{path}={enough} leaves nine tenths" if enough <= 1000 else f"{path}=1000",
        )


def _exact(facts: Facts) -> int:
    """Tokens that T5's span corruption needs on the decoder's side."""
    data = facts.root.model.data.model_copy(update={"seq_length_dec": None})
    model = facts.root.model.model_copy(update={"data": data})
    return task_of(facts.root.model_copy(update={"model": model})).decoder_length


def sentinels_suffice(facts: Facts) -> Iterator[Finding]:
    """Every span needs a sentinel of its own."""
    model = facts.root.model
    count, library = model.tokenizer.num_sentinel_tokens, model.tokenizer.library
    if task_name(model) not in _FAMILIES[model.family] or model.data.data_impl == "mock":
        return
    if model.family == "gpt":
        if count:
            yield no_effect(_SENTINELS, "model.family", "with `family: gpt`, which has no sentinels")
        return
    if library == "char":
        yield Finding(
            "error",
            ("model.tokenizer.library", "model.family"),
            f"`char` has no token that ends a text, which `family: {model.family}` needs",
            "tokenizer=byte",
        )
        return
    task = _task(facts)
    if task is None or task.name != "t5" or task.corruption is None:
        return
    if library != "byte-level" or model.data.data_impl == "mmap":
        return  # the tokenizer may bring sentinels of its own; they are counted when it is read
    there = _BYTE_SENTINELS if count is None else count
    needed = 1 if model.data.geometric_dist is not None else noise_counts(task.window, task.corruption)[1]
    if there < needed:
        yield Finding(
            "error",
            (_SENTINELS, f"{_AT}.mean_ngram_size"),
            f"{there} sentinels are too few: {task.window:,} tokens of text have {needed} hidden spans",
            f"{_SENTINELS}={needed}, or longer spans ({_AT}.mean_ngram_size)",
        )


def mask_is_for_bert(facts: Facts) -> Iterator[Finding]:
    """Only BERT hides single tokens."""
    model = facts.root.model
    if model.tokenizer.special_tokens.mask_token is not None and model.family != "bert":
        path = "model.tokenizer.special_tokens.mask_token"
        yield Finding(
            "warning",
            (path, "model.family"),
            f"`mask_token` hides nothing with `family: {model.family}`: it only adds a token to the vocabulary",
            f"~{path}",
        )


def _task(facts: Facts) -> Task | None:
    try:
        return task_of(facts.root)
    except ValueError:
        return None


def keys_of_the_task(facts: Facts) -> Iterator[Finding]:
    """Keys of one task, or of one way to draw spans, that are set beside another."""
    data = facts.root.model.data
    for key, why in _silent(facts).items():
        path = f"{_AT}.{key}"
        if path in facts.own and getattr(data, key) != DataBlock.model_fields[key].default:
            yield no_effect(path, _TYPE, why)


def _silent(facts: Facts) -> dict[str, str]:
    """The keys that change nothing, and why."""
    model = facts.root.model
    data, name = model.data, task_name(model)
    without = f"with `dataset_type: {name}`"
    silent: dict[str, str] = {}
    if name not in ("t5", "bert"):
        silent |= dict.fromkeys(("masked_lm_prob", "geometric_dist", "mean_ngram_size", *_NGRAM_KEYS), without)
    elif data.geometric_dist is None:
        silent |= dict.fromkeys(_NGRAM_KEYS, "with `geometric_dist: null`, which draws T5's spans")
        if name == "bert":
            silent["mean_ngram_size"] = "with `geometric_dist: null`, which hides single tokens"
    elif data.geometric_dist:
        silent["favor_longer_ngrams"] = "with `geometric_dist: True`"
    else:
        silent["mean_ngram_size"] = "with `geometric_dist: False`"
    if name != "t5":
        silent |= dict.fromkeys(("respect_document_boundaries", "short_seq_prob"), without)
    elif not data.respect_document_boundaries:
        silent |= dict.fromkeys(("short_seq_prob", "packed_sequence"), "without `respect_document_boundaries`")
    if name not in ("t5", "seq2seq", "sft"):
        silent["packed_sequence"] = without
    elif data.data_impl == "mock":
        silent["packed_sequence"] = "with `data_impl: mock`"
    if model.family != "t5":
        silent["seq_length_dec"] = without
    if model.family == "t5" or name == "sft":
        apart = f"{without}; `packed_sequence` keeps samples apart"
        silent |= dict.fromkeys(("reset_position_ids", "reset_attention_mask"), apart)
        if data.data_impl == "mock" and model.family == "t5":
            silent |= dict.fromkeys((*_DRAWN_KEYS, *_NGRAM_KEYS), "with `data_impl: mock`")
    if name != "gpt":
        silent["eod_mask_loss"] = without
    if data.data_impl not in ("jsonl", "huggingface"):
        silent |= dict.fromkeys(("context_key", "label_key"), f"with `data_impl: {data.data_impl}`")
    return silent


def documents_are_known(facts: Facts) -> Iterator[Finding]:
    """A data set of another package gives windows of text, not documents."""
    data = facts.root.model.data
    is_built_in = data.data_impl in BUILT_IN
    if data.respect_document_boundaries and not is_built_in and task_name(facts.root.model) == "t5":
        yield Finding(
            "error",
            (f"{_AT}.respect_document_boundaries", f"{_AT}.data_impl"),
            f"`data_impl: {data.data_impl}` gives windows of text, which do not say where documents begin",
            f"~{_AT}.respect_document_boundaries",
        )


TASK_RULES: tuple[Rule, ...] = (
    model_learns_the_task,
    pairs_are_for_their_tasks,
    sides_fit,
    spans_are_as_long_as_asked,
    sentinels_suffice,
    mask_is_for_bert,
    keys_of_the_task,
    documents_are_known,
)
