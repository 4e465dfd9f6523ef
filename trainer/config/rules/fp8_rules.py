"""Rules of fp8: formats, layers, precision, and what has no effect with or without it."""

from __future__ import annotations

from collections.abc import Iterator, Set
from operator import attrgetter

from ....models.config.families import keys_by_stack
from ....models.config.fp8 import MULTIPLE, Fp8Keys, fp8_slice, scaling_of
from ....models.config.key_block import Finding
from ....models.config.peft import FROZEN_SCHEMES
from ....models.config.sizes import head_dim_of
from ..parameter_layout import DISTRIBUTED_OPTIMIZERS
from ..run_precision import resolve_precision
from ..schema.key_index import format_value
from .rule_context import RuleContext, no_effect, num_data_ranks, num_processes, unused

_DELAYED = ("model.fp8_interval", "model.fp8_amax_history_len", "model.fp8_amax_compute_algo")
_ENDS = ("model.num_layers_at_start_in_bf16", "model.num_layers_at_end_in_bf16")


def fp8_has_a_format(context: RuleContext) -> Iterator[Finding]:
    """Gradients are cast to e4m3 or to e5m2."""
    keys = context.root.model
    if keys.fp8 and not (keys.fp8_e4m3 or keys.fp8_hybrid):
        yield Finding.error(
            ("model.fp8_hybrid", "model.fp8_e4m3", "model.fp8"),
            "`fp8_hybrid` (False) or `fp8_e4m3` (False) must be True with `fp8` (True): gradients are cast to e5m2 or "
            "to e4m3",
            "model.fp8_hybrid=true",
        )
    elif keys.fp8 and keys.fp8_e4m3 and keys.fp8_hybrid and "model.fp8_hybrid" in context.set_by_user:
        yield no_effect("model.fp8_hybrid", "model.fp8_e4m3", "with `fp8_e4m3` (True), which takes precedence")


def fp8_settings_need_fp8(context: RuleContext) -> Iterator[Finding]:
    """The settings of fp8 have no effect without it, those of layers at the ends without these layers."""
    keys = context.root.model
    settings = [f"model.{name}" for name in Fp8Keys.own_keys() if name != "fp8"]
    if not keys.fp8:
        for path in settings:
            yield from unused(context, path, "model.fp8", "without `fp8`")
    elif not keys.first_last_layers_bf16:
        for path in _ENDS:
            yield from unused(context, path, "model.first_last_layers_bf16", "without `first_last_layers_bf16`")
    if keys.fp8 and keys.fp8_recipe in ("rowwise", "blockwise"):
        when = f"with `fp8_recipe` ({keys.fp8_recipe}), whose scales are those of the values that a rank has"
        yield from unused(context, "model.reduce_amax", "model.fp8_recipe", when)


def fp8_params_are_possible(context: RuleContext) -> Iterator[Finding]:
    """Weights that are kept in fp8 alone are on the GPU, and all frozen or cast from main weights."""
    keys = context.root.model
    if not keys.fp8 or not keys.fp8_params:
        return
    path, scheme, cure = "model.fp8_params", keys.peft.peft_scheme, "model.fp8_params=false"
    if keys.peft.is_on and scheme not in FROZEN_SCHEMES:
        yield Finding.error(
            (path, "model.peft.peft_scheme", "model.fp8"),
            f"`fp8_params` (True) needs weights that are all trained or all frozen, not some of them "
            f"(`peft_scheme`, {format_value(scheme)})",
            cure,
        )
        return
    moved = {"fsdp": keys.fsdp and keys.fsdp_sharding_strategy != "grad"}
    if not keys.peft.is_on:
        moved["cpu_offloading_optimizer"] = keys.cpu_offloading_optimizer
        yield from _trained_fp8_params(context)
    moved |= {f"{at}cpu_offloading": stack.cpu_offloading for at, stack in keys_by_stack(keys).items()}
    for name in (name for name, value in moved.items() if value):
        yield Finding.error(
            (path, f"model.{name}"),
            f"`fp8_params` (True) keeps weights and what they are cast from on the GPU, not with `{name}` "
            f"({attrgetter(name)(keys)}), which splits or moves them",
            cure,
        )
    for at, stack in keys_by_stack(keys).items():
        fp8 = fp8_slice(keys, stack.num_layers, stack.transformer_engine)
        if fp8 is not None and fp8.uses_transformer_engine:
            yield Finding.error(
                (path, f"model.{at}transformer_engine"),
                "`fp8_params` (True) keeps the casts of stoker's kernels, which TransformerEngine's linear layers "
                "(`transformer_engine`, True) do not read",
                cure,
            )


def _trained_fp8_params(context: RuleContext) -> Iterator[Finding]:
    """Trained weights are cast from main weights, of which a rank may have some rows only."""
    keys, trainer = context.root.model, context.root.trainer
    capability = None if trainer.accelerator in ("cpu", "mps") else (9, 0)
    if not resolve_precision(trainer.precision, keys.megatron_amp_O2, capability).main_weights:
        has_copies = resolve_precision(trainer.precision, True, capability).main_weights
        at = "model.megatron_amp_O2" if has_copies else "trainer.precision"
        value = keys.megatron_amp_O2 if has_copies else trainer.precision
        yield Finding.error(
            ("model.fp8_params", at, "model.fp8"),
            f"`fp8_params` (True) casts trained weights from fp32 main weights, which a run with "
            f"`{at.partition('.')[2]}` ({format_value(value)}) does not have",
            f"{at}={'true' if has_copies else 'bf16'}, or model.fp8_params=false",
        )
    shards = keys.fsdp_sharding_strategy == "grad" if keys.fsdp else keys.optim.name in DISTRIBUTED_OPTIMIZERS
    ranks = num_data_ranks(context) * keys.context_parallel_size
    if shards and ranks > 1 and keys.fp8_recipe in ("rowwise", "blockwise"):
        yield Finding.error(
            ("model.fp8_params", "model.fp8_recipe", "model.fsdp" if keys.fsdp else "model.optim.name"),
            f"`fp8_params` (True) needs `fp8_recipe` (tensorwise, not {keys.fp8_recipe}) on {ranks} ranks that each "
            "update some rows of a weight: scales of its columns and blocks need other rows too",
            "model.fp8_recipe=tensorwise, or model.fp8_params=false",
        )


def delayed_scaling_is_possible(context: RuleContext) -> Iterator[Finding]:
    """Delayed scaling needs TransformerEngine, and one state for all ranks; its settings have no effect without it."""
    keys = context.root.model
    if not keys.fp8:
        return
    stacks = keys_by_stack(keys).items()
    found = {scaling_of(keys, stack.transformer_engine) for _, stack in stacks}
    if "delayed" not in found and not keys.fp8_dot_product_attention:
        for path in _DELAYED:
            when = "without `fp8_recipe` (delayed) or `fp8_dot_product_attention`"
            yield from unused(context, path, "model.fp8_recipe", when)
        return
    without = [f"model.{at}transformer_engine" for at, stack in stacks if not stack.transformer_engine]
    if keys.fp8_recipe == "delayed" and without:
        yield Finding.error(
            ("model.fp8_recipe", *without),
            "`fp8_recipe` (delayed) needs `transformer_engine` (True): scales of former steps are for "
            "TransformerEngine's linear layers only",
            f"{' '.join(f'{path}=true' for path in without)}, or model.fp8_recipe=tensorwise",
        )
    if not keys.reduce_amax and num_processes(context) > 1:
        chosen = [f"model.{at}transformer_engine" for at, stack in stacks if stack.transformer_engine]
        recipe = ["model.fp8_recipe", *([] if keys.fp8_recipe else chosen)]
        yield Finding.error(
            ("model.reduce_amax", *(recipe if "delayed" in found else ["model.fp8_dot_product_attention"])),
            f"`reduce_amax` (False) must be True with {_delayed(found)} on {num_processes(context)} ranks: a "
            "checkpoint holds one state of the scales",
            "model.reduce_amax=true",
        )


def _delayed(scalings: Set[str]) -> str:
    return "`fp8_recipe` (delayed)" if "delayed" in scalings else "`fp8_dot_product_attention` (True)"


def fp8_attention_is_possible(context: RuleContext) -> Iterator[Finding]:
    """Attention in fp8 needs TransformerEngine, one of its recipes, whole sequences and no dropout."""
    keys, path = context.root.model, "model.fp8_dot_product_attention"
    if not keys.fp8 or not keys.fp8_dot_product_attention:
        return
    for at, stack in keys_by_stack(keys).items():
        if not stack.transformer_engine:
            yield Finding.error(
                (path, f"model.{at}transformer_engine"),
                "`fp8_dot_product_attention` (True) needs `transformer_engine` (True): stoker's own kernels have no "
                "attention in fp8",
                f"model.{at}transformer_engine=true, or {path}=false",
            )
        if stack.attention_dropout:
            yield Finding.error(
                (path, f"model.{at}attention_dropout"),
                f"`attention_dropout` ({stack.attention_dropout}) must be 0 with `fp8_dot_product_attention` (True), "
                "whose kernels have no dropout",
                f"model.{at}attention_dropout=0, or {path}=false",
            )
    if keys.fp8_recipe in ("rowwise", "blockwise"):
        yield Finding.error(
            (path, "model.fp8_recipe"),
            f"`fp8_dot_product_attention` (True) cannot be combined with `fp8_recipe` ({keys.fp8_recipe}): attention "
            "has one scale for each tensor",
            f"model.fp8_recipe=delayed, or {path}=false",
        )
    if keys.context_parallel_size > 1 and keys.cp_comm_type != "a2a":
        yield Finding.error(
            (path, "model.cp_comm_type", "model.context_parallel_size"),
            f"`fp8_dot_product_attention` (True) needs whole sequences, which ranks have with `cp_comm_type` a2a, not "
            f"{format_value(keys.cp_comm_type)}",
            f"model.cp_comm_type=a2a, or {path}=false",
        )


def fp8_layers_are_left(context: RuleContext) -> Iterator[Finding]:
    """Some layers multiply in fp8."""
    keys = context.root.model
    if not keys.fp8:
        return
    for at, stack in keys_by_stack(keys).items():
        if fp8_slice(keys, stack.num_layers, stack.transformer_engine) is None:
            path = "model.first_last_layers_bf16"
            message = (
                f"`first_last_layers_bf16` (True) leaves no layer of {at.rstrip('.') or 'the model'} to `fp8` (True): "
                f"of {stack.num_layers} (`num_layers`) the first {keys.num_layers_at_start_in_bf16} and the last "
                f"{keys.num_layers_at_end_in_bf16} multiply in the run's precision"
            )
            yield Finding.warning((path, "model.fp8", f"model.{at}num_layers"), message, f"{path}=false")


def fp8_precision_is_supported(context: RuleContext) -> Iterator[Finding]:
    """On a GPU fp8 needs bf16 activations, and MPS has none; `accelerator: auto` is checked when the run starts."""
    precision, accelerator = context.root.trainer.precision, context.root.trainer.accelerator
    if not context.root.model.fp8:
        return
    if accelerator == "mps":
        yield Finding.error(
            ("model.fp8", "trainer.accelerator"),
            "`fp8` (True) must be False with `accelerator` (mps), which has no fp8 matmuls",
            "model.fp8=false",
        )
    if accelerator in ("gpu", "cuda") and not str(precision or "bf16").startswith("bf16"):
        yield Finding.error(
            ("trainer.precision", "model.fp8"),
            f"`precision` ({format_value(precision)}) must be bf16 with `fp8` (True) on a GPU: scaled matmuls return "
            "bf16",
            "trainer.precision=bf16, or model.fp8=false",
        )


def fp8_widths_are_multiples(context: RuleContext) -> Iterator[Finding]:
    """The widths of matrices, of the part of a tensor-parallel rank, are multiples of 16."""
    keys = context.root.model
    ranks = keys.tensor_model_parallel_size
    if not keys.fp8:
        return
    for at, stack in keys_by_stack(keys).items():
        heads, head = stack.num_attention_heads, head_dim_of(stack)
        if stack.kv_channels is None and stack.hidden_size % heads:  # reported by another rule
            continue
        groups = heads if stack.num_query_groups is None else stack.num_query_groups
        parts = min(groups, ranks)
        widths = {
            "hidden_size": (stack.hidden_size, 1, "hidden_size"),
            "num_attention_heads": (heads * head, ranks, "num_attention_heads x head width"),
            "num_query_groups": (2 * groups * head, parts, "num_query_groups x head width, of keys and values"),
            "ffn_hidden_size": (stack.ffn_hidden_size, ranks, "ffn_hidden_size"),
        }
        for name, (width, split, what) in widths.items():
            if width % split == 0 and width // split % MULTIPLE:
                share = f" on each of {split} tensor-parallel ranks" if split > 1 else ""
                yield Finding.error(
                    (f"model.{at}{name}", "model.fp8"),
                    f"`{what}` ({width // split}{share}) must be a multiple of {MULTIPLE} with `fp8` (True)",
                    "model.fp8=false, or another width",
                )


def overlap_is_not_in_fp8(context: RuleContext) -> Iterator[Finding]:
    """Products in fp8 do not run beside the communication of tensor-parallel ranks."""
    keys = context.root.model
    if keys.fp8 and keys.ub_tp_comm_overlap and keys.tensor_model_parallel_size > 1:
        yield no_effect("model.ub_tp_comm_overlap", "model.fp8", "on layers that multiply in fp8 (`fp8`)")
