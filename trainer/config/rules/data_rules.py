"""Cross-field rules of `model.data`: where samples come from, and which keys have an effect there."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.key_block import Finding
from ...data.sources.text_sources import SPLITS
from ...plugins.datasets import BUILT_IN, installed_datasets
from ..blend_spec import is_per_split, parse_prefixes
from ..data_task import task_name
from ..schema.key_index import show_value
from ..schema.root import T5ModelBlock
from ..schema.trainer_and_data import DataBlock
from ..suggest import closest
from .rule_context import Facts, Rule, no_effect

_AT = "model.data"
_IMPL = f"{_AT}.data_impl"
_PREFIX = f"{_AT}.data_prefix"
_READS_A_PATH = ("text", "jsonl", "huggingface")


def source_is_known(facts: Facts) -> Iterator[Finding]:
    """`data_impl` is a source of stoker's or the name of an installed one; packages are looked at for the latter."""
    name = facts.root.model.data.data_impl
    if name in BUILT_IN:
        return
    installed = sorted(installed_datasets())
    if name not in installed:
        near = closest(name, [*BUILT_IN, *installed])
        yield Finding(
            "error",
            (_IMPL,),
            f"`data_impl` must be one of {', '.join(BUILT_IN)}, or the name of an installed data set "
            f"({', '.join(installed[:10]) or 'there is none'})",
            f"did you mean {_IMPL}={near}?" if near else "",
        )


def text_needs_a_path(facts: Facts) -> Iterator[Finding]:
    """`data_impl: text`, `jsonl` and `huggingface` read a file or folder, the other sources none."""
    data = facts.root.model.data
    if data.data_impl == "jsonl" and data.train_ds.file_names is not None:
        return
    if data.data_impl in _READS_A_PATH and not data.path:
        yield Finding(
            "error",
            ("model.data.path", "model.data.data_impl"),
            f"`data_impl: {data.data_impl}` needs a file or folder to read"
            f"{', or a name of the hub' * (data.data_impl == 'huggingface')}",
            "model.data.path=FILE_OR_FOLDER"
            + (", or data=pystd to train on the Python standard library" if data.data_impl == "text" else "")
            + (", or data=docstring" if data.data_impl == "jsonl" and not data.chat else ""),
        )
    elif data.data_impl in BUILT_IN and data.data_impl not in _READS_A_PATH and data.path is not None:
        yield Finding(
            "error",
            ("model.data.path", "model.data.data_impl"),
            f"`path` is read with `data_impl: {'`, `'.join(_READS_A_PATH)}` only, but it is `{data.data_impl}`",
            "data=text, or ~model.data.path",
        )


def prefixes_are_for_mmap(facts: Facts) -> Iterator[Finding]:
    """`data_impl: mmap` reads the tokens of `data_prefix`, the other sources none."""
    data = facts.root.model.data
    if data.data_impl == "mmap" and not data.data_prefix:
        yield Finding(
            "error",
            (_PREFIX, _IMPL),
            "`data_impl: mmap` needs the path of a .bin/.idx pair, without suffix",
            f"{_PREFIX}=PATH, or data=pystd to train on the Python standard library",
        )
    elif data.data_prefix and data.data_impl in BUILT_IN and data.data_impl != "mmap":
        yield Finding(
            "error",
            (_PREFIX, _IMPL),
            f"`data_prefix` is read with `data_impl: mmap` only, but it is `{data.data_impl}`",
            f"{_IMPL}=mmap, or ~{_PREFIX}",
        )
    elif data.data_prefix and data.data_impl == "mmap":
        yield from _parsed(data)


def _parsed(data: DataBlock) -> Iterator[Finding]:
    assert data.data_prefix
    try:
        blends = parse_prefixes(data.data_prefix)
    except ValueError as error:
        yield Finding("error", (_PREFIX,), f"`data_prefix` ({show_value(data.data_prefix)}) {error}")
        return
    if is_per_split(data.data_prefix):
        weighted = [split for split, blend in blends.items() if split != "train" and blend.weighted]
        if weighted:
            yield Finding(
                "warning",
                (f"{_PREFIX}.{weighted[0]}",),
                f"the weights of `{weighted[0]}` have no effect: it takes every token of its sets once",
                "leave them out",
            )


def splits_hold_training_data(facts: Facts) -> Iterator[Finding]:
    """There must be something to train on, and to validate on if that is asked for; random tokens are not split."""
    data, trainer = facts.root.model.data, facts.root.trainer
    shares = [float(share) for share in data.splits_string.split(",")]
    key = "model.data.splits_string"
    uncut = ""
    if data.data_impl == "mock":
        uncut = "with `data_impl: mock`: each split is random tokens"
    elif data.data_impl not in BUILT_IN:
        return  # the package that has the data cuts them
    elif data.data_impl == "mmap" and is_per_split(data.data_prefix):
        uncut = "with a `data_prefix` for each split"
    elif data.data_impl == "jsonl" and data.train_ds.file_names is not None:
        uncut = "with `train_ds.file_names`: each split has files of its own"
    if uncut:
        if key in facts.own and data.splits_string != DataBlock.model_fields["splits_string"].default:
            yield no_effect(key, "model.data.data_impl", uncut)
        return
    if shares[0] == 0:
        yield Finding(
            "error", ("model.data.splits_string",), "the first share, for training, must not be 0", "900,50,50"
        )
    elif trainer.limit_val_batches and (len(shares) < 2 or shares[1] == 0):
        yield Finding(
            "error",
            ("model.data.splits_string", "trainer.limit_val_batches"),
            "the second share, for validation, must not be 0 while validation is on",
            "model.data.splits_string='900,100,0', or trainer.limit_val_batches=0",
        )


def sample_fits_model(facts: Facts) -> Iterator[Finding]:
    """The model is built for samples of `encoder_seq_length` tokens (T5: `seq_length`, on the encoder's side)."""
    model = facts.root.model
    length = model.data.seq_length
    key = "seq_length" if isinstance(model, T5ModelBlock) else "encoder_seq_length"
    of_model = model.seq_length if isinstance(model, T5ModelBlock) else model.encoder_seq_length
    if length is not None and length != of_model:
        yield Finding(
            "error",
            ("model.data.seq_length", f"model.{key}"),
            f"`data.seq_length` ({length}) must equal `{key}` ({of_model}), the length the model is built for",
            f"model.{key}={length}, or ~model.data.seq_length",
        )


def validation_has_data(facts: Facts) -> Iterator[Finding]:
    """A block of prefixes has no `splits_string` to cut a validation set from."""
    data, trainer = facts.root.model.data, facts.root.trainer
    # A block with other names in it is refused as a whole.
    if data.data_impl != "mmap" or not isinstance(data.data_prefix, dict) or set(data.data_prefix) - set(SPLITS):
        return
    if not data.data_prefix.get("validation") and trainer.limit_val_batches:
        yield Finding(
            "error",
            (_PREFIX, "trainer.limit_val_batches"),
            "`data_prefix` has no `validation` while validation is on",
            f"{_PREFIX}.validation=PATH, or trainer.limit_val_batches=0",
        )


def settings_have_an_effect(facts: Facts) -> Iterator[Finding]:
    """Settings of one source that are set beside another."""
    model = facts.root.model
    data = model.data
    of_documents = data.respect_document_boundaries and task_name(model) == "t5"
    for name in ("index_mapping_dir", "shuffle_documents"):
        if data.data_impl in BUILT_IN and data.data_impl != "mmap" and _is_set(facts, name):
            yield no_effect(f"{_AT}.{name}", _IMPL, f"with `data_impl: {data.data_impl}`")
        elif data.data_impl == "mmap" and of_documents and _is_set(facts, name):
            when = "with `respect_document_boundaries`: pieces of documents are shuffled one by one, without an index"
            yield no_effect(f"{_AT}.{name}", f"{_AT}.respect_document_boundaries", when)
    if data.data_impl in BUILT_IN and data.data_impl != "huggingface" and _is_set(facts, "dataset_kwargs"):
        yield no_effect(f"{_AT}.dataset_kwargs", _IMPL, f"with `data_impl: {data.data_impl}`, which takes none")
    if model.family == "gpt" and data.eod_mask_loss and data.data_impl == "mock":
        yield no_effect(f"{_AT}.eod_mask_loss", _IMPL, "with `data_impl: mock`: random tokens are no documents")
    for name in ("reset_position_ids", "reset_attention_mask"):
        if model.family != "t5" and getattr(data, name) and data.data_impl == "mock":
            yield Finding(
                "warning",
                (f"{_AT}.{name}", f"{_AT}.data_impl"),
                f"`{name}` with `data_impl: mock` ends a document wherever chance draws the end token: for timing only",
                f"~{_AT}.{name}",
            )


def documents_end(facts: Facts) -> Iterator[Finding]:
    """What is done at the end of a document needs a token that says so."""
    model = facts.root.model
    data = model.data
    mock = data.data_impl == "mock"
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if getattr(data, name) and model.tokenizer.library == "char" and not mock:
            yield Finding(
                "error",
                (f"{_AT}.{name}", "model.tokenizer.library"),
                f"`{name}` needs a token that ends documents, and `char` has none",
                f"tokenizer=byte, or {_AT}.{name}=false",
            )


def positions_can_restart(facts: Facts) -> Iterator[Finding]:
    """`reset_position_ids` acts on positions a token has of its own."""
    model = facts.root.model
    if isinstance(model, T5ModelBlock) or not model.data.reset_position_ids:
        return
    kind = model.position_embedding_type
    keys = (f"{_AT}.reset_position_ids", "model.position_embedding_type")
    if kind not in ("learned_absolute", "rope", "xpos"):
        why = {"none": "has no positions", "learned_parameters": "counts places in a sample"}
        yield Finding(
            "warning",
            keys,
            f"`reset_position_ids` has no effect with `position_embedding_type: {kind}`, which "
            f"{why.get(kind, 'knows only distances')}",
            f"~{keys[0]}",
        )
    elif kind != "learned_absolute" and model.data.reset_attention_mask:
        yield Finding(
            "info",
            (*keys, f"{_AT}.reset_attention_mask"),
            f"`reset_position_ids` changes nothing but rounding with `position_embedding_type: {kind}`, which knows "
            "only distances: with `reset_attention_mask` all of them are within a document",
            f"~{keys[0]}",
        )


def _is_set(facts: Facts, name: str) -> bool:
    value = getattr(facts.root.model.data, name)
    key = f"{_AT}.{name}"
    # A block is given by the keys in it.
    given = key in facts.own or any(path.startswith(f"{key}.") for path in facts.own)
    return given and value != DataBlock.model_fields[name].default


DATA_RULES: tuple[Rule, ...] = (
    source_is_known,
    text_needs_a_path,
    prefixes_are_for_mmap,
    splits_hold_training_data,
    sample_fits_model,
    validation_has_data,
    settings_have_an_effect,
    documents_end,
    positions_can_restart,
)
