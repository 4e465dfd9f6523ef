"""Rules that depend on the number of processes: sharding, CUDA graphs and batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.families import keys_by_stack
from ....models.config.key_block import Finding
from ....models.config.stack import divisors
from ..captured_layers import captures_layers, layer_capture_reason, uncaptured_layer_keys
from ..node_counts import fits, min_nodes
from ..parameter_layout import DISTRIBUTED_OPTIMIZERS
from .rule_context import RuleContext, has_16_bit_weights, no_effect, num_data_ranks, num_processes

PARALLEL_SIZE_KEYS = frozenset(
    f"model.{kind}_parallel_size"
    for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)
"""NeMo's model-parallel sizes: with a wrong one the number of data-parallel ranks is unknown."""


def mps_uses_one_process(context: RuleContext) -> Iterator[Finding]:
    """MPS supports one process: a machine has one GPU and no collective communication."""
    trainer = context.root.trainer
    if trainer.accelerator == "mps" and num_processes(context) > 1:
        yield Finding.error(
            ("trainer.devices", "trainer.accelerator"),
            f"`accelerator` (mps) supports one process, not {num_processes(context)}",
            "trainer.devices=1 trainer.num_nodes=1",
        )


def restarts_resume(context: RuleContext) -> Iterator[Finding]:
    """A run that is restarted, after a failure or because nodes join and leave, goes on from its checkpoints."""
    trainer, manager = context.root.trainer, context.root.exp_manager
    switches = {name: getattr(manager, name) for name in ("resume_if_exists", "create_checkpoint_callback")}
    for key, acts in (
        ("max_restarts", trainer.max_restarts > 0),
        ("min_nodes", min_nodes(trainer) < trainer.num_nodes),
    ):
        if acts and not all(switches.values()):
            yield Finding.error(
                (f"trainer.{key}", *(f"exp_manager.{name}" for name, is_on in switches.items() if not is_on)),
                f"`{key}` ({getattr(trainer, key)}) restarts from checkpoints, which this run does not have",
                " ".join(f"exp_manager.{name}=true" for name, is_on in switches.items() if not is_on),
            )


def fewer_nodes_fit(context: RuleContext) -> Iterator[Finding]:
    """`min_nodes` nodes divide the global batch and hold whole replicas."""
    trainer, path = context.root.trainer, "trainer.min_nodes"
    fewest = min_nodes(trainer)
    if fewest > trainer.num_nodes:
        yield Finding.error(
            (path, "trainer.num_nodes"),
            f"`min_nodes` ({fewest}) must not be more than `num_nodes` ({trainer.num_nodes})",
            f"{path}={trainer.num_nodes}",
        )
    elif fewest < trainer.num_nodes and trainer.devices == "auto":
        message = f"`min_nodes` ({fewest}) below `num_nodes` needs a number of `devices`, the same on every node"
        yield Finding.error((path, "trainer.devices"), message, "trainer.devices=8")
    elif fewest < trainer.num_nodes and not fits(context.root, fewest * int(trainer.devices)):
        fitting = [n for n in range(1, trainer.num_nodes + 1) if fits(context.root, n * int(trainer.devices))]
        counts = f"numbers of nodes that do: {', '.join(map(str, fitting))}" if fitting else "no number of nodes does"
        yield Finding.error(
            (path, "trainer.devices", "model.global_batch_size", "model.micro_batch_size"),
            f"`min_nodes` ({fewest}) with {trainer.devices} `devices` each must hold whole replicas of the model and "
            f"divide `global_batch_size` ({context.root.model.global_batch_size}) into micro batches; {counts}",
            f"{path}={min(fitting, key=lambda n: abs(n - fewest))}" if fitting else "",
        )


def cuda_graphs_are_possible(context: RuleContext) -> Iterator[Finding]:
    """CUDA graphs need a CUDA device, and communication that they support."""
    trainer, model = context.root.trainer, context.root.model
    key, processes = "model.enable_cuda_graph", num_processes(context)
    if not model.enable_cuda_graph:
        return
    if trainer.accelerator in ("cpu", "mps"):
        message = f"`enable_cuda_graph` (True) needs a CUDA device, not `{trainer.accelerator}`"
        yield Finding.error((key, "trainer.accelerator"), message, f"{key}=False")
        return
    if captures_layers(model, processes) and (reason := layer_capture_reason(model)) is not None:
        paths = (f"model.{name}" for name, _ in uncaptured_layer_keys(model))
        yield Finding.error((key, *paths), f"`enable_cuda_graph` (True) {reason}", f"{key}=False")
    if processes > 1 and model.sequence_parallel and model.ub_tp_comm_overlap:
        message = "`enable_cuda_graph` (True) does not capture copies of other ranks' memory (`ub_tp_comm_overlap`)"
        yield Finding.error((key, "model.ub_tp_comm_overlap"), message, f"{key}=False")


def distributed_keys_need_processes(context: RuleContext) -> Iterator[Finding]:
    """Check FSDP settings, and warn about distributed settings without effect."""
    model, trainer = context.root.model, context.root.trainer
    replicas = num_data_ranks(context)
    several = replicas > 1 or trainer.devices == "auto"
    names, engines = ("fsdp_sharding_strategy", "fsdp_shard_size"), "model.copy_engine_collectives"
    if model.fsdp and not several:
        yield no_effect("model.fsdp", "trainer.devices", f"with one {_rank_name(context)}")
    if not model.fsdp:
        for name in names:
            if f"model.{name}" in context.given:
                yield no_effect(f"model.{name}", "model.fsdp", "without `model.fsdp`")
    elif model.fsdp_sharding_strategy != "hybrid" and model.fsdp_shard_size is not None:
        yield no_effect(
            "model.fsdp_shard_size",
            "model.fsdp_sharding_strategy",
            f"with `fsdp_sharding_strategy` {model.fsdp_sharding_strategy}",
        )
    elif model.fsdp_shard_size is not None and several and replicas % model.fsdp_shard_size:
        yield Finding.error(
            ("model.fsdp_shard_size", "trainer.devices"),
            f"`fsdp_shard_size` ({model.fsdp_shard_size}) must divide the {replicas} "
            f"{'processes' if replicas == num_processes(context) else 'data-parallel ranks'}",
            f"model.fsdp_shard_size={max(d for d in divisors(replicas) if d <= model.fsdp_shard_size)}",
        )
    if model.fsdp and several and model.fsdp_sharding_strategy == "hybrid":
        size = model.fsdp_shard_size
        if trainer.num_nodes == 1 and size in (None, replicas):
            half = next((divisor for divisor in reversed(divisors(replicas)) if 1 < divisor < replicas), None)
            yield Finding.warning(
                ("model.fsdp_sharding_strategy", "model.fsdp_shard_size", "trainer.num_nodes"),
                "`fsdp_sharding_strategy: hybrid` equals `full` on one node with one sharding group",
                f"model.fsdp_shard_size={half}" if half else "model.fsdp_sharding_strategy=full",
            )
        size = size or max(1, num_processes(context) // trainer.num_nodes // model.tensor_model_parallel_size)
        if model.copy_engine_collectives and size < replicas:
            yield Finding.error(
                (engines, "model.fsdp_sharding_strategy"),
                "`copy_engine_collectives` (True) does not support `fsdp_sharding_strategy: hybrid` with several "
                f"({replicas // size}) copies of each shard, which use NCCL",
                f"{engines}=null",
            )
    reduce = "model.fsdp_grad_reduce_dtype"
    for path, acts in (
        (reduce, several),
        (engines, several),
        ("trainer.process_timeout", several or num_processes(context) > 1),
    ):
        if path in context.given and not acts:
            yield no_effect(path, "trainer.devices", f"with one {_rank_name(context)}")
    shards = model.optim.name in DISTRIBUTED_OPTIMIZERS or (model.fsdp and model.fsdp_sharding_strategy == "grad")
    if model.optim.overlap_param_sync and not (shards and several):
        when = "without a distributed optimizer or `fsdp_sharding_strategy: grad`"
        if shards:
            when = f"with one {_rank_name(context)}"
        yield no_effect("model.optim.overlap_param_sync", "trainer.devices" if shards else "model.optim.name", when)
    elif model.optim.overlap_param_sync:
        yield from _weights_are_read_at_once(context)
    if reduce in context.given and several and not has_16_bit_weights(context):
        when = "with weights that are not 16-bit: gradients are reduced in their own dtype"
        yield no_effect(reduce, "trainer.precision", when)


def _weights_are_read_at_once(context: RuleContext) -> Iterator[Finding]:
    """Yield the warning that a step needs all weights when it begins (`ResolvedRun.overlaps_param_sync`)."""
    model, path = context.root.model, "model.optim.overlap_param_sync"
    stacks = [(at, stack) for at, stack in keys_by_stack(model).items() if stack.cpu_offloading]
    for at, stack in stacks:
        if stack.cpu_offloading_weights:
            when = f"with `{at}cpu_offloading_weights` (True), which copies weights to the host"
            yield no_effect(path, f"model.{at}cpu_offloading_weights", when)
            return
    several = model.global_batch_size > model.micro_batch_size * num_data_ranks(context)
    if model.fp8 and not model.fp8_params and not stacks and (several or model.peft.is_on):
        when = "with `fp8` (True) where weights are cast once a step, all of them before its first layer"
        yield no_effect(path, "model.fp8", when)


def _rank_name(context: RuleContext) -> str:
    return "process" if num_processes(context) == 1 else "data-parallel rank"


def _devices(context: RuleContext) -> tuple[str, ...]:
    """Return the keys that determine the number of data-parallel ranks."""
    if num_processes(context) == 1:
        return ()
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    return ("trainer.devices", *(f"model.{name}" for name in names if getattr(context.root.model, name) > 1))


def _interleaved_ranks(context: RuleContext) -> int:
    """Return the ranks of a pipeline with virtual stages, which must divide the micro batches of a step; else 1."""
    model = context.root.model
    interleaves = (model.virtual_pipeline_model_parallel_size or 1) > 1 and model.family != "t5"
    return model.pipeline_model_parallel_size if interleaves else 1


def rampup_batch_size_divides(context: RuleContext) -> Iterator[Finding]:
    """`rampup_batch_size` must consist of whole micro batches on every process and reach `global_batch_size`."""
    model = context.root.model
    if not model.rampup_batch_size:
        return
    start, increment, samples = model.rampup_batch_size
    stages = _interleaved_ranks(context)
    unit = model.micro_batch_size * num_data_ranks(context) * stages
    path = "model.rampup_batch_size"
    whole = [unit * max(1, round(value / unit)) for value in (start, increment)]
    first, step = min(whole[0], max(unit, model.global_batch_size // unit * unit)), whole[1]
    step = unit if (model.global_batch_size - first) % step else step
    ranks = "processes" if num_data_ranks(context) == num_processes(context) else "data-parallel ranks"
    ranks += " and, with virtual stages, those of a pipeline" if stages > 1 else ""
    for what, value in (("start", start), ("increment", increment)):
        if value % unit:
            yield Finding.error(
                (path, "model.micro_batch_size", *_devices(context)),
                f"the {what} of `rampup_batch_size` ({value}) must be a multiple of `micro_batch_size` times the "
                f"{ranks} ({unit})",
                f"{path}=[{first},{step},{samples}]",
            )
    if whole != [start, increment] or model.global_batch_size % unit:  # another error
        return
    if start > model.global_batch_size:
        yield Finding.error(
            (path, "model.global_batch_size", *_devices(context)),
            f"`rampup_batch_size` starts at {start}, above `global_batch_size` ({model.global_batch_size})",
            f"model.global_batch_size={start}",
        )
    elif (model.global_batch_size - start) % increment:
        yield Finding.error(
            (path, "model.global_batch_size", *_devices(context)),
            f"`global_batch_size` ({model.global_batch_size}) is not reached from {start} in steps of {increment}",
            f"model.global_batch_size={start + (model.global_batch_size - start) // increment * increment + increment}",
        )


def batch_sizes_divide(context: RuleContext) -> Iterator[Finding]:
    """`global_batch_size` must be a multiple of `micro_batch_size` times the number of devices.

    With virtual stages a rank runs as many micro batches of each in turn as a pipeline has ranks, as in Megatron.
    """
    model = context.root.model
    devices, stages = num_data_ranks(context), _interleaved_ranks(context)
    name = "devices" if devices == num_processes(context) else "data-parallel ranks"
    micro_batch, global_batch = model.micro_batch_size, model.global_batch_size
    unit = micro_batch * devices * stages
    if global_batch % unit:
        times_devices = "" if devices == 1 else f" * {name} ({devices})"
        times_devices += f" * pipeline ranks ({stages}), with virtual stages" if stages > 1 else ""
        nearest = max(unit, round(global_batch / unit) * unit)
        samples, rest = divmod(global_batch, devices * stages)
        best = max((size for size in divisors(samples) if size <= micro_batch), default=1) if rest == 0 else 0
        other = f", or model.micro_batch_size={best}" if best else ""
        if global_batch % (micro_batch * devices) == 0:
            other = ", or model.virtual_pipeline_model_parallel_size=null"
        yield Finding.error(
            ("model.global_batch_size", "model.micro_batch_size", *_devices(context)),
            f"`global_batch_size` ({global_batch}) must be a multiple of `micro_batch_size` ({micro_batch})"
            f"{times_devices}",
            f"model.global_batch_size={nearest}{other}",
        )
