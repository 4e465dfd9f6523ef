"""Whether a run can fit at all: a lower bound of its memory in closed form, before anything is built.

`plan` says what a run on a GPU will take; this is the part of it that holds for every device, backend and compiler, so
that nothing is refused that could run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...kernels.moe.routing import capacity_of
from ...models.build import plan_model
from ...models.config.families import FamilySlice, family_slice
from ...models.config.moe_slice import MoESlice
from ...models.config.slices import AttentionSlice, StackSlice
from ...models.config.t5 import T5Keys
from ...models.config.t5_slice import T5Slice
from ...models.memory.offload_activations import LEAST_SIZE
from ..config.batch_spec import sample_form
from ..config.parameter_layout import DataLayout
from ..config.schema.root import AnyModelBlock, RootBlock
from ..data.dataloader import BATCHES_AHEAD
from ..device.determinism import attention_flags
from ..device.precision import PrecisionPlan
from ..optim.optimizer_factory import count_state, is_state_on_host
from ..utils.errors import UserError
from .state_memory import main_weight_bytes, rotary_tables
from .trainable_count import count_trained

_GIB = 2**30
_EXPERT_SIZES = ("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_EXPERT_ROWS = ("moe_router_topk", "moe_expert_capacity_factor", "ffn_hidden_size", "moe_ffn_hidden_size")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(
    root: RootBlock, precision: PrecisionPlan, device: torch.device, layout: DataLayout | None = None
) -> None:
    """Refuse a run that needs more memory than its device, or its host, has.

    The bound holds for any run: weights, gradients and the optimizer's state; the input of each layer and what goes
    through its experts, which the backward pass needs; the mask that keeps packed documents apart; the prepared
    batches. A run that passes may still be too large.

    Args:
        root: the keys.
        precision: of the run.
        device: of this process.
        layout: what each process holds; None for one process.

    Raises:
        UserError: it cannot fit; names the keys that decide it.
    """
    keys = root.model
    form = sample_form(root)
    vocab_size = keys.override_vocab_size or 1
    counts = count_trained(keys, vocab_size, form)
    parameters, trained = counts.all, counts.trained
    model = family_slice(keys, vocab_size=vocab_size, form=form)
    stacks = model.stacks
    lengths = (form.length, form.decoder_length)[: len(stacks)]
    table = rotary_tables(stacks)
    width = precision.weights.itemsize
    main = main_weight_bytes(precision)
    kept = count_state(keys, vocab_size, trained) if keys.peft.is_on else count_state(keys, vocab_size)
    average = root.exp_manager.ema
    averaged = trained * max(width, 4) if average.enable else 0
    shards = layout.shards if layout else 1
    ranks = layout.replicas * shards if layout else 1
    weights = (parameters + trained) * width // (1 if layout is None or layout.whole_weights else shards)
    averaged //= shards
    average_on_host = averaged if average.cpu_offload and device.type == "cuda" else 0
    optimizer = (trained * main + kept * (main or width)) // shards
    on_host = optimizer if is_state_on_host(keys, device) else 0
    manager = root.exp_manager
    if manager.create_checkpoint_callback and manager.checkpoint_callback_params.async_save:
        on_host *= 2  # a checkpoint is written from a copy
    state = weights + (0 if on_host else optimizer) + averaged - average_on_host + table
    narrow = (precision.autocast or precision.weights).itemsize
    tokens = [keys.micro_batch_size * length for length in lengths]
    sized = list(zip(stacks, tokens, strict=True))
    begun = list(zip(sized, counts.begins, strict=True))  # no layer before these keeps anything
    activations = sum(_kept(stack, n, max(first, _offloaded(stack, device))) for (stack, n), first in begun) * narrow
    sent = sum(_kept(stack, n, first) for (stack, n), first in begun) * narrow - activations
    beside = _weights_on_host(model, device, width)
    # at most so many weights are on the host when the backward begins
    away = parameters * width if any(_offloaded(stack, device, weights=True) for stack in stacks) else 0
    mask = _mask_bytes(root, precision, device)
    # tokens and labels in int64, and the numbers of documents in int32
    numbers = 4 * (form.packed or form.restart)
    of_sample = sum(lengths) * (8 + numbers) + lengths[-1] * 8
    batches = keys.global_batch_size // ranks * of_sample * BATCHES_AHEAD
    host = host_memory()
    if host is not None:
        host //= max(1, ranks // root.trainer.num_nodes)
    available = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host
    each = " in each process" if ranks > 1 else ""
    if isinstance(keys, T5Keys):
        length, packs, places = "seq_length data.seq_length_dec", "packed_sequence", ("encoder.", "decoder.")
    else:
        length, packs, places = "encoder_seq_length", "reset_attention_mask", ("",)
    depth, width, rows = [], [], []
    for place, stack in zip(places, stacks, strict=True):
        depth += [f"{place}num_layers", f"{place}hidden_size"]
        width += [f"{place}ffn_hidden_size", *(f"{place}{size}" for size in _EXPERT_SIZES if stack.moe)]
        rows += [f"{place}{size}" for size in _EXPERT_ROWS if stack.moe]
    for need, has, what, names in (
        (
            state,
            available,
            f"{parameters:,} parameters with their gradients and optimizer state need{each}",
            f"{' '.join(depth + width)} {length} max_position_embeddings override_vocab_size "
            "make_vocab_size_divisible_by",
        ),
        (
            state + activations - away,
            available,
            "the model and the activations of one micro batch need",
            f"micro_batch_size {length} {' '.join(depth + rows)}",
        ),
        (
            state + activations + mask - away,
            available,
            f"the model, the activations of one micro batch and the mask of `data.{packs}` need",
            f"micro_batch_size {length}",
        ),
        (
            on_host,
            host,
            f"the optimizer's state and main weights in host memory need{each}",
            f"cpu_offloading_optimizer {' '.join(depth + width)}",
        ),
        (
            on_host + average_on_host,
            host,
            f"the averages of `exp_manager.ema.cpu_offload` and what else is in host memory need{each}",
            f"cpu_offloading_optimizer {' '.join(depth + width)}",
        ),
        (
            on_host + average_on_host + sent + beside,
            host,
            f"the activations of a micro batch and whatever else offloading keeps in host memory need{each}",
            f"micro_batch_size {length} {' '.join(f'{place}cpu_offloading_num_layers' for place in places)} "
            f"cpu_offloading_optimizer {' '.join(depth)}",
        ),
        (batches, host, "the batches prepared ahead need", f"global_batch_size {length}"),
    ):
        if has is not None and need > has:
            values = ", ".join(f"`{name}` ({value})" for name in names.split() if (value := _value(keys, name)))
            raise UserError(
                [
                    f"out of memory: {what} at least {need / _GIB:,.1f} GiB, of {has / _GIB:,.1f} GiB there are",
                    f"    it follows from {values} below `model`; use smaller ones",
                ]
            )


def _offloaded(stack: StackSlice, device: torch.device, *, weights: bool = False) -> int:
    """How many of the first layers have their activations, or their weights, in host memory."""
    offload = stack.offload
    if offload is None or device.type != "cuda":
        return 0
    return offload.layers if (offload.weights if weights else offload.activations) else 0


def _weights_on_host(model: FamilySlice, device: torch.device, itemsize: int) -> int:
    """Bytes of the weights that have a copy in host memory: the matrices of the first layers, but for small ones."""
    total = 0
    for stack in model.stacks:
        cross = model.cross_attention if isinstance(model, T5Slice) and stack is model.stacks[-1] else None
        for layer in range(_offloaded(stack, device, weights=True)):
            moe = stack.moe if stack.moe is not None and stack.moe.layers[layer] else None
            sizes = (count * itemsize for count in _matrices(stack, moe, cross))
            total += sum(size for size in sizes if size >= LEAST_SIZE)
    return total


def _matrices(stack: StackSlice, moe: MoESlice | None, cross: AttentionSlice | None) -> Iterator[int]:
    """Numbers in each matrix of a layer, with these experts and this cross-attention; all experts have one."""
    own = stack.attention
    asked, read = own.heads * own.head_dim, 2 * own.groups * own.head_dim
    rows = [asked + read, asked]
    if cross is not None:
        asked, read = cross.heads * cross.head_dim, 2 * cross.groups * cross.head_dim
        rows += [asked, read, asked]
    widths = [stack.mlp.ffn_hidden_size]
    if moe is not None:
        widths = [moe.experts * moe.ffn_hidden_size, moe.shared_ffn_hidden_size or 0]
        rows.append(moe.experts)
    for width in widths:
        rows += [width * (2 if stack.mlp.gated else 1), width]
    yield from (stack.hidden_size * number for number in rows)


def _kept(stack: StackSlice, tokens: int, first: int) -> int:
    """Numbers that the layers from `first` on keep of a micro batch at least."""
    return stack.hidden_size * _kept_inputs(stack, first) * tokens + _kept_in_experts(stack, tokens, first)


def _kept_inputs(stack: StackSlice, first: int) -> int:
    """How many of these layers keep their input at least: of those that are recomputed together, the first."""
    recompute = stack.recompute
    if recompute is None or recompute.layers <= first:
        return stack.num_layers - first
    return stack.num_layers - recompute.layers + -(-recompute.layers // recompute.chunk) - -(-first // recompute.chunk)


def _kept_in_experts(stack: StackSlice, tokens: int, first: int = 0) -> int:
    """Numbers that the experts of these layers keep of a micro batch at least: what comes out of the first projections.

    Each of the `topk` experts of a token has a row, as far as their capacity allows; with padding every expert has as
    many rows as its capacity.
    """
    moe = stack.moe
    recompute = stack.recompute
    if moe is None or (recompute is not None and "moe" in recompute.modules):
        return 0
    rows = tokens * moe.topk
    if moe.capacity_factor is not None:
        capacity = capacity_of(tokens, moe.experts, moe.topk, moe.capacity_factor)
        rows = capacity * moe.experts if moe.pad_to_capacity else min(rows, capacity * moe.experts)
    first = max(first, 0 if recompute is None else recompute.layers)
    return sum(moe.layers[first:]) * rows * moe.ffn_hidden_size * (2 if stack.mlp.gated else 1)


def _mask_bytes(root: RootBlock, precision: PrecisionPlan, device: torch.device) -> int:
    """Bytes of the masks that keep packed documents apart, 0 where the attention backends need none."""
    form = sample_form(root)
    if not form.packed:
        return 0
    try:
        plan = plan_model(
            family_slice(root.model, vocab_size=1, form=form),
            device=device,
            dtype=precision.autocast or precision.weights,
            flags=attention_flags(root),
            micro_batch_size=root.model.micro_batch_size,
            form=form,
        )
    except ValueError:  # no backend may run, which is told next, with its reasons
        return 0
    masks = (
        max(plan.decisions[planned.label(kind)].mask_bytes for kind in planned.calls) for planned in plan.attentions
    )
    return sum(masks)


def _value(keys: AnyModelBlock, path: str) -> Any:
    """The value at a path below `model`."""
    value: Any = keys
    for name in path.split("."):
        value = getattr(value, name)
    return value


def host_memory() -> int | None:
    """Bytes of memory this process may use: the machine's, or its container's limit; None where unknown."""
    limits: list[int] = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # `max` is no number: no limit
            limits.append(int(Path(path).read_text()))
    return min(limits, default=None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or the host, as Python, numpy or torch tell it."""
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_host_memory(error):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether an allocation of host memory failed."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
