"""Losses and metrics of the user's own: loaded, and checked when they are called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from ...models.config.extensions import extension_names
from ...models.lm_head import OwnFunctions, TokenFunction
from ..config.own_components import IMPORT_HINT, load_component
from ..conversion.load_model import LoadedModel
from ..utils.errors import UserError

LOSS_KEY, METRICS_KEY = "model.loss", "trainer.validation_metrics"


def own_functions(loss: str | None, metrics: Sequence[str]) -> OwnFunctions:
    """Return the loss and the metrics of these names.

    Raises:
        UserError: one is not registered, or cannot be imported.
    """
    return OwnFunctions(
        None if loss is None else _load("loss", loss, LOSS_KEY),
        tuple(_load("metric", name, METRICS_KEY) for name in metrics),
    )


def measure_own_metrics(restored: LoadedModel) -> list[str]:
    """Let a loaded model measure the metrics of its run that are registered; return their names, and note the others on
    standard error.
    """
    names, registered = restored.run.trainer.validation_metrics, extension_names("metric")
    found = [name for name in names if name in registered]
    if missing := [name for name in names if name not in found]:
        print(f"note: {', '.join(missing)}: not registered, so not measured; {IMPORT_HINT}", file=sys.stderr)
    restored.model.own_functions = own_functions(None, found)
    return found


def _load(kind: Literal["loss", "metric"], name: str, key: str) -> TokenFunction:
    component = load_component(kind, name, key)
    function: Callable[[Tensor, Tensor], Any] = component() if isinstance(component, type) else component

    def checked(logits: Tensor, labels: Tensor) -> Tensor:
        values = function(logits, labels)
        if not isinstance(values, Tensor) or values.shape != labels.shape:
            found = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f"`{key}` ({name}) must return a value of each token, a tensor of shape {list(labels.shape)}, not "
                f"{found}; for example with reduction='none'"
            )
        return values

    return checked
