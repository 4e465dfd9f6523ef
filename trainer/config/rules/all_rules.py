"""Every rule between keys, and those that belong to no group: precision, norms, names of optimizers.

Each rule is one small pure function from the facts to findings with full paths; `models/config/model_rules.py` has
those of the stack. They run on typed keys, outside pydantic, so that every problem is found at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....models.config.family_rules import model_rules, stacks_of_keys
from ....models.config.key_block import Block, Finding
from ....models.config.moe_slice import moe_slice
from ....models.config.position_rules import window_hides_nothing
from ....models.config.position_slices import BOUNDED
from ....models.config.stack import StackKeys
from ..data_task import task_of
from ..parameter_layout import DISTRIBUTED_OPTIMIZERS
from ..schema.key_index import show_value
from ..schema.optim import optimizer_kind, optimizer_settings
from ..schema.root import T5ModelBlock
from .checkpoint_rules import CHECKPOINT_RULES
from .data_rules import DATA_RULES
from .environment_rules import ENVIRONMENT_RULES
from .exp_manager_rules import EXP_MANAGER_RULES
from .fine_tuning_rules import FINE_TUNING_RULES
from .offload_key_rules import OFFLOAD_RULES
from .optim_rules import optim_rules
from .peft_rules import PEFT_RULES
from .process_rules import PROCESS_RULES
from .rule_context import Facts, Rule, is_fp32_for_the_host, no_effect
from .task_rules import TASK_RULES
from .tokenizer_rules import TOKENIZER_RULES


def _stacks(facts: Facts) -> Iterator[tuple[str, StackKeys]]:
    """The keys of each stack, with the beginning of their paths."""
    for at, stack in stacks_of_keys(facts.root.model).items():
        yield f"model.{at}", stack


def query_key_scaling_is_for_fp16(facts: Facts) -> Iterator[Finding]:
    """NeMo switches it off in every other precision, and so does stoker."""
    for at, stack in _stacks(facts):
        if stack.apply_query_key_layer_scaling:
            yield Finding(
                "warning",
                (f"{at}apply_query_key_layer_scaling", "trainer.precision"),
                "it is for fp16 and is switched off in every other precision, as in NeMo; it never changes the "
                "mathematics",
                f"{at}apply_query_key_layer_scaling=false",
            )


def main_weights_are_for_bf16(facts: Facts) -> Iterator[Finding]:
    """Only `bf16` has a choice between main weights and autocast."""
    trainer, model = facts.root.trainer, facts.root.model
    if is_fp32_for_the_host(facts) and "model.megatron_amp_O2" in facts.own:
        yield Finding(
            "warning",
            ("model.megatron_amp_O2", "trainer.precision", "trainer.accelerator"),
            f"no effect with `precision` (null), which is 32 with `accelerator` ({trainer.accelerator}): the choice "
            "between main weights and autocast goes with bf16",
            "trainer.precision=bf16, or ~model.megatron_amp_O2",
        )
    if trainer.precision is None or trainer.precision == "bf16":
        return
    # False asks for what fp32 and bf16-mixed do anyway; bf16-true does neither.
    unheard = model.megatron_amp_O2 or trainer.precision == "bf16-true"
    if unheard and "model.megatron_amp_O2" in facts.given:
        yield Finding(
            "warning",
            ("model.megatron_amp_O2", "trainer.precision"),
            f"no effect with `precision` ({show_value(trainer.precision)}): "
            "the choice between main weights and autocast goes with bf16",
            "trainer.precision=bf16, or ~model.megatron_amp_O2",
        )


def norms_that_decay_are_trained(facts: Facts) -> Iterator[Finding]:
    """Weight decay is for what is trained, and there must be some."""
    model = facts.root.model
    key, peft = "model.do_layer_norm_weight_decay", model.peft
    if not model.do_layer_norm_weight_decay or key not in facts.own:
        return
    without_norms = peft.peft_scheme in ("lora", "ptuning", "ia3") or (
        peft.peft_scheme == "adapter" and peft.adapter_tuning.norm_position is None
    )
    if model.optim.weight_decay == 0:
        yield no_effect(key, "model.optim.weight_decay", "with `weight_decay` (0)")
    elif without_norms:
        when = f"with `peft_scheme` ({peft.peft_scheme}), which trains no norm here"
        yield no_effect(key, "model.peft.peft_scheme", when)


def initial_values_are_drawn(facts: Facts) -> Iterator[Finding]:
    """Weights that are read are all there: one that is missing is an error."""
    model = facts.root.model
    if model.restore_from_path is None:
        return
    drawn: list[tuple[str, Block, str]] = [("model.", model, "embedding_init_method_std")]
    for at, stack in _stacks(facts):
        drawn += [(at, stack, "init_method_std"), (at, stack, "use_scaled_init_method")]
    for at, block, name in drawn:
        path = f"{at}{name}"
        if path in facts.own and getattr(block, name) != type(block).model_fields[name].default:
            yield no_effect(path, "model.restore_from_path", "with `restore_from_path`, which has every weight")


def recordings_read_no_counts(facts: Facts) -> Iterator[Finding]:
    """A recorded micro batch cannot ask how many tokens an expert has, as experts one after the other do."""
    model = facts.root.model
    for at, stack in _stacks(facts):
        moe = moe_slice(stack, of_t5=isinstance(model, T5ModelBlock))
        if model.enable_cuda_graph and moe is not None and moe.reads_counts:
            yield Finding(
                "error",
                (f"{at}moe_grouped_gemm", "model.enable_cuda_graph"),
                "`moe_grouped_gemm` (False) must not meet `enable_cuda_graph` (True): experts that run one after the "
                "other wait for the number of their tokens, which a recording cannot",
                f"{at}moe_grouped_gemm=null, or model.enable_cuda_graph=False",
            )


def state_on_the_host_is_worth_it(facts: Facts) -> Iterator[Finding]:
    """The state of an optimizer leaves the memory of a CUDA device, where there is some."""
    trainer, model = facts.root.trainer, facts.root.model
    key, kind = "model.cpu_offloading_optimizer", optimizer_kind(model.optim.name)
    if not model.cpu_offloading_optimizer:
        return
    if trainer.accelerator in ("cpu", "mps"):
        yield no_effect(
            key, "trainer.accelerator", f"with `accelerator` ({trainer.accelerator}): it is for CUDA devices"
        )
        return
    chosen = optimizer_settings(model.optim)
    missing = {"sgd": "momentum", "adafactor": "beta1"}.get(kind)
    has_main_weights = trainer.precision in (None, "bf16") and model.megatron_amp_O2
    if missing is not None and not chosen[missing] and not has_main_weights:
        what = "no state" if kind == "sgd" else "a few vectors as its state"
        yield Finding(
            "warning",
            (key, f"model.optim.{missing}", "model.optim.name"),
            f"`cpu_offloading_optimizer` saves nothing: without `{missing}` and without main weights {kind} has {what}",
            f"~{key}",
        )


def centred_norms_are_centred(facts: Facts) -> Iterator[Finding]:
    """`layernorm1p` is the zero-centred layer norm."""
    for at, stack in _stacks(facts):
        path = f"{at}layernorm_zero_centered_gamma"
        if stack.normalization == "layernorm1p" and not stack.layernorm_zero_centered_gamma and path in facts.own:
            yield Finding(
                "warning",
                (path, f"{at}normalization"),
                "`layernorm_zero_centered_gamma` (False) has no effect with `layernorm1p`, whose weight is "
                "zero-centred",
                f"{at}normalization=layernorm",
            )


def fused_names_mean_adamw(facts: Facts) -> Iterator[Finding]:
    """NeMo's names of its fused and distributed AdamW."""
    model = facts.root.model
    name = model.optim.name
    if name in DISTRIBUTED_OPTIMIZERS:
        what = (
            "`fsdp` cuts its state already" if model.fsdp else "its state is cut over the processes, where several run"
        )
        yield Finding("info", ("model.optim.name",), f"`{name}` is AdamW here; {what}", "adamw")
    elif name != optimizer_kind(name):
        yield Finding(
            "info", ("model.optim.name",), f"`{name}` is AdamW here, fused wherever the device allows it", "adamw"
        )


def cross_bias_is_for_one_pair(facts: Facts) -> Iterator[Finding]:
    """A bias by distance is one vector for all pairs of a row, whose texts begin at different distances."""
    model = facts.root.model
    if not isinstance(model, T5ModelBlock) or model.decoder.position_embedding_type != "relative":
        return
    if not model.decoder.relative_position_bias_self_attention_only and model.data.packed_sequence:
        yield Finding(
            "error",
            ("model.decoder.relative_position_bias_self_attention_only", "model.data.packed_sequence"),
            "`relative_position_bias_self_attention_only` (False) must not meet `packed_sequence`: the pairs of a row "
            "begin at different distances from each other, which one bias cannot tell",
            "model.decoder.relative_position_bias_self_attention_only=true, or model.data.packed_sequence=false",
        )


def decoder_window_is_shorter_than_answers(facts: Facts) -> Iterator[Finding]:
    """A window as long as the longest answer hides nothing; the rules of the model say so of the encoder's."""
    model = facts.root.model
    if not isinstance(model, T5ModelBlock) or model.decoder.position_embedding_type not in BOUNDED:
        return
    try:
        answer = task_of(facts.root).decoder_length
    except ValueError:  # lengths that no text fills, which another rule tells
        return
    longest = max(answer, model.max_position_embeddings or 0)
    if window_hides_nothing(model.decoder, causal=True, longest=longest):
        yield Finding(
            "warning",
            ("model.decoder.window_size", "model.data.seq_length_dec", "model.max_position_embeddings"),
            f"`decoder.window_size` ({model.decoder.window_size}) has no effect: the decoder writes no text longer "
            f"than {longest} tokens (`data.seq_length_dec`, `max_position_embeddings`)",
            "model.decoder.window_size=null",
        )


def optimizer_and_schedule(facts: Facts) -> Iterator[Finding]:
    """What the keys of `model.optim` need of each other."""
    yield from optim_rules(facts.root.model.optim, facts.own, facts.root.trainer.max_steps)


RULES: tuple[Rule, ...] = (
    *PROCESS_RULES,
    *OFFLOAD_RULES,
    optimizer_and_schedule,
    query_key_scaling_is_for_fp16,
    main_weights_are_for_bf16,
    norms_that_decay_are_trained,
    initial_values_are_drawn,
    recordings_read_no_counts,
    state_on_the_host_is_worth_it,
    centred_norms_are_centred,
    fused_names_mean_adamw,
    cross_bias_is_for_one_pair,
    decoder_window_is_shorter_than_answers,
    *DATA_RULES,
    *TASK_RULES,
    *FINE_TUNING_RULES,
    *TOKENIZER_RULES,
    *PEFT_RULES,
    *CHECKPOINT_RULES,
    *EXP_MANAGER_RULES,
    *ENVIRONMENT_RULES,
)


def run_rules(facts: Facts) -> list[Finding]:
    """Everything the keys have against each other, with full paths; a warning about defaults alone is left out."""
    found = [finding for rule in RULES for finding in rule(facts)]
    for finding in model_rules(facts.root.model):
        found.append(replace(finding, keys=tuple(f"model.{key}" for key in finding.keys)))
    return [finding for finding in found if finding.level == "error" or _concerns_user(finding, facts)]


def _concerns_user(finding: Finding, facts: Facts) -> bool:
    known = finding.keys[0] not in facts.variables
    return not known or any(key in facts.given for key in finding.keys)
