"""The plan of a run: what it takes of memory and time on a device, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...kernels.attention.backends.registry import installed
from ...kernels.attention.dispatch import Decision
from ...models.config.memory import RecomputeModule
from ...models.config.memory_slice import RecomputeSlice
from ...models.config.peft_slice import peft_slice
from ...models.memory.host_copies import SLAB
from ...models.recompute.analysis import idle_recompute, made_again_for_copies, saving_recompute
from ..checkpoint.run_environment import device_name
from ..config.schema.root import RootBlock
from ..device.determinism import attention_flags
from .hardware import Card, card_of
from .inputs import RunFacts, Target, facts_of, precision_there
from .roofline import StepTime, step_time
from .state_memory import CONTEXT, idle_of, parameters_of
from .timeline import MemoryPlan, memory_plan
from .transfers import sent_by

FRAGMENTS = 1.03
"""What the allocator reserves, in what it has given out at the peak, where its segments grow. Of the runs of seed 3 in
docs/results/plan_check.jsonl the median is 1.02, all but one have at most 1.04; 1.00 to 1.03 where memory is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will take.

    Attributes:
        facts: what it follows from.
        parameters: of the model.
        active: those that a token meets.
        memory: of each rank.
        time: of a step; None where the card's peak is not known, or there is no card.
    """

    facts: RunFacts
    parameters: int
    active: int
    memory: MemoryPlan
    time: StepTime | None

    @property
    def allocated(self) -> int:
        """Bytes that the allocator has given out at the peak: `torch.cuda.max_memory_allocated`."""
        return self.memory.total

    @property
    def reserved(self) -> int:
        """Bytes that the allocator holds then: `torch.cuda.max_memory_reserved`."""
        return int(self.allocated * FRAGMENTS)

    @property
    def needed(self) -> int:
        """Bytes of the device, the CUDA context included."""
        return self.reserved + CONTEXT

    @property
    def available(self) -> int | None:
        """Bytes the device has; None where that is not known."""
        return self.facts.target.memory

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough, and the host as far as it is known; None where that of neither is."""
        return None if self.available is None else self.needed <= self.available and not self.short_of_host

    @property
    def on_host(self) -> int:
        """Bytes of host memory of each rank for what is offloaded; that of layers is taken in slabs."""
        held = self.memory.held
        return -(-sum(map(sent_by, self.memory.layers)) // SLAB) * SLAB + held.on_host + held.average_on_host

    @property
    def short_of_host(self) -> int:
        """Bytes of host memory that are missing, as far as is known."""
        there = self.facts.target.host_memory
        return 0 if there is None else max(0, self.on_host - there)

    @property
    def seconds(self) -> float:
        """Of a step; infinite where it is not known, so that plans can be compared by (time, memory)."""
        return self.time.seconds if self.time else float("inf")


def make_plan(root: RootBlock, target: Target, *, vocab_size: int | None = None) -> Plan:
    """Plan a run.

    Args:
        root: the keys; the rules have found no error in them.
        target: where it will be.
        vocab_size: tokens of the tokenizer, None where that is not known.

    Raises:
        ValueError: no attention backend is left there, compilation cannot be had, or the vocabulary is too small.
        UserError: micro batches shall be recorded as CUDA graphs and cannot be.
    """
    facts = facts_of(root, target, precision_there(root, target), vocab_size=vocab_size)
    memory = memory_plan(facts)
    return Plan(
        facts=facts,
        parameters=parameters_of(facts),
        active=parameters_of(facts) - idle_of(facts),
        memory=memory,
        time=step_time(facts, memory),
    )


def idle_modules(plan: Plan) -> list[str]:
    """For each part that shall be recomputed but keeps nothing: why that saves nothing, and what does."""
    facts, peft = plan.facts, peft_slice(plan.facts.keys.peft)
    return list(idle_recompute(facts.family, _decisions(facts), peft, compiled=facts.compiled))


def saved_by_recomputation(facts: RunFacts) -> tuple[RecomputeSlice | None, ...]:
    """For each stack, what recomputation saves."""
    peft = peft_slice(facts.keys.peft)
    return saving_recompute(facts.family, _decisions(facts), peft, compiled=facts.compiled)


def made_again(facts: RunFacts) -> tuple[frozenset[RecomputeModule], ...]:
    """For each stack, what its offloaded layers make again so that it need not be copied; nothing without a GPU."""
    if facts.target.device != "cuda":
        return (frozenset(),) * len(facts.stacks)
    compiled = all(stack.compiled for stack in facts.stacks)
    return made_again_for_copies(facts.family, _decisions(facts), peft_slice(facts.keys.peft), compiled=compiled)


def _decisions(facts: RunFacts) -> dict[str, Decision]:
    """What was chosen for each attention in training, by its label."""
    found: dict[str, Decision] = {}
    for stack in facts.stacks:
        found[f"{stack.name} training".strip()] = stack.attention
        if stack.cross_attention is not None:
            found["cross training"] = stack.cross_attention
    return found


def target_here(root: RootBlock, device: torch.device, world_size: int = 1) -> Target:
    """This machine's device, and its host memory."""
    from .memory_check import host_memory

    host = host_memory()
    card: Card | None = None
    capability, memory = None, None
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        capability, memory = torch.cuda.get_device_capability(device), facts.total_memory
        card = card_of(device_name(device), memory, capability)
    software = replace(installed(device.type), deterministic_algorithms=bool(root.trainer.deterministic))
    return Target(
        device=device.type,
        capability=capability,
        card=card,
        memory=memory,
        software=software,
        flags=attention_flags(root),
        world_size=world_size,
        host_memory=None if host is None else host // max(1, world_size // root.trainer.num_nodes),
    )


def target_elsewhere(root: RootBlock, card: Card, world_size: int = 1) -> Target:
    """A card that need not be here, with the software of this machine as it would be beside it."""
    from ..cli.explain import assumed_software, run_flags

    software = assumed_software(root, "cuda")
    return Target(
        device="cuda",
        capability=card.capability,
        card=card,
        memory=card.memory,
        software=replace(software, deterministic_algorithms=bool(root.trainer.deterministic)),
        flags=run_flags(root),
        world_size=world_size,
    )
