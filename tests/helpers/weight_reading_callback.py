"""Imported by the ranks of a run (`registers`): registers the callback `reads_weights`."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

import stoker


@stoker.register("callback", "reads_weights")
class ReadsWeights(pl.Callback):
    """Logs the sum of the squares of all weights after every step."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        squares = [weight.detach().square().sum() for weight in pl_module.model.parameters()]
        pl_module.log("squares", sum(squares))
