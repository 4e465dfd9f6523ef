"""Cross-field rules of `model.data`: datasets, splits, and keys without effect."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.families import sequence_length_of
from ....models.config.key_block import Finding
from ..blend_spec import is_per_split, parse_prefixes
from ..data_task import task_name
from ..dataset_names import BUILT_IN_DATASETS, SPLITS
from ..schema.key_index import format_value
from ..schema.root import T5ModelBlock
from ..schema.trainer_and_data import DataBlock
from .rule_context import RuleContext, choose_data, no_effect, unused

_AT = "model.data"
_IMPL = f"{_AT}.data_impl"
_PREFIX = f"{_AT}.data_prefix"
_IMPLS_WITH_PATH = ("text", "jsonl", "huggingface")


def path_matches_data_impl(context: RuleContext) -> Iterator[Finding]:
    """`path` is required with `data_impl: text`, `jsonl` and `huggingface`, and not supported with others."""
    data = context.root.model.data
    if data.data_impl == "jsonl" and data.train_ds.file_names is not None:
        return
    pystd = choose_data(context, "pystd", "pystd")
    docstring = choose_data(context, "docstring", "pystd_docstring")
    if data.data_impl in _IMPLS_WITH_PATH and not data.path:
        yield Finding.error(
            ("model.data.path", "model.data.data_impl"),
            f"`data_impl: {data.data_impl}` needs a file or folder to read"
            f"{', or a name on the hub' * (data.data_impl == 'huggingface')}",
            "model.data.path=FILE_OR_FOLDER"
            + (f", or {pystd} to train on the Python standard library" if data.data_impl == "text" else "")
            + (f", or {docstring}" if data.data_impl == "jsonl" and not data.chat else ""),
        )
    elif data.data_impl in BUILT_IN_DATASETS and data.data_impl not in _IMPLS_WITH_PATH and data.path is not None:
        yield Finding.error(
            ("model.data.path", "model.data.data_impl"),
            f"`path` is read with `data_impl: {'`, `'.join(_IMPLS_WITH_PATH)}` only, but it is `{data.data_impl}`",
            f"{choose_data(context, 'text', 'text')}, or ~model.data.path",
        )


def data_prefix_matches_data_impl(context: RuleContext) -> Iterator[Finding]:
    """`data_prefix` is required with `data_impl: mmap`, and not supported with others."""
    data = context.root.model.data
    if data.data_impl == "mmap" and not data.data_prefix:
        yield Finding.error(
            (_PREFIX, _IMPL),
            "`data_impl: mmap` needs the path of a .bin/.idx pair, without suffix",
            f"{_PREFIX}=PATH, or {choose_data(context, 'pystd', 'pystd')} to train on the Python standard library",
        )
    elif data.data_prefix and data.data_impl in BUILT_IN_DATASETS and data.data_impl != "mmap":
        yield Finding.error(
            (_PREFIX, _IMPL),
            f"`data_prefix` is read with `data_impl: mmap` only, but it is `{data.data_impl}`",
            f"{_IMPL}=mmap, or ~{_PREFIX}",
        )
    elif data.data_prefix and data.data_impl == "mmap":
        yield from _prefix_findings(data)


def _prefix_findings(data: DataBlock) -> Iterator[Finding]:
    assert data.data_prefix
    try:
        blends = parse_prefixes(data.data_prefix)
    except ValueError as error:
        yield Finding.error((_PREFIX,), f"`data_prefix` ({format_value(data.data_prefix)}) {error}")
        return
    if is_per_split(data.data_prefix):
        weighted = [split for split, blend in blends.items() if split != "train" and blend.has_weights]
        if weighted:
            yield Finding.warning(
                (f"{_PREFIX}.{weighted[0]}",),
                f"the weights of `{weighted[0]}` have no effect: that split uses every token of its datasets once",
                "leave them out",
            )


def splits_are_not_empty(context: RuleContext) -> Iterator[Finding]:
    """`splits_string` must leave training data, and validation data if validation is on; some sources ignore it."""
    data, trainer = context.root.model.data, context.root.trainer
    shares = [float(share) for share in data.splits_string.split(",")]
    key = "model.data.splits_string"
    why_unused = ""
    if data.data_impl == "mock":
        why_unused = "with `data_impl: mock`: each split is random tokens"
    elif data.data_impl not in BUILT_IN_DATASETS:
        return  # the installed package splits its data
    elif data.data_impl == "mmap" and is_per_split(data.data_prefix):
        why_unused = "with a `data_prefix` for each split"
    elif data.data_impl == "jsonl" and data.train_ds.file_names is not None:
        why_unused = "with `train_ds.file_names`: each split has its own files"
    if why_unused:
        yield from unused(context, key, "model.data.data_impl", why_unused)
        return
    if shares[0] == 0:
        yield Finding.error(("model.data.splits_string",), "the first share, for training, must not be 0", "900,50,50")
    elif trainer.limit_val_batches and (len(shares) < 2 or shares[1] == 0):
        yield Finding.error(
            ("model.data.splits_string", "trainer.limit_val_batches"),
            "the second share, for validation, must not be 0 while validation is on",
            "model.data.splits_string='900,100,0', or trainer.limit_val_batches=0",
        )


def seq_length_matches_model(context: RuleContext) -> Iterator[Finding]:
    """`data.seq_length` must equal `encoder_seq_length` (T5: `seq_length`, of the encoder)."""
    model = context.root.model
    length = model.data.seq_length
    key, model_length = "seq_length" if model.family == "t5" else "encoder_seq_length", sequence_length_of(model)
    if length is not None and length != model_length:
        yield Finding.error(
            ("model.data.seq_length", f"model.{key}"),
            f"`data.seq_length` ({length}) must equal `{key}` ({model_length}), the model's sequence length",
            f"model.{key}={length}, or ~model.data.seq_length",
        )


def data_prefix_has_validation(context: RuleContext) -> Iterator[Finding]:
    """A `data_prefix` per split needs `validation` while validation is on, since `splits_string` does not apply."""
    data, trainer = context.root.model.data, context.root.trainer
    # A block with unknown splits is an error of its own.
    if data.data_impl != "mmap" or not isinstance(data.data_prefix, dict) or set(data.data_prefix) - set(SPLITS):
        return
    if not data.data_prefix.get("validation") and trainer.limit_val_batches:
        yield Finding.error(
            (_PREFIX, "trainer.limit_val_batches"),
            "`data_prefix` has no `validation` while validation is on",
            f"{_PREFIX}.validation=PATH, or trainer.limit_val_batches=0",
        )


def unused_data_settings(context: RuleContext) -> Iterator[Finding]:
    """Warn about settings that the chosen source does not use."""
    model = context.root.model
    data = model.data
    in_chunks = data.respect_document_boundaries and task_name(model) == "t5"
    for name in ("index_mapping_dir", "shuffle_documents"):
        if data.data_impl in BUILT_IN_DATASETS and data.data_impl != "mmap":
            yield from unused(context, f"{_AT}.{name}", _IMPL, f"with `data_impl: {data.data_impl}`")
        elif data.data_impl == "mmap" and in_chunks:
            when = "with `respect_document_boundaries`: document chunks are shuffled individually, without an index"
            yield from unused(context, f"{_AT}.{name}", f"{_AT}.respect_document_boundaries", when)
    if data.data_impl in BUILT_IN_DATASETS and data.data_impl != "huggingface":
        when = f"with `data_impl: {data.data_impl}`, which has none"
        yield from unused(context, f"{_AT}.dataset_kwargs", _IMPL, when)
    if model.family == "gpt" and data.eod_mask_loss and data.data_impl == "mock":
        yield no_effect(f"{_AT}.eod_mask_loss", _IMPL, "with `data_impl: mock`: random tokens have no documents")
    for name in ("reset_position_ids", "reset_attention_mask"):
        if model.family != "t5" and getattr(data, name) and data.data_impl == "mock":
            yield Finding.warning(
                (f"{_AT}.{name}", f"{_AT}.data_impl"),
                f"`{name}` with `data_impl: mock` splits documents at random end tokens: useful for timing only",
                f"~{_AT}.{name}",
            )


def document_ends_need_eod_token(context: RuleContext) -> Iterator[Finding]:
    """Keys that act at document ends need a tokenizer with an end-of-document token."""
    model = context.root.model
    data = model.data
    mock = data.data_impl == "mock"
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if getattr(data, name) and model.tokenizer.library == "char" and not mock:
            yield Finding.error(
                (f"{_AT}.{name}", "model.tokenizer.library"),
                f"`{name}` needs an end-of-document token, which `char` does not have",
                f"model.tokenizer.library=byte-level, or {_AT}.{name}=false",
            )


def reset_position_ids_has_effect(context: RuleContext) -> Iterator[Finding]:
    """`reset_position_ids` acts only with position embeddings that depend on absolute positions."""
    model = context.root.model
    if isinstance(model, T5ModelBlock) or not model.data.reset_position_ids:
        return
    kind = model.position_embedding_type
    keys = (f"{_AT}.reset_position_ids", "model.position_embedding_type")
    if kind not in ("learned_absolute", "rope", "xpos"):
        why = {"none": "has no positions", "learned_parameters": "depends on the position in the sample"}
        yield Finding.warning(
            keys,
            f"`reset_position_ids` has no effect with `position_embedding_type: {kind}`, which "
            f"{why.get(kind, 'depends on relative distances only')}",
            f"~{keys[0]}",
        )
    elif kind != "learned_absolute" and model.data.reset_attention_mask:
        yield Finding.info(
            (*keys, f"{_AT}.reset_attention_mask"),
            f"`reset_position_ids` changes nothing but rounding with `position_embedding_type: {kind}`, which depends "
            "on relative distances only: with `reset_attention_mask` all of them are within a document",
            f"~{keys[0]}",
        )
