"""Plan of a run: estimated memory and step time on a device, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...kernels.attention.call_spec import InstalledSoftware
from ...kernels.attention.installed_software import detect_installed_software
from ...models.build import ModelPlan
from ...models.config.memory import RecomputeModule, RecomputeSlice
from ...models.memory.host_copies import SLAB_BYTES
from ...models.model_cost import count_parameters
from ...models.parallel.overlap import devices_share_memory
from ...models.parallel.schedule import SimulatedStep, simulate_step
from ...models.recompute.analysis import ineffective_recompute_messages, memory_saving_recompute, recomputed_for_offload
from ..config.resolved_run import ResolvedRun
from ..device.attention_software import assumed_software, run_flags
from ..device.bench_table import FoundTable, card_name, find_table
from ..device.choose_device import compute_capability, device_name
from ..device.determinism import attention_flags
from ..utils.host_memory import host_memory
from .hardware import EFFICIENCY, GPUSpec, adjust_to_measured, match_gpu
from .roofline import StepTime, step_time
from .run_inputs import RunInputs, collect_inputs, pipeline_ranks
from .state_memory import CUDA_CONTEXT_BYTES
from .target import Target
from .timeline import MemoryPlan, memory_plan
from .transfers import offloaded_bytes


class RankPlan(NamedTuple):
    """Memory of a rank of a pipeline, or of any rank without one.

    Attributes:
        inputs: inputs of the estimate.
        memory: memory of the rank.
    """

    inputs: RunInputs
    memory: MemoryPlan

    @property
    def allocated(self) -> int:
        """Bytes allocated at the peak: `torch.cuda.max_memory_allocated`."""
        return self.memory.total

    @property
    def reserved(self) -> int:
        """Bytes reserved at the peak: `torch.cuda.max_memory_reserved`."""
        return int(self.memory.reserved * EFFICIENCY["allocator_reserve"])

    @property
    def outside(self) -> int:
        """Bytes of device memory outside of torch's allocator."""
        return CUDA_CONTEXT_BYTES + self.memory.persistent.symmetric + self.memory.persistent.nccl

    @property
    def needed(self) -> int:
        """Bytes of device memory needed, including those outside of torch's allocator."""
        return self.reserved + self.outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Estimated memory and step time of a run.

    Attributes:
        inputs: inputs of the estimate, of all ranks of a pipeline together.
        num_parameters: number of parameters.
        num_active_parameters: number of parameters active for each token.
        ranks: each rank of the pipeline; one without a pipeline.
        time: step time; None without a GPU, or if its peak is not known.
    """

    inputs: RunInputs
    num_parameters: int
    num_active_parameters: int
    ranks: tuple[RankPlan, ...]
    time: StepTime | None

    @property
    def largest(self) -> RankPlan:
        """The rank that needs the most device memory."""
        return max(self.ranks, key=lambda rank: rank.allocated)

    @property
    def peak_at(self) -> str:
        """The moment with the most memory, and the pipeline rank if there are several."""
        where, rank = self.memory.peak.where, self.largest.inputs.pipeline_rank
        return where if rank is None else f"{where}, on pipeline rank {rank}"

    @property
    def memory(self) -> MemoryPlan:
        """Memory of the rank that needs the most."""
        return self.largest.memory

    @property
    def schedule(self) -> SimulatedStep | None:
        """Schedule of a step of a pipeline; None if the times are not known, or without a pipeline."""
        if self.time is None or not self.time.stages:
            return None
        return simulate_step(self.time.stages, len(self.ranks), self.inputs.micro_batches)

    @property
    def allocated(self) -> int:
        """Bytes allocated at the peak of the rank that needs the most."""
        return self.largest.allocated

    @property
    def reserved(self) -> int:
        """Bytes reserved at the peak of the rank that needs the most."""
        return self.largest.reserved

    @property
    def needed(self) -> int:
        """Bytes of device memory needed by the rank that needs the most, with those outside of torch's allocator."""
        return self.largest.needed

    @property
    def available(self) -> int | None:
        """Bytes of device memory; None if not known."""
        return self.inputs.target.memory

    @property
    def fits(self) -> bool | None:
        """True if device memory suffices, and host memory as far as known; None if device memory is not known."""
        return None if self.available is None else self.needed <= self.available and not self.missing_host_memory

    @property
    def on_host(self) -> int:
        """Bytes of host memory of the rank that needs the most for offloading; that of layers is allocated in slabs."""
        return max(_on_host(rank.memory) for rank in self.ranks)

    @property
    def missing_host_memory(self) -> int:
        """Bytes of host memory that are missing, as far as known."""
        available = self.inputs.target.host_memory
        return 0 if available is None else max(0, self.on_host - available)

    @property
    def seconds(self) -> float:
        """Step time; infinite if not known, so that plans can be compared by (time, memory)."""
        return self.time.seconds if self.time else float("inf")


def _on_host(memory: MemoryPlan) -> int:
    held = memory.persistent
    return -(-sum(map(offloaded_bytes, memory.layers)) // SLAB_BYTES) * SLAB_BYTES + held.on_host + held.ema_on_host


def make_plan(
    run: ResolvedRun, target: Target, *, vocab_size: int | None = None, model_plan: ModelPlan | None = None
) -> Plan:
    """Estimate memory and step time of the ranks of a run; arguments as in `collect_inputs`.

    Raises:
        ValueError: as `collect_inputs` and `pipeline_ranks`.
        UserError: CUDA graphs are required but not supported for this run.
    """
    inputs = collect_inputs(run, target, vocab_size=vocab_size, model_plan=model_plan)
    ranks = [(each, memory_plan(each)) for each in pipeline_ranks(inputs)]
    model = run.model, inputs.vocab_size, run.batch_spec
    inactive = count_parameters(*model) - count_parameters(*model, active=True)  # experts
    return Plan(
        inputs=inputs,
        num_parameters=inputs.num_parameters,
        num_active_parameters=inputs.num_parameters - inactive,
        ranks=tuple(RankPlan(*each) for each in ranks),
        time=step_time(ranks),
    )


def useless_recompute_notes(plan: Plan) -> list[str]:
    """Explain, for each module whose recomputation saves no memory, why, and name modules that do."""
    run = plan.inputs
    return list(ineffective_recompute_messages(run.family, run.decisions, run.peft, compiled=run.compiled))


def own_block_notes(plan: Plan) -> list[str]:
    """Say what is not known of the layers of users' own blocks."""
    blocks = {stack.block: None for stack in plan.inputs.family.stacks if stack.is_own_block}
    return [
        f"`transformer_block_type` ({block}) is your own: its parameters are counted; its memory and time are those of "
        "pre_ln, since what it does between attention and MLP is not known"
        for block in blocks
    ]


def effective_recompute(run: RunInputs) -> tuple[RecomputeSlice | None, ...]:
    """Return, for each stack, the part of its recomputation that saves memory."""
    return memory_saving_recompute(run.family, run.decisions, run.peft, compiled=run.compiled)


def offload_recompute(run: RunInputs) -> tuple[frozenset[RecomputeModule], ...]:
    """Return, for each stack, the modules its offloaded layers recompute to avoid copies; empty without a GPU."""
    if run.target.device != "cuda":
        return (frozenset(),) * len(run.stacks)
    return recomputed_for_offload(run.family, run.decisions, run.peft, compiled=run.compiled)


def local_target(run: ResolvedRun, device: torch.device, found: FoundTable | None = None) -> Target:
    """Return the target for a device of this machine, with its measurements; None looks for them."""
    software, host = detect_installed_software(device.type), host_memory()
    if found is None:
        found = find_table(card_name(device), software, run.env_vars)
    gpu: GPUSpec | None = None
    capability, memory = compute_capability(device), None
    if capability is not None:
        memory = torch.cuda.get_device_properties(device).total_memory
        gpu = _with_rates(match_gpu(device_name(device), memory, capability), found)
    return Target(
        device=device.type,
        capability=capability,
        gpu=gpu,
        memory=memory,
        software=_of_run(run, software, found),
        flags=attention_flags(run.trainer.deterministic),
        host_memory=None if host is None else host // run.ranks_per_node,
        peer_access=None if capability is None else peer_access(run.ranks_per_node),
        ignored_bench=found.ignored,
    )


def peer_access(devices: int) -> bool | None:
    """Return True if so many GPUs of this machine read each other's memory; None for one, or if others are planned."""
    if devices <= torch.cuda.device_count():
        return devices_share_memory(range(devices)) if devices > 1 else None
    # the ranks of a run may see one GPU each, of which they cannot address the others'
    return False if torch.distributed.is_initialized() else None


def gpu_target(run: ResolvedRun, gpu: GPUSpec) -> Target:
    """Return the target for a GPU that need not be installed, with this machine's software as if it were."""
    software = assumed_software(run.model, "cuda")
    found = find_table(gpu.name, software, run.env_vars)
    return Target(
        device="cuda",
        capability=gpu.capability,
        gpu=_with_rates(gpu, found),
        memory=gpu.memory,
        software=_of_run(run, software, found),
        flags=run_flags(run),
        ignored_bench=found.ignored,
    )


def _of_run(run: ResolvedRun, software: InstalledSoftware, found: FoundTable) -> InstalledSoftware:
    return replace(software, deterministic_algorithms=bool(run.trainer.deterministic), measured=found.times)


def _with_rates(gpu: GPUSpec, found: FoundTable) -> GPUSpec:
    rates = None if found.table is None else found.table.rates
    return gpu if rates is None else adjust_to_measured(gpu, rates, found.source)
