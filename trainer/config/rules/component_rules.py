"""Rules of components of users' own code: their names are known, and they support what the run does."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from ....models.config.extensions import extension_names
from ....models.config.key_block import Finding
from ...utils.errors import UserError
from ..component_keys import COMPONENT_KEYS
from ..own_components import IMPORT_HINT, load_component
from ..schema.exp_manager import METRICS, OWN_METRIC
from ..schema.optim import OPTIMIZERS
from ..suggest import closest
from .rule_context import RuleContext, is_changed, no_effect

_LISTED = 10
"""Names of the user's own components that a message lists."""


def component_names_are_known(context: RuleContext) -> Iterator[Finding]:
    """A name must be built in or registered (entry points are searched only then).

    Not in the configuration of a checkpoint, which may be used without the components that trained it.
    """
    if context.is_saved:
        return
    for key in COMPONENT_KEYS:
        for name in key.own_names(context.root):
            registered = extension_names(key.kind)
            if name in registered:
                continue
            own = ", ".join(registered[:_LISTED]) + ", ..." * (len(registered) > _LISTED)
            built_in = f"one of {', '.join(key.built_in)}, or " if key.built_in else ""
            near = closest(name, [*key.built_in, *registered])
            written = f"[{near}]" if isinstance(attrgetter(key.path)(context.root), list) else near
            suggestion = f"did you mean {key.path}={written}?" if near else ""
            yield Finding.error(
                (key.path,),
                f"`{key.path.rpartition('.')[2]}` ({name}) must be {built_in}a registered {key.kind} "
                f"({own or 'there is none'}); {IMPORT_HINT}",
                suggestion,
            )


def monitored_metrics_are_measured(context: RuleContext) -> Iterator[Finding]:
    """`monitor` may be `val_NAME` of a metric of the user's own that is measured."""
    manager, measured = context.root.exp_manager, context.root.trainer.validation_metrics
    known = [*METRICS, *(f"{OWN_METRIC}{name}" for name in measured)]
    for block in ("checkpoint_callback_params", "early_stopping_callback_params"):
        metric = getattr(manager, block).monitor
        if metric not in known:
            near, path = closest(metric, known), f"exp_manager.{block}.monitor"
            yield Finding.error(
                (path, "trainer.validation_metrics"),
                f"`monitor` ({metric}) must be one of {', '.join(known)}",
                f"{path}={near}" if near else f"trainer.validation_metrics=[{metric.removeprefix(OWN_METRIC)}]",
            )


def validation_metrics_have_effect(context: RuleContext) -> Iterator[Finding]:
    """Metrics are measured in validation, each once."""
    path, trainer = "trainer.validation_metrics", context.root.trainer
    names = list(dict.fromkeys(trainer.validation_metrics))
    if len(names) < len(trainer.validation_metrics):
        yield Finding.error((path,), "`validation_metrics` must name each metric once", f"{path}=[{','.join(names)}]")
    if "loss" in names:
        yield Finding.error((path,), "no metric may have the name `loss`: `val_loss` is the cross-entropy")
    if not trainer.limit_val_batches and is_changed(context, path):
        yield no_effect(path, "trainer.limit_val_batches", "with `limit_val_batches` (0)")


def own_loss_replaces_cross_entropy(context: RuleContext) -> Iterator[Finding]:
    """`label_smoothing` is of the cross-entropy; a loss of the user's own needs the logits of the whole vocabulary."""
    model = context.root.model
    if model.loss is None:
        return
    if is_changed(context, "model.label_smoothing"):
        yield no_effect("model.label_smoothing", "model.loss", "with `loss`, which replaces the cross-entropy")
    if model.tensor_model_parallel_size > 1:
        yield Finding.error(
            ("model.loss", "model.tensor_model_parallel_size"),
            f"`loss` ({model.loss}) gets the logits of the whole vocabulary; tensor-parallel ranks have parts of them",
            "model.tensor_model_parallel_size=1, or ~model.loss",
        )


def own_optimizer_supports_layout(context: RuleContext) -> Iterator[Finding]:
    """An optimizer of the user's own gets parts of parameters only if it declares that its update is elementwise."""
    model, name = context.root.model, context.root.model.optim.name
    if name in OPTIMIZERS:
        return
    key = "model.optim.name"
    if model.cpu_offloading_optimizer:
        yield Finding.error(
            ("model.cpu_offloading_optimizer", key),
            f"`cpu_offloading_optimizer` does not support an optimizer of your own ({name})",
            "~model.cpu_offloading_optimizer",
        )
    sharded = [
        f"model.{other}"
        for other, value in (
            ("fsdp", model.fsdp),
            ("tensor_model_parallel_size", model.tensor_model_parallel_size > 1),
            ("pipeline_model_parallel_size", model.pipeline_model_parallel_size > 1),
            ("expert_model_parallel_size", model.expert_model_parallel_size > 1),
        )
        if value
    ]
    if not sharded or name not in extension_names("optimizer"):
        return
    try:
        component = load_component("optimizer", name, key)
    except UserError as error:
        yield Finding.error((key,), error.lines[0])
        return
    if not getattr(component, "elementwise", False):
        with_key = f"with `{sharded[0].partition('.')[2]}`"
        yield Finding.error(
            (key, *sharded),
            f"`{name}` does not say that its update is elementwise, and {with_key} a rank has a part of the parameters",
            f"set `elementwise = True` on {name} if it is, or ~{sharded[0]}",
        )
