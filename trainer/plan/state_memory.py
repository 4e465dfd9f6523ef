"""What a rank holds whatever it computes: weights, optimizer state, sums of gradients, tables, batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...models.config.parameter_count import count_parameters
from ...models.config.slices import StackSlice
from ...models.config.t5_slice import T5Slice
from ..config.parameter_layout import DataLayout
from ..config.schema.optim import optimizer_kind, optimizer_settings
from ..device.precision import PrecisionPlan
from ..optim.optimizer_factory import count_state, is_state_on_host
from ..optim.state_buckets import BUCKET_BYTES, StateShape, plan_buckets
from .inputs import RunFacts
from .trainable_count import count_trained

CUBLAS_WORKSPACE = {9: 32 << 20, 10: 32 << 20}
"""Bytes that torch gives cuBLAS for each of its handles, by the first number of the capability."""
_SMALL_WORKSPACE = 8 << 20
_HANDLES = 2
"""Of cuBLAS: one of the thread that runs the forward pass, one of autograd's."""
CONTEXT = 600 << 20
"""Bytes of a CUDA context with its libraries and kernels, which the allocator does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """Bytes that are there during the whole run.

    Attributes:
        weights: parameters in the dtype of the model.
        main_weights: their fp32 copies in the optimizer.
        optimizer: everything else an optimizer keeps.
        average: the moving average of the weights.
        gradient_sums: fp32 sums of the gradients of several micro batches.
        tables: rotary angles, masks of packed documents.
        batches: samples on the device.
        workspace: of the libraries.
        on_host: main weights and optimizer state that live in host memory instead.
        average_on_host: likewise the moving average.
    """

    weights: int
    main_weights: int
    optimizer: int
    average: int
    gradient_sums: int
    tables: int
    batches: int
    workspace: int
    on_host: int = 0
    average_on_host: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        held = self.weights + self.main_weights + self.optimizer + self.average + self.gradient_sums
        return held + self.tables + self.batches + self.workspace


def parameters_of(facts: RunFacts) -> int:
    """Parameters of the model, frozen ones too."""
    return count_trained(facts.keys, facts.vocab_size, facts.form).all


def idle_of(facts: RunFacts) -> int:
    """Parameters of experts that a token does not meet."""
    given = facts.keys, facts.vocab_size, facts.form
    return count_parameters(*given) - count_parameters(*given, active=True)


def trained_of(facts: RunFacts) -> int:
    """Parameters that have gradients and optimizer state."""
    return count_trained(facts.keys, facts.vocab_size, facts.form).trained


def state_of(facts: RunFacts) -> int:
    """Numbers that the optimizer keeps besides main weights."""
    return count_state(facts.keys, facts.vocab_size, trained_of(facts) if facts.keys.peft.is_on else None)


def rotary_tables(stacks: tuple[StackSlice, ...]) -> int:
    """Bytes of the angles of all stacks: cosine and sine in fp32, in xPos those of keys too."""
    return sum(
        stack.rotary.positions * stack.rotary.dim * 4 * (2 if stack.rotary.fading else 1)
        for stack in stacks
        if stack.rotary
    )


def whole_weights(layout: DataLayout | None) -> bool:
    """Whether a rank keeps all weights between two steps."""
    return layout is None or layout.whole_weights


def main_weight_bytes(precision: PrecisionPlan) -> int:
    """Bytes of a main weight beside the weight itself."""
    return 4 if precision.main_weights and precision.weights.itemsize < 4 else 0


def held_state(facts: RunFacts) -> HeldState:
    """What a rank of a run on CUDA holds from the first step to the last."""
    keys, widths = facts.keys, facts.widths
    parameters = trained_of(facts)
    shards, main = facts.shards, main_weight_bytes(facts.precision)
    weights = parameters_of(facts) * widths.weights // (1 if whole_weights(facts.layout) else shards)
    state = state_of(facts) * (main or widths.weights) // shards
    on_host = is_state_on_host(keys, torch.device(facts.target.device))
    moved = (parameters * main // shards + state) if on_host else 0
    average = parameters * facts.average_width // shards
    sums = 0
    if main and adds_up(facts):
        sums = parameters * 4 // (1 if whole_weights(facts.layout) else shards)
    return HeldState(
        weights=weights,
        main_weights=0 if on_host else parameters * main // shards,
        optimizer=0 if on_host else state,
        average=0 if facts.average_on_host else average,
        gradient_sums=sums,
        tables=rotary_tables(tuple(each.stack for each in facts.stacks)) + _masks(facts),
        batches=_batches(facts),
        workspace=_workspace(facts),
        on_host=moved,
        average_on_host=average if facts.average_on_host else 0,
    )


def adds_up(facts: RunFacts) -> bool:
    """Whether the optimizer adds gradients of narrow weights up in fp32: over micro batches, or to sum over ranks."""
    if not facts.precision.main_weights:
        return False
    if facts.layout is not None and facts.layout.whole_weights and facts.reduce_width > facts.widths.weights:
        return True
    return facts.micro_batches > 1


def summed_apart(facts: RunFacts) -> bool:
    """Whether gradients are summed over ranks in copies, of another dtype than the one they are kept in."""
    if facts.layout is None or not facts.layout.whole_weights:
        return False
    return facts.reduce_width != (4 if adds_up(facts) else facts.widths.weights)


def _masks(facts: RunFacts) -> int:
    """Bytes of the masks that keep packed documents apart: one for each stack and one across."""
    found = 0
    for stack in facts.stacks:
        found += stack.attention.mask_bytes
        found += stack.cross_attention.mask_bytes if stack.cross_attention else 0
    return found


def _batches(facts: RunFacts) -> int:
    """Bytes of the batch of this step and of the next one on the device."""
    form = facts.form
    lengths = [form.length, *([form.decoder_length] if form.decoder_length else [])]
    numbers = 4 * (form.packed or form.restart) + (1 if form.padded else 0)
    sample = sum(lengths) * (8 + numbers) + lengths[-1] * 8
    return 2 * facts.keys.global_batch_size // facts.ranks * sample


def _workspace(facts: RunFacts) -> int:
    capability = facts.target.capability
    return 0 if capability is None else _HANDLES * CUBLAS_WORKSPACE.get(capability[0], _SMALL_WORKSPACE)


def update_working(facts: RunFacts) -> int:
    """Bytes the optimizer needs during its update besides what it keeps."""
    kind, chosen = optimizer_kind(facts.keys.optim.name), optimizer_settings(facts.keys.optim)
    weights = _weights(facts)
    parameters = trained_of(facts) // facts.shards
    largest = max(weight.numbers for weight in weights) // facts.shards
    hidden = max((weight.numbers for weight in weights if weight.is_hidden), default=0) // facts.shards
    slots = slots_of(facts) if is_state_on_host(facts.keys, torch.device(facts.target.device)) else 0
    match kind:
        case "adafactor":  # steps of all weights together, in fp32 unless they are the gradients themselves
            together = largest if slots else parameters
            steps = together * 4 if facts.widths.weights < 4 and not adds_up(facts) else 0
            return slots + steps + largest * 4 * (4 if chosen["beta1"] is not None else 3)
        case "muon":  # gradient, mean and direction in fp32, iterations in bf16, the step
            return slots + hidden * 28
        case "sgd":
            return slots + (min(largest, BUCKET_BYTES // 4) if slots else largest) * 16
        case _:
            return slots


def slots_of(facts: RunFacts) -> int:
    """Bytes of the buckets on the device through which state goes that is kept on the host."""
    kind, chosen = optimizer_kind(facts.keys.optim.name), optimizer_settings(facts.keys.optim)
    main = main_weight_bytes(facts.precision)
    states: list[tuple[int, int, bool]] = []
    for weight in _weights(facts):
        moments = count_moments(kind, chosen, is_hidden=weight.is_hidden)
        whole = kind == "adafactor" or (kind == "muon" and weight.is_hidden) or chosen.get("scale_parameter", False)
        width = main + moments * (main or facts.widths.weights)
        states.append((-(-weight.numbers // facts.shards), width, whole))
    return _slots(tuple(states))


@lru_cache(maxsize=16)
def _slots(states: tuple[tuple[int, int, bool], ...]) -> int:
    """Bytes of all slots, from the elements of each state, the bytes of an element, and whether it must be whole."""
    shapes: list[StateShape] = []
    for elements, width, whole in states:
        unit = torch.float32 if width % 4 == 0 else torch.bfloat16
        tensors = {str(number): ((elements,), unit) for number in range(width // unit.itemsize)}
        shapes.append(StateShape(tensors, most_bytes=elements * width, elements=None if whole else elements))
    return sum(plan_buckets([shapes]).slots)


def count_moments(kind: str, chosen: dict[str, Any], *, is_hidden: bool) -> int:
    """Numbers an optimizer keeps for each of a weight, its main weight and small vectors left out."""
    match kind:
        case "adafactor":
            return int(chosen["beta1"] is not None)
        case "sgd":
            return int(bool(chosen["momentum"]))
        case "muon":
            return 1 if is_hidden else 2
        case _:
            return 2


class _Weight(NamedTuple):
    """A large parameter.

    Attributes:
        numbers: in it.
        is_hidden: it is a matrix of a layer, or those of all experts of one.
    """

    numbers: int
    is_hidden: bool


def _weights(facts: RunFacts) -> list[_Weight]:
    """The large parameters, in the order in which an optimizer has them."""
    if facts.keys.peft.is_on:
        trained = count_trained(facts.keys, facts.vocab_size, facts.form).sizes
        return [_Weight(numbers, is_hidden=dimensions > 1) for numbers, dimensions in trained]
    first = facts.stacks[0].stack.hidden_size
    table = _Weight(facts.family.padded_vocab_size * first, is_hidden=False)
    family = facts.family
    of_decoder = isinstance(family, T5Slice) and not family.shared_embeddings
    found = [table] * (1 + of_decoder)
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
            found += [_Weight(size, is_hidden=True) for size in sizes]
    return found if family.tied else [*found, table]
