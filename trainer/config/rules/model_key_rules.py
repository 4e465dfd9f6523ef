"""Rules between `model` keys and others without a file of their own: precision, norms, optimizer names, CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from ....models.config.families import keys_by_stack, without_transformer_engine
from ....models.config.key_block import Finding
from ....models.config.moe import moe_slice
from ....models.config.position_rules import window_masks_nothing
from ....models.config.positions import BOUNDED_POSITION_TYPES
from ....models.config.stack import StackKeys
from ..data_task import task_from_keys
from ..parameter_layout import DISTRIBUTED_OPTIMIZERS
from ..run_precision import resolve_precision
from ..schema.key_index import format_value
from ..schema.optim import optimizer_kind, optimizer_settings
from ..schema.root import T5ModelBlock
from .rule_context import RuleContext, defaults_to_fp32, has_16_bit_weights, has_main_weights, no_effect, unused


def _stacks(context: RuleContext) -> Iterator[tuple[str, StackKeys]]:
    """Yield the key prefix and the keys of each stack."""
    for at, stack in keys_by_stack(context.root.model).items():
        yield f"model.{at}", stack


def query_key_scaling_is_for_fp16(context: RuleContext) -> Iterator[Finding]:
    """`apply_query_key_layer_scaling` is for fp16, where scores are scaled in fp32; NeMo disables it otherwise."""
    is_fp16 = resolve_precision(context.root.trainer.precision, True, None).scales_loss
    for at, stack in _stacks(context):
        if stack.apply_query_key_layer_scaling and not is_fp16:
            yield Finding.warning(
                (f"{at}apply_query_key_layer_scaling", "trainer.precision"),
                "it acts with fp16 only and is disabled in every other precision, as in NeMo; it does not change the "
                "mathematical result",
                f"{at}apply_query_key_layer_scaling=false",
            )


def transformer_engine_is_installed(context: RuleContext) -> Iterator[Finding]:
    """`transformer_engine: True` needs the package; `config` and `plan` warn, for they may be for another machine."""
    stacks = [at for at, stack in _stacks(context) if stack.transformer_engine]
    if stacks and find_spec("transformer_engine") is None:
        paths = tuple(f"{at}transformer_engine" for at in stacks)
        yield Finding.warning(
            paths,
            "`transformer_engine` (True) needs TransformerEngine, which is not installed: `stoker train` refuses it",
            f"{without_transformer_engine(context.root.model)}, or pip install 'stoker[te]'",
        )


def main_weights_need_16_bits(context: RuleContext) -> Iterator[Finding]:
    """`megatron_amp_O2` acts only with `precision` bf16 or 16."""
    trainer, model = context.root.trainer, context.root.model
    if defaults_to_fp32(context) and "model.megatron_amp_O2" in context.set_by_user:
        yield Finding.warning(
            ("model.megatron_amp_O2", "trainer.precision", "trainer.accelerator"),
            f"no effect with `precision` (null), which is 32 with `accelerator` ({trainer.accelerator}): main weights "
            "and autocast are for bf16 and 16",
            "trainer.precision=bf16, or ~model.megatron_amp_O2",
        )
    if trainer.precision in (None, "bf16", 16, "16"):
        return
    # False is what fp32, bf16-mixed and 16-mixed do anyway; bf16-true and 16-true have neither.
    is_ignored = model.megatron_amp_O2 or trainer.precision in ("bf16-true", "16-true")
    if is_ignored and "model.megatron_amp_O2" in context.given:
        yield Finding.warning(
            ("model.megatron_amp_O2", "trainer.precision"),
            f"no effect with `precision` ({format_value(trainer.precision)}): main weights and autocast are for bf16 "
            "and 16",
            "trainer.precision=bf16, or ~model.megatron_amp_O2",
        )


def loss_scale_is_for_fp16(context: RuleContext) -> Iterator[Finding]:
    """`native_amp_*` and `hysteresis` act in fp16 only; every NeMo file has them."""
    precision = context.root.trainer.precision
    if resolve_precision(precision, True, None).scales_loss:
        return
    for name in ("native_amp_init_scale", "native_amp_growth_interval", "hysteresis"):
        when = f"with `precision` ({format_value(precision)}): the loss is scaled in fp16 only"
        yield from unused(context, f"model.{name}", "trainer.precision", when)


def fp32_residual_needs_16_bit_weights(context: RuleContext) -> Iterator[Finding]:
    """`fp32_residual_connection` has no effect with fp32 weights, beside which the residual stream is fp32 anyway."""
    if has_16_bit_weights(context):
        return
    for at, stack in _stacks(context):
        if stack.fp32_residual_connection:
            when = "with fp32 or fp64 weights, beside which the residual stream is never narrower"
            yield no_effect(f"{at}fp32_residual_connection", "trainer.precision", when)


def t5_overflows_in_fp16(context: RuleContext) -> Iterator[Finding]:
    """The residual stream of a T5 grows beyond the range of fp16, in pretrained ones the feed-forward layers too."""
    model, precision = context.root.model, context.root.trainer.precision
    if not isinstance(model, T5ModelBlock) or not resolve_precision(precision, True, None).scales_loss:
        return
    keys = tuple(f"model.{name}.fp32_residual_connection" for name in ("encoder", "decoder"))
    if model.restore_from_path is not None:
        yield Finding.warning(
            ("trainer.precision", "model.restore_from_path"),
            f"`precision` ({precision}): feed-forward layers of pretrained T5s are known to overflow in fp16 (above "
            "65,504), which no loss scale prevents",
            "trainer.precision=bf16, or 32",
        )
    elif has_16_bit_weights(context) and not (
        model.encoder.fp32_residual_connection and model.decoder.fp32_residual_connection
    ):
        yield Finding.warning(
            ("trainer.precision", *keys),
            f"`precision` ({precision}): the residual stream of a T5 is known to overflow in fp16 (above 65,504), "
            "which no loss scale prevents",
            f"{' '.join(f'{key}=true' for key in keys)}, or trainer.precision=bf16",
        )


def norm_weight_decay_acts(context: RuleContext) -> Iterator[Finding]:
    """`do_layer_norm_weight_decay` needs weight decay and trainable norms."""
    model = context.root.model
    key, peft = "model.do_layer_norm_weight_decay", model.peft
    if not model.do_layer_norm_weight_decay or key not in context.set_by_user:
        return
    without_norms = peft.peft_scheme in ("lora", "ptuning", "ia3") or (
        peft.peft_scheme == "adapter" and peft.adapter_tuning.norm_position is None
    )
    if model.optim.weight_decay == 0:
        yield no_effect(key, "model.optim.weight_decay", "with `weight_decay` (0)")
    elif without_norms:
        when = f"with `peft_scheme` ({peft.peft_scheme}), which trains no norms"
        yield no_effect(key, "model.peft.peft_scheme", when)


def init_settings_act(context: RuleContext) -> Iterator[Finding]:
    """Initialization settings have no effect with `restore_from_path`, which must hold every weight."""
    model = context.root.model
    if model.restore_from_path is None:
        return
    paths = ["model.embedding_init_method_std"]
    for at, _ in _stacks(context):
        paths += [f"{at}init_method_std", f"{at}use_scaled_init_method"]
    for path in paths:
        yield from unused(
            context, path, "model.restore_from_path", "with `restore_from_path`, which holds every weight"
        )


def cuda_graph_needs_grouped_gemm(context: RuleContext) -> Iterator[Finding]:
    """Experts without grouped GEMM read token counts on the host, which CUDA graph capture does not allow."""
    model = context.root.model
    for at, stack in _stacks(context):
        moe = moe_slice(stack)
        if model.enable_cuda_graph and moe is not None and moe.reads_counts and model.expert_model_parallel_size == 1:
            yield Finding.error(
                (f"{at}moe_grouped_gemm", "model.enable_cuda_graph"),
                "`moe_grouped_gemm` (False) is not supported with `enable_cuda_graph` (True): experts that run one "
                "after the other wait for their token counts, which cannot be captured",
                f"{at}moe_grouped_gemm=null, or model.enable_cuda_graph=False",
            )


def optimizer_offloading_saves_memory(context: RuleContext) -> Iterator[Finding]:
    """`cpu_offloading_optimizer` needs a CUDA device and an optimizer with state."""
    trainer, model = context.root.trainer, context.root.model
    key, kind = "model.cpu_offloading_optimizer", optimizer_kind(model.optim.name)
    if not model.cpu_offloading_optimizer:
        return
    if trainer.accelerator in ("cpu", "mps"):
        yield no_effect(
            key, "trainer.accelerator", f"with `accelerator` ({trainer.accelerator}): it needs a CUDA device"
        )
        return
    chosen = optimizer_settings(model.optim)
    missing = {"sgd": "momentum", "adafactor": "beta1"}.get(kind)
    if missing is not None and not chosen[missing] and not has_main_weights(context):
        state = "no state" if kind == "sgd" else "only a few vectors of state"
        yield Finding.warning(
            (key, f"model.optim.{missing}", "model.optim.name"),
            f"`cpu_offloading_optimizer` saves no memory: without `{missing}` and main weights {kind} has {state}",
            f"~{key}",
        )


def layernorm1p_is_zero_centered(context: RuleContext) -> Iterator[Finding]:
    """`layernorm_zero_centered_gamma: False` has no effect with `layernorm1p`, which is zero-centred."""
    for at, stack in _stacks(context):
        path = f"{at}layernorm_zero_centered_gamma"
        if (
            stack.normalization == "layernorm1p"
            and not stack.layernorm_zero_centered_gamma
            and path in context.set_by_user
        ):
            yield Finding.warning(
                (path, f"{at}normalization"),
                "`layernorm_zero_centered_gamma` (False) has no effect with `layernorm1p`, whose weight is "
                "zero-centred",
                f"{at}normalization=layernorm",
            )


def optimizer_aliases_are_adamw(context: RuleContext) -> Iterator[Finding]:
    """Note that NeMo's fused and distributed optimizers are AdamW here."""
    model = context.root.model
    name = model.optim.name
    if name in DISTRIBUTED_OPTIMIZERS:
        what = "`fsdp` shards its state" if model.fsdp else "its state is sharded over data-parallel ranks"
        yield Finding.info(("model.optim.name",), f"`{name}` is AdamW here; {what}", "adamw")
    elif name != optimizer_kind(name):
        yield Finding.info(("model.optim.name",), f"`{name}` is AdamW here, fused if the device supports it", "adamw")


def cross_attention_bias_excludes_packing(context: RuleContext) -> Iterator[Finding]:
    """A relative bias in cross-attention does not support packing: packed pairs have different offsets."""
    model = context.root.model
    if not isinstance(model, T5ModelBlock) or model.decoder.position_embedding_type != "relative":
        return
    if not model.decoder.relative_position_bias_self_attention_only and model.data.packed_sequence:
        yield Finding.error(
            ("model.decoder.relative_position_bias_self_attention_only", "model.data.packed_sequence"),
            "`relative_position_bias_self_attention_only` (False) is not supported with `packed_sequence`: input and "
            "target of packed pairs have different offsets, which one bias cannot represent",
            "model.decoder.relative_position_bias_self_attention_only=true, or model.data.packed_sequence=false",
        )


def decoder_window_has_effect(context: RuleContext) -> Iterator[Finding]:
    """Warn if the decoder's window covers the longest target; the model's rules check the encoder's window."""
    model = context.root.model
    if not isinstance(model, T5ModelBlock) or model.decoder.position_embedding_type not in BOUNDED_POSITION_TYPES:
        return
    try:
        target_length = task_from_keys(context.root.model).decoder_length
    except ValueError:  # invalid lengths are reported by another rule
        return
    longest = max(target_length, model.max_position_embeddings or 0)
    if window_masks_nothing(model.decoder, causal=True, longest=longest):
        yield Finding.warning(
            ("model.decoder.window_size", "model.data.seq_length_dec", "model.max_position_embeddings"),
            f"`decoder.window_size` ({model.decoder.window_size}) has no effect: decoder sequences have at most "
            f"{longest} tokens (`data.seq_length_dec`, `max_position_embeddings`)",
            "model.decoder.window_size=null",
        )
