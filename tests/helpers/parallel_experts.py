"""Mixtures of experts on several ranks, beside one process that runs the same micro batches; in forked gloo ranks."""

from __future__ import annotations

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
