"""Persistent memory of a rank: weights, optimizer state, gradient accumulators, rotary tables, batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...models.config.parameter_count import count_parameters
from ...models.config.stack import StackSlice
from ...models.config.t5 import T5Slice
from ..config.schema.optim import optimizer_kind, optimizer_settings
from ..device.precision import PrecisionPlan
from ..optim.optimizer_factory import min_state_elements, offloads_optimizer_state
from ..optim.state_buckets import BUCKET_BYTES, StateShape, plan_buckets
from .inputs import RunInputs
from .trainable_count import count_trainable

_CUBLAS_WORKSPACE = {9: 32 << 20, 10: 32 << 20}
"""Bytes of workspace that torch allocates for each cuBLAS handle, by major compute capability."""
_SMALL_WORKSPACE = 8 << 20
_CUBLAS_HANDLES = 2
"""One of the thread that runs the forward pass, one of autograd's thread."""
CUDA_CONTEXT_BYTES = 600 << 20
"""Bytes of a CUDA context with its libraries and kernels, outside of torch's allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentState:
    """Bytes of device memory held during the whole run.

    Attributes:
        weights: parameters in the dtype of the model.
        main_weights: fp32 copies of the parameters in the optimizer.
        optimizer: all other optimizer state.
        ema: exponential moving average (EMA) of the weights.
        gradient_sums: fp32 accumulators of gradients over micro batches.
        tables: rotary cos/sin tables, masks of packed documents.
        batches: samples on the device.
        workspace: of cuBLAS.
        on_host: main weights and optimizer state in host memory instead.
        ema_on_host: EMA in host memory instead.
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

    @property
    def total(self) -> int:
        """Bytes on the device."""
        held = self.weights + self.main_weights + self.optimizer + self.ema + self.gradient_sums
        return held + self.tables + self.batches + self.workspace


def num_parameters(facts: RunInputs) -> int:
    """Number of parameters, including frozen ones."""
    return count_trainable(facts.model_config, facts.vocab_size, facts.batch_spec).total


def num_inactive_parameters(facts: RunInputs) -> int:
    """Number of expert parameters that are inactive for a token."""
    args = facts.model_config, facts.vocab_size, facts.batch_spec
    return count_parameters(*args) - count_parameters(*args, active=True)


def num_trainable_parameters(facts: RunInputs) -> int:
    """Number of trainable parameters."""
    return count_trainable(facts.model_config, facts.vocab_size, facts.batch_spec).trainable


def num_state_elements(facts: RunInputs) -> int:
    """Number of elements of optimizer state besides main weights."""
    return min_state_elements(
        facts.model_config, facts.vocab_size, num_trainable_parameters(facts) if facts.model_config.peft.is_on else None
    )


def rotary_table_bytes(stacks: tuple[StackSlice, ...]) -> int:
    """Bytes of the rotary tables of all stacks: cos and sin in fp32, for xPos separate ones for keys."""
    return sum(
        stack.rotary.positions * stack.rotary.dim * 4 * (2 if stack.rotary.xpos else 1)
        for stack in stacks
        if stack.rotary
    )


def main_weight_bytes(precision: PrecisionPlan) -> int:
    """Bytes of the fp32 main copy of one weight; 0 without a copy."""
    return 4 if precision.main_weights and precision.param_dtype.itemsize < 4 else 0


def persistent_state(facts: RunInputs) -> PersistentState:
    """Return the persistent memory of a rank of a run on CUDA."""
    keys, widths = facts.model_config, facts.widths
    parameters = num_trainable_parameters(facts)
    shards, main = facts.shards, main_weight_bytes(facts.precision)
    weight_shards = 1 if facts.layout is None or facts.layout.replicates_weights else shards
    state = num_state_elements(facts) * (main or widths.weights) // shards
    on_host = offloads_optimizer_state(keys, torch.device(facts.target.device))
    ema = parameters * facts.ema_itemsize // shards
    return PersistentState(
        weights=num_parameters(facts) * widths.weights // weight_shards,
        main_weights=0 if on_host else parameters * main // shards,
        optimizer=0 if on_host else state,
        ema=0 if facts.ema_on_host else ema,
        gradient_sums=parameters * 4 // weight_shards if main and accumulates_in_fp32(facts) else 0,
        tables=rotary_table_bytes(tuple(each.stack for each in facts.stacks)) + _masks(facts),
        batches=_batches(facts),
        workspace=_workspace(facts),
        on_host=(parameters * main // shards + state) if on_host else 0,
        ema_on_host=ema if facts.ema_on_host else 0,
    )


def accumulates_in_fp32(facts: RunInputs) -> bool:
    """True if the optimizer accumulates 16-bit gradients in fp32, over micro batches or for reduction over ranks."""
    if not facts.precision.main_weights:
        return False
    if facts.layout is not None and facts.layout.replicates_weights and facts.reduce_itemsize > facts.widths.weights:
        return True
    return facts.micro_batches > 1


def reduces_in_other_dtype(facts: RunInputs) -> bool:
    """True if gradients are copied to another dtype for the reduction over ranks."""
    if facts.layout is None or not facts.layout.replicates_weights:
        return False
    return facts.reduce_itemsize != (4 if accumulates_in_fp32(facts) else facts.widths.weights)


def _masks(facts: RunInputs) -> int:
    """Bytes of the masks that separate packed documents: one for each stack and one for cross-attention."""
    total = 0
    for stack in facts.stacks:
        total += stack.attention.mask_bytes
        total += stack.cross_attention.mask_bytes if stack.cross_attention else 0
    return total


def _batches(facts: RunInputs) -> int:
    """Bytes on the device of the current batch and the prefetched next one."""
    form = facts.batch_spec
    lengths = [form.seq_length, *([form.decoder_seq_length] if form.decoder_seq_length else [])]
    extras = 4 * (form.packed or form.reset_position_ids) + (1 if form.padded else 0)  # document ids, padding mask
    sample = sum(lengths) * (8 + extras) + lengths[-1] * 8
    return 2 * facts.model_config.global_batch_size // facts.ranks * sample


def _workspace(facts: RunInputs) -> int:
    capability = facts.target.capability
    return 0 if capability is None else _CUBLAS_HANDLES * _CUBLAS_WORKSPACE.get(capability[0], _SMALL_WORKSPACE)


def update_working_bytes(facts: RunInputs) -> int:
    """Bytes of temporary memory of the optimizer's update."""
    kind, settings = optimizer_kind(facts.model_config.optim.name), optimizer_settings(facts.model_config.optim)
    weights = _weights(facts)
    parameters = num_trainable_parameters(facts) // facts.shards
    largest = max(weight.elements for weight in weights) // facts.shards
    hidden = max((weight.elements for weight in weights if weight.is_hidden), default=0) // facts.shards
    slots = (
        offload_bucket_bytes(facts)
        if offloads_optimizer_state(facts.model_config, torch.device(facts.target.device))
        else 0
    )
    match kind:
        case "adafactor":  # updates of all weights at once, in fp32 unless they overwrite the gradients
            elements = largest if slots else parameters
            updates = elements * 4 if facts.widths.weights < 4 and not accumulates_in_fp32(facts) else 0
            return slots + updates + largest * 4 * (4 if settings["beta1"] is not None else 3)
        case "muon":  # gradient, momentum and direction in fp32, Newton-Schulz iterations in bf16, the update
            return slots + hidden * 28
        case "sgd":
            return slots + (min(largest, BUCKET_BYTES // 4) if slots else largest) * 16
        case _:
            return slots


def offload_bucket_bytes(facts: RunInputs) -> int:
    """Bytes of the device buckets through which optimizer state on the host is streamed."""
    kind, settings = optimizer_kind(facts.model_config.optim.name), optimizer_settings(facts.model_config.optim)
    main = main_weight_bytes(facts.precision)
    states: list[tuple[int, int, bool]] = []
    for weight in _weights(facts):
        moments = _count_moments(kind, settings, is_hidden=weight.is_hidden)
        whole = kind == "adafactor" or (kind == "muon" and weight.is_hidden) or settings.get("scale_parameter", False)
        width = main + moments * (main or facts.widths.weights)
        states.append((-(-weight.elements // facts.shards), width, whole))
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


def _weights(facts: RunInputs) -> list[_Weight]:
    """Return the large parameters in the optimizer's order."""
    if facts.model_config.peft.is_on:
        trained = count_trainable(facts.model_config, facts.vocab_size, facts.batch_spec).trainable_tensors
        return [_Weight(elements, is_hidden=dimensions > 1) for elements, dimensions in trained]
    first = facts.stacks[0].stack.hidden_size
    embedding = _Weight(facts.family.padded_vocab_size * first, is_hidden=False)
    family = facts.family
    has_decoder_embedding = isinstance(family, T5Slice) and not family.shared_embeddings
    weights = [embedding] * (1 + has_decoder_embedding)
    for each in facts.stacks:
        stack, mlp = each.stack, each.stack.mlp
        hidden, ups = stack.hidden_size, 2 if mlp.gated else 1
        attentions = [stack.attention, *([each.cross] if each.cross else [])]
        for number in range(stack.num_layers):
            sizes: list[int] = []
            for attention in attentions:
                query, key = attention.heads * attention.head_dim, attention.groups * attention.head_dim
                sizes += [hidden * (query + 2 * key), hidden * query]
            if stack.moe is None or not stack.moe.layers[number]:
                sizes += [hidden * mlp.ffn_hidden_size * ups, hidden * mlp.ffn_hidden_size]
            else:
                experts = stack.moe.experts * hidden * stack.moe.ffn_hidden_size
                shared = hidden * (stack.moe.shared_ffn_hidden_size or 0)
                sizes += [experts * ups, experts, *([shared * ups, shared] if shared else [])]
            weights += [_Weight(size, is_hidden=True) for size in sizes]
    return weights if family.tied else [*weights, embedding]
