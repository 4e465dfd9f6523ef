"""Mixtures of experts on several ranks, beside one process that runs the same micro batches; in forked gloo ranks."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parallel_models import BATCH, LENGTH, VOCAB, batch_of, build, on_ranks, part_of
from torch import Tensor

SHARE = 0.7
"""Share of a micro batch in the global batch, a factor of the router losses."""
_groups: dict[tuple[int, ...], Any] = {}


def compare(directory: str, size: int, cases: list[list[Any]]) -> list[dict[str, float]]:
    """Run all cases, each [keys, axes of the layout, options], on `size` ranks; return the largest differences.

    Options: `without` experts that no token may choose, `padding`, True for sequences of several lengths, and the
    `exchange` of context-parallel ranks.
    """
    return on_ranks(directory, size, _compare_passes, cases)


def _group_of(rank: int, groups: list[tuple[int, ...]]) -> tuple[Any, tuple[int, ...]]:
    """Return this rank's process group among these, and its members; every rank makes them all, once."""
    import torch.distributed as dist

    for members in groups:
        if members not in _groups:
            _groups[members] = dist.new_group(list(members))
    own = next(members for members in groups if rank in members)
    return _groups[own], own


def _batches(family: str, number: int, padding: bool) -> list[dict[str, Tensor]]:
    batches = [batch_of(family, seed) for seed in range(number)]
    for seed, batch in enumerate(batches if padding else ()):
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
        batch["padding"] = torch.arange(LENGTH) < lengths
        batch["labels"] = batch["labels"].where(batch["padding"], -100)
    return batches


def _compare_passes(
    rank: int, size: int, changes: dict[str, Any], axes: dict[str, int], options: dict[str, Any]
) -> dict[str, float]:
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce

    from stoker.models.dispatch.context_calls import ContextSplit
    from stoker.models.moe.moe_layer import find_moe_layers
    from stoker.models.parallel.collectives import TensorParallel
    from stoker.models.parallel.context import ContextParallel, SequenceShard, shard_batch
    from stoker.models.parallel.expert import ExpertParallel
    from stoker.models.parallel.layout import ParallelLayout
    from stoker.models.parallel.partition import partitions_of
    from stoker.models.tensor_parallel import partial_gradients, reduce_partial_gradients

    sizes: dict[str, Any] = axes
    layout = ParallelLayout(**sizes, sequence=True)
    assert layout.world_size == size
    place, family = layout.coordinates(rank), changes.get("family", "gpt")
    tensor_group, _ = _group_of(rank, layout.groups("tensor"))
    data_group, data_ranks = _group_of(rank, layout.groups("data", "context"))
    context_group, _ = _group_of(rank, layout.groups("context"))
    expert_group, experts = _group_of(rank, layout.expert_groups())
    replica_group, replicas = _group_of(rank, layout.expert_data_groups())
    ranks = TensorParallel(
        place.tensor, layout.tensor, tensor_group.group_name, sequence=True, data_rank=data_ranks.index(rank),
        data_ranks=len(data_ranks),
    )  # fmt: skip
    expert_ranks = ExpertParallel(
        experts.index(rank), layout.expert, expert_group.group_name, replicas.index(rank), len(replicas)
    )
    split = ContextSplit(layout.context, options.get("exchange", "a2a"), 1)
    context = ContextParallel(place.context, split, context_group.group_name) if layout.context > 1 else None
    samples = "padded" if family == "bert" and "padding" in options else ""
    whole = build(changes, samples=samples)
    part = build(
        changes,
        ranks if layout.tensor > 1 else None,
        experts=expert_ranks if layout.expert > 1 else None,
        context=context,
        samples=samples,
    )

    def local(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch if context is None else shard_batch(batch, context.rank, context.size, causal=family != "bert")

    def total(loss: Tensor) -> Tensor:
        return loss.detach() if context is None else all_reduce(loss.detach(), "sum", context_group)

    without: list[int] = options.get("without", [])
    layers, part_layers = list(find_moe_layers(whole).values()), list(find_moe_layers(part).values())
    for layer in (*layers, *part_layers):
        layer.loss_share.fill_(SHARE)
        if layer.expert_bias is not None:
            layer.expert_bias[without] = -1e3
    batches = _batches(family, layout.data, options.get("padding", False))
    own = batches[place.data]
    statistics, losses = 0.0, []
    torch.manual_seed(place.data)
    loss = part.batch_loss(local(own), 27.0)
    loss.backward()
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        for layer in layers:
            layer.statistics.zero_()
        losses.append(whole.batch_loss(batch, 27.0))
        losses[-1].backward()
        if batch is own:
            for layer, part_layer in zip(layers, part_layers, strict=True):
                scale = layer.statistics.abs().clamp(min=1.0)
                statistics = max(statistics, float(((part_layer.statistics - layer.statistics) / scale).abs().max()))
    gradients = {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}
    if layout.tensor > 1:
        reduce_partial_gradients(gradients, partial_gradients(part, ranks), ranks)
    parts = partitions_of(part)
    for name, gradient in gradients.items():
        of_experts = name in parts and parts[name].axis == "expert"
        dist.all_reduce(gradient, group=replica_group if of_experts else data_group)
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    assert wanted.keys() == gradients.keys()
    wanted = {name: part_of(gradient, parts.get(name)) for name, gradient in wanted.items()}
    # each kind of parameter on its own scale, so that a small gradient of the router is compared too
    worst = max(
        float((gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-3))
        for name, gradient in wanted.items()
    )
    found = {
        "loss": abs(float(losses[place.data].detach() - total(loss))),
        "gradients": worst,
        "fp32 statistics": statistics,
        "tokens of the left out": float(sum(layer.statistics[without].sum() for layer in part_layers)),
        "experts": max(len(layer.experts.up) / len(layer.router.weight) for layer in part_layers),
    }
    for model in (whole, part):
        model.eval()
    with torch.no_grad():
        found["evaluation"] = abs(float(whole.batch_loss(own, 27.0) - total(part.batch_loss(local(own), 27.0))))
        inputs = [name for name in own if name not in ("labels", "padding")]
        # a shorter one is generation
        lengths = (LENGTH, LENGTH - 3) if family == "gpt" and context is None else (LENGTH,)
        for length in lengths:
            logits = [
                model(*(batch[name][:, :length] for name in inputs))[..., :VOCAB]
                for model, batch in ((whole, own), (part, local(own)))
            ]
            if context is not None:
                logits[0] = SequenceShard(context, family != "bert").local(logits[0])
            found[f"logits {length}"] = float((logits[0] - logits[1]).abs().max())
    return found


def compare_overlapped(directory: str, size: int, cases: list[list[Any]]) -> list[dict[str, float]]:
    """Run experts in fp32 on Triton's interpreter on `size` ranks, each case [changes of `Experts`, options].

    Options: `dropped` assignments, `frozen` weights, `compile` to a graph, and compile by `inductor`.

    Returns:
        The largest differences from the same experts computed after their tokens have arrived; compiled also the number
        of collectives `forward` and `backward`, of numbers `read` by the host in the backward pass, and of `overlapped`
        matmuls of weights that follow the start of an exchange in it, before the wait for it.
    """
    return on_ranks(directory, size, _compare_overlapped, cases)


def _compare_overlapped(rank: int, size: int, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    import torch.distributed as dist
    from compiled_graphs import CompiledGraphs
    from torch._inductor import config as inductor_config
    from torch._inductor.utils import run_and_get_code

    from stoker.kernels.moe.routing import RoutingResult
    from stoker.models.layers.compiling import configure_dynamo
    from stoker.models.moe.experts import Experts
    from stoker.models.moe.router import Routing
    from stoker.models.parallel.expert import ExpertParallel

    number, width, tokens = 4, 16, 12
    generator = torch.Generator().manual_seed(rank)
    keys: dict[str, Any] = {
        "nonlinearity": "silu", "gated": True, "bias": False, "dropout": 0.0, "implementation": "triton",
        "pad_to_capacity": False,
    }  # fmt: skip
    experts: Any = Experts(number // size, width, 32, **keys | changes)
    experts.ranks = ExpertParallel(rank, size, dist.distributed_c10d._get_default_group().group_name)
    for parameter in experts.parameters():
        parameter.data.normal_(generator=generator)
        parameter.requires_grad_("frozen" not in options)
    chosen = torch.rand(tokens, number, generator=generator).argsort(1)[:, :2].contiguous()
    kept = torch.rand(tokens, 2, generator=generator) > 0.3 if "dropped" in options else None
    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    gates = torch.rand(tokens, 2, generator=generator, requires_grad=True)
    trained = {name: each for name, each in experts.named_parameters() if each.requires_grad}
    outer = torch.randn(tokens, width, generator=generator)

    def run(call: Any) -> dict[str, Tensor]:
        output = call(hidden, Routing(RoutingResult(chosen, gates), kept, None, hidden))
        gradients = torch.autograd.grad((output * outer).sum(), [hidden, gates, *trained.values()])
        return dict(zip(("output", "hidden", "gates", *trained), (output.detach(), *gradients), strict=True))

    counts: dict[str, float] = {}
    configure_dynamo(traces_counts=True)
    if "inductor" in options:
        inductor_config.compile_threads = 1
        compiled = torch.compile(experts.forward, backend="inductor", fullgraph=True, dynamic=False)
        found, code = run_and_get_code(run, compiled)
        counts = _count_operations(*(re.findall(r"torch\.ops\.([\w.]+)\(", each) for each in code))
    elif "compile" in options:
        graphs = CompiledGraphs()
        found = run(torch.compile(experts.forward, backend=graphs.backend, fullgraph=True))
        counts = _count_operations(*map(_called, (*graphs.forwards, *graphs.backwards)))
    else:
        found = run(experts)
    experts.compute_arriving = lambda sent: experts.compute(sent.receive())
    wanted = run(experts)
    return counts | {name: float((found[name] - wanted[name]).abs().max()) for name in wanted}


def compare_peers(directory: str, size: int, cases: list[list[Any]]) -> list[dict[str, float]]:
    """Run the layers of experts of `Experts` with `flex`, over memory of the host, on `size` ranks, several times each.

    A case is [changes of `Experts`, options]: `dropped` assignments, `frozen` weights, `compile` to a graph, in `fp64`
    without Triton's interpreter, all assignments to the experts of one rank (`crowded`), and other numbers of `tokens`
    than usual.

    Returns:
        The largest differences from `alltoall`.
    """
    return on_ranks(directory, size, partial(_compare_peers, Path(directory)), cases)


def _compare_peers(
    directory: Path, rank: int, size: int, changes: dict[str, Any], options: dict[str, Any]
) -> dict[str, float]:
    import torch.distributed as dist
    from host_memory import HostMemory

    from stoker.kernels.moe.routing import RoutingResult
    from stoker.models.layers.compiling import configure_dynamo
    from stoker.models.layers.dropout import LayerDropout
    from stoker.models.moe.experts import Experts
    from stoker.models.moe.router import Routing
    from stoker.models.parallel.expert import ExpertParallel
    from stoker.models.parallel.peer_exchange import _EXCHANGES, open_exchange

    number, width = 4, 16
    group = dist.distributed_c10d._get_default_group().group_name
    folder = directory / "peers"

    def allocate(num_bytes: int) -> HostMemory:
        made = folder / str(sum(1 for _ in folder.glob(f"*.{rank}")))
        made.with_suffix(f".{rank}").mkdir(parents=True)
        made.mkdir(exist_ok=True)
        return HostMemory(made, rank, size, num_bytes)

    exchange = _EXCHANGES.get(group) or open_exchange(group, allocate, size)
    dtype = torch.float64 if "fp64" in options else torch.float32
    keys: dict[str, Any] = {
        "nonlinearity": "silu", "gated": True, "bias": False, "dropout": 0.0, "pad_to_capacity": False,
        "implementation": "sequential" if "fp64" in options else "triton",
    }  # fmt: skip
    worst: dict[str, float] = {}
    generator = torch.Generator().manual_seed(rank)
    both = [Experts(number // size, width, 32, **keys | changes, dispatcher=name) for name in ("flex", "alltoall")]
    for experts in both:
        experts.ranks, experts.exchange = ExpertParallel(rank, size, group), exchange
        experts.to(dtype)
        generator.manual_seed(rank)
        for parameter in experts.parameters():
            parameter.data.normal_(generator=generator)
            parameter.requires_grad_("frozen" not in options)
    configure_dynamo(traces_counts=True)
    calls: list[Any] = [experts.forward for experts in both]
    if "compile" in options:
        calls[0] = torch.compile(both[0].forward, backend=options["compile"], fullgraph=True, dynamic=False)
    for tokens in options.get("tokens", (12, 7, 20)):
        chosen = torch.rand(tokens, number, generator=generator).argsort(1)[:, :2].contiguous()
        if "crowded" in options:
            chosen = torch.arange(2).expand(tokens, 2).contiguous()
        kept = torch.rand(tokens, 2, generator=generator) > 0.3 if "dropped" in options else None
        hidden = torch.randn(tokens, width, generator=generator, dtype=dtype, requires_grad=True)
        gates = torch.rand(tokens, 2, generator=generator, dtype=dtype, requires_grad=True)
        outer = torch.randn(tokens, width, generator=generator, dtype=dtype)
        found: list[tuple[Tensor, ...]] = []
        for experts, call in zip(both, calls, strict=True):
            places = torch.arange(tokens) + tokens * rank
            dropout = LayerDropout(torch.arange(32).view(16, 2), places, places)
            output = call(hidden, Routing(RoutingResult(chosen, gates), kept, None, hidden), dropout=dropout)
            trained = [each for each in experts.parameters() if each.requires_grad]
            gradients = torch.autograd.grad((output * outer).sum(), [hidden, gates, *trained])
            found.append((output.detach(), *gradients))
        for index, (own, other) in enumerate(zip(*found, strict=True)):
            name = ("output", "hidden", "gates")[index] if index < 3 else "weights"
            worst[name] = max(worst.get(name, 0.0), float((own - other).abs().max()))
    return worst


def _called(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def _count_operations(forward: list[str], backward: list[str]) -> dict[str, float]:
    exchanges = ("_c10d_functional.all_to_all_single.default", "_c10d_functional.all_gather_into_tensor.default",
                 "_c10d_functional.reduce_scatter_tensor.default")  # fmt: skip
    in_flight = overlapped = 0
    for name in backward:
        in_flight += (name in exchanges) - (name == "_c10d_functional.wait_tensor.default")
        overlapped += name == "stoker.moe_experts_up_gradients.default" and in_flight > 0
    return {
        "forward": sum(map(forward.count, exchanges)),
        "backward": sum(map(backward.count, exchanges)),
        "read": backward.count("aten._local_scalar_dense.default"),
        "overlapped": overlapped,
    }


def count_waits(ranks: int) -> list[str]:
    """Return the operations of a dispatch over `ranks` ranks for which the host would wait for a CUDA device."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    from stoker.kernels.moe import assignments
    from stoker.kernels.moe.routing import RoutingResult
    from stoker.models.moe.dispatch import dispatch_all_to_all
    from stoker.models.moe.router import Routing
    from stoker.models.parallel.expert import ExpertParallel

    found: list[str] = []
    assignments.triton_runs_on = lambda tensor: True  # rows are sorted by the operation of a GPU

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            on_device = any(isinstance(each, Tensor) and each.is_cuda for each in args)
            to_host = isinstance(result, Tensor) and result.is_cpu
            tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
            sized = (kwargs or {}).get("output_size") is not None  # of `repeat_interleave`
            if on_device and not sized and (to_host or tags.intersection(func.tags)):
                found.append(str(func))
            return result

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    own = ExpertParallel(0, ranks, dist.distributed_c10d._get_default_group().group_name)
    # fake tensors are read number by number, as in a compiled graph
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad(), torch.device("cuda"), Waits():
        tokens, gates, chosen = torch.randn(64, 32), torch.rand(64, 2), torch.zeros(64, 2, dtype=torch.int64)
        sent = dispatch_all_to_all(tokens, Routing(RoutingResult(chosen, gates), None, None, tokens), own, 2, False)
        sent.combine(sent.receive().tokens)
    return found
