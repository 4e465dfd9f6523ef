"""Out-of-memory check before a run: a closed-form lower bound of its memory, before anything is built.

`plan` estimates the memory of a run on a GPU; this bound holds for every device, backend and compiler, so a run that
could fit is never rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...kernels.moe.routing import expert_capacity
from ...models.build import plan_model
from ...models.config.families import FamilySlice, family_slice
from ...models.config.moe_slice import MoESlice
from ...models.config.slices import AttentionSlice, StackSlice
from ...models.config.t5 import T5Keys
from ...models.config.t5_slice import T5Slice
from ...models.layers.position_embeddings import rotary_table_bytes
from ...models.memory.offload_activations import MIN_OFFLOAD_BYTES
from ..config.batch_spec import batch_spec
from ..config.parameter_layout import DataParallelLayout
from ..config.schema.root import AnyModelBlock, RootBlock
from ..data.dataloader import PREFETCH_FACTOR
from ..device.determinism import attention_flags
from ..device.precision import PrecisionPlan
from ..optim.optimizer_factory import min_state_elements, offloads_optimizer_state
from ..utils.errors import UserError
from ..utils.host_memory import host_memory
from .state_memory import main_weight_bytes
from .trainable_count import count_trainable

_GIB = 2**30
_EXPERT_SIZES = ("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_EXPERT_ROWS = ("moe_router_topk", "moe_expert_capacity_factor", "ffn_hidden_size", "moe_ffn_hidden_size")


def check_memory(
    root: RootBlock, precision: PrecisionPlan, device: torch.device, layout: DataParallelLayout | None = None
) -> None:
    """Reject a run that needs more memory than its device or its host has.

    The lower bound counts weights, gradients and optimizer state; the saved input of each layer and the saved expert
    activations; the attention mask of packed documents; the prefetched batches. A run that passes may still not fit.

    Args:
        root: the configuration.
        precision: dtypes of the run.
        device: device of this process.
        layout: data-parallel layout; None for one process.

    Raises:
        UserError: the run cannot fit; the message names the keys that determine the size.
    """
    keys = root.model
    form = batch_spec(root)
    vocab_size = keys.override_vocab_size or 1
    counts = count_trainable(keys, vocab_size, form)
    parameters, trained = counts.total, counts.trainable
    model = family_slice(keys, vocab_size=vocab_size, batch_spec=form)
    stacks = model.stacks
    lengths = (form.seq_length, form.decoder_seq_length)[: len(stacks)]
    table = sum(rotary_table_bytes(stack.rotary) for stack in stacks)
    itemsize = precision.param_dtype.itemsize
    main = main_weight_bytes(precision)
    state_size = (
        min_state_elements(keys, vocab_size, trained) if keys.peft.is_on else min_state_elements(keys, vocab_size)
    )
    ema = root.exp_manager.ema
    ema_bytes = trained * max(itemsize, 4) if ema.enable else 0
    shards = layout.shards if layout else 1
    ranks = layout.replicas * shards if layout else 1
    # weights and gradients
    weights = (parameters + trained) * itemsize // (1 if layout is None or layout.replicates_weights else shards)
    ema_bytes //= shards
    ema_on_host = ema_bytes if ema.cpu_offload and device.type == "cuda" else 0
    optimizer = (trained * main + state_size * (main or itemsize)) // shards
    on_host = optimizer if offloads_optimizer_state(keys, device) else 0
    manager = root.exp_manager
    if manager.create_checkpoint_callback and manager.checkpoint_callback_params.async_save:
        on_host *= 2  # an asynchronous save writes from a copy in host memory
    state = weights + (0 if on_host else optimizer) + ema_bytes - ema_on_host + table
    compute_itemsize = (precision.autocast_dtype or precision.param_dtype).itemsize
    tokens = [keys.micro_batch_size * length for length in lengths]
    # layers before `first` need no backward pass and save nothing
    spans = list(zip(stacks, tokens, counts.first_backward_layers, strict=True))
    activations = compute_itemsize * sum(
        _saved_activations(stack, n, max(first, _num_offloaded_layers(stack, device))) for stack, n, first in spans
    )
    offloaded = compute_itemsize * sum(_saved_activations(stack, n, first) for stack, n, first in spans) - activations
    weights_on_host = _weights_on_host(model, device, itemsize)
    # upper bound of the weights that are on the host when the backward pass starts
    away = parameters * itemsize if any(_num_offloaded_layers(stack, device, weights=True) for stack in stacks) else 0
    mask = _mask_bytes(root, precision, device)
    # tokens and labels in int64, document ids in int32
    document_id_bytes = 4 * (form.packed or form.reset_position_ids)
    sample_bytes = sum(lengths) * (8 + document_id_bytes) + lengths[-1] * 8
    batches = keys.global_batch_size // ranks * sample_bytes * PREFETCH_FACTOR
    host = host_memory()
    if host is not None:
        host //= max(1, ranks // root.trainer.num_nodes)
    available = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host
    each = " in each process" if ranks > 1 else ""
    if isinstance(keys, T5Keys):
        length, packing_key, prefixes = "seq_length data.seq_length_dec", "packed_sequence", ("encoder.", "decoder.")
    else:
        length, packing_key, prefixes = "encoder_seq_length", "reset_attention_mask", ("",)
    depth, width, rows = [], [], []  # keys of the size in each dimension, for the message
    for prefix, stack in zip(prefixes, stacks, strict=True):
        depth += [f"{prefix}num_layers", f"{prefix}hidden_size"]
        width += [f"{prefix}ffn_hidden_size", *(f"{prefix}{size}" for size in _EXPERT_SIZES if stack.moe)]
        rows += [f"{prefix}{size}" for size in _EXPERT_ROWS if stack.moe]
    for needed, limit, what, names in (
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
            f"the model, the activations of one micro batch and the mask of `data.{packing_key}` need",
            f"micro_batch_size {length}",
        ),
        (
            on_host,
            host,
            f"the optimizer state and main weights in host memory need{each}",
            f"cpu_offloading_optimizer {' '.join(depth + width)}",
        ),
        (
            on_host + ema_on_host,
            host,
            f"the EMA weights of `exp_manager.ema.cpu_offload` and the optimizer state in host memory need{each}",
            f"cpu_offloading_optimizer {' '.join(depth + width)}",
        ),
        (
            on_host + ema_on_host + offloaded + weights_on_host,
            host,
            f"the activations of a micro batch and everything else offloaded to host memory need{each}",
            f"micro_batch_size {length} {' '.join(f'{prefix}cpu_offloading_num_layers' for prefix in prefixes)} "
            f"cpu_offloading_optimizer {' '.join(depth)}",
        ),
        (batches, host, "the prefetched batches need", f"global_batch_size {length}"),
    ):
        if limit is not None and needed > limit:
            values = ", ".join(f"`{name}` ({value})" for name in names.split() if (value := _key_value(keys, name)))
            raise UserError(
                [
                    f"out of memory: {what} at least {needed / _GIB:,.1f} GiB, but there are {limit / _GIB:,.1f} GiB",
                    f"    this follows from {values} below `model`; use smaller values",
                ]
            )


def _num_offloaded_layers(stack: StackSlice, device: torch.device, *, weights: bool = False) -> int:
    """Return the number of first layers with activations (or weights) offloaded to host memory."""
    offload = stack.offload
    if offload is None or device.type != "cuda":
        return 0
    return offload.layers if (offload.weights if weights else offload.activations) else 0


def _weights_on_host(model: FamilySlice, device: torch.device, itemsize: int) -> int:
    """Return the bytes of the weights with a copy in host memory: the larger matrices of the offloaded layers."""
    total = 0
    for stack in model.stacks:
        cross = model.cross_attention if isinstance(model, T5Slice) and stack is model.stacks[-1] else None
        for layer in range(_num_offloaded_layers(stack, device, weights=True)):
            moe = stack.moe if stack.moe is not None and stack.moe.layers[layer] else None
            sizes = (count * itemsize for count in _matrix_sizes(stack, moe, cross))
            total += sum(size for size in sizes if size >= MIN_OFFLOAD_BYTES)
    return total


def _matrix_sizes(stack: StackSlice, moe: MoESlice | None, cross: AttentionSlice | None) -> Iterator[int]:
    """Yield the number of elements of each weight matrix of a layer; all experts share one stacked matrix."""
    own = stack.attention
    q, kv = own.heads * own.head_dim, 2 * own.groups * own.head_dim
    rows = [q + kv, q]
    if cross is not None:
        q, kv = cross.heads * cross.head_dim, 2 * cross.groups * cross.head_dim
        rows += [q, kv, q]
    widths = [stack.mlp.ffn_hidden_size]
    if moe is not None:
        widths = [moe.experts * moe.ffn_hidden_size, moe.shared_ffn_hidden_size or 0]
        rows.append(moe.experts)
    for width in widths:
        rows += [width * (2 if stack.mlp.gated else 1), width]
    yield from (stack.hidden_size * number for number in rows)


def _saved_activations(stack: StackSlice, tokens: int, first: int) -> int:
    """Return a lower bound of the elements that the layers from `first` on save for backward, per micro batch."""
    return stack.hidden_size * _num_saved_inputs(stack, first) * tokens + _saved_in_experts(stack, tokens, first)


def _num_saved_inputs(stack: StackSlice, first: int) -> int:
    """Return the number of layers from `first` on that save their input; a recomputed chunk saves that of its first."""
    recompute = stack.recompute
    if recompute is None or recompute.layers <= first:
        return stack.num_layers - first
    return stack.num_layers - recompute.layers + -(-recompute.layers // recompute.chunk) - -(-first // recompute.chunk)


def _saved_in_experts(stack: StackSlice, tokens: int, first: int = 0) -> int:
    """Return a lower bound of the elements that experts save for backward: the outputs of their first projections.

    Each token has a row in each of its `topk` experts, up to the capacity; with padding every expert has as many rows
    as its capacity.
    """
    moe = stack.moe
    recompute = stack.recompute
    if moe is None or (recompute is not None and "moe" in recompute.modules):
        return 0
    rows = tokens * moe.topk
    if moe.capacity_factor is not None:
        capacity = expert_capacity(tokens, moe.experts, moe.topk, moe.capacity_factor)
        rows = capacity * moe.experts if moe.pad_to_capacity else min(rows, capacity * moe.experts)
    first = max(first, 0 if recompute is None else recompute.layers)
    return sum(moe.layers[first:]) * rows * moe.ffn_hidden_size * (2 if stack.mlp.gated else 1)


def _mask_bytes(root: RootBlock, precision: PrecisionPlan, device: torch.device) -> int:
    """Return the bytes of the attention masks of packed documents; 0 if the attention backends need none."""
    form = batch_spec(root)
    if not form.packed:
        return 0
    try:
        plan = plan_model(
            family_slice(root.model, vocab_size=1, batch_spec=form),
            device=device,
            dtype=precision.autocast_dtype or precision.param_dtype,
            flags=attention_flags(root),
            micro_batch_size=root.model.micro_batch_size,
            batch_spec=form,
        )
    except ValueError:  # no backend is available; the attention check reports that with its reasons
        return 0
    masks = (
        max(plan.decisions[planned.label(kind)].mask_bytes for kind in planned.calls) for planned in plan.attentions
    )
    return sum(masks)


def _key_value(keys: AnyModelBlock, path: str) -> Any:
    """Return the value of a dotted key below `model`."""
    value: Any = keys
    for name in path.split("."):
        value = getattr(value, name)
    return value
