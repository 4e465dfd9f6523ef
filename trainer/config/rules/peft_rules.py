"""Cross-field rules of `model.peft`: what a scheme needs, and which keys have no effect with it."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.family_rules import stacks_of_keys
from ....models.config.key_block import Finding
from ....models.config.moe_slice import moe_slice
from ....models.config.peft_slice import SelectiveSlice, peft_slice
from ....models.config.position_slices import BOUNDED
from ..data_task import task_name
from ..schema.root import T5ModelBlock
from .rule_context import Facts, Rule, no_effect

_AT = "model.peft"
_SCHEME = f"{_AT}.peft_scheme"
_BLOCKS = {
    "lora": "lora_tuning",
    "adapter": "adapter_tuning",
    "ptuning": "p_tuning",
    "ia3": "ia3_tuning",
    "selective": "selective_tuning",
}


def settings_are_those_of_the_scheme(facts: Facts) -> Iterator[Finding]:
    """Of the blocks of settings one acts: that of the scheme."""
    scheme = facts.root.model.peft.peft_scheme
    for name, block in _BLOCKS.items():
        given = sorted(path for path in facts.own if path.startswith(f"{_AT}.{block}."))
        if given and scheme != name:
            yield Finding(
                "warning",
                (given[0], _SCHEME),
                f"`{block}` has no effect with `peft_scheme` ({scheme or 'null'})",
                f"{_SCHEME}={name}" if scheme in (None, "none") else f"~{_AT}.{block}",
            )


def adapters_have_a_scheme(facts: Facts) -> Iterator[Finding]:
    """`peft.restore_from_path` begins with what a scheme trains."""
    peft = facts.root.model.peft
    if peft.restore_from_path is not None and not peft.is_on:
        yield Finding(
            "error",
            (f"{_AT}.restore_from_path", _SCHEME),
            "`peft.restore_from_path` needs the `peft_scheme` it was trained with: the model has no place for it",
            f"{_SCHEME}=lora, or stoker finetune, which reads it there",
        )


def frozen_weights_are_trained_ones(facts: Facts) -> Iterator[Finding]:
    """What is frozen should have learnt something before; where speed is measured on random tokens it need not."""
    model = facts.root.model
    if model.peft.is_on and model.restore_from_path is None and model.data.data_impl != "mock":
        yield Finding(
            "warning",
            (_SCHEME, "model.restore_from_path"),
            f"`peft_scheme` ({model.peft.peft_scheme}) freezes random weights without `model.restore_from_path`",
            "model.restore_from_path=FOLDER",
        )


def initial_values_are_drawn(facts: Facts) -> Iterator[Finding]:
    """Trained parameters that are read are all there: one that is missing is an error."""
    peft = facts.root.model.peft
    block = _BLOCKS.get(peft.peft_scheme or "", "")
    if peft.restore_from_path is None or not block:
        return
    settings = getattr(peft, block)
    for name in ("column_init_method", "row_init_method", "init_std"):
        field, path = type(settings).model_fields.get(name), f"{_AT}.{block}.{name}"
        if field is not None and path in facts.own and getattr(settings, name) != field.default:
            when = "with `peft.restore_from_path`, which has all that is trained"
            yield no_effect(path, f"{_AT}.restore_from_path", when)


def chosen_layers_are_there(facts: Facts) -> Iterator[Finding]:
    """`layer_selection` counts the layers of a stack from 1."""
    model = facts.root.model
    most = max(stack.num_layers for stack in stacks_of_keys(model).values())
    block = _BLOCKS.get(model.peft.peft_scheme or "", "")
    chosen = getattr(getattr(model.peft, block, None), "layer_selection", None)
    beyond = [number for number in chosen or () if number > most]
    if beyond:
        path = f"{_AT}.{block}.layer_selection"
        rule = f"`layer_selection` ({beyond[0]}) must not be above the number of layers ({most})"
        yield Finding("error", (path,), rule, f"{path}={sorted(set(chosen or ()) - set(beyond)) or [most]}")


def experts_have_no_factors(facts: Facts) -> Iterator[Finding]:
    """IA3 scales the inner activations of an MLP; those of experts are within one operation."""
    model = facts.root.model
    if model.peft.peft_scheme != "ia3":
        return
    for at, stack in stacks_of_keys(model).items():
        experts = stack.num_moe_experts
        if experts is not None and (experts > 1 or not isinstance(model, T5ModelBlock)):
            key = f"model.{at}num_moe_experts"
            rule = (
                f"`peft_scheme` (ia3) has no factors for experts, of which `{at}num_moe_experts` ({experts}) has some"
            )
            yield Finding("error", (_SCHEME, key), rule, f"{_SCHEME}=lora")


def frozen_routers_keep_their_biases(facts: Facts) -> Iterator[Finding]:
    """The bias on the choice of experts moves with the router: where that is frozen, it stays as the model has it."""
    model = facts.root.model
    peft = peft_slice(model.peft)
    if peft is None:
        return
    names = peft.names if isinstance(peft, SelectiveSlice) else ()
    for at, stack in stacks_of_keys(model).items():
        moe = moe_slice(stack, of_t5=isinstance(model, T5ModelBlock))
        if moe is None or moe.bias_update_rate is None:
            continue
        inside = at or ("encoder." if model.family == "bert" else "decoder.")
        routers = [f"{inside}layers.{n}.mlp.router.weight" for n, has_some in enumerate(moe.layers) if has_some]
        if any(name in router for name in names for router in routers):
            continue
        keys = ["moe_router_bias_update_rate"]
        if model.restore_from_path is None:  # else the biases that are read there choose
            keys.append("moe_router_enable_expert_bias")
        for path in (f"model.{at}{key}" for key in keys):
            if path in facts.own:
                yield no_effect(path, _SCHEME, f"with `peft_scheme` ({model.peft.peft_scheme}), which trains no router")


def selected_parameters_are_named(facts: Facts) -> Iterator[Finding]:
    """`peft_scheme: selective` trains the parameters that are named."""
    peft = facts.root.model.peft
    path = f"{_AT}.selective_tuning.tunable_base_param_names"
    if peft.peft_scheme == "selective" and peft.selective_tuning.tunable_base_param_names is None:
        rule = "`peft_scheme: selective` needs the names of the parameters that it trains"
        yield Finding("error", (path, _SCHEME), rule, f"{path}=[attention.qkv]")


def vectors_have_room(facts: Facts) -> Iterator[Finding]:
    """Virtual tokens stand in front of one text, and take positions of it."""
    model = facts.root.model
    if model.peft.peft_scheme != "ptuning":
        return
    data, number = model.data, model.peft.p_tuning.virtual_tokens
    packed = "model.data.packed_sequence"
    if task_name(model) == "sft" and packed in facts.given - facts.own and not data.packed_sequence:
        rule = "`packed_sequence` is false: vectors stand in front of one text, so a row holds one example, and padding"
        yield Finding("info", (packed, _SCHEME), rule)
    for name in ("reset_attention_mask", "reset_position_ids", "packed_sequence"):
        if getattr(data, name):
            rule = f"`peft_scheme` (ptuning) puts its vectors in front of one text, but `{name}` (True) packs several"
            yield Finding("error", (f"model.data.{name}", _SCHEME), rule, f"model.data.{name}=false")
    if model.family == "bert":
        yield Finding(
            "error", (_SCHEME, "model.family"), "`peft_scheme` (ptuning) is for gpt and t5", f"{_SCHEME}=lora"
        )
        return
    stack = next(iter(stacks_of_keys(model).values()))
    if stack.position_embedding_type not in BOUNDED and not stack.position_embedding_type.startswith("learned_"):
        return
    length = model.seq_length if isinstance(model, T5ModelBlock) else model.encoder_seq_length
    there = max(model.max_position_embeddings or 0, length)
    if length + number > there:
        short = "seq_length" if isinstance(model, T5ModelBlock) else "encoder_seq_length"
        yield Finding(
            "error",
            (f"{_AT}.p_tuning.virtual_tokens", f"{_AT}.peft_scheme", f"model.{short}", "model.max_position_embeddings"),
            f"`virtual_tokens` ({number}) and `{short}` ({length}) must fit into the model's {there} positions",
            f"model.{short}={max(1, there - number)}",
        )


PEFT_RULES: tuple[Rule, ...] = (
    settings_are_those_of_the_scheme,
    adapters_have_a_scheme,
    frozen_weights_are_trained_ones,
    initial_values_are_drawn,
    chosen_layers_are_there,
    experts_have_no_factors,
    frozen_routers_keep_their_biases,
    selected_parameters_are_named,
    vectors_have_room,
)
