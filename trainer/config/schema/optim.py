"""`model.optim.*` and `model.optim.sched.*`: the optimizer, the learning rate over the steps, and which keys act when.

The keys are flat, as NeMo's: each acts for the optimizers and schedules that have such a setting, and a rule
(`optim_rules.py`) tells of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ....models.config.key_block import Block, own
from .trainer_and_data import nested

Decay = Annotated[float, Field(ge=0, lt=1)]
Small = Annotated[float, Field(gt=0)]


class SchedBlock(Block):
    """`model.optim.sched.*`: the learning rate over the steps. Golden numbers: nemo_semantics, Appendix B."""

    name: Literal[
        "CosineAnnealing",
        "WarmupAnnealing",
        "WarmupPolicy",
        "WarmupHoldPolicy",
        "WarmupHoldAnnealLinear",
        "WarmupHoldAnnealOneMinusSquareRoot",
        "InverseSquareRootAnnealing",
        "T5InverseSquareRootAnnealing",
        "NoamAnnealing",
        "NoamHoldAnnealing",
        "SquareAnnealing",
        "SquareRootAnnealing",
        "PolynomialDecayAnnealing",
        "PolynomialHoldDecayAnnealing",
    ] = "CosineAnnealing"
    """Shape of the schedule. Warm-up, stable, decay (WSD) is WarmupHoldAnnealLinear or
    WarmupHoldAnnealOneMinusSquareRoot."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warm-up."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """The same as a part of `max_steps`; only one of the two."""
    constant_steps: int | None = Field(None, ge=0)
    """Steps at `min_lr` at the end (CosineAnnealing), or at the peak (T5InverseSquareRootAnnealing)."""
    constant_ratio: float | None = Field(None, ge=0, le=1)
    """The same as a part of `max_steps`; only one of the two."""
    hold_steps: int | None = Field(None, ge=0)
    """Steps at the peak after the warm-up (the schedules with Hold in their name)."""
    hold_ratio: float | None = Field(None, ge=0, le=1)
    """The same as a part of `max_steps`; only one of the two."""
    power: float = Field(1.0, gt=0)
    """Exponent of the polynomial schedules."""
    decay_rate: float = Field(0.5, gt=0)
    """Exponent of NoamHoldAnnealing: 0.5 is Noam's, 1.0 Squeezeformer's."""
    d_model: int | None = Field(None, ge=1)
    """Width that NoamAnnealing scales by; usually `model.hidden_size`."""
    min_lr: float = Field(0.0, ge=0)
    """Final learning rate."""
    max_steps: int | None = Field(None, ge=1)
    """Length of the schedule; null: `trainer.max_steps`."""


class OptimBlock(Block):
    """`model.optim.*`."""

    name: Literal[
        "adamw",
        "fused_adam",
        "distributed_fused_adam",
        "megatron_fused_adam",
        "mcore_distributed_optim",
        "adafactor",
        "muon",
        "sgd",
    ] = "adamw"
    """`adamw` and NeMo's names of its fused and distributed forms; `adafactor`; `muon` (AdamW for embeddings, head,
    norms and biases); `sgd`."""
    lr: float = Field(2e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay (sgd: added to the gradient), for matrices and tables; never for biases and norms (but
    see `model.do_layer_norm_weight_decay`)."""
    betas: list[Decay] = Field([0.9, 0.98], min_length=2, max_length=2)
    """adamw, muon: decay of the running mean and of the running square."""
    eps: Small | Annotated[list[Small], Field(min_length=2, max_length=2)] | None = None
    """adamw, muon: added to the root of the running square; null: 1e-8. adafactor: two values, added to squared
    gradients and the least size of a weight; null: [1e-30, 1e-3]."""
    momentum: Decay | None = None
    """sgd, muon: decay of the momentum; null: 0 for sgd, 0.95 for muon."""
    nesterov: bool | None = None
    """sgd, muon: Nesterov's form of momentum; null: False for sgd, True for muon."""
    clip_threshold: float = Field(1.0, gt=0)
    """adafactor: the root mean square of a step, before the learning rate, is at most this."""
    decay_rate: float = Field(-0.8, ge=-1, lt=0)
    """adafactor: the decay of the running squares at step t is 1 - t ** decay_rate."""
    beta1: Decay | None = None
    """adafactor: decay of a running mean of the steps; null keeps none, which saves its memory."""
    scale_parameter: bool | None = None
    """adafactor, adamw: multiply the learning rate of a weight by its root mean square, at least 1e-3 (adafactor: the
    second `eps`); null: True for adafactor, False for adamw. With adamw it is nanoT5's AdamWScale."""
    relative_step: bool = False
    """adafactor: take the learning rate from the step, 1 / sqrt(step) but at most 0.01, not from `lr` and `sched`."""
    warmup_init: bool = False
    """adafactor: with `relative_step`, warm up as 1e-6 * step."""
    ns_steps: int = own(5, ge=1, le=20)
    """muon: Newton-Schulz iterations."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = own("match_rms_adamw")
    """muon: `match_rms_adamw` makes steps as large as AdamW's, so one `lr` serves all parameters; `original` is
    sqrt(rows / columns) for tall matrices."""
    sched: SchedBlock = nested(SchedBlock)
    """Learning-rate schedule."""


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"betas": None, "eps": 1e-8, "scale_parameter": False},
    "sgd": {"momentum": 0.0, "nesterov": False},
    "adafactor": {
        "eps": [1e-30, 1e-3],
        "clip_threshold": None,
        "decay_rate": None,
        "beta1": None,
        "scale_parameter": True,
    },
    "muon": {
        "betas": None,
        "eps": 1e-8,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": None,
        "adjust_lr_fn": None,
    },
}
"""For each kind of optimizer the keys that act, with what null means where it means a value."""

RELATIVE_STEP_KEYS = ("relative_step", "warmup_init")
"""Keys of adafactor that choose the schedule."""


def optimizer_kind(name: str) -> str:
    """The optimizer that a name means: NeMo's fused and distributed ones are AdamW."""
    return name if name in _DEFAULTS else "adamw"


def optimizer_settings(optim: OptimBlock) -> dict[str, Any]:
    """The keys that act for the chosen optimizer alone, by name, with values in the place of nulls."""
    settings: dict[str, Any] = {}
    for key, default in _DEFAULTS[optimizer_kind(optim.name)].items():
        value = getattr(optim, key)
        settings[key] = default if value is None else value
    return settings
