"""Out-of-memory check before a run: a lower bound of its memory, before anything is built.

`plan` estimates the memory of a run on a GPU; this bound has the same inputs and held state, but holds for every
device, backend and compiler, so a run that could fit is never rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

import torch

from ...kernels.attention.installed_software import detect_installed_software
from ...kernels.moe.routing import expert_capacity
from ...models.build import ModelPlan
from ...models.config.families import keys_by_stack
from ...models.config.moe import has_experts
from ...models.config.stack import StackSlice
from ...models.config.t5 import T5Keys
from ...models.layer_cost import layer_weights
from ...models.layers.cost import StackInputs
from ...models.memory.offload_activations import MIN_OFFLOAD_BYTES
from ...models.moe.moe_layer import expert_rows
from ...models.parallel.schedule import most_held
from ..config.resolved_run import ResolvedRun
from ..data.dataloader import PREFETCH_FACTOR
from ..device.determinism import attention_flags
from ..utils.errors import UserError
from ..utils.host_memory import host_memory
from .hardware import GIB
from .run_inputs import RunInputs, collect_inputs, pipeline_ranks
from .run_plan import peer_access
from .state_memory import persistent_state, rotary_bytes, sample_bytes
from .target import Target

_EXPERT_SIZES = ("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_EXPERT_ROWS = ("moe_router_topk", "moe_expert_capacity_factor", "ffn_hidden_size", "moe_ffn_hidden_size")


def check_memory(run: ResolvedRun, device: torch.device, model_plan: ModelPlan) -> None:
    """Reject a run that needs more memory than its device or its host has; one that passes may still not fit.

    Args:
        run: the run.
        device: device of this process.
        model_plan: its attention backends.

    Raises:
        UserError: the run cannot fit; the message names the keys that determine the size.
    """
    host = host_memory()
    if host is not None:
        host //= run.ranks_per_node
    available = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host
    target = Target(
        device=device.type,
        capability=None,
        gpu=None,
        memory=available,
        software=detect_installed_software(device.type),
        flags=attention_flags(run.trainer.deterministic),
        peer_access=peer_access(run.ranks_per_node) if device.type == "cuda" else None,
    )
    ranks, mask = pipeline_ranks(collect_inputs(run, target, model_plan=model_plan)), _mask_bytes(model_plan)
    for on_host, needed, what, names in chain.from_iterable(_demands(rank, mask) for rank in ranks):
        limit = host if on_host else available
        if limit is not None and needed > limit:
            values = ", ".join(
                f"`{name}` ({value})" for name in names.split() if (value := attrgetter(name)(run.model))
            )
            raise UserError(
                [
                    f"out of memory: {what} at least {needed / GIB:,.1f} GiB, but there are {limit / GIB:,.1f} GiB",
                    f"    this follows from {values} below `model`; use smaller values",
                ]
            )


def _demands(run: RunInputs, mask: int) -> Iterator[tuple[bool, int, str, str]]:
    """Yield (of host memory, least bytes, what needs them, keys that determine the size) of everything that must fit.

    Args:
        run: a rank of the pipeline, or all without one.
        mask: bytes of the attention mask of packed documents.
    """
    keys, params = run.model_config, run.run.exp_manager.checkpoint_callback_params
    held, each = persistent_state(run, ()), " in each process" if run.ranks > 1 else ""
    gradients = run.counts.trainable * run.widths.weights
    state = held.main_weights + held.optimizer + held.ema + rotary_bytes(run)
    state += run.sharded(gradients) if run.shards_gradients else gradients
    state += min(held.weights, run.counts.total * run.widths.weights)  # not all devices keep casts to fp8
    saved, on_device = _most_activations(run)
    offloads_weights = any(_num_offloaded_layers(stack, weights=True) for stack in run.stacks)
    if isinstance(keys, T5Keys):
        length, packing_key = "seq_length data.seq_length_dec", "packed_sequence"
    else:
        length, packing_key = "encoder_seq_length", "reset_attention_mask"
    depth, width, rows, offloading = [], [], [], []  # keys of the size in each dimension
    for prefix, stack in keys_by_stack(keys).items():
        has_moe = has_experts(stack)
        depth += [f"{prefix}num_layers", f"{prefix}hidden_size"]
        width += [f"{prefix}ffn_hidden_size", *(f"{prefix}{size}" for size in _EXPERT_SIZES if has_moe)]
        rows += [f"{prefix}{size}" for size in _EXPERT_ROWS if has_moe]
        offloading.append(f"{prefix}cpu_offloading_num_layers")
    model_keys, batch_keys = " ".join(depth + width), f"micro_batch_size {length}"
    yield (
        False,
        state,
        f"{run.num_parameters:,} parameters with their gradients and optimizer state need{each}",
        f"{model_keys} {length} max_position_embeddings override_vocab_size make_vocab_size_divisible_by",
    )
    # weights may be on the host when the backward pass starts
    used = state + on_device - run.counts.total * run.widths.weights * offloads_weights
    what = "the model and the activations of one micro batch need"
    yield False, used, what, f"{batch_keys} {' '.join(depth + rows)}"
    what = f"the model, the activations of one micro batch and the mask of `data.{packing_key}` need"
    yield False, used + mask, what, batch_keys
    used, optimizer_keys = held.on_host, f"cpu_offloading_optimizer {model_keys}"
    if run.run.exp_manager.create_checkpoint_callback and params.async_save:
        used *= 2  # an asynchronous save writes from a copy in host memory
    yield True, used, f"the optimizer state and main weights in host memory need{each}", optimizer_keys
    used += held.ema_on_host
    what = "the EMA weights of `exp_manager.ema.cpu_offload` and the optimizer state in host memory need"
    yield True, used, f"{what}{each}", optimizer_keys
    what = "the activations of a micro batch and everything else offloaded to host memory need"
    offload_keys = f"{' '.join(offloading)} cpu_offloading_optimizer {' '.join(depth)}"
    yield True, used + saved - on_device + _weights_on_host(run), f"{what}{each}", f"{batch_keys} {offload_keys}"
    batches = keys.global_batch_size // run.mesh.data * sample_bytes(run) * PREFETCH_FACTOR
    yield True, batches, "the prefetched batches need", f"global_batch_size {length}"


def _most_activations(run: RunInputs) -> tuple[int, int]:
    """Return lower bounds of the bytes that passes in flight save for backward: of all, and of those on the device."""
    run, saved, on_device = run.with_all_recomputed, dict[int, int](), dict[int, int]()
    for stage, inputs in zip(run.stages, run.stacks, strict=True):
        # layers before the first that is trained need no backward pass and save nothing
        first = min(inputs.first_trained_layer, inputs.stack.num_layers)
        for sizes, start in ((saved, first), (on_device, max(first, _num_offloaded_layers(inputs)))):
            elements = _saved_activations(inputs.stack, inputs.residual_tokens, start)
            sizes[stage.number] = inputs.widths.compute * elements
    return most_held(run.pass_order, saved), most_held(run.pass_order, on_device)


def _num_offloaded_layers(inputs: StackInputs, *, weights: bool = False) -> int:
    """Return the number of first layers with activations (or weights) offloaded to host memory."""
    offload = inputs.stack.offload
    if offload is None or inputs.attention.call.device != "cuda":
        return 0
    return offload.layers if (offload.weights if weights else offload.activations) else 0


def _weights_on_host(run: RunInputs) -> int:
    """Return the bytes of the weights with a copy in host memory: the larger matrices of the offloaded layers."""
    total = 0
    for inputs in run.stacks:
        moe = inputs.stack.moe
        for layer in range(_num_offloaded_layers(inputs, weights=True)):
            weights = layer_weights(inputs.stack, inputs.cross, has_experts=moe is not None and moe.layers[layer])
            sizes = (matrix.numel * run.widths.weights for matrix in weights.matrices)
            total += sum(size for size in sizes if size >= MIN_OFFLOAD_BYTES)
    return total


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
    """Return a lower bound of the elements that experts save for backward: the outputs of their first projections."""
    moe, recompute = stack.moe, stack.recompute
    if moe is None or (recompute is not None and "moe" in recompute.modules):
        return 0
    rows = expert_rows(moe, tokens, tokens)  # the whole micro batch has a larger capacity
    if moe.capacity_factor is not None:  # tokens beyond the capacity may be dropped
        rows = min(rows, moe.experts * expert_capacity(tokens, moe.experts, moe.topk, moe.capacity_factor))
    first = max(first, 0 if recompute is None else recompute.layers)
    return sum(moe.layers[first:]) * rows * moe.ffn_hidden_size * (2 if stack.mlp.gated else 1)


def _mask_bytes(plan: ModelPlan) -> int:
    """Return the bytes of the attention masks of packed documents; 0 if the attention backends need none."""
    labels = ([planned.label(kind) for kind in planned.calls] for planned in plan.attentions)
    return sum(max(plan.decisions[label].mask_bytes for label in found if label in plan.decisions) for found in labels)
