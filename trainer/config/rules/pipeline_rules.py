"""Rules of pipeline parallelism: how the layers are distributed over the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ....models.config.families import keys_by_stack
from ....models.config.key_block import Finding
from ....models.config.memory import partial_recompute
from ....models.config.peft import AdapterSlice, IA3Slice, LoRASlice, peft_slice
from ....models.config.stack import divisors
from ....models.config.t5 import T5Keys
from ....models.parallel.rules import PIPELINE
from ....models.recompute.per_stage import in_flight
from ..parameter_layout import pipeline_split
from ..schema.root import AnyModelBlock
from .rule_context import RuleContext, no_effect, num_data_ranks

_SIZE = "pipeline_model_parallel_size"
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_SPLIT = "pipeline_model_parallel_split_rank"
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_NUMBER = "activations_checkpoint_num_layers"
_PARTIAL = "num_micro_batches_with_partial_activation_checkpoints"
_FEWER = "activations_checkpoint_layers_per_pipeline"
_COUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def settings_need_a_pipeline(context: RuleContext) -> Iterator[Finding]:
    """Without a pipeline its settings have no effect; several virtual stages are an error then, as in Megatron."""
    keys = context.root.model
    ranks, when = keys.pipeline_model_parallel_size, f"with `{_SIZE}` (1)"
    if ranks == 1 and (chunks := keys.virtual_pipeline_model_parallel_size or 1) > 1:
        yield Finding.error(
            (f"model.{_VIRTUAL}", PIPELINE),
            f"`{_VIRTUAL}` ({chunks}) needs several ranks of a pipeline, not `{_SIZE}` (1)",
            f"model.{_VIRTUAL}=null",
        )
    for name in _set(keys, *_ENDS, *_COUNTS) if ranks == 1 else ():
        yield no_effect(f"model.{name}", PIPELINE, when)
    if keys.pipeline_model_parallel_split_rank and (ranks == 1 or keys.family != "t5"):
        yield no_effect(f"model.{_SPLIT}", PIPELINE, when if ranks == 1 else "without an encoder and a decoder")


def layers_divide_over_stages(context: RuleContext) -> Iterator[Finding]:
    """Every stage has as many layers, but for those of the first and last rank if keys set them."""
    keys = context.root.model
    if isinstance(keys, T5Keys) or _fits(keys):
        return
    ends, counts = _set(keys, *_ENDS), _set(keys, *_COUNTS)
    ranks, chunks = keys.pipeline_model_parallel_size, keys.virtual_pipeline_model_parallel_size or 1
    whole = f"`num_layers` ({keys.num_layers})"
    stages = f"`{_SIZE}` ({ranks})" + (f" times `{_VIRTUAL}` ({chunks})" if chunks > 1 else "")
    if ends and counts:
        rule = f"{_listed(keys, counts)} cannot be combined with {_listed(keys, ends)}: both distribute the layers"
    elif ends:
        rule = f"{_listed(keys, ends)} must leave the other ranks of `{_SIZE}` ({ranks}) equal parts of {whole}"
        rule += f", and `{_VIRTUAL}` ({chunks}) divide the layers of each" if chunks > 1 else ""
    else:
        rule = f"{stages} must divide {whole}" + (f" plus {len(counts)} ({_listed(keys, counts)})" if counts else "")
    names = (_SIZE, *((_VIRTUAL,) if chunks > 1 else ()), *ends, *counts, "num_layers")
    yield Finding.error(tuple(f"model.{name}" for name in names), rule, _first_fitting(keys, _layer_changes(keys)))


def _layer_changes(keys: AnyModelBlock) -> Iterator[dict[str, Any]]:
    """Yield changes that may let the layers of a GPT or BERT be distributed, the smaller ones first."""
    ends, off = _set(keys, *_ENDS), dict.fromkeys(_set(keys, *_COUNTS), False)
    chunks = keys.virtual_pipeline_model_parallel_size or 1
    layers, ranks = keys_by_stack(keys)[""].num_layers, keys.pipeline_model_parallel_size
    if off:
        yield off
    for size in divisors(chunks)[-2::-1]:
        yield {_VIRTUAL: size if size > 1 else None}
    for virtual in [{}, {_VIRTUAL: None}][: 2 if chunks > 1 else 1]:
        for name in reversed(ends or _ENDS[1:]):
            count = getattr(keys, name) or layers // ranks
            for other in sorted(range(1, layers), key=lambda value: abs(value - count)):
                yield {**off, **virtual, name: other}
        yield {**off, **virtual, **dict.fromkeys(ends)}
    for size in divisors(ranks)[-2:0:-1]:
        yield {_SIZE: size}
    for number in range(layers + 1, layers + 2 * ranks * chunks + 2):
        yield {"num_layers": number}
    yield {**off, **dict.fromkeys(ends), "num_layers": ranks * chunks}


def encoder_and_decoder_have_ranks(context: RuleContext) -> Iterator[Finding]:
    """The first ranks of a T5's pipeline have the encoder, the others the decoder, each evenly."""
    keys = context.root.model
    ranks, first = keys.pipeline_model_parallel_size, keys.pipeline_model_parallel_split_rank
    if not isinstance(keys, T5Keys) or ranks == 1:
        return
    layers = keys.encoder.num_layers, keys.decoder.num_layers
    chunks = (_VIRTUAL,) if (keys.virtual_pipeline_model_parallel_size or 1) > 1 else ()
    for name in (*chunks, *_set(keys, *_ENDS, *_COUNTS)):
        yield Finding.error(
            (f"model.{name}", PIPELINE),
            f"{_listed(keys, [name])} is not supported in a pipeline with an encoder and a decoder, whose layers are "
            "distributed evenly",
            f"model.{name}={'false' if name in _COUNTS else 'null'}",
        )
    plain = keys.model_copy(update={_VIRTUAL: None, **dict.fromkeys(_ENDS), **dict.fromkeys(_COUNTS, False)})
    if _fits(plain):
        return
    near = sorted(range(1, ranks), key=lambda rank: abs(rank - ranks // 2))
    fix = _first_fitting(plain, ({_SPLIT: rank} for rank in near))
    if not fix:
        parts = zip(layers, (near[0], ranks - near[0]), strict=True)
        sizes = [-(-number // part) * part for number, part in parts]
        fix = f"model.{_SPLIT}={near[0]} model.encoder.num_layers={sizes[0]} model.decoder.num_layers={sizes[1]}"
    path, size = f"model.{_SPLIT}", f"`{_SIZE}` ({ranks})"
    if not 0 < first < ranks:
        rule = f"`{_SPLIT}` ({first}), the ranks that have the encoder, must be from 1 to {ranks - 1} with {size}"
        yield Finding.error((path, PIPELINE), rule, fix)
    elif layers[0] % first:
        rule = f"`{_SPLIT}` ({first}) must divide `encoder.num_layers` ({layers[0]})"
        yield Finding.error((path, "model.encoder.num_layers"), rule, fix)
    else:
        rule = f"{size} less `{_SPLIT}` ({first}) must divide `decoder.num_layers` ({layers[1]})"
        yield Finding.error((path, PIPELINE, "model.decoder.num_layers"), rule, fix)


def every_rank_trains_a_layer(context: RuleContext) -> Iterator[Finding]:
    """Each rank has a layer that fine-tuning adds parameters to, since a rank cannot train nothing; what `selective`
    names is known when the model is planned.
    """
    keys = context.root.model
    split, peft = pipeline_split(keys), peft_slice(keys.peft)
    if split is None or not isinstance(peft, LoRASlice | AdapterSlice | IA3Slice) or not _fits(keys):
        return
    counts = [stack.num_layers for stack in keys_by_stack(keys).values()]
    own = {rank: [stage.layers for stage in split.stages_of(rank, counts)] for rank in range(split.ranks)}
    idle = [
        f"rank {rank} ({_numbers(parts)})"
        for rank, parts in own.items()
        if not any(peft.layers.includes(index) for part in parts for index in part)
    ]
    if idle:
        scheme, numbers = keys.peft.peft_scheme, peft.layers.numbers
        path, given = "model.peft.peft_scheme", f"`peft_scheme` ({scheme})"
        if numbers is not None:
            path, given = f"model.peft.{scheme}_tuning.layer_selection", f"`layer_selection` ({sorted(numbers)})"
        rule = f"`{_SIZE}` ({split.ranks}) leaves {' and '.join(idle)} nothing to train with {given}"
        yield Finding.error((PIPELINE, path), rule, f"{PIPELINE}=1" + f" model.{_VIRTUAL}=null" * (split.chunks > 1))


def _numbers(parts: Iterable[range]) -> str:
    """Return the numbers of layers, counted from 1, like `layers 1-2, 5-6`."""
    found = [f"{part.start + 1}-{part.stop}".removeprefix(f"{part.stop}-") for part in parts if part]
    return f"layers {', '.join(found)}" if found else "no layers"


def offloaded_layers_are_of_one_rank(context: RuleContext) -> Iterator[Finding]:
    """CPU offloading of layers is not supported in a pipeline, as in Megatron."""
    ranks = context.root.model.pipeline_model_parallel_size
    for at, stack in keys_by_stack(context.root.model).items():
        if stack.cpu_offloading and ranks > 1:
            path = f"model.{at}cpu_offloading"
            message = f"`cpu_offloading` (True) does not support `{_SIZE}` ({ranks}), whose stages begin other micro "
            message += "batches before the copies of one come back"
            yield Finding.error((path, PIPELINE), message, f"{path}=false")


def recompute_fits_stages(context: RuleContext) -> Iterator[Finding]:
    """Recompute of whole layers counts those of a stage; that of some micro batches or ranks needs a pipeline."""
    keys = context.root.model
    split = pipeline_split(keys)
    for index, (at, stack) in enumerate(keys_by_stack(keys).items()):
        number, (partial, fewer) = stack.activations_checkpoint_num_layers, partial_recompute(stack)
        paths = {name: f"model.{at}{name}" for name in (_PARTIAL, _FEWER, _NUMBER)}
        if split is None:
            for name, value in ((_PARTIAL, partial), (_FEWER, fewer)):
                if value:
                    yield no_effect(paths[name], PIPELINE, f"with `{_SIZE}` (1)")
        elif _fits(keys):
            counts = (each.num_layers for each in keys_by_stack(keys).values())
            stages = [stage for stage in split.stages(*counts) if stage.stack == index]
            largest = max(len(stage.layers) for stage in stages)
            if number and stack.activations_checkpoint_granularity == "full" and largest < number <= stack.num_layers:
                yield Finding.warning(
                    (paths[_NUMBER], PIPELINE),
                    f"`{_NUMBER}` ({number}) is larger than the layers of a stage ({largest}) and reduced to them",
                    f"{paths[_NUMBER]}={largest}",
                )
            micro_batches = max(1, keys.global_batch_size // (keys.micro_batch_size * num_data_ranks(context)))
            if split.chunks > 1:  # others are another error
                micro_batches = -(-micro_batches // split.ranks) * split.ranks
            most = max(in_flight(split, split.rank_of(stage), micro_batches) for stage in stages)
            if partial is not None and partial >= most:
                message = f"`{_PARTIAL}` ({partial}) has no effect: a rank has at most {most} micro batches in flight"
                yield Finding.warning((paths[_PARTIAL], PIPELINE), message, f"{paths[_PARTIAL]}=null")


def _first_fitting(keys: AnyModelBlock, changes: Iterable[dict[str, Any]]) -> str:
    """Return the overrides of the first changes with which the layers can be distributed; empty without."""
    for change in changes:
        if _fits(keys.model_copy(update=change)):
            shown = {name: "null" if value is None else str(value).lower() for name, value in change.items()}
            return " ".join(f"model.{name}={value}" for name, value in shown.items())
    return ""


def _fits(keys: AnyModelBlock) -> bool:
    split = pipeline_split(keys)
    if split is None:
        return True
    if _set(keys, *_ENDS) and _set(keys, *_COUNTS):
        return False
    try:
        split.stages(*(stack.num_layers for stack in keys_by_stack(keys).values()))
    except ValueError:
        return False
    return True


def _set(keys: AnyModelBlock, *names: str) -> list[str]:
    return [name for name in names if getattr(keys, name)]


def _listed(keys: AnyModelBlock, names: Iterable[str]) -> str:
    return " and ".join(f"`{name}` ({getattr(keys, name)})" for name in names)
