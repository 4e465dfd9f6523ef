"""Rules between keys that depend on the number of processes: layouts of the parameters, shares of a batch."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.key_block import Finding
from ....models.config.model_rules import divisors
from .rule_context import Facts, Rule, is_fp32_for_the_host, no_effect, processes

PARALLEL_SIZES = frozenset(
    f"model.{kind}_parallel_size"
    for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)
"""Of NeMo: other than 1 (which is refused) they divide the processes, so that fewer share a batch."""


def mps_is_alone(facts: Facts) -> Iterator[Finding]:
    """Apple's GPUs come one to a machine and do not talk to each other."""
    trainer = facts.root.trainer
    if trainer.accelerator == "mps" and processes(facts) > 1:
        yield Finding(
            "error",
            ("trainer.devices", "trainer.accelerator"),
            f"`mps` runs one process, not {processes(facts)}",
            "trainer.devices=1 trainer.num_nodes=1",
        )


def recordings_are_of_one_gpu(facts: Facts) -> Iterator[Finding]:
    """A CUDA graph holds the work of one process on a CUDA device."""
    trainer, model = facts.root.trainer, facts.root.model
    key = "model.enable_cuda_graph"
    if model.enable_cuda_graph and trainer.accelerator in ("cpu", "mps"):
        message = f"`enable_cuda_graph` (True) records work of a CUDA device, not of `{trainer.accelerator}`"
        yield Finding("error", (key, "trainer.accelerator"), message, f"{key}=False")
    elif model.enable_cuda_graph and processes(facts) > 1:
        message = f"`enable_cuda_graph` (True) records no communication, which {processes(facts)} processes need"
        yield Finding("error", (key, "trainer.devices"), message, f"{key}=False")


def sharding_has_processes(facts: Facts) -> Iterator[Finding]:
    """Settings of several processes, where there is one, or of another layout."""
    model, trainer = facts.root.model, facts.root.trainer
    world = processes(facts)
    several = world > 1 or trainer.devices == "auto"
    names = ("fsdp_sharding_strategy", "fsdp_shard_size")
    if model.fsdp and not several:
        yield no_effect("model.fsdp", "trainer.devices", "with one process")
    if not model.fsdp:
        for name in names:
            if f"model.{name}" in facts.given:
                yield no_effect(f"model.{name}", "model.fsdp", "without `model.fsdp`")
    elif model.fsdp_sharding_strategy != "hybrid" and model.fsdp_shard_size is not None:
        yield no_effect(
            "model.fsdp_shard_size",
            "model.fsdp_sharding_strategy",
            f"with `fsdp_sharding_strategy` {model.fsdp_sharding_strategy}",
        )
    elif model.fsdp_shard_size is not None and several and world % model.fsdp_shard_size:
        yield Finding(
            "error",
            ("model.fsdp_shard_size", "trainer.devices"),
            f"`fsdp_shard_size` ({model.fsdp_shard_size}) must divide the {world} processes",
            f"model.fsdp_shard_size={max(d for d in divisors(world) if d <= model.fsdp_shard_size)}",
        )
    if model.fsdp and several and model.fsdp_sharding_strategy == "hybrid":
        size = model.fsdp_shard_size
        if trainer.num_nodes == 1 and size in (None, world):
            half = next((divisor for divisor in reversed(divisors(world)) if 1 < divisor < world), None)
            yield Finding(
                "warning",
                ("model.fsdp_sharding_strategy", "model.fsdp_shard_size", "trainer.num_nodes"),
                "`fsdp_sharding_strategy: hybrid` is `full` on one machine that shares one copy of the parameters",
                f"model.fsdp_shard_size={half}" if half else "model.fsdp_sharding_strategy=full",
            )
    reduce = "model.fsdp_grad_reduce_dtype"
    for path in (reduce, "trainer.process_timeout"):
        if path in facts.given and not several:
            yield no_effect(path, "trainer.devices", "with one process")
    asks_for_bf16 = trainer.precision == "bf16-true" or (trainer.precision in (None, "bf16") and model.megatron_amp_O2)
    if reduce in facts.given and several and (is_fp32_for_the_host(facts) or not asks_for_bf16):
        yield no_effect(reduce, "trainer.precision", "with weights that are not bf16: gradients are summed as they are")


def ramp_up_divides(facts: Facts) -> Iterator[Finding]:
    """A growing batch is a whole number of micro batches on every process, and arrives at the full size."""
    model = facts.root.model
    if not model.rampup_batch_size:
        return
    start, increment, _ = model.rampup_batch_size
    unit = model.micro_batch_size * processes(facts)
    path = "model.rampup_batch_size"
    if start > model.global_batch_size:
        yield Finding(
            "error",
            (path, "model.global_batch_size"),
            f"`rampup_batch_size` starts at {start}, above `global_batch_size` ({model.global_batch_size})",
            f"model.global_batch_size={start}",
        )
    elif (model.global_batch_size - start) % increment:
        yield Finding(
            "error",
            (path, "model.global_batch_size"),
            f"`global_batch_size` ({model.global_batch_size}) is not reached from {start} in steps of {increment}",
            f"model.global_batch_size={start + (model.global_batch_size - start) // increment * increment + increment}",
        )
    for what, value in (("start", start), ("increment", increment)):
        if value % unit:
            yield Finding(
                "error",
                (path, "model.micro_batch_size"),
                f"the {what} of `rampup_batch_size` ({value}) must be a multiple of `micro_batch_size` times the "
                f"processes ({unit})",
                f"{unit * max(1, round(value / unit))}",
            )


def batches_divide(facts: Facts) -> Iterator[Finding]:
    """Gradients accumulate over a whole number of micro batches."""
    model = facts.root.model
    devices = processes(facts)
    micro, together = model.micro_batch_size, model.global_batch_size
    if together % (micro * devices):
        shares = "" if devices == 1 else f" * devices ({devices})"
        fitting = max(micro * devices, round(together / (micro * devices)) * micro * devices)
        per_device = together // devices if together % devices == 0 else together
        best = max(size for size in divisors(per_device) if size <= micro)
        other = f", or model.micro_batch_size={best}" if together % devices == 0 else ""
        yield Finding(
            "error",
            ("model.global_batch_size", "model.micro_batch_size", *(["trainer.devices"] if shares else [])),
            f"`global_batch_size` ({together}) must be a multiple of `micro_batch_size` ({micro}){shares}",
            f"model.global_batch_size={fitting}{other}",
        )


PROCESS_RULES: tuple[Rule, ...] = (
    mps_is_alone,
    recordings_are_of_one_gpu,
    sharding_has_processes,
    ramp_up_divides,
    batches_divide,
)
