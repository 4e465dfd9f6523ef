"""What a rank holds whatever it computes: weights, optimizer state, sums of gradients, tables, batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...models.config.counting import count_parameters
from ...models.config.slices import StackSlice
from ..config.optim import optimizer_kind, optimizer_settings
from ..distributed.layout import DataLayout
from ..optim.buckets import BUCKET_BYTES, SLOTS
from ..optim.build import count_state, is_state_on_host
from ..precision import PrecisionPlan
from .facts import RunFacts

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

    @property
    def total(self) -> int:
        """On the device."""
        held = self.weights + self.main_weights + self.optimizer + self.average + self.gradient_sums
        return held + self.tables + self.batches + self.workspace


def parameters_of(facts: RunFacts) -> int:
    """Parameters of the model."""
    return count_parameters(facts.keys, facts.vocab_size, facts.form)


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
    parameters = parameters_of(facts)
    shards, main = facts.shards, main_weight_bytes(facts.precision)
    weights = parameters * widths.weights // (1 if whole_weights(facts.layout) else shards)
    state = count_state(keys, facts.vocab_size) * (main or widths.weights) // shards
    on_host = is_state_on_host(keys, torch.device(facts.target.device))
    moved = (parameters * main // shards + state) if on_host else 0
    sums = 0
    if main and adds_up(facts):
        sums = parameters * 4 // (1 if whole_weights(facts.layout) else shards)
    return HeldState(
        weights=weights,
        main_weights=0 if on_host else parameters * main // shards,
        optimizer=0 if on_host else state,
        average=parameters * facts.average_width // shards,
        gradient_sums=sums,
        tables=rotary_tables(tuple(each.stack for each in facts.stacks)) + _masks(facts),
        batches=_batches(facts),
        workspace=_workspace(facts),
        on_host=moved,
    )


def adds_up(facts: RunFacts) -> bool:
    """Whether the optimizer adds gradients of narrow weights up in fp32: over micro batches, or to sum over ranks."""
    if facts.layout is not None and facts.layout.whole_weights and facts.reduce_width > facts.widths.weights:
        return True
    return facts.micro_batches > 1


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


def update_working(facts: RunFacts, largest: int) -> int:
    """Bytes the optimizer needs during its update besides what it keeps.

    Args:
        facts: of the run.
        largest: numbers of the largest weight.
    """
    kind, chosen = optimizer_kind(facts.keys.optim.name), optimizer_settings(facts.keys.optim)
    parameters = parameters_of(facts) // facts.shards
    largest //= facts.shards
    buckets = 0
    if is_state_on_host(facts.keys, torch.device(facts.target.device)):
        whole = kind in ("adafactor", "muon")  # a weight's state is on the device as a whole
        buckets = SLOTS * max(BUCKET_BYTES, largest * 8 * whole)
    return buckets + _update_itself(facts, kind, chosen, parameters, largest)


def _update_itself(facts: RunFacts, kind: str, chosen: dict[str, Any], parameters: int, largest: int) -> int:
    """Bytes of what an update calculates on the way."""
    match kind:
        case "adafactor":  # steps of all weights together, in fp32 unless they are the gradients themselves
            steps = parameters * 4 if facts.widths.weights < 4 and not adds_up(facts) else 0
            return steps + largest * 4 * (4 if chosen["beta1"] is not None else 3)
        case "muon":  # gradient, mean and direction in fp32, iterations in bf16, the step
            return largest * 28
        case "sgd":
            return largest * 16
        case _:
            return 0
