"""Models whose ranks share the tokens of each sequence, beside one process: results, messages and attention calls."""

from __future__ import annotations

from typing import Any

import torch
from parallel_models import VOCAB, build, on_ranks, part_of, samples_of


def compare(directory: str, size: int, cases: list[list[Any]]) -> list[dict[str, float]]:
    """Share tokens, each case [keys, samples, exchange, neighbours, tensor ranks]; return the largest differences."""
    return on_ranks(directory, size, _compare, cases)


def messages(directory: str, size: int, cases: list[list[Any]]) -> list[dict[str, list[int]]]:
    """Return the elements that each collective of a loss and its gradients sends, for cases as above."""
    return on_ranks(directory, size, _messages, cases)


def attention_calls(directory: str, size: int, cases: list[list[Any]]) -> list[dict[str, list[list[int]]]]:
    """Return the largest attention call of any rank, and the planned one, by attention, for cases as above."""
    return on_ranks(directory, size, _attention_calls, cases)


def _context_ranks(rank: int, size: int, exchange: str, neighbours: int, tensor_ranks: int) -> tuple[Any, Any]:
    """Return the tensor-parallel ranks, None for one, and the context-parallel ranks of this process."""
    import torch.distributed as dist

    from stoker.models.dispatch.context_calls import ContextSplit
    from stoker.models.parallel.collectives import TensorParallel
    from stoker.models.parallel.context import ContextParallel
    from stoker.models.parallel.layout import ParallelLayout

    layout = ParallelLayout(tensor=tensor_ranks, context=size // tensor_ranks)
    place, names = layout.coordinates(rank), {}
    of_context = layout.groups("context")
    kinds = {
        "tensor": layout.groups("tensor"),
        "context": of_context,
        "heads": [each[n : n + neighbours] for each in of_context for n in range(0, len(each), neighbours)],
        "ring": [each[n::neighbours] for each in of_context for n in range(neighbours)],
    }
    for kind, groups in kinds.items():
        for members in groups:
            group: Any = dist.new_group(list(members))
            if rank in members:
                names[kind] = group.group_name
    tensor = TensorParallel(place.tensor, tensor_ranks, names["tensor"], sequence=True) if tensor_ranks > 1 else None
    split = ContextSplit(layout.context, exchange, neighbours)  # pyrefly: ignore[bad-argument-type]
    if exchange != "a2a+p2p":
        return tensor, ContextParallel(place.context, split, names["context"])
    return tensor, ContextParallel(place.context, split, names["context"], names["heads"], names["ring"])


def _compare(rank: int, size: int, changes: dict[str, Any], samples: str, *split: Any) -> dict[str, float]:
    from torch.distributed._functional_collectives import all_reduce

    from stoker.models.parallel.context import SequenceShard, shard_batch
    from stoker.models.parallel.partition import partitions_of
    from stoker.models.tensor_parallel import partial_gradients, reduce_partial_gradients

    tensor, context = _context_ranks(rank, size, *split)
    whole, part = build(changes, samples=samples), build(changes, tensor, context=context, samples=samples)
    family = changes.get("family", "gpt")
    batch = samples_of(family, samples)
    local = shard_batch(batch, context.rank, context.size, causal=family != "bert")
    torch.manual_seed(2)
    wanted_loss = whole.batch_loss(batch, 27.0)
    torch.manual_seed(2)
    loss = part.batch_loss(local, 27.0)
    for each in (wanted_loss, loss):
        each.backward()
    gradients = {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}
    if tensor is not None:
        reduce_partial_gradients(gradients, partial_gradients(part, tensor), tensor)
    total = loss.detach().clone()
    for each in (total, *gradients.values()):
        each.copy_(all_reduce(each, "sum", context.group))
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    parts = partitions_of(part) if tensor is not None else {}
    wanted = {name: part_of(gradient, parts.get(name)) for name, gradient in wanted.items()}
    assert wanted.keys() == gradients.keys()
    scale = max(float(gradient.norm()) for gradient in wanted.values())
    worst = max(float((gradients[name] - gradient).norm()) / scale for name, gradient in wanted.items())
    for model in (whole, part):
        model.eval()
    with torch.no_grad():
        logits = [
            model(**{name: field for name, field in fields.items() if name != "labels"})[..., :VOCAB]
            for model, fields in ((whole, batch), (part, local))
        ]
    logits[0] = SequenceShard(context, family != "bert").local(logits[0])
    return {
        "loss": abs(float(wanted_loss.detach() - total)),
        "gradients": worst,
        "logits": float((logits[0] - logits[1]).abs().max()),
    }


def _messages(rank: int, size: int, changes: dict[str, Any], samples: str, *split: Any) -> dict[str, list[int]]:
    from torch.utils._python_dispatch import TorchDispatchMode

    from stoker.models.parallel.context import shard_batch

    found: dict[str, list[int]] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
                found.setdefault(func.__name__.split(".")[0], []).append(args[0].numel())
            return func(*args, **(kwargs or {}))

    tensor, context = _context_ranks(rank, size, *split)
    family = changes.get("family", "gpt")
    model = build(changes, tensor, context=context, samples=samples)
    batch = shard_batch(samples_of(family, samples), context.rank, context.size, causal=family != "bert")
    with Count():
        model.batch_loss(batch, 27.0).backward()
    return found


def _attention_calls(rank: int, size: int, changes: dict[str, Any], samples: str, *split: Any) -> dict[str, Any]:
    """Return [queries, keys, heads, groups, reach] of the largest call and of the planned one."""
    from dataclasses import replace

    from stoker.models.layers.attention import Attention
    from stoker.models.parallel import ring_attention
    from stoker.models.parallel.context import shard_batch
    from stoker.models.parallel.context_attention import HeadExchange, KeyGather

    _, context = _context_ranks(rank, size, *split)
    family = changes.get("family", "gpt")
    model, found = build(changes, context=context, samples=samples), {}
    current = [""]

    def record(inputs: Any) -> None:
        bias, slopes = inputs.distance_bias, inputs.alibi_slopes
        reach = 0 if bias is None else bias.shape[1] // 2
        sizes = [inputs.queries, inputs.keys, *(each.shape[2] for each in inputs[:2]), reach, int(slopes is not None)]
        known = found.setdefault(current[0], [sizes, None])
        known[0] = max(known[0], sizes)

    def recorded(function: Any, name: str) -> Any:
        """Return a function that records the calls of the backend inside an exchange."""

        def inner(inputs: Any) -> Any:
            record(inputs)
            return function.function(inputs)

        outer = function
        if isinstance(function, KeyGather) or (isinstance(function, HeadExchange) and context.split.ring_ranks == 1):
            outer = replace(function, function=inner)

        def call(inputs: Any) -> Any:
            current[0] = name
            return outer(inputs)

        return call

    attend = ring_attention.attend_to_block

    def attend_and_record(inputs: Any, **options: Any) -> Any:
        record(inputs)
        return attend(inputs, **options)

    ring_attention.attend_to_block = attend_and_record
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            name = "cross " if "cross" in path else f"{path.split('.')[0]} " if family == "t5" else ""
            module.backends["training"] = recorded(module.backends["training"], f"{name}training")
    batch = shard_batch(samples_of(family, samples), context.rank, context.size, causal=family != "bert")
    model.batch_loss(batch, 27.0)
    ring_attention.attend_to_block = attend
    for name, known in found.items():
        planned = model.attention_decisions[name].call
        slopes = int(planned.bias_is_alibi)
        known[1] = [planned.queries, planned.keys, planned.heads, planned.groups, planned.reach, slopes]
    return found
