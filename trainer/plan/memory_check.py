"""Out-of-memory check before a run: a closed-form lower bound of its memory, before anything is built.

`plan` estimates the memory of a run on a GPU; this bound holds for every device, backend and compiler, so a run that
could fit is never rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

import torch

from ...kernels.moe.routing import expert_capacity
from ...models.build import ModelPlan
from ...models.config.families import FamilySlice, keys_by_stack
from ...models.config.moe import has_experts
from ...models.config.stack import StackSlice
from ...models.config.t5 import T5Keys
from ...models.layer import layer_weights
from ...models.layers.position_embeddings import rotary_table_bytes
from ...models.memory.offload_activations import MIN_OFFLOAD_BYTES
from ...models.model_cost import stack_part, stacks_with_cross_attention, stage_slice
from ...models.moe.moe_layer import expert_rows
from ...models.parallel.schedule import PipelinePass, most_held, pass_order
from ...models.parallel.stages import Stage, whole_stacks
from ...models.tensor_parallel import rank_slice
from ..config.resolved_run import ResolvedRun
from ..config.schema.root import AnyModelBlock
from ..data.dataloader import PREFETCH_FACTOR
from ..optim.optimizer_factory import min_state_elements, offloads_optimizer_state
from ..utils.errors import UserError
from ..utils.host_memory import host_memory
from .trainable_count import count_rank, count_stages, count_trainable

_GIB = 2**30
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
    keys, ranks = run.model, run.world_size
    host = host_memory()
    if host is not None:
        host //= run.ranks_per_node
    available = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host
    each = " in each process" if ranks > 1 else ""
    bounds = _lower_bounds(run, device, model_plan)
    for on_host, needed, what, names in chain.from_iterable(_demands(bound, keys, each) for bound in bounds):
        limit = host if on_host else available
        if limit is not None and needed > limit:
            values = ", ".join(f"`{name}` ({value})" for name in names.split() if (value := attrgetter(name)(keys)))
            raise UserError(
                [
                    f"out of memory: {what} at least {needed / _GIB:,.1f} GiB, but there are {limit / _GIB:,.1f} GiB",
                    f"    this follows from {values} below `model`; use smaller values",
                ]
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LowerBound:
    """Lower bound of the memory of a process, in bytes.

    Attributes:
        parameters: number of parameters.
        state: weights, gradients, optimizer state, EMA and tables on the device.
        activations: saved input of each layer, and saved expert activations, on the device.
        offloaded_weights: upper bound of the weights that are on the host when the backward pass starts.
        mask: attention mask of packed documents.
        optimizer_on_host: optimizer state and main weights in host memory.
        ema_on_host: EMA in host memory.
        offloaded: activations and weights of layers in host memory.
        batches: prefetched batches in host memory.
    """

    parameters: int
    state: int
    activations: int
    offloaded_weights: int
    mask: int
    optimizer_on_host: int
    ema_on_host: int
    offloaded: int
    batches: int


def _lower_bounds(run: ResolvedRun, device: torch.device, model_plan: ModelPlan) -> Iterator[_LowerBound]:
    """Yield the bound of each rank of the pipeline, or of any rank without one."""
    num_layers = [stack.num_layers for stack in run.family.stacks]
    if run.pipeline is None:
        yield _lower_bound(run, device, model_plan, whole_stacks(*num_layers), ())
        return
    for rank in range(run.pipeline.ranks):
        order = pass_order(rank, run.pipeline.ranks, run.pipeline.chunks, run.micro_batches)
        yield _lower_bound(run, device, model_plan, run.pipeline.stages_of(rank, num_layers), order)


def _lower_bound(
    run: ResolvedRun,
    device: torch.device,
    model_plan: ModelPlan,
    stages: Sequence[Stage],
    order: Sequence[PipelinePass],
) -> _LowerBound:
    """Return the bound of a rank with these pipeline stages, and this order of its passes; () without a pipeline."""
    keys, form, manager, mesh, layout = run.model, run.batch_spec, run.exp_manager, run.mesh, run.layout
    vocab_size, shards = keys.override_vocab_size or 1, layout.shards if layout else 1
    if shards > 1 and mesh.expert > 1:  # experts may be in more shards
        shards = max(shards, mesh.world_size // mesh.pipeline // mesh.expert)
    of_stages, whole = rank_slice(run.family, mesh.tensor), count_trainable(keys, vocab_size, form)
    counts = count_rank(whole, run.family, of_stages, mesh)
    model = of_stages if run.pipeline is None else stage_slice(of_stages, stages)
    counts = count_stages(counts, of_stages, model, mesh)
    lengths = (form.seq_length, form.decoder_seq_length)
    itemsize, main = run.precision.weights_itemsize, run.precision.main_weight_bytes
    state_size = min_state_elements(keys, vocab_size, *((whole.trainable,) if keys.peft.is_on else ()))
    state_size = state_size * counts.total // whole.total
    optimizer = (counts.trainable * main + state_size * (main or itemsize)) // shards
    optimizer_on_host = optimizer if offloads_optimizer_state(keys, device) else 0
    if manager.create_checkpoint_callback and manager.checkpoint_callback_params.async_save:
        optimizer_on_host *= 2  # an asynchronous save writes from a copy in host memory
    ema = counts.trainable * max(itemsize, 4) // shards if manager.ema.enable else 0
    ema_on_host = ema if manager.ema.cpu_offload and device.type == "cuda" else 0
    # weights and gradients
    weights = (counts.total + counts.trainable) * itemsize
    weights //= 1 if layout is None or layout.replicates_weights else shards
    tables = sum(rotary_table_bytes(stack.rotary) for stack in model.stacks)
    # layers before the first that is trained need no backward pass and save nothing
    compute_itemsize = run.precision.compute_itemsize
    saved, on_device = dict[int, int](), dict[int, int]()
    for stage in stages:
        stack, first = stack_part(of_stages.stacks[stage.stack], [stage]), counts.first_backward_layers[stage.stack]
        if stack.recompute is not None and stack.recompute.partial_micro_batches is not None:  # others save the least
            stack = replace(stack, recompute=replace(stack.recompute, layers=stack.num_layers))
        first = min(max(0, first - stage.layers.start), stack.num_layers)
        tokens = keys.micro_batch_size * lengths[stage.stack] // mesh.context // (mesh.tensor if mesh.sequence else 1)
        saved[stage.number] = compute_itemsize * _saved_activations(stack, tokens, first)
        resident = max(first, _num_offloaded_layers(stack, device))
        on_device[stage.number] = compute_itemsize * _saved_activations(stack, tokens, resident)
    most_saved, most_on_device = (
        most_held(order, sizes) if order else sum(sizes.values()) for sizes in (saved, on_device)
    )
    offloads_weights = any(_num_offloaded_layers(stack, device, weights=True) for stack in model.stacks)
    # tokens and labels in int64, document ids in int32
    sample_bytes = sum(lengths) * (8 + 4 * (form.packed or form.reset_position_ids)) + lengths[-1] * 8
    return _LowerBound(
        parameters=whole.total,
        state=weights + (0 if optimizer_on_host else optimizer) + ema - ema_on_host + tables,
        activations=most_on_device,
        offloaded_weights=counts.total * itemsize if offloads_weights else 0,
        mask=_mask_bytes(model_plan),
        optimizer_on_host=optimizer_on_host,
        ema_on_host=ema_on_host,
        offloaded=most_saved - most_on_device + _weights_on_host(model, device, itemsize),
        batches=keys.global_batch_size // mesh.data * sample_bytes * PREFETCH_FACTOR,
    )


def _demands(bound: _LowerBound, keys: AnyModelBlock, each: str) -> Iterator[tuple[bool, int, str, str]]:
    """Yield (of host memory, bytes, what needs them, keys that determine the size) of everything that must fit."""
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
        bound.state,
        f"{bound.parameters:,} parameters with their gradients and optimizer state need{each}",
        f"{model_keys} {length} max_position_embeddings override_vocab_size make_vocab_size_divisible_by",
    )
    used = bound.state + bound.activations - bound.offloaded_weights
    what = "the model and the activations of one micro batch need"
    yield False, used, what, f"{batch_keys} {' '.join(depth + rows)}"
    what = f"the model, the activations of one micro batch and the mask of `data.{packing_key}` need"
    yield False, used + bound.mask, what, batch_keys
    used, optimizer_keys = bound.optimizer_on_host, f"cpu_offloading_optimizer {model_keys}"
    yield True, used, f"the optimizer state and main weights in host memory need{each}", optimizer_keys
    used += bound.ema_on_host
    what = "the EMA weights of `exp_manager.ema.cpu_offload` and the optimizer state in host memory need"
    yield True, used, f"{what}{each}", optimizer_keys
    what = "the activations of a micro batch and everything else offloaded to host memory need"
    offload_keys = f"{' '.join(offloading)} cpu_offloading_optimizer {' '.join(depth)}"
    yield True, used + bound.offloaded, f"{what}{each}", f"{batch_keys} {offload_keys}"
    yield True, bound.batches, "the prefetched batches need", f"global_batch_size {length}"


def _num_offloaded_layers(stack: StackSlice, device: torch.device, *, weights: bool = False) -> int:
    """Return the number of first layers with activations (or weights) offloaded to host memory."""
    offload = stack.offload
    if offload is None or device.type != "cuda":
        return 0
    return offload.layers if (offload.weights if weights else offload.activations) else 0


def _weights_on_host(model: FamilySlice, device: torch.device, itemsize: int) -> int:
    """Return the bytes of the weights with a copy in host memory: the larger matrices of the offloaded layers."""
    total = 0
    for stack, cross in stacks_with_cross_attention(model):
        for layer in range(_num_offloaded_layers(stack, device, weights=True)):
            weights = layer_weights(stack, cross, has_experts=stack.moe is not None and stack.moe.layers[layer])
            sizes = (matrix.numel * itemsize for matrix in weights.matrices)
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
