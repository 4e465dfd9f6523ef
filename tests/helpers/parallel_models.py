"""Losses, gradients and logits of models split over ranks, beside those of one process; run in forked ranks on gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from forked_ranks import fork_ranks
from torch import Tensor

LENGTH, DECODER_LENGTH, BATCH, VOCAB = 16, 8, 2, 90


def keys_of(changes: dict[str, Any]) -> Any:
    """Return the keys of a small model of `changes["family"]`, with two stacks in a T5; `peft` is not one of them."""
    from own_components import register_all

    from stoker.models.config.bert import BertKeys
    from stoker.models.config.gpt import GPTKeys
    from stoker.models.config.t5 import T5Keys

    register_all()
    changes = {name: value for name, value in changes.items() if name != "peft"}
    family = changes.pop("family", "gpt")
    stack = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "init_method_std": 0.3,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    outer = {"make_vocab_size_divisible_by": 8}
    outer |= {name: changes.pop(name) for name in list(changes) if name.startswith(("fp8", "first_last_layers"))}
    if family == "t5":
        own = {
            name: changes.pop(name)
            for name in ("share_token_embeddings", "label_smoothing", "compile", "embedding_dropout")
            if name in changes
        }
        decoder = {**stack, **changes, "num_layers": 1}
        return T5Keys.model_validate(
            {
                **outer,
                "embedding_dropout": 0.0,
                **own,
                "seq_length": LENGTH,
                "encoder": {**stack, **changes},
                "decoder": decoder,
            }
        )
    keys = {"gpt": GPTKeys, "bert": BertKeys}[family]
    return keys.model_validate({**outer, **stack, "encoder_seq_length": LENGTH, **changes})


def batch_of(family: str, seed: int = 1) -> dict[str, Tensor]:
    """Return a batch with labels that are ignored, more of them in one row."""
    generator = torch.Generator().manual_seed(seed)
    length = DECODER_LENGTH if family == "t5" else LENGTH
    tokens, labels = (torch.randint(0, VOCAB, (BATCH, length), generator=generator) for _ in range(2))
    labels[0, :5] = -100
    if family != "t5":
        return {"tokens": tokens, "labels": labels}
    encoder_tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    return {"encoder_tokens": encoder_tokens, "decoder_tokens": tokens, "labels": labels}


def samples_of(family: str, samples: str) -> dict[str, Tensor]:
    """Return a batch whose documents or padding end at different places in each row, none at the end of a run."""
    batch = batch_of(family)
    lengths = {"encoder_": LENGTH, "decoder_": DECODER_LENGTH} if family == "t5" else {"": LENGTH}
    for prefix, length in lengths.items():
        position = torch.arange(length)
        if samples in ("packed", "restarted"):
            ends = torch.tensor([[3, 9, 15], [1, 5, 13]]) * length // LENGTH
            batch[f"{prefix}documents"] = (position[None, :, None] >= ends[:, None]).sum(-1).int()
        elif samples == "padded" and prefix != "decoder_":
            batch[f"{prefix}padding"] = position < torch.tensor([[11], [7]])
    if family == "bert":
        batch["token_types"] = (torch.arange(LENGTH) >= 6).long().expand(BATCH, -1)
    return batch


def compare(directory: str, size: int, cases: list[list[Any]]) -> list[dict[str, float]]:
    """Run all cases, each [keys, sequence parallel, overlap of (gathers, scatters)], on `size` ranks.

    Returns the largest differences of any rank.
    """
    return on_ranks(directory, size, _compare_passes, cases)


def compare_steps(directory: str, size: int, tensor_ranks: int, cases: list[list[Any]]) -> list[dict[str, float]]:
    """Train with tensor and data parallelism, each case [keys, layout, optimizer (AdamW)], and without.

    Returns the largest differences.
    """
    return on_ranks(directory, size, partial(_compare_steps, tensor_ranks=tensor_ranks), cases)


def on_ranks(
    directory: str, size: int, run: Callable[..., dict[str, Any]], cases: list[list[Any]]
) -> list[dict[str, Any]]:
    """Run every case on forked ranks; return the largest value of any rank."""
    if any("compile" in part for case in cases for part in case if isinstance(part, dict)):
        # what a first compilation imports and builds takes longer than most others, and is then there on all ranks
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(1, requires_grad=True))
        torch.compiler.reset()
    found = fork_ranks(directory, size, partial(_in_group, directory, size, run=run, cases=cases))
    return [{name: max(each[n][name] for each in found) for name in found[0][n]} for n in range(len(cases))]


def _in_group(directory: str, size: int, rank: int, run: Any, cases: list[list[Any]]) -> list[dict[str, float]]:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    # traced as a whole and split into forward and backward as on a GPU, but run by plain operations
    torch.compile = partial(torch.compile, backend="aot_eager")
    dist.init_process_group("gloo", store=FileStore(f"{directory}/store", size), rank=rank, world_size=size)
    found = [run(rank, size, *case) for case in cases]
    dist.barrier()
    dist.destroy_process_group()
    return found


def build(
    changes: dict[str, Any],
    ranks: Any = None,
    sharding: Any = None,
    experts: Any = None,
    context: Any = None,
    samples: str = "",
    pipeline: Any = None,
) -> Any:
    from stoker.kernels.attention.flags import AttentionFlags
    from stoker.models.build import ALL_CALL_KINDS, build_model
    from stoker.models.config.batch_shape import BatchSpec
    from stoker.models.config.peft import PeftKeys, peft_slice

    decoder_length = DECODER_LENGTH if changes.get("family") == "t5" else 0
    return build_model(
        keys_of(changes),
        vocab_size=VOCAB,
        device="cpu",
        dtype=torch.float64,
        flags=AttentionFlags(),
        micro_batch_size=BATCH,
        batch_spec=BatchSpec(
            seq_length=LENGTH,
            decoder_seq_length=decoder_length,
            packed=samples == "packed",
            reset_position_ids=samples in ("packed", "restarted"),
            padded=samples == "padded",
        ),
        kinds=ALL_CALL_KINDS if context is None and pipeline is None else ("training", "evaluation"),
        tensor_parallel=ranks,
        expert_parallel=experts,
        context_parallel=context,
        pipeline_parallel=pipeline,
        sharding=sharding,
        peft=peft_slice(PeftKeys.model_validate(changes.get("peft", {}))),
    ).train()


def part_of(full: Tensor, part: Any) -> Tensor:
    """Return a rank's part of a full tensor."""
    if part is None or part.partition is None:
        return full
    return torch.cat(
        [full.narrow(part.partition.dim, each.start, each.size) for each in part.ranges()], part.partition.dim
    )


def _define_overlap() -> None:
    """Give the products that overlap with communication, which exist on GPUs, the operations they stand for."""
    import torch.distributed._symmetric_memory as symmetric

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    _kept.append(library)


_kept: list[Any] = []


def _compare_passes(
    rank: int, size: int, changes: dict[str, Any], sequence: bool, overlap: tuple[bool, bool] = (False, False)
) -> dict[str, float]:
    import torch.distributed as dist

    from stoker.models.parallel.collectives import TensorParallel
    from stoker.models.parallel.partition import partitions_of
    from stoker.models.tensor_parallel import partial_gradients, reduce_partial_gradients

    if any(overlap) and not _kept:
        _define_overlap()
    group: Any = dist.group.WORLD
    gather, scatter = overlap
    ranks = TensorParallel(
        rank, size, group.group_name, sequence=sequence, overlap_gather=gather, overlap_scatter=scatter
    )
    whole, part = build(changes), build(changes, ranks)
    family = changes.get("family", "gpt")
    batch = batch_of(family)
    losses = []
    for model in (whole, part):
        torch.manual_seed(2)
        losses.append(model.batch_loss(batch, 27.0))
        torch.manual_seed(3)  # recomputation draws what the forward pass drew, whatever the generator's state
        losses[-1].backward()
    gradients = {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}
    reduce_partial_gradients(gradients, partial_gradients(part, ranks), ranks)
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    assert wanted.keys() == gradients.keys()
    parts = partitions_of(part)
    wanted = {name: part_of(gradient, parts.get(name)) for name, gradient in wanted.items()}
    scale = max(float(gradient.norm()) for gradient in wanted.values())
    worst = max(float((gradients[name] - gradient).norm()) / scale for name, gradient in wanted.items())
    for model in (whole, part):
        model.eval()
    with torch.no_grad():
        inputs = [batch[name] for name in batch if name != "labels"]
        logits = [model(*inputs)[..., :VOCAB] for model in (whole, part)]
    return {
        "loss": abs(float(losses[0].detach() - losses[1].detach())),
        "gradients": worst,
        "logits": float((logits[0] - logits[1]).abs().max()),
        "parts": sum(p.numel() for p in part.parameters()) / sum(p.numel() for p in whole.parameters()),
    }


def _optimizer(name: str, changes: dict[str, Any], model: Any, **options: Any) -> Any:
    """Return an optimizer with all the state it can have; `scaled` is AdamW with `scale_parameter`."""
    from stoker.trainer.optim.adafactor import Adafactor
    from stoker.trainer.optim.adamw import AdamW
    from stoker.trainer.optim.muon import Muon
    from stoker.trainer.optim.optimizer_factory import fused_projection_rows

    fused = fused_projection_rows(keys_of(changes))
    build: Any = {
        "adamw": partial(AdamW, eps=1e-4),  # with the default, Adam makes steps of gradients that are rounding
        "scaled": partial(AdamW, scale_parameter=True, fused=fused),
        "adafactor": partial(Adafactor, beta1=0.9),
        "muon": partial(Muon, fused=fused),
    }[name]
    return build(model.named_parameters(), lr=0.01, weight_decay=0.1, clip_norm=0.05, main_weights=True, **options)


def _compare_steps(
    rank: int, size: int, changes: dict[str, Any], kind: str, optimizer: str = "adamw", *, tensor_ranks: int
) -> dict[str, float]:
    """Three steps with clipping, two micro batches for each data-parallel rank, in fp64."""
    import torch.distributed as dist

    from stoker.models.parallel.collectives import TensorParallel
    from stoker.models.parallel.layout import ParallelLayout
    from stoker.models.parallel.partition import partitions_of
    from stoker.models.tensor_parallel import partial_gradients, reduce_partial_gradients
    from stoker.trainer.config.parameter_layout import DataParallelLayout, plan_layout
    from stoker.trainer.distributed.data_parallel import DataParallel
    from stoker.trainer.distributed.ddp import ReplicatedDataParallel
    from stoker.trainer.distributed.fsdp import ShardedDataParallel
    from stoker.trainer.distributed.process_group import DistributedContext
    from stoker.trainer.utils.local_shard import local_tensor

    layout = ParallelLayout(tensor=tensor_ranks, data=size // tensor_ranks)
    tensor_groups: dict[Any, Any] = {members: dist.new_group(list(members)) for members in layout.groups("tensor")}
    data_groups: dict[Any, Any] = {members: dist.new_group(list(members)) for members in layout.groups("data")}
    tensor_group, data_group = (
        tensor_groups[layout.group_of(rank, "tensor")],
        data_groups[layout.group_of(rank, "data")],
    )
    place = layout.coordinates(rank)
    ranks = TensorParallel(
        place.tensor,
        tensor_ranks,
        tensor_group.group_name,
        sequence=True,
        data_rank=place.data,
        data_ranks=layout.data,
    )
    name = "distributed_fused_adam" if kind == "zero1" else "adamw"
    plan = plan_layout(layout.data, optimizer=name, fsdp=kind == "fsdp", strategy="full", shard_size=None)
    device = torch.device("cpu")
    if plan is None:
        data_parallel: Any = DataParallel(DataParallelLayout("none", 1, 1), None)
    elif kind == "fsdp":
        data_parallel = ShardedDataParallel(plan, device, None, tensor_ranks=tensor_ranks)
    else:
        replicas = DistributedContext(place.data, layout.data, group=data_group)
        data_parallel = ReplicatedDataParallel(plan, device, None, replicas)
    whole = build(changes)
    part = build(changes, ranks, data_parallel)
    single = _optimizer(optimizer, changes, whole)
    sharding = replace(data_parallel.parameter_sharding, parts=partitions_of(part), sum_over_parts=ranks.sum)
    several = _optimizer(optimizer, changes, part, sharding=sharding)
    data_parallel.attach(part, several)
    partial_names = partial_gradients(part, ranks)
    family, norms = changes.get("family", "gpt"), 0.0
    for step in range(3):
        batches = [batch_of(family, 10 * step + number) for number in range(2 * layout.data)]
        for number, batch in enumerate(batches):
            torch.manual_seed(number)
            whole.batch_loss(batch, 100.0).backward()
        data_parallel.before_step(2)
        for index in range(2):
            torch.manual_seed(index * layout.data + place.data)
            part.batch_loss(batches[index * layout.data + place.data], 100.0).backward()
        data_parallel.before_update()
        gradients = {
            name: local_tensor(parameter.grad)
            for name, parameter in part.named_parameters()
            if parameter.grad is not None
        }
        reduce_partial_gradients(gradients, partial_names, ranks)
        for each in (single, several):
            each.step()
        data_parallel.after_update()
        norms = max(norms, float((single.grad_norm / several.grad_norm - 1).abs()))
        for each in (single, several):
            each.zero_grad()
    state = 0.0
    full_state = single.local_shards()
    for name, shard in several.local_shards().items():
        expected = shard.with_local(torch.empty_like(shard.local))
        expected.copy_from_full(full_state[name].local)
        assert shard.shape == full_state[name].shape, name
        state = max(state, float((shard.local - expected.local).abs().max()) if shard.local.numel() else 0.0)
    parts, worst = partitions_of(part), 0.0
    wanted = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        worst = max(worst, float((full - part_of(wanted[name], parts.get(name))).detach().abs().max()))
    return {"norms": norms, "weights": worst, "state": state}
