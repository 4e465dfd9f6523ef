"""Resume from a checkpoint: choose it, check its compatibility with the run, load its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ...models.config.families import keys_by_stack
from ...models.config.fp8 import Fp8Keys, Fp8Slice, fp8_slice
from ..checkpoint.reader import (
    BaseRecord,
    Checkpoint,
    CheckpointMismatchError,
    RunState,
    find_checkpoint,
    newest_checkpoint,
)
from ..checkpoint.run_directory import RunDirectory
from ..checkpoint.run_environment import main_versions
from ..checkpoint.writer import remove_temporaries
from ..config import dotted_paths
from ..config.component_keys import component_sources
from ..config.override_typos import quoted_override
from ..config.resolved_run import ResolvedRun
from ..config.schema.exp_manager import ExpManagerBlock
from ..config.schema.key_index import format_value
from ..config.schema.root import RootBlock
from ..conversion.adapter_weights import load_with_base
from ..conversion.finetune_defaults import SHAPES
from ..conversion.pretrained import PretrainedWeights
from ..conversion.warm_start import TRAINING_ONLY_KEYS, function_mismatch_warnings, load_checkpoint_config
from ..data.build_datasets import Data
from ..device.bench_table import BenchTable
from ..optim.optimizer_factory import recorded_settings
from ..utils.environment import user_path
from ..utils.errors import EXIT_IO, UserError
from ..utils.redaction import redact_value

_FIELD_KEYS = {
    "seed": ("model.seed", "dropout and the data order differ from here on"),
    "global_batch_size": ("model.global_batch_size", "the data position is kept, but the batch size differs"),
    "micro_batch_size": ("model.micro_batch_size", "dropout masks and rounding differ"),
    "sequence_length": ("model.data.seq_length", "samples are split differently: some text is repeated or skipped"),
    "decoder_length": ("model.data.seq_length_dec", "samples are split differently"),
    "precision": ("trainer.precision", "rounding differs"),
}
_SOURCE_KEYS = {"data_impl", "path", "data_prefix", "dataset_kwargs", "context_key", "label_key"}  # in the fingerprint
_EXCLUDED_DATA_KEYS = {
    *_SOURCE_KEYS,
    *("seq_length", "seq_length_dec"),  # in the lengths
    *("index_mapping_dir", "num_workers", "train_ds", "validation_ds", "test_ds"),
}
_FILE_KEYS = {"file_names", "concat_sampling_probabilities"}  # in the fingerprint, and the order
_TRAINING_KEYS = {
    *(*TRAINING_ONLY_KEYS, "embedding_dropout", "label_smoothing", "answer_only_loss"),
    *("override_vocab_size", "do_layer_norm_weight_decay", "rampup_batch_size"),
}
_EMA_KEYS = {f"exp_manager.ema.{name}" for name in ("enable", "decay", "every_n_steps", "validate_original_weights")}
_SUBSET_KEYS = {"overfit_batches", "global_batch_size", "encoder_seq_length", "seq_length"}  # of `overfit_batches`


def find_resume_checkpoint(keys: ExpManagerBlock, directory: RunDirectory) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint a run resumes from, and log lines about damaged or removed ones.

    A checkpoint of this run (`resume_if_exists`) takes precedence over `resume_from_checkpoint`, as in NeMo: it is more
    recent.

    Raises:
        UserError: there is no valid checkpoint but there must be one, or the disk is read-only (exit code 74).
    """
    lines: list[str] = []
    if keys.create_checkpoint_callback:  # otherwise another run may be saving to this directory
        try:
            removed = remove_temporaries(directory.checkpoints)
        except OSError as error:
            raise UserError(
                f"cannot remove {error.filename}, left by an interrupted save: {error.strerror or error}", EXIT_IO
            ) from error
        lines += [f"removed {path}, left by an interrupted save" for path in removed]
    if keys.resume_if_exists:
        checkpoint, complaints = newest_checkpoint(directory.checkpoints)
        if checkpoint is not None:
            return checkpoint, [*lines, *complaints]
        if complaints:
            raise UserError(
                [
                    f"every checkpoint in {directory.checkpoints} is damaged:",
                    *(f"  {complaint}" for complaint in complaints),
                    "move them away to start from scratch",
                ]
            )
    if keys.resume_from_checkpoint:
        path = user_path(keys.resume_from_checkpoint, "exp_manager.resume_from_checkpoint")
        checkpoint, complaints = find_checkpoint(path, with_optimizer=True)
        return checkpoint, [*lines, *complaints]
    if keys.resume_if_exists and not keys.resume_ignore_no_checkpoint:
        raise UserError(
            f"there is no checkpoint in {directory.checkpoints}; set exp_manager.resume_ignore_no_checkpoint=True to "
            "start from scratch"
        )
    return None, lines


def initial_run_state(
    run: ResolvedRun, data: Data, base: BaseRecord | None = None, attention_times: BenchTable | None = None
) -> RunState:
    """Return the state of a run at step 0, as recorded in its checkpoints; `base` is None for full training."""
    model, form = run.model, run.batch_spec
    return RunState(
        step=0,
        consumed_samples=0,
        seed=model.seed,
        global_batch_size=model.global_batch_size,
        micro_batch_size=model.micro_batch_size,
        sequence_length=form.seq_length,
        decoder_length=form.decoder_seq_length,
        precision=run.precision.name,
        optimizer={
            **recorded_settings(model.optim, run.trainer.max_steps),
            "gradient_clip_val": run.trainer.gradient_clip_val or 0.0,
        },
        data_fingerprint=data.fingerprint,
        components=component_sources(RootBlock(trainer=run.trainer, exp_manager=run.exp_manager, model=model)),
        data_keys={
            **model.data.model_dump(exclude=_EXCLUDED_DATA_KEYS),
            **{f"train_ds.{name}": value for name, value in model.data.train_ds.model_dump(exclude=_FILE_KEYS).items()},
            "dataset_type": run.data.task.name,
        },
        base=base,
        attention_times=attention_times,
        versions=main_versions(),
    )


def check_resume_compatibility(
    checkpoint: Checkpoint, current: RunState, tokenizer_document: dict[str, Any], root: RootBlock
) -> list[str]:
    """Check that a run can resume from a checkpoint.

    Args:
        checkpoint: the checkpoint.
        current: state of the run at step 0.
        tokenizer_document: tokenizer of the run.
        root: configuration of the run.

    Returns:
        One warning for each difference that makes the resumed run differ from an uninterrupted one.

    Raises:
        UserError: data or tokenizer differ, so that the position in the data is meaningless; or the optimizer or the
            base weights differ.
    """
    _check_same_training(checkpoint, current, tokenizer_document, root)
    return list(_differences(checkpoint, current, root))


def _check_same_training(
    checkpoint: Checkpoint, current: RunState, tokenizer_document: dict[str, Any], root: RootBlock
) -> None:
    saved = checkpoint.state
    if saved.data_fingerprint != current.data_fingerprint:
        raise UserError(
            [
                f"checkpoint {checkpoint.path} was trained on other data: fingerprint "
                f"{_shorten(saved.data_fingerprint)}, now {_shorten(current.data_fingerprint)}",
                *_explain_other_data(checkpoint, current, root),
                f"use the same data, or start a new run from these weights: {_new_run_overrides(checkpoint)}",
            ]
        )
    if checkpoint.tokenizer_document != tokenizer_document:
        what = f"checkpoint {checkpoint.path} was trained with a different tokenizer than `model.tokenizer`"
        if not (cure := _undo(checkpoint, root, _selects_tokenizer)):
            raise UserError(f"{what}, whose files may have changed since; use the same one")
        raise UserError([what, *_changed_keys(checkpoint, root, _selects_tokenizer), f"use the same one: {cure}"])
    before, after = saved.optimizer.get("optim.name", "adamw"), current.optimizer["optim.name"]
    if before != after:
        raise UserError(
            f"checkpoint {checkpoint.path} holds the state of {before}, but `model.optim.name` is {after}; "
            f"use model.optim.name={before}, or start a new run"
        )
    if (saved.base is None) != (current.base is None) or (
        saved.base and current.base and saved.base.sha256 != current.base.sha256
    ):
        raise UserError(
            f"checkpoint {checkpoint.path} was trained on {saved.base.path if saved.base else 'no base weights'}, but "
            f"this run uses {current.base.path if current.base else 'none'}; use the same model.restore_from_path and "
            "model.peft"
        )


def _differences(checkpoint: Checkpoint, current: RunState, root: RootBlock) -> Iterator[str]:
    saved = checkpoint.state
    for field, (key, effect) in _FIELD_KEYS.items():
        yield from _change(checkpoint, key, getattr(saved, field), getattr(current, field), effect)
    for key in sorted(saved.data_keys.keys() & current.data_keys.keys()):
        values = saved.data_keys[key], current.data_keys[key]
        yield from _change(checkpoint, f"model.data.{key}", *values, "samples are built differently")
    config = load_checkpoint_config(checkpoint)
    if config is not None and config.model.family == root.model.family:
        yield from function_mismatch_warnings(root.model, config.model)
        if _fp8_recipes(config) != _fp8_recipes(root):
            names = {*Fp8Keys.own_keys()} - {"fp8_params"}  # which changes no bits
            yield from _changed_keys(checkpoint, root, lambda path: path.rpartition(".")[2] in names)
    yield from _changed_keys(
        checkpoint, root, lambda path: path in _EMA_KEYS or path.rpartition(".")[2] in _TRAINING_KEYS
    )
    for key in sorted(saved.optimizer.keys() | current.optimizer.keys()):
        path = f"model.{key}" if key.startswith("optim") else f"trainer.{key}"
        yield from _change(checkpoint, path, saved.optimizer.get(key), current.optimizer.get(key))
    for key, after in current.components.items():
        before = saved.components.get(key, after)
        if before != after:
            yield f"`{key}` was {before} in {checkpoint.path.name} and is {after} now"
    for name, after in current.versions.items():
        if saved.versions.get(name) != after:
            yield f"{name} was {saved.versions.get(name)} and is {after} now: rounding may differ"


def _fp8_recipes(root: RootBlock) -> list[Fp8Slice | None]:
    """Return what the keys of fp8 come to in each stack, whatever keeps the weights."""
    stacks = keys_by_stack(root.model).values()
    found = (fp8_slice(root.model, stack.num_layers, stack.transformer_engine) for stack in stacks)
    return [fp8 and replace(fp8, keeps_weights=False) for fp8 in found]


def _change(checkpoint: Checkpoint, key: str, before: Any, after: Any, effect: str = "") -> Iterator[str]:
    """Yield a line if the value of a key has changed since the checkpoint."""
    if before != after:
        consequence = f": {effect}" if effect else ""
        before, after = (redact_value(key, str(value)) for value in (before, after))
        yield f"`{key}` was {before} in {checkpoint.path.name} and is {after} now{consequence}"


def load_resumed_weights(
    checkpoint: Checkpoint, model: nn.Module, base: PretrainedWeights | None, root: RootBlock
) -> None:
    """Load the weights of the checkpoint a run resumes from, with `base` below those of an adapter.

    Raises:
        UserError: the weights do not fit; the message names the changed keys, then the tensors that differ.
    """
    try:
        load_with_base(checkpoint, model, base, cast=False)
    except CheckpointMismatchError as error:
        changed = _changed_keys(checkpoint, root, _changes_shapes)
        raise UserError([*changed, *error.lines]) from None


def _changes_shapes(path: str) -> bool:
    """Return True if a key may change the shapes of weights."""
    if path.startswith("model.peft."):
        return path != "model.peft.restore_from_path"
    return path.rpartition(".")[2] in SHAPES | {"max_position_embeddings", "encoder_seq_length"}


def _selects_data(path: str) -> bool:
    """Return True if a key selects the data."""
    return path.startswith("model.data.") and not {*path.split(".")}.isdisjoint(
        _SOURCE_KEYS | _FILE_KEYS | {"splits_string"}
    )


def _selects_tokenizer(path: str) -> bool:
    """Return True if a key selects the tokenizer, whose documents are compared without the chat template."""
    return path.startswith("model.tokenizer.") and path != "model.tokenizer.chat_template"


def _selects_vocabulary(path: str) -> bool:
    """Return True if a key selects the size of the vocabulary."""
    return _selects_tokenizer(path) or path == "model.override_vocab_size"


def _shorten(fingerprint: str) -> str:
    """Return 16 digits of a fingerprint, and which samples of the data `overfit_batches` takes."""
    digits, comma, subset = fingerprint.partition(",")
    return f"{digits[:16]}{comma}{subset}"


def _explain_other_data(checkpoint: Checkpoint, now: RunState, root: RootBlock) -> list[str]:
    """Explain why the data of a checkpoint differ from those of the run."""
    data = root.model.data
    if checkpoint.state.data_fingerprint.partition(",")[0] == now.data_fingerprint.partition(",")[0]:
        return _changed_keys(checkpoint, root, lambda path: path.rpartition(".")[2] in _SUBSET_KEYS)
    is_mock = data.data_impl == "mock"  # made for the vocabulary
    if changed := _changed_keys(
        checkpoint, root, lambda path: _selects_data(path) or (is_mock and _selects_vocabulary(path))
    ):
        return changed
    if data.data_impl in ("pystd", "pystd_docstring"):
        return [
            f"`{data.data_impl}` reads the standard library of the running Python: "
            f"{checkpoint.state.versions.get('python', 'unknown')} then, {now.versions['python']} now"
        ]
    if data.path:
        return [f"the data at `model.data.path` ({data.path}) have changed since"]
    return [f"what `model.data.data_impl={data.data_impl}` reads has changed since"]


def _new_run_overrides(checkpoint: Checkpoint) -> str:
    """Return the overrides for a new run that starts from the weights of a checkpoint."""
    key = "model.peft.restore_from_path" if checkpoint.is_adapter else "model.restore_from_path"
    return f"{key}={checkpoint.path}, with another exp_manager.explicit_log_dir"


def _changed_keys(checkpoint: Checkpoint, root: RootBlock, selected: Callable[[str], bool]) -> list[str]:
    """Return a line for each selected key that has changed since the checkpoint.

    None if the configuration of the checkpoint cannot be read.
    """
    before, after = _leaves(checkpoint, root, selected)
    return [
        line for path in {**before, **after} for line in _change(checkpoint, path, before.get(path), after.get(path))
    ]


def _undo(checkpoint: Checkpoint, root: RootBlock, selected: Callable[[str], bool]) -> str:
    """Return the overrides that give the selected keys their values in a checkpoint."""
    before, after = _leaves(checkpoint, root, selected)
    return " ".join(
        quoted_override(path, format_value(before[path])) if path in before else f"~{path}"
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    )


def _leaves(
    checkpoint: Checkpoint, root: RootBlock, selected: Callable[[str], bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the selected keys in a checkpoint and now; none if its configuration cannot be read."""
    saved = load_checkpoint_config(checkpoint)
    if saved is None:
        return {}, {}
    before, after = (
        {path: value for path, value in dotted_paths.leaves(each.model_dump()) if selected(path) and value != {}}
        for each in (saved, root)
    )
    return before, after
