"""Build the optimizer from its configuration keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn

from ...models.config.batch_shape import BatchSpec
from ...models.config.families import family_slice, sequence_length_of
from ...models.config.stack import StackSlice
from ...models.config.t5 import T5Slice
from ...models.memory.host_copies import CopyEngine
from ...models.model_cost import count_parameters, outer_weights
from ..config.lr_schedule import OwnSchedule
from ..config.own_components import load_component
from ..config.schema.optim import OptimBlock, build_schedule, optimizer_kind, optimizer_settings
from ..config.schema.root import AnyModelBlock
from .adafactor import Adafactor
from .adamw import AdamW
from .base_optimizer import Optimizer
from .muon import Muon
from .own_optimizer import OwnOptimizer
from .pinned_memory import PinnedStateCopyEngine
from .sgd import SGD

_KINDS: dict[str, type[Optimizer]] = {"adamw": AdamW, "adafactor": Adafactor, "muon": Muon, "sgd": SGD}


def build_optimizer(
    keys: AnyModelBlock, named_parameters: Iterable[tuple[str, nn.Parameter]], **common: Any
) -> Optimizer:
    """Build the optimizer of `model.optim` for the parameters of the model.

    `common` are arguments of `Optimizer` that do not follow from `keys`: `main_weights`, `clip_norm`, `host`,
    `sharding` and `reduce_gradients`.
    """
    optim = keys.optim
    kind = optimizer_kind(optim.name)
    settings = optimizer_settings(optim)
    if kind == "muon" or (kind == "adamw" and settings["scale_parameter"]):
        settings["fused"] = fused_projection_rows(keys)
    build: Any = _KINDS.get(kind)
    if build is None:
        make = load_component("optimizer", optim.name, "model.optim.name")
        build = partial(OwnOptimizer, make=make, name=optim.name)
    return build(
        named_parameters,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        norms_decay=keys.do_layer_norm_weight_decay,
        **settings,
        **common,
    )


def offloads_optimizer_state(keys: AnyModelBlock, device: torch.device) -> bool:
    """Return True if main weights and state are kept in host memory: `cpu_offloading_optimizer` on a CUDA device."""
    return keys.cpu_offloading_optimizer and device.type == "cuda"


def host_copy_engine(keys: AnyModelBlock, device: torch.device) -> CopyEngine | None:
    """Return the argument `host` of `Optimizer`; None to keep the state on the device."""
    return PinnedStateCopyEngine(device) if offloads_optimizer_state(keys, device) else None


def fused_projection_rows(keys: AnyModelBlock) -> dict[str, tuple[int, ...]]:
    """Return the rows of each projection of the fused weights, by suffix of the parameter name."""
    model = family_slice(keys, vocab_size=1, batch_spec=BatchSpec(seq_length=sequence_length_of(keys)))
    if not isinstance(model, T5Slice):
        return _fused_rows("", model.stack)
    rows: dict[str, tuple[int, ...]] = {}
    for name, stack in zip(("encoder", "decoder"), model.stacks, strict=True):
        for layer in range(stack.num_layers):  # full names, since the stacks may differ in shape
            rows |= _fused_rows(f"{name}.layers.{layer}.", stack)
    key_rows = model.cross_attention.groups * model.cross_attention.head_dim
    return rows | {"cross_attention.kv.weight": (key_rows, key_rows)}


def _fused_rows(prefix: str, stack: StackSlice) -> dict[str, tuple[int, ...]]:
    attention, mlp, moe = stack.attention, stack.mlp, stack.moe
    key_rows = attention.groups * attention.head_dim
    rows: dict[str, tuple[int, ...]] = {
        f"{prefix}attention.qkv.weight": (attention.heads * attention.head_dim, key_rows, key_rows)
    }
    if mlp.gated:
        rows[f"{prefix}mlp.up.weight"] = (mlp.ffn_hidden_size, mlp.ffn_hidden_size)
    if mlp.gated and moe is not None:
        rows[f"{prefix}mlp.experts.up"] = (moe.ffn_hidden_size, moe.ffn_hidden_size)
        if moe.shared_ffn_hidden_size is not None:
            rows[f"{prefix}mlp.shared.up.weight"] = (moe.shared_ffn_hidden_size, moe.shared_ffn_hidden_size)
    return rows


def recorded_settings(optim: OptimBlock, max_steps: int) -> dict[str, str | int | float | None]:
    """Return the optimizer and schedule settings recorded in a checkpoint: effective keys, relative to `model`."""
    found: dict[str, Any] = {"optim.name": optimizer_kind(optim.name), "optim.weight_decay": optim.weight_decay}
    found |= {f"optim.{key}": value for key, value in optimizer_settings(optim).items()}
    if found["optim.name"] == "adamw" and not found["optim.scale_parameter"]:
        del found["optim.scale_parameter"]  # absent in checkpoints older than this key
    schedule = build_schedule(optim, max_steps)
    if isinstance(schedule, OwnSchedule):
        found |= {"optim.lr": schedule.lr, "optim.sched.min_lr": schedule.min_lr, "optim.sched.name": schedule.name}
        found |= {"optim.sched.max_steps": schedule.max_steps, "optim.sched.kwargs": dict(schedule.kwargs)}
        return _plain(found)
    for field in fields(schedule):
        block = "optim" if field.name == "lr" or hasattr(schedule, "warmup_init") else "optim.sched"
        found[f"{block}.{field.name}"] = getattr(schedule, field.name)
    if hasattr(schedule, "warmup_init"):
        found["optim.relative_step"] = True
    else:
        found["optim.sched.name"] = optim.sched.name
    return _plain(found)


def _plain(found: dict[str, Any]) -> dict[str, str | int | float | None]:
    """Return settings with lists, blocks and booleans as text."""
    return {key: str(value) if isinstance(value, list | dict | bool) else value for key, value in found.items()}


def min_state_elements(keys: AnyModelBlock, vocab_size: int, trainable: int | None = None) -> int:
    """Return a lower bound of the elements of optimizer state besides main weights; Adafactor's vectors are left out.

    `trainable` is the number of trainable parameters if others are frozen, else None.
    """
    parameters = count_parameters(keys, vocab_size) if trainable is None else trainable
    kind, chosen = optimizer_kind(keys.optim.name), optimizer_settings(keys.optim)
    if kind == "adamw" or kind not in _KINDS:  # of the user's own nothing is known
        return 2 * parameters
    if kind == "muon" and trainable is not None:
        return parameters  # lower bound: one element per parameter of a matrix
    if kind == "muon":
        model = family_slice(keys, vocab_size=vocab_size, batch_spec=BatchSpec(seq_length=sequence_length_of(keys)))
        return parameters + outer_weights(model).numel
    kept = chosen["momentum"] if kind == "sgd" else chosen["beta1"] is not None
    return parameters if kept else 0
