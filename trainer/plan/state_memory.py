"""Persistent memory of a rank: weights, optimizer state, gradient accumulators, rotary tables, batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...models.config.t5 import T5Slice
from ...models.layer_cost import layer_weights
from ...models.layers.cost import Matrix, StackInputs
from ...models.layers.position_embeddings import rotary_table_bytes
from ...models.parallel.schedule import most_held
from ...models.parallel.stages import Stage
from ...models.parallel.traffic import CommunicationAxis
from ..config.schema.optim import OPTIMIZERS, optimizer_kind, optimizer_settings
from ..optim.optimizer_factory import min_state_elements, offloads_optimizer_state
from ..optim.state_buckets import BUCKET_BYTES, StateShape, plan_buckets
from .data_exchange import gradient_sums, nccl_bytes, symmetric_memory_bytes
from .run_inputs import RunInputs

_CUBLAS_WORKSPACE = {9: 32 << 20, 10: 32 << 20}
"""Bytes of workspace that torch allocates for each cuBLAS handle, by major compute capability."""
_SMALL_WORKSPACE = 8 << 20
_TE_WORKSPACE, _TE_SMALL_WORKSPACE = (32 << 20) + 1024, 4 << 20
"""Bytes that TransformerEngine's GEMMs take from sm_90 on, and before (cpp_extensions/gemm.py, 2.20)."""
_CUBLAS_HANDLES = 2
"""One of the thread that runs the forward pass, one of autograd's thread."""
CUDA_CONTEXT_BYTES = 840 << 20
"""Bytes of a CUDA context with its libraries and kernels, outside of torch's allocator: what is in use but not reserved
at the end of a run on an H100 (scripts/bench/plan_check.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentState:
    """Bytes of device memory held during the whole run.

    Attributes:
        weights: parameters in the dtype of the model, fp8 casts of them that are kept, and the state of their scales.
        main_weights: fp32 copies of the parameters in the optimizer.
        optimizer: all other optimizer state.
        ema: exponential moving average (EMA) of the weights.
        gradient_sums: fp32 accumulators of gradients over micro batches.
        tables: rotary cos/sin tables, masks of packed documents.
        batches: samples on the device.
        workspace: of cuBLAS.
        on_host: main weights and optimizer state in host memory instead.
        ema_on_host: EMA in host memory instead.
        symmetric: memory that other ranks read or write, outside of torch's allocator.
        nccl: of communicators, outside of it too.
    """

    weights: int
    main_weights: int
    optimizer: int
    ema: int
    gradient_sums: int
    tables: int
    batches: int
    workspace: int
    on_host: int = 0
    ema_on_host: int = 0
    symmetric: int = 0
    nccl: int = 0

    @property
    def total(self) -> int:
        """Bytes that torch's allocator holds on the device."""
        held = self.weights + self.main_weights + self.optimizer + self.ema + self.gradient_sums
        return held + self.tables + self.batches + self.workspace


def num_state_elements(run: RunInputs) -> int:
    """Number of elements of optimizer state of a rank's parameters besides main weights."""
    if run.is_frozen:
        return min_state_elements(run.model_config, run.vocab_size, run.counts.trainable)
    elements = min_state_elements(run.model_config, run.vocab_size)
    if run.counts.total == run.num_parameters:
        return elements
    return elements * run.counts.total // run.num_parameters


def persistent_state(run: RunInputs, layers: Sequence[int]) -> PersistentState:
    """Return the persistent memory of a rank of a run on CUDA; `layers`: see `symmetric_memory_bytes`."""
    keys, widths = run.model_config, run.widths
    parameters = run.counts.trainable
    main = run.precision.main_weight_bytes
    shards_weights = run.layout is not None and not run.layout.replicates_weights
    state = run.sharded(num_state_elements(run) * run.precision.state_itemsize)
    on_host = offloads_optimizer_state(keys, torch.device(run.target.device))
    ema = run.sharded(parameters * run.ema_itemsize)
    weights, sums = run.counts.total * widths.weights, _accumulators(run)
    return PersistentState(
        weights=(run.sharded(weights) if shards_weights else weights + _fp8_casts(run)) + _delayed_scales(run),
        main_weights=0 if on_host else run.sharded(parameters * main),
        optimizer=0 if on_host else state,
        ema=0 if run.ema_on_host else ema,
        gradient_sums=run.sharded(sums) if run.shards_gradients else sums,
        tables=rotary_bytes(run) + _masks(run) // run.mesh.context,
        batches=_batches(run),
        workspace=_workspace(run),
        on_host=(run.sharded(parameters * main) + state) if on_host else 0,
        ema_on_host=ema if run.ema_on_host else 0,
        symmetric=symmetric_memory_bytes(run, layers) if run.target.device == "cuda" else 0,
        nccl=nccl_bytes(run) if run.target.device == "cuda" else 0,
    )


def _delayed_scales(run: RunInputs) -> int:
    """Bytes of the scales and amaxes of delayed scaling, of three tensors of each linear layer and six of attention."""
    total = 0
    for stack in run.stacks:
        fp8 = stack.stack.fp8
        if fp8 is None:
            continue
        matrices = layer_weights(stack.stack, stack.cross, has_experts=False, expert_ranks=1).matrices
        tensors = 3 * len(matrices) if fp8.recipe.scaling == "delayed" else 0
        tensors += 6 * (1 if stack.cross is None else 2) if fp8.attention else 0
        total += 4 * tensors * sum(fp8.layers) * (2 + fp8.recipe.amax_history_len)  # with the largest of each format
    return total


def _accumulators(run: RunInputs) -> int:
    """Bytes of the fp32 accumulators of gradients, before they are sharded."""
    trained = run.counts.trainable
    experts = trained * run.expert_parameters // run.counts.total
    return (trained - experts) * gradient_sums(run).accumulated + experts * gradient_sums(run, experts=True).accumulated


def _fp8_casts(run: RunInputs) -> int:
    """Bytes of the kept casts of weights, rowwise in both layouts, less those of the weights kept as casts alone."""
    if not run.run.keeps_fp8_casts:
        return 0
    return sum(matrix.numel * _cast_bytes(run, stack, matrix) for stack, matrix in _fp8_matrices(run))


def _fp8_matrices(run: RunInputs) -> Iterator[tuple[StackInputs, Matrix]]:
    """Yield the matrices of a rank that multiply in fp8."""
    for stack in run.stacks:
        for fp8, experts in zip(
            stack.stack.fp8.layers if stack.stack.fp8 else (),
            stack.stack.moe.layers if stack.stack.moe else (False,) * stack.stack.num_layers,
            strict=False,
        ):
            if fp8:
                layer = layer_weights(stack.stack, stack.cross, has_experts=experts, expert_ranks=run.mesh.expert)
                is_in_fp8 = stack.with_layer(is_fp8=True).is_in_fp8
                yield from ((stack, matrix) for matrix in layer.matrices if is_in_fp8(matrix))


def trained_fp8_weights(run: RunInputs, axis: CommunicationAxis = "data") -> list[int]:
    """Return the elements of each trained matrix of a rank that is kept as its cast alone; `expert data`: of experts
    that are split over ranks, `data`: of the others.
    """
    if run.is_frozen or not run.model_config.fp8_params:
        return []
    split = bool(run.expert_parameters)
    of_axis = {True: "expert data", False: "data"}
    return [
        matrix.numel for _, matrix in _fp8_matrices(run) if of_axis[split and matrix.inputs == "expert rows"] == axis
    ]


def _cast_bytes(run: RunInputs, stack: StackInputs, matrix: Matrix) -> int:
    """Bytes per weight of the casts of a matrix, less those of the weight itself if it is kept as casts alone."""
    fp8 = stack.stack.fp8
    assert fp8 is not None
    own = matrix.inputs == "expert rows" or fp8.why_own_kernels  # TransformerEngine keeps the transpose too
    return (1 if own and fp8.recipe.transposes_weights else 2) - fp8.keeps_weights * run.widths.weights


def rotary_bytes(run: RunInputs) -> int:
    """Bytes of rotary tables, which all pipeline stages of a stack share."""
    return sum({stage.stack: rotary_table_bytes(each.stack.rotary) for stage, each in _with_stages(run)}.values())


def _masks(run: RunInputs) -> int:
    """Bytes of the masks that separate packed documents: one for each stack and one for cross-attention, for each micro
    batch in flight.
    """
    sizes = {
        stage.number: each.attention.mask_bytes + (each.cross_attention.mask_bytes if each.cross_attention else 0)
        for stage, each in _with_stages(run)
    }
    return most_held(run.pass_order, sizes)


def _with_stages(run: RunInputs) -> list[tuple[Stage, StackInputs]]:
    return list(zip(run.stages, run.stacks, strict=True))


def _batches(run: RunInputs) -> int:
    """Bytes on the device of the current batch and the prefetched next one."""
    return 2 * run.model_config.global_batch_size // run.mesh.data * sample_bytes(run) // run.mesh.context


def sample_bytes(run: RunInputs) -> int:
    """Bytes of a sample: tokens and labels in int64, document ids in int32, a padding mask."""
    form = run.batch_spec
    lengths = [form.seq_length, *([form.decoder_seq_length] if form.decoder_seq_length else [])]
    extras = 4 * (form.packed or form.reset_position_ids) + (1 if form.padded else 0)
    return sum(lengths) * (8 + extras) + lengths[-1] * 8


def _workspace(run: RunInputs) -> int:
    capability = run.target.capability
    if capability is None:
        return 0
    through_te = any(stack.stack.fp8 is not None and stack.stack.fp8.uses_transformer_engine for stack in run.stacks)
    own = (_TE_WORKSPACE if capability[0] >= 9 else _TE_SMALL_WORKSPACE) * through_te
    return own + _CUBLAS_HANDLES * _CUBLAS_WORKSPACE.get(capability[0], _SMALL_WORKSPACE)


def update_working_bytes(run: RunInputs) -> int:
    """Bytes of temporary memory of the optimizer's update, and of the casts of weights kept in fp8 after it."""
    cast = run.sharded(max([*trained_fp8_weights(run), *trained_fp8_weights(run, "expert data")], default=0))
    return max(_optimizer_working_bytes(run), cast * (run.widths.weights + 1))


def _optimizer_working_bytes(run: RunInputs) -> int:
    kind, settings = optimizer_kind(run.model_config.optim.name), optimizer_settings(run.model_config.optim)
    weights = _weights(run)
    parameters = run.sharded(run.counts.trainable)
    largest = max(weight.elements for weight in weights) // run.shards
    hidden = max((weight.elements for weight in weights if weight.is_hidden), default=0) // run.shards
    slots = (
        offload_bucket_bytes(run) if offloads_optimizer_state(run.model_config, torch.device(run.target.device)) else 0
    )
    match kind:
        case "adafactor":  # updates of all weights at once, in fp32 unless they overwrite the gradients
            elements = largest if slots else parameters
            updates = elements * 4 if run.widths.weights < 4 and gradient_sums(run).updated < 4 else 0
            return slots + updates + largest * 4 * (4 if settings["beta1"] is not None else 3)
        case "muon":  # gradient, momentum and direction in fp32, Newton-Schulz iterations in bf16, the update
            return slots + hidden * 28
        case name if name not in OPTIMIZERS:  # of the user's own: the scaled gradients, and as much again, we assume
            return 2 * parameters * (run.precision.main_weight_bytes or run.widths.weights)
        case "sgd":
            return slots + (min(largest, BUCKET_BYTES // 4) if slots else largest) * 16
        case _:
            return slots


def offload_bucket_bytes(run: RunInputs) -> int:
    """Bytes of the device buckets through which optimizer state on the host is streamed."""
    kind, settings = optimizer_kind(run.model_config.optim.name), optimizer_settings(run.model_config.optim)
    main = run.precision.main_weight_bytes
    states: list[tuple[int, int, bool]] = []
    for weight in _weights(run):
        moments = _count_moments(kind, settings, is_hidden=weight.is_hidden)
        whole = kind == "adafactor" or (kind == "muon" and weight.is_hidden) or settings.get("scale_parameter", False)
        width = main + moments * run.precision.state_itemsize
        states.append((-(-weight.elements // run.shards), width, whole))
    return _slots(tuple(states))


@lru_cache(maxsize=16)
def _slots(states: tuple[tuple[int, int, bool], ...]) -> int:
    """Bytes of all buckets for states of (elements, bytes per element, must not be split)."""
    shapes: list[StateShape] = []
    for elements, width, whole in states:
        unit = torch.float32 if width % 4 == 0 else torch.bfloat16
        tensors = {str(number): ((elements,), unit) for number in range(width // unit.itemsize)}
        shapes.append(StateShape(tensors, max_shard_bytes=elements * width, elements=None if whole else elements))
    return sum(plan_buckets([shapes]).slot_bytes)


def _count_moments(kind: str, settings: dict[str, Any], *, is_hidden: bool) -> int:
    """State elements of an optimizer per weight element, without the main weight and small factored vectors."""
    match kind:
        case "adafactor":
            return int(settings["beta1"] is not None)
        case "sgd":
            return int(bool(settings["momentum"]))
        case "muon":
            return 1 if is_hidden else 2
        case _:
            return 2


class _Weight(NamedTuple):
    """A large parameter.

    Attributes:
        elements: number of elements.
        is_hidden: a matrix of a layer, or the matrices of all experts of a layer.
    """

    elements: int
    is_hidden: bool


def _weights(run: RunInputs) -> list[_Weight]:
    """Return the large parameters in the optimizer's order."""
    if run.is_frozen:
        return [_Weight(elements, is_hidden=dimensions > 1) for elements, dimensions in run.counts.trainable_tensors]
    family, last = run.family, run.family.stacks[-1]
    embedding = _Weight(family.padded_vocab_size * last.hidden_size, is_hidden=False)
    tables = sum(stack.begins for stack in family.stacks)
    if isinstance(family, T5Slice) and family.shared_embeddings:
        tables = min(tables, 1)
    weights = [embedding] * tables
    for each in run.stacks:
        for has_experts in each.stack.moe.layers if each.stack.moe else (False,) * each.stack.num_layers:
            layer = layer_weights(each.stack, each.cross, has_experts=has_experts, expert_ranks=run.mesh.expert)
            large = [matrix.numel for matrix in layer.matrices if matrix.name != "router"]
            weights += [_Weight(elements, is_hidden=True) for elements in large]
    return [*weights, embedding] if last.ends and not (family.tied and last.begins) else weights
