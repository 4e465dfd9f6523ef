"""Rules of the training objective (`model.data.dataset_type`): model families, data sources, keys without effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ....models.config.key_block import Finding
from ..data_task import PAIR_TASKS, Task, task_from_keys, task_name
from ..dataset_names import BUILT_IN_DATASETS, PAIR_SOURCES
from ..span_lengths import clipped_geometric_mean, noise_counts
from .rule_context import RuleContext, no_effect, unused

_AT = "model.data"
_TYPE = f"{_AT}.dataset_type"
_SENTINELS = "model.tokenizer.num_sentinel_tokens"
_TASKS_OF_FAMILY = {"gpt": ("gpt", "sft"), "t5": ("t5", "t5_prefix_lm", "seq2seq"), "bert": ("bert",)}
_PRESETS = {"gpt": "gpt_125m", "t5": "t5_small", "bert": "bert_base"}
_BYTE_SENTINELS = 125
_NGRAM_KEYS = ("max_ngram_size", "whole_word_masking", "favor_longer_ngrams")
_SPAN_SAMPLING_KEYS = ("geometric_dist", "respect_document_boundaries", "short_seq_prob", "packed_sequence")


def family_supports_task(context: RuleContext) -> Iterator[Finding]:
    """Each model family supports certain tasks."""
    model = context.root.model
    possible = _TASKS_OF_FAMILY[model.family]
    if task_name(model) not in possible:
        families = [family for family, tasks in _TASKS_OF_FAMILY.items() if task_name(model) in tasks]
        others = [f"model.family={family} (a preset: model={_PRESETS[family]})" for family in families]
        yield Finding.error(
            (_TYPE, "model.family"),
            f"`family: {model.family}` supports {', '.join(possible)}, not `{task_name(model)}`",
            " or ".join(others),
        )


def pair_data_matches_task(context: RuleContext) -> Iterator[Finding]:
    """`seq2seq` and `sft` need pairs (or mock data); other tasks do not support pairs."""
    model = context.root.model
    source, name = model.data.data_impl, task_name(model)
    is_pair_task = name in PAIR_TASKS.values()
    if is_pair_task == (source in PAIR_SOURCES) or (is_pair_task and source == "mock"):
        return
    if is_pair_task:
        yield Finding.error(
            (_TYPE, f"{_AT}.data_impl"),
            f"`dataset_type: {name}` needs pairs, which `data_impl: {source}` does not have",
            f"{_AT}.data_impl=jsonl with {_AT}.path=FILE, or ~{_TYPE}",
        )
    else:
        yield Finding.error(
            (f"{_AT}.data_impl", _TYPE),
            f"`data_impl: {source}` holds pairs, which `dataset_type: {name}` does not support",
            f"{_TYPE}={PAIR_TASKS[model.family]}, or another data_impl"
            if model.family in PAIR_TASKS
            else f"another data_impl, or a model that supports pairs (model={_PRESETS['t5']})",
        )


def sequence_lengths_fit(context: RuleContext) -> Iterator[Finding]:
    """Encoder and decoder lengths must fit the masked spans of the task."""
    model = context.root.model
    data = model.data
    if task_name(model) not in _TASKS_OF_FAMILY[model.family]:
        return
    keys = (f"{_AT}.seq_length_dec", f"{_AT}.masked_lm_prob", f"{_AT}.mean_ngram_size")
    try:
        task = task_from_keys(context.root.model)
    except ValueError as error:
        needed = str(error).rpartition("at least ")[2]
        if "`decoder_length`" in str(error):
            yield Finding.error(
                keys,
                f"`seq_length_dec` ({data.seq_length_dec}) must be at least {needed}: the masked tokens of a full "
                "encoder sequence, their sentinels and eos",
                f"{keys[0]}={needed}, or ~{keys[0]}",
            )
        else:
            reason = str(error).replace("`encoder_length`", "the encoder's length")
            yield Finding.error(
                keys[1:], f"span corruption: {reason}", "use a longer sequence, or a smaller masked_lm_prob"
            )
        return
    if task.name == "t5" and data.geometric_dist is None and data.seq_length_dec is not None:
        exact, divisor = _exact_decoder_length(context), _decoder_length_divisor(context)
        needed = -(-exact // divisor) * divisor
        if task.decoder_length > needed:
            ranks = f", {needed} to be a multiple of {divisor} for the ranks that share it" if needed > exact else ""
            yield Finding.info(
                keys,
                f"`seq_length_dec` ({task.decoder_length}) adds {task.decoder_length - exact} padding tokens to "
                f"every sample: span corruption needs {exact}{ranks}",
                f"{keys[0]}={needed}" if needed > exact else f"~{keys[0]}",
            )
    shortest = 1
    if task.name == "t5" and task.corruption is not None and task.window > 1:
        shortest = noise_counts(task.window, task.corruption)[0] + 2  # plus a sentinel and eos
    if task.is_encoder_decoder and task.decoder_length < shortest:
        yield Finding.error(
            keys[:2],
            f"`seq_length_dec` ({task.decoder_length}) must be at least {shortest}: the masked tokens "
            f"(`masked_lm_prob` {data.masked_lm_prob:g} of {task.window:,} tokens), a sentinel and eos",
            f"{keys[0]}={shortest}, or ~{keys[0]}",
        )
    if task.name not in ("gpt", "sft") and task.length < 4:
        yield Finding.error(
            (_TYPE,), f"`dataset_type: {task.name}` needs samples of at least 4 tokens, not {task.length}", ""
        )


def span_truncation_keeps_mean(context: RuleContext) -> Iterator[Finding]:
    """Report if truncation at `max_ngram_size` lowers the mean span length by more than 10 %."""
    data, name = context.root.model.data, task_name(context.root.model)
    mean, longest = data.mean_ngram_size, data.max_ngram_size
    samples_spans = name == "bert" or (name == "t5" and data.data_impl != "mock")
    if not samples_spans or not data.geometric_dist or mean is None or mean == 1:
        return
    truncated_mean = clipped_geometric_mean(mean, longest)
    if truncated_mean < 0.9 * mean:
        enough = math.ceil(math.log(0.1, 1 - 1 / mean))
        path = f"{_AT}.max_ngram_size"
        yield Finding(
            "warning" if mean > longest else "info",
            (f"{_AT}.mean_ngram_size", path),
            f"`mean_ngram_size` ({mean:g}) is the mean before spans are truncated to `max_ngram_size` ({longest}), "
            f"which reduces it to {truncated_mean:.3g}",
            f"{path}={enough} keeps 90 % of it" if enough <= 1000 else f"{path}=1000",
        )


def _exact_decoder_length(context: RuleContext) -> int:
    """Return the number of decoder tokens that T5's span corruption needs."""
    data = context.root.model.data.model_copy(update={"seq_length_dec": None})
    model = context.root.model.model_copy(update={"data": data})
    return task_from_keys(model).decoder_length


def _decoder_length_divisor(context: RuleContext) -> int:
    """Return the number of which the decoder length is a multiple with this layout (`models/parallel/rules.py`)."""
    keys = context.root.model
    ranks, tensor = keys.context_parallel_size, keys.tensor_model_parallel_size
    causal = 2 * ranks if ranks > 1 else 1
    shared = ranks * tensor // math.gcd(tensor, keys.micro_batch_size) if keys.sequence_parallel else 1
    return math.lcm(causal, shared)


def sentinels_suffice(context: RuleContext) -> Iterator[Finding]:
    """Every masked span needs its own sentinel."""
    model = context.root.model
    count, library = model.tokenizer.num_sentinel_tokens, model.tokenizer.library
    if task_name(model) not in _TASKS_OF_FAMILY[model.family] or model.data.data_impl == "mock":
        return
    if model.family == "gpt":
        if count:
            yield no_effect(_SENTINELS, "model.family", "with `family: gpt`, which has no sentinels")
        return
    if library == "char":
        yield Finding.error(
            ("model.tokenizer.library", "model.family"),
            f"`char` has no eos token, which `family: {model.family}` needs",
            "model.tokenizer.library=byte-level",
        )
        return
    task = _task(context)
    if task is None or task.name != "t5" or task.corruption is None:
        return
    if library != "byte-level" or model.data.data_impl == "mmap":
        return  # the tokenizer may have its own sentinels, which are counted when it is loaded
    available = _BYTE_SENTINELS if count is None else count
    needed = 1 if model.data.geometric_dist is not None else noise_counts(task.window, task.corruption)[1]
    if available < needed:
        yield Finding.error(
            (_SENTINELS, f"{_AT}.mean_ngram_size"),
            f"{available} sentinels are too few: {task.window:,} tokens of text have {needed} masked spans",
            f"{_SENTINELS}={needed}, or longer spans ({_AT}.mean_ngram_size)",
        )


def mask_token_needs_bert(context: RuleContext) -> Iterator[Finding]:
    """`mask_token` acts only in BERT."""
    model = context.root.model
    if model.tokenizer.special_tokens.mask_token is not None and model.family != "bert":
        path = "model.tokenizer.special_tokens.mask_token"
        yield Finding.warning(
            (path, "model.family"),
            f"`mask_token` is unused with `family: {model.family}`: it only adds a token to the vocabulary",
            f"~{path}",
        )


def _task(context: RuleContext) -> Task | None:
    try:
        return task_from_keys(context.root.model)
    except ValueError:
        return None


def unused_task_keys(context: RuleContext) -> Iterator[Finding]:
    """Warn about keys of another task or another way of sampling spans."""
    for key, why in _unused_keys(context).items():
        yield from unused(context, f"{_AT}.{key}", _TYPE, why)


def _unused_keys(context: RuleContext) -> dict[str, str]:
    """Return the keys of `model.data` that have no effect, with the condition."""
    model = context.root.model
    data, name = model.data, task_name(model)
    without = f"with `dataset_type: {name}`"
    found: dict[str, str] = {}
    if name not in ("t5", "bert"):
        found |= dict.fromkeys(("masked_lm_prob", "geometric_dist", "mean_ngram_size", *_NGRAM_KEYS), without)
    elif data.geometric_dist is None:
        found |= dict.fromkeys(_NGRAM_KEYS, "with `geometric_dist: null`, which samples T5's spans")
        if name == "bert":
            found["mean_ngram_size"] = "with `geometric_dist: null`, which masks single tokens"
    elif data.geometric_dist:
        found["favor_longer_ngrams"] = "with `geometric_dist: True`"
    else:
        found["mean_ngram_size"] = "with `geometric_dist: False`"
    if name != "t5":
        found |= dict.fromkeys(("respect_document_boundaries", "short_seq_prob"), without)
    elif not data.respect_document_boundaries:
        found |= dict.fromkeys(("short_seq_prob", "packed_sequence"), "without `respect_document_boundaries`")
    if name not in ("t5", "seq2seq", "sft"):
        found["packed_sequence"] = without
    elif data.data_impl == "mock":
        found["packed_sequence"] = "with `data_impl: mock`"
    if model.family != "t5":
        found["seq_length_dec"] = without
    if model.family == "t5" or name == "sft":
        separated = f"{without}; `packed_sequence` separates samples"
        found |= dict.fromkeys(("reset_position_ids", "reset_attention_mask"), separated)
        if data.data_impl == "mock" and model.family == "t5":
            found |= dict.fromkeys((*_SPAN_SAMPLING_KEYS, *_NGRAM_KEYS), "with `data_impl: mock`")
    if name != "gpt":
        found["eod_mask_loss"] = without
    if data.data_impl not in ("jsonl", "huggingface"):
        found |= dict.fromkeys(("context_key", "label_key"), f"with `data_impl: {data.data_impl}`")
    return found


def document_boundaries_are_available(context: RuleContext) -> Iterator[Finding]:
    """`respect_document_boundaries` is not supported with datasets of other packages, which yield token windows."""
    data = context.root.model.data
    is_built_in = data.data_impl in BUILT_IN_DATASETS
    if data.respect_document_boundaries and not is_built_in and task_name(context.root.model) == "t5":
        yield Finding.error(
            (f"{_AT}.respect_document_boundaries", f"{_AT}.data_impl"),
            f"`data_impl: {data.data_impl}` yields windows of tokens without document boundaries",
            f"~{_AT}.respect_document_boundaries",
        )
