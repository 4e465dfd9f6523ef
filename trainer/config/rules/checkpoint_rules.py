"""Rules for the run directory, validation and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.key_block import Finding
from ...utils.text import pluralize
from .rule_context import RuleContext, no_effect, step_limit, unused

_NAME_MAX = 255
"""Bytes of a file name on Linux and macOS."""


def names_stay_below_exp_dir(context: RuleContext) -> Iterator[Finding]:
    """`name` and `version` must be directories below `exp_dir`."""
    root = context.root
    for path, value in (
        ("name", root.name),
        ("exp_manager.name", root.exp_manager.name),
        ("exp_manager.version", root.exp_manager.version),
    ):
        if not isinstance(value, str):
            continue
        if value.startswith("/") or ".." in value.split("/") or "\0" in value:
            yield Finding.error(
                (path,),
                f"`{path}` must be a name below `exp_manager.exp_dir`, without `..`",
                "use a plain name, or exp_manager.explicit_log_dir=DIRECTORY",
            )
        elif not value.isprintable() or any(
            len(part.encode(errors="replace")) > _NAME_MAX for part in value.split("/")
        ):
            yield Finding.error(
                (path,),
                f"`{path}` is part of a path: it must be printable, and no name in it longer than {_NAME_MAX} bytes",
                "use a plain name",
            )


def explicit_log_dir_overrides_names(context: RuleContext) -> Iterator[Finding]:
    """`exp_dir`, `name` and `version` have no effect with `explicit_log_dir`, nor `version` when resuming."""
    manager = context.root.exp_manager
    if manager.explicit_log_dir is not None:
        for name in ("exp_dir", "name", "version"):
            path = f"exp_manager.{name}"
            if path in context.given and getattr(manager, name) is not None:
                yield no_effect(path, "exp_manager.explicit_log_dir", "with `explicit_log_dir`")
    elif manager.resume_if_exists and manager.version is not None:
        when = "with `resume_if_exists`: all attempts share one run directory"
        yield no_effect("exp_manager.version", "exp_manager.resume_if_exists", when)
    determines_directory = {
        "explicit_log_dir": manager.explicit_log_dir is not None,
        "resume_if_exists": manager.resume_if_exists,
        "version": manager.version is not None,
    }
    other = next((name for name, is_set in determines_directory.items() if is_set), "")
    if other:
        when = f"with `{other}`, which determines the run directory"
        yield from unused(context, "exp_manager.use_datetime_version", f"exp_manager.{other}", when)


def ignore_no_checkpoint_needs_resume(context: RuleContext) -> Iterator[Finding]:
    """`resume_ignore_no_checkpoint` acts only with `resume_if_exists`."""
    switch = "exp_manager.resume_if_exists"
    if not context.root.exp_manager.resume_if_exists:
        yield from unused(context, "exp_manager.resume_ignore_no_checkpoint", switch, "without `resume_if_exists`")


def checkpoint_params_need_callback(context: RuleContext) -> Iterator[Finding]:
    """`checkpoint_callback_params` have no effect without `create_checkpoint_callback`."""
    manager = context.root.exp_manager
    prefix = "exp_manager.checkpoint_callback_params."
    if manager.create_checkpoint_callback:
        return
    given = sorted(path for path in context.given if path.startswith(prefix))
    if manager.resume_if_exists and f"{prefix}dirpath" in given:
        given.remove(f"{prefix}dirpath")  # still read, to find the checkpoint to resume from
    if given:
        yield Finding.warning(
            (given[0], "exp_manager.create_checkpoint_callback"),
            "the keys of `checkpoint_callback_params` have no effect with `create_checkpoint_callback: false`",
        )


def some_checkpoint_is_saved(context: RuleContext) -> Iterator[Finding]:
    """Warn if checkpoints are enabled but none is ever due or kept."""
    manager, steps = context.root.exp_manager, step_limit(context)
    params = manager.checkpoint_callback_params
    if not manager.create_checkpoint_callback or params.save_last:
        return
    prefix = "exp_manager.checkpoint_callback_params"
    if params.save_top_k == 0:
        yield Finding.warning(
            (f"{prefix}.save_top_k", f"{prefix}.save_last"),
            "no checkpoint is written, not even on SIGTERM: `save_top_k` (0) and `save_last` (False) keep none",
            f"{prefix}.save_last=true, or exp_manager.create_checkpoint_callback=false",
        )
    elif (
        isinstance(params.every_n_train_steps, int)
        and params.every_n_train_steps > steps
        and params.train_time_interval is None
    ):
        yield Finding.warning(
            (f"{prefix}.every_n_train_steps", f"{prefix}.save_last", "trainer.max_steps"),
            f"no checkpoint is due in {pluralize(steps, 'step')}: `every_n_train_steps` is "
            f"{params.every_n_train_steps} and `save_last` False",
            f"{prefix}.save_last=true, or {prefix}.every_n_train_steps={steps}",
        )


def validation_keys_need_validation(context: RuleContext) -> Iterator[Finding]:
    """Settings of validation have no effect with `limit_val_batches: 0`."""
    manager, trainer = context.root.exp_manager, context.root.trainer
    drop_last, batches, when = (
        "model.data.validation_drop_last",
        "trainer.limit_val_batches",
        "with `limit_val_batches` (0)",
    )
    if trainer.overfit_batches:
        full = "with `overfit_batches`, which are always full batches"
        yield from unused(context, drop_last, "trainer.overfit_batches", full)
    if trainer.limit_val_batches:
        return
    if not trainer.overfit_batches:
        yield from unused(context, drop_last, batches, when)
    yield from unused(context, "trainer.num_sanity_val_steps", batches, when)
    params = manager.checkpoint_callback_params
    val_check_interval_acts = (
        manager.create_checkpoint_callback and params.every_n_train_steps is None and params.train_time_interval is None
    ) or manager.create_early_stopping_callback
    if "trainer.val_check_interval" in context.set_by_user and not val_check_interval_acts:
        yield no_effect("trainer.val_check_interval", batches, when)


def checkpoint_interval_fits_run(context: RuleContext) -> Iterator[Finding]:
    """Note that only the end of the run is saved if `val_check_interval` exceeds `max_steps`."""
    manager, trainer = context.root.exp_manager, context.root.trainer
    params = manager.checkpoint_callback_params
    is_timed = params.every_n_train_steps is not None or params.train_time_interval is not None
    if not manager.create_checkpoint_callback or is_timed or step_limit(context) < 1000:
        return
    key = "trainer.val_check_interval"
    if trainer.val_check_interval > step_limit(context) and key in context.given:
        yield Finding.info(
            ("exp_manager.checkpoint_callback_params.every_n_train_steps", key),
            f"checkpoints are saved every `val_check_interval` ({trainer.val_check_interval}) steps: only the end of "
            "the run is saved",
            "exp_manager.checkpoint_callback_params.every_n_train_steps=1000",
        )
