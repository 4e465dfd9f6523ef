"""Training state: model, optimizer and EMA, with initial, pretrained or resumed weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.build import LanguageModel
from ..checkpoint.reader import BaseRecord, Checkpoint, RunState
from ..conversion.pretrained import PretrainedWeights, find_configured_pretrained
from ..conversion.warm_start import load_pretrained_weights
from ..distributed.data_parallel import DataParallel
from ..optim.base_optimizer import Optimizer
from ..optim.ema import EMA
from ..utils.text import pluralize
from .factory import build_ema, build_model, build_optimizer, data_parallel_from_config
from .resume import check_resume_compatibility, initial_run_state, load_resumed_weights
from .run_context import RunContext


@dataclass(frozen=True)
class TrainingState:
    """Everything that training changes and a checkpoint holds.

    Attributes:
        model: the model, on its device.
        optimizer: optimizer of its trainable parameters.
        ema: exponential moving average of the weights, or None.
        data_parallel: the data-parallel strategy; None for one process.
        start: `state.json` as of the first step of this process.
    """

    model: LanguageModel
    optimizer: Optimizer
    ema: EMA | None
    data_parallel: DataParallel | None
    start: RunState


def build_training_state(run: RunContext) -> TrainingState:
    """Build model, optimizer and EMA, and load the weights and the state they start from.

    Raises:
        UserError: the model does not fit in memory, or the checkpoint or the pretrained weights do not fit the model.
    """
    root, resumed = run.root, run.resumed
    base = find_configured_pretrained(root.model.restore_from_path)
    start = initial_run_state(root, run.data, run.precision, _base_record(run, base))
    data_parallel = data_parallel_from_config(root, run.precision, run.device, run.ranks)
    model = build_model(root, run.data, run.precision, run.device, data_parallel)
    if resumed is None:
        for line in load_pretrained_weights(root, model, run.data.tokenizer, base):
            run.logger.log(line)
    optimizer = build_optimizer(root, model, run.precision, data_parallel)
    if resumed is not None:
        start = _resume(run, resumed, start, model, optimizer, base)
    ema = build_ema(root, model, optimizer, data_parallel)
    if ema is not None and resumed is not None:
        if resumed.has_ema:
            resumed.load_ema(ema.local_shards())
        else:
            run.logger.log(f"warning: {resumed.path} holds no EMA weights; the EMA starts from the current weights")
    return TrainingState(model, optimizer, ema, data_parallel, start)


def _resume(
    run: RunContext,
    resumed: Checkpoint,
    start: RunState,
    model: LanguageModel,
    optimizer: Optimizer,
    base: PretrainedWeights | None,
) -> RunState:
    """Load weights and optimizer state of a checkpoint; return `start` at its step."""
    changes = check_resume_compatibility(resumed, start, run.data.tokenizer.to_dict(), run.root)
    load_resumed_weights(resumed, model, base, run.root)
    for warning in changes:  # logged only after the weights fit
        run.logger.log(f"warning: {warning}")
    resumed.load_optimizer(optimizer)
    state = resumed.state
    run.logger.log(f"resuming from {resumed.path}, {pluralize(state.consumed_samples, 'sample')} consumed")
    progress = ("step", "consumed_samples", "loop", "metrics")
    return start.model_copy(update={name: getattr(state, name) for name in progress})


def _base_record(run: RunContext, base: PretrainedWeights | None) -> BaseRecord | None:
    """Return the record of the base weights for adapter checkpoints, hashed by rank 0; None without PEFT."""
    if base is None or not run.root.model.peft.is_on:
        return None
    text = base.record().model_dump_json() if run.ranks.is_rank_zero else ""
    return BaseRecord.model_validate_json(run.ranks.broadcast_text(text))
