"""Keys of the optimizer (`model.optim.*`) and of the learning-rate schedule (`model.optim.sched.*`).

The keys are flat, like NeMo's: each acts for the optimizers and schedules that have such a setting; the rules in
`rules/optim_rules.py` report those without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ....models.config.key_block import ComponentName, ConfigBlock, OpenBlock, block_default, extension_field
from ..lr_schedule import SCHEDULES, OwnSchedule, RelativeStep, ScheduleName
from ..own_components import load_component

Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
OwnScheduleName = Annotated[str, Field(min_length=1), ComponentName("the name of a schedule of your own")]
OwnOptimizerName = Annotated[str, Field(min_length=1), ComponentName("the name of an optimizer of your own")]
PHASES = ("warmup", "constant", "hold")
"""Phases of a schedule, each with keys `X_steps` and `X_ratio`."""


class SchedBlock(ConfigBlock):
    """`model.optim.sched.*`: learning-rate schedule."""

    name: ScheduleName | OwnScheduleName = "CosineAnnealing"
    """Schedule. Warmup-stable-decay (WSD) is WarmupHoldAnnealLinear or WarmupHoldAnnealOneMinusSquareRoot; see
    docs/extend.md for your own."""
    warmup_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0)] | None = None
    """Steps of linear warm-up."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """`warmup_steps` as a fraction of `max_steps`; set one of the two."""
    constant_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0)] | None = None
    """Steps at `min_lr` at the end (CosineAnnealing), or at the peak (T5InverseSquareRootAnnealing)."""
    constant_ratio: float | None = Field(None, ge=0, le=1)
    """`constant_steps` as a fraction of `max_steps`; set one of the two."""
    hold_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0)] | None = None
    """Steps at the peak after warm-up (schedules with Hold in their name)."""
    hold_ratio: float | None = Field(None, ge=0, le=1)
    """`hold_steps` as a fraction of `max_steps`; set one of the two."""
    power: float = Field(1.0, gt=0)
    """Exponent of the polynomial schedules."""
    decay_rate: float = Field(0.5, gt=0)
    """Exponent of NoamHoldAnnealing: 0.5 as in Noam, 1.0 as in Squeezeformer."""
    d_model: int | None = Field(None, ge=1)
    """Model width in NoamAnnealing's scale; usually `model.hidden_size`."""
    min_lr: float = Field(0.0, ge=0)
    """Final learning rate."""
    max_steps: int | None = Field(None, ge=1)
    """Length of the schedule; null: `trainer.max_steps`."""
    kwargs: OpenBlock = extension_field({})
    """Settings of a schedule of your own."""


OptimizerName = Literal[
    "adamw",
    "fused_adam",
    "distributed_fused_adam",
    "megatron_fused_adam",
    "mcore_distributed_optim",
    "adafactor",
    "muon",
    "sgd",
]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)


class OptimBlock(ConfigBlock):
    """`model.optim.*`."""

    name: OptimizerName | OwnOptimizerName = "adamw"
    """`adamw` (also under NeMo's names for fused and distributed variants); `adafactor`; `muon` (AdamW for embeddings,
    head, norms and biases); `sgd`; or any torch.optim.Optimizer (docs/extend.md)."""
    lr: float = Field(2e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay (sgd: added to the gradient) for matrices and embeddings; never for biases and norms (but
    see `model.do_layer_norm_weight_decay`)."""
    betas: list[Decay] = Field([0.9, 0.98], min_length=2, max_length=2)
    """adamw, muon: decay rates of the first and second moment."""
    eps: PositiveFloat | Annotated[list[PositiveFloat], Field(min_length=2, max_length=2)] | None = None
    """adamw, muon: added to the square root of the second moment; null: 1e-8. adafactor: two values, added to squared
    gradients and the minimum RMS of a parameter; null: [1e-30, 1e-3]."""
    momentum: Decay | None = None
    """sgd, muon: momentum factor; null: 0 for sgd, 0.95 for muon."""
    nesterov: bool | None = None
    """sgd, muon: Nesterov momentum; null: False for sgd, True for muon."""
    clip_threshold: float = Field(1.0, gt=0)
    """adafactor: maximum RMS of an update before the learning rate is applied."""
    decay_rate: float = Field(-0.8, ge=-1, lt=0)
    """adafactor: the decay rate of the second moment at step t is 1 - t ** decay_rate."""
    beta1: Decay | None = None
    """adafactor: decay rate of the first moment; null: no first moment, which saves its memory."""
    scale_parameter: bool | None = None
    """adafactor, adamw: scale the learning rate of each parameter by its RMS, at least 1e-3 (adafactor: the second
    `eps`); null: True for adafactor, False for adamw. With adamw this is nanoT5's AdamWScale."""
    relative_step: bool = False
    """adafactor: use the learning rate 1 / sqrt(step), at most 0.01, instead of `lr` and `sched`."""
    warmup_init: bool = False
    """adafactor: with `relative_step`, warm up with 1e-6 * step."""
    ns_steps: int = extension_field(5, ge=1, le=20)
    """muon: Newton-Schulz iterations."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = extension_field("match_rms_adamw")
    """muon: update scale. `match_rms_adamw` matches the RMS of AdamW's updates, so one `lr` fits all parameters;
    `original` is sqrt(rows / columns) for tall matrices."""
    overlap_param_sync: bool | None = None
    """With a distributed optimizer, or `fsdp_sharding_strategy: grad`: gather updated weights while the next forward
    pass runs, in which each layer waits for its own; false: before it begins; null: true, unless something reads all
    weights before it."""
    kwargs: OpenBlock = extension_field({})
    """Settings of an optimizer of your own."""
    sched: SchedBlock = block_default(SchedBlock)
    """Learning-rate schedule."""


_SETTINGS: Mapping[str, Mapping[str, Any]] = {
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
"""Keys that act for each kind of optimizer, with the value that null stands for (None: the key's own default)."""

RELATIVE_STEP_KEYS = ("relative_step", "warmup_init")
"""Keys of adafactor that replace the schedule."""


def optimizer_kind(name: str) -> str:
    """Return the optimizer behind `name`; NeMo's fused and distributed variants are AdamW."""
    return name if name in _SETTINGS or name not in OPTIMIZERS else "adamw"


def optimizer_settings(optim: OptimBlock) -> dict[str, Any]:
    """Return the settings specific to the chosen optimizer, by key, with nulls replaced by their defaults."""
    settings: dict[str, Any] = {}
    for key, default in _SETTINGS.get(optimizer_kind(optim.name), {"kwargs": None}).items():
        value = getattr(optim, key)
        settings[key] = default if value is None else value
    return settings


def build_schedule(optim: OptimBlock, max_steps: int) -> Any:
    """Build the schedule of `model.optim.sched`; its length is `sched.max_steps`, or else the trainer's `max_steps`.

    Ratios are fractions of that length, rounded down as in NeMo. Adafactor's `relative_step` is a separate schedule.

    Raises:
        UserError: a schedule of the user's own is not registered.
    """
    if optim.name == "adafactor" and optim.relative_step:
        return RelativeStep(optim.warmup_init)
    sched = optim.sched
    length = sched.max_steps or max_steps
    values = {
        "lr": optim.lr,
        "min_lr": sched.min_lr,
        "max_steps": length,
        **{f"{phase}_steps": phase_steps(sched, phase, length) for phase in PHASES},
        "power": sched.power,
        "decay_rate": sched.decay_rate,
        "d_model": sched.d_model,
    }
    kind = SCHEDULES.get(sched.name)
    if kind is None:
        function = load_component("schedule", sched.name, "model.optim.sched.name")
        return OwnSchedule(sched.name, function, optim.lr, sched.min_lr, length, sched.kwargs)
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def phase_steps(sched: SchedBlock, phase: str, length: int) -> float:
    """Return the steps of one of `PHASES`, given as such, as a fraction of `length`, or not at all (0)."""
    steps: float | None = getattr(sched, f"{phase}_steps")
    ratio: float | None = getattr(sched, f"{phase}_ratio")
    if steps is not None:
        return steps
    return int(ratio * length) if ratio is not None else 0
