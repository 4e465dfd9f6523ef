"""Cross-field rules of `model.peft`: requirements of each scheme, and keys without effect."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.families import keys_by_stack, sequence_length_of
from ....models.config.key_block import Finding
from ....models.config.moe import moe_slice
from ....models.config.peft import SelectiveSlice, peft_slice
from ....models.config.positions import BOUNDED_POSITION_TYPES
from ..data_task import task_name
from ..schema.root import T5ModelBlock
from .rule_context import RuleContext, no_effect, unused

_AT = "model.peft"
_SCHEME = f"{_AT}.peft_scheme"
_BLOCKS = {
    "lora": "lora_tuning",
    "adapter": "adapter_tuning",
    "ptuning": "p_tuning",
    "ia3": "ia3_tuning",
    "selective": "selective_tuning",
}


def unused_scheme_settings(context: RuleContext) -> Iterator[Finding]:
    """Warn about settings of a scheme that is not the chosen one."""
    scheme, family = context.root.model.peft.peft_scheme, context.root.model.family
    for name, block in _BLOCKS.items():
        given = sorted(path for path in context.set_by_user if path.startswith(f"{_AT}.{block}."))
        if given and scheme != name:
            yield Finding.warning(
                (given[0], _SCHEME),
                f"`{block}` has no effect with `peft_scheme` ({scheme or 'null'})",
                f"{_SCHEME}={name}"
                if scheme in (None, "none") and (name != "ptuning" or family != "bert")
                else f"~{_AT}.{block}",
            )


def restored_adapter_needs_scheme(context: RuleContext) -> Iterator[Finding]:
    """`peft.restore_from_path` needs the scheme of the adapter."""
    peft = context.root.model.peft
    if peft.restore_from_path is not None and not peft.is_on:
        yield Finding.error(
            (f"{_AT}.restore_from_path", _SCHEME),
            "`peft.restore_from_path` needs the `peft_scheme` the adapter was trained with",
            f"{_SCHEME}=lora, or stoker finetune, which reads the scheme from the adapter",
        )


def frozen_weights_are_pretrained(context: RuleContext) -> Iterator[Finding]:
    """Frozen weights should be pretrained, except in benchmarks: with mock data and without checkpoints."""
    model = context.root.model
    is_benchmark = model.data.data_impl == "mock" and not context.root.exp_manager.create_checkpoint_callback
    if model.peft.is_on and model.restore_from_path is None and not is_benchmark:
        yield Finding.warning(
            (_SCHEME, "model.restore_from_path"),
            f"`peft_scheme` ({model.peft.peft_scheme}) freezes random weights without `model.restore_from_path`",
            "model.restore_from_path=FOLDER",
        )


def adapter_init_settings_act(context: RuleContext) -> Iterator[Finding]:
    """Initialization settings have no effect with `peft.restore_from_path`, which must hold every parameter."""
    peft = context.root.model.peft
    block = _BLOCKS.get(peft.peft_scheme or "", "")
    if peft.restore_from_path is None or not block:
        return
    for name in ("column_init_method", "row_init_method", "init_std"):
        when = "with `peft.restore_from_path`, which holds all trained parameters"
        yield from unused(context, f"{_AT}.{block}.{name}", f"{_AT}.restore_from_path", when)


def layer_selection_is_valid(context: RuleContext) -> Iterator[Finding]:
    """`layer_selection` must not exceed the number of layers (counted from 1)."""
    model = context.root.model
    most = max(stack.num_layers for stack in keys_by_stack(model).values())
    block = _BLOCKS.get(model.peft.peft_scheme or "", "")
    chosen = getattr(getattr(model.peft, block, None), "layer_selection", None)
    beyond = [number for number in chosen or () if number > most]
    if beyond:
        path = f"{_AT}.{block}.layer_selection"
        rule = f"`layer_selection` ({beyond[0]}) must not be above the number of layers ({most})"
        yield Finding.error((path,), rule, f"{path}={sorted(set(chosen or ()) - set(beyond)) or [most]}")


def ia3_excludes_experts(context: RuleContext) -> Iterator[Finding]:
    """IA3 does not support experts: it scales inner MLP activations, which the fused expert kernels do not expose."""
    model = context.root.model
    if model.peft.peft_scheme != "ia3":
        return
    for at, stack in keys_by_stack(model).items():
        experts = stack.num_moe_experts
        if experts is not None and (experts > 1 or not isinstance(model, T5ModelBlock)):
            key = f"model.{at}num_moe_experts"
            rule = f"`peft_scheme` (ia3) is not supported with experts (`{at}num_moe_experts` is {experts})"
            yield Finding.error((_SCHEME, key), rule, f"{_SCHEME}=lora")


def expert_bias_needs_trained_router(context: RuleContext) -> Iterator[Finding]:
    """The expert bias of the router is updated only if the router is trained; with a frozen router it stays fixed."""
    model = context.root.model
    peft = peft_slice(model.peft)
    if peft is None:
        return
    names = peft.names if isinstance(peft, SelectiveSlice) else ()
    for at, stack in keys_by_stack(model).items():
        moe = moe_slice(stack)
        if moe is None or moe.bias_update_rate is None:
            continue
        prefix = at or ("encoder." if model.family == "bert" else "decoder.")
        routers = [f"{prefix}layers.{n}.mlp.router.weight" for n, is_moe in enumerate(moe.layers) if is_moe]
        if any(name in router for name in names for router in routers):
            continue
        keys = ["moe_router_bias_update_rate"]
        if model.restore_from_path is None:  # restored biases still act in routing
            keys.append("moe_router_enable_expert_bias")
        for path in (f"model.{at}{key}" for key in keys):
            if path in context.set_by_user:
                yield no_effect(path, _SCHEME, f"with `peft_scheme` ({model.peft.peft_scheme}), which trains no router")


def selective_needs_parameter_names(context: RuleContext) -> Iterator[Finding]:
    """`peft_scheme: selective` needs the names of the parameters to train."""
    peft = context.root.model.peft
    path = f"{_AT}.selective_tuning.tunable_base_param_names"
    if peft.peft_scheme == "selective" and peft.selective_tuning.tunable_base_param_names is None:
        rule = "`peft_scheme: selective` needs the names of the parameters to train"
        yield Finding.error((path, _SCHEME), rule, f"{path}=[attention.qkv]")


def virtual_tokens_fit(context: RuleContext) -> Iterator[Finding]:
    """P-tuning needs unpacked sequences, a GPT or T5, and positions for its virtual tokens."""
    model = context.root.model
    if model.peft.peft_scheme != "ptuning":
        return
    data, number = model.data, model.peft.p_tuning.virtual_tokens
    packed = "model.data.packed_sequence"
    if task_name(model) == "sft" and packed in context.given - context.set_by_user and not data.packed_sequence:
        rule = "`packed_sequence` is false: virtual tokens precede one sample, so each sequence holds one sample"
        yield Finding.info((packed, _SCHEME), f"{rule} and padding")
    for name in ("reset_attention_mask", "reset_position_ids", "packed_sequence"):
        if getattr(data, name):
            rule = f"`peft_scheme` (ptuning) needs one sample per sequence, but `{name}` (True) packs several"
            yield Finding.error((f"model.data.{name}", _SCHEME), rule, f"model.data.{name}=false")
    if model.family == "bert":
        yield Finding.error(
            (_SCHEME, "model.family"), "`peft_scheme` (ptuning) supports gpt and t5 only", f"{_SCHEME}=lora"
        )
        return
    stack = next(iter(keys_by_stack(model).values()))
    if stack.position_embedding_type not in BOUNDED_POSITION_TYPES and not stack.position_embedding_type.startswith(
        "learned_"
    ):
        return
    length = sequence_length_of(model)
    positions = max(model.max_position_embeddings or 0, length)
    if length + number > positions:
        key = "seq_length" if isinstance(model, T5ModelBlock) else "encoder_seq_length"
        if number < positions:  # the positions stay those of the model, which pretrained ones have to match
            table = (
                f" model.max_position_embeddings={positions}"
                if positions > (model.max_position_embeddings or 0)
                else ""
            )
            cure = f"model.{key}={positions - number}{table}"
        else:
            cure = f"model.max_position_embeddings={length + number}"
        yield Finding.error(
            (f"{_AT}.p_tuning.virtual_tokens", f"{_AT}.peft_scheme", f"model.{key}", "model.max_position_embeddings"),
            f"`virtual_tokens` ({number}) and `{key}` ({length}) must fit into the model's {positions} positions",
            cure,
        )
