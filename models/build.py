"""From keys to a model: the only reader of the configuration in this room."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from ..kernels.attention.backends import AttentionFunction, function_of, installed, torch_version
from ..kernels.attention.call import AttentionCall, DType
from ..kernels.attention.dispatch import Decision
from ..kernels.attention.flags import AttentionFlags
from .attention import SelfAttention
from .attention_calls import CallKind, attention_calls, decide
from .config.gpt import GPTKeys
from .config.slices import GPTSlice, StackSlice, gpt_slice
from .gpt import GPT
from .init import InitRules, initialise_
from .mlp import MLP
from .norms import NORMS, LayerNorm, RMSNorm
from .positions import RotaryEmbedding
from .stack import Layer, Stack

Backends = Mapping[CallKind, AttentionFunction]

DTYPE_NAMES: dict[torch.dtype, DType] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Sharding(Protocol):
    """What cuts the parameters of a model over several processes."""

    def cut(self, model: GPT) -> None:
        """Replace the parameters of a model on the meta device by this process's parts of them."""
        ...

    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Copy this process's part of a whole parameter (fp32, CPU) into what `cut` made of it."""
        ...


def build_gpt(
    keys: GPTKeys,
    *,
    vocab_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
    flags: AttentionFlags,
    micro_batch_size: int,
    seq_length: int | None = None,
    compute_dtype: torch.dtype | None = None,
    kinds: Collection[CallKind] = ("training", "evaluation", "generation"),
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    sharding: Sharding | None = None,
) -> GPT:
    """Build a GPT with its initial weights.

    Args:
        keys: what the model is; `gpt_rules` has found no error in it.
        vocab_size: tokens of the tokenizer.
        device: where the parameters shall lie; `meta` builds shapes only, without weights, decisions or compilation.
        dtype: of the parameters.
        flags: what the environment says about attention.
        micro_batch_size: samples in a call.
        seq_length: tokens in a sample; None is `encoder_seq_length`.
        compute_dtype: the dtype of the arithmetic where it is not that of the parameters.
        kinds: the kinds of call the run can make; the model raises on any other.
        reset_position_ids: in training and evaluation the positions of each document of a sample begin at 0.
        reset_attention_mask: in training and evaluation a token sees no earlier document of its sample.
        sharding: cuts the parameters over processes; None leaves them whole.

    Raises:
        ValueError: `override_vocab_size` is too small, or `compile` cannot be had.
        NoBackendError: no attention backend is left for a kind of call.
    """
    device = torch.device(device)
    gpt = gpt_slice(keys, vocab_size=vocab_size)
    length = seq_length or gpt.seq_length
    if device.type == "meta":
        return _assemble(gpt, length, {}, {}, reset_position_ids, reset_attention_mask).to(dtype)
    decisions, (use_compile, reason) = plan_gpt(
        gpt,
        device=device,
        dtype=compute_dtype or dtype,
        flags=flags,
        micro_batch_size=micro_batch_size,
        seq_length=length,
        kinds=kinds,
        packed=reset_attention_mask,
    )
    fusion = flags.masked_softmax_fusion and gpt.stack.attention.masked_softmax_fusion
    backends: Backends = {kind: function_of(made, masked_softmax_fusion=fusion) for kind, made in decisions.items()}
    model = _assemble(gpt, length, decisions, backends, reset_position_ids, reset_attention_mask).to(dtype)
    model.compiled, model.compile_reason = use_compile, reason
    if use_compile:
        whole = all(decision.compiles for kind, decision in decisions.items() if kind != "generation")
        model.decoder.compile_parts(hooked=sharding is not None, whole=whole)
    if sharding is None:
        model = model.to_empty(device=device)
        initialise_(model, init_rules(gpt))
    else:
        sharding.cut(model)
        model.to_empty(device=device)
        initialise_(model, init_rules(gpt), sharding.fill)
    return model


def plan_gpt(
    gpt: GPTSlice,
    *,
    device: torch.device,
    dtype: torch.dtype,
    flags: AttentionFlags,
    micro_batch_size: int,
    seq_length: int,
    kinds: Collection[CallKind] = ("training", "evaluation", "generation"),
    packed: bool = False,
) -> tuple[dict[CallKind, Decision], tuple[bool, str]]:
    """What `build_gpt` decides before it builds: the attention of each kind of call, and whether to compile and why.

    Args:
        gpt: what the model is.
        device: where it shall run.
        dtype: of the arithmetic.
        flags: what the environment says about attention.
        micro_batch_size: samples in a call.
        seq_length: tokens in a sample.
        kinds: the kinds of call the run can make.
        packed: samples of training and evaluation hold several documents, which do not see each other.

    Raises:
        ValueError: compilation cannot be had.
        NoBackendError: no attention backend is left for a kind of call.
    """
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"`dtype` ({dtype}) must be one of {', '.join(str(known) for known in DTYPE_NAMES)}.")
    attention = gpt.stack.attention
    calls = attention_calls(
        attention,
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=DTYPE_NAMES[dtype],
        batch=micro_batch_size,
        seq_length=seq_length,
        longest=gpt.max_positions or seq_length,
        packed=packed,
        deterministic=not flags.allow_nondeterministic,
    )
    asked: dict[CallKind, AttentionCall] = {kind: call for kind, call in calls.items() if kind in kinds}
    decisions = decide(attention, asked, flags, installed(device.type))
    return decisions, compile_policy(gpt.compile, device.type, torch_version(), dropout=has_dropout(gpt.stack))


def parameter_count(model: nn.Module) -> int:
    """Parameters of a built model, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------- decisions


def has_dropout(stack: StackSlice) -> bool:
    """Whether a layer draws random numbers in training."""
    return bool(stack.hidden_dropout or stack.attention.dropout or stack.mlp.dropout)


def compile_policy(
    wish: bool | None, device_type: str, torch_release: tuple[int, int], *, dropout: bool
) -> tuple[bool, str]:
    """Whether to compile the layers, and why.

    Raises:
        ValueError: compilation is asked for where it silently gives wrong dropout masks.
    """
    wrong_masks = dropout and device_type == "cuda" and torch_release >= (2, 13)
    release = ".".join(map(str, torch_release))
    if wish is False:
        return False, "`compile` is False"
    if wrong_masks:
        if wish:
            raise ValueError(
                f"`compile` (True) must not be combined with dropout on a GPU under PyTorch {release}, whose compiled "
                "dropout masks are wrong (pytorch #198333); use compile=null, dropouts of 0, or PyTorch 2.12."
            )
        return False, f"dropout masks compiled by PyTorch {release} are wrong (pytorch #198333)"
    if wish:
        return True, "`compile` is True"
    if device_type == "cuda":
        return True, "on a GPU"
    return False, f"not worth its time on {device_type}; `compile: True` forces it"


def init_rules(gpt: GPTSlice) -> InitRules:
    """How the parameters of a GPT start."""
    return InitRules(
        seed=gpt.seed,
        std=gpt.stack.init_std,
        output_std=gpt.stack.output_init_std,
        norm_weight=0.0 if gpt.stack.norm.zero_centered else 1.0,
    )


# ---------------------------------------------------------------- modules


def _assemble(
    gpt: GPTSlice,
    seq_length: int,
    decisions: dict[CallKind, Decision],
    backends: Backends,
    reset_position_ids: bool,
    reset_attention_mask: bool,
) -> GPT:
    """All modules of a GPT on the meta device: nothing is allocated yet."""
    hidden_size = gpt.stack.hidden_size
    with torch.device("meta"):
        return GPT(
            token_embedding=nn.Embedding(gpt.padded_vocab_size, hidden_size),
            position_embedding=nn.Embedding(gpt.learned_positions, hidden_size) if gpt.learned_positions else None,
            decoder=_build_stack(gpt.stack, backends),
            head=None if gpt.tied else nn.Linear(hidden_size, gpt.padded_vocab_size, bias=False),
            vocab_size=gpt.vocab_size,
            seq_length=seq_length,
            max_positions=gpt.max_positions,
            dropout=gpt.stack.hidden_dropout,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            attention_decisions=decisions,
        )


def _build_stack(stack: StackSlice, backends: Backends) -> Stack:
    rotary = stack.rotary
    table = rotary and RotaryEmbedding(
        rotary.dim, rotary.positions, base=rotary.base, position_scale=rotary.position_scale
    )
    layers = (_build_layer(stack, backends) for _ in range(stack.num_layers))
    return Stack(layers, final_norm=_build_norm(stack), rotary=table)


def _build_layer(stack: StackSlice, backends: Backends) -> Layer:
    return Layer(
        attention_norm=_build_norm(stack),
        attention=_build_attention(stack, backends),
        mlp_norm=_build_norm(stack),
        mlp=MLP(
            stack.hidden_size,
            stack.mlp.ffn_hidden_size,
            nonlinearity=stack.mlp.nonlinearity,
            gated=stack.mlp.gated,
            bias=stack.mlp.bias,
            dropout=stack.mlp.dropout,
        ),
        dropout=stack.hidden_dropout,
    )


def _build_norm(stack: StackSlice) -> LayerNorm | RMSNorm:
    return NORMS[stack.norm.kind](stack.hidden_size, stack.norm.epsilon, zero_centered=stack.norm.zero_centered)


def _build_attention(stack: StackSlice, backends: Backends) -> SelfAttention:
    attention = stack.attention
    return SelfAttention(
        stack.hidden_size,
        heads=attention.heads,
        groups=attention.groups,
        head_dim=attention.head_dim,
        scale=attention.scale,
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
        dropout=attention.dropout,
        causal=attention.causal,
        rotary_interleaved=stack.rotary.interleaved if stack.rotary else False,
        backends=backends,
    )
