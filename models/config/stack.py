"""One stack of layers: all of its keys, the frozen record that they resolve to, and cross-field rules.

A rule is a pure function from keys to findings; paths are relative to the block of the stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...kernels.attention.backend_support import BACKENDS_BY_NAME
from .dense_stack import AttentionSlice, MLPSlice, NormSlice, attention_slice, is_own_block, mlp_slice, norm_slice
from .fp8 import MULTIPLE, Fp8Keys, Fp8Slice, fp8_slice
from .key_block import Finding
from .memory import (
    MemoryKeys,
    OffloadSlice,
    RecomputeModule,
    RecomputeSlice,
    effective_modules,
    offload_slice,
    recompute_slice,
)
from .memory_rules import offload_rules, recompute_rules
from .moe import MoESlice, moe_slice
from .moe_rules import moe_rules
from .position_rules import DIRECTION_RULES, POSITION_RULES
from .positions import BOUNDED_POSITION_TYPES, RotarySlice, rotary_slice


class StackKeys(MemoryKeys):
    """All keys of one stack: dense layers, mixture of experts, recompute and offloading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSlice:
    """Stack of transformer layers.

    Attributes:
        block: placement of the norms in a layer, a `BlockType` or the name of a block of a user's own.
        hidden_dropout: dropout probability of attention and MLP outputs before the residual add, and of the embeddings.
        norm: all norms of the stack.
        mlp: MLP of the dense layers.
        moe: experts of the MoE layers; None in a dense stack.
        init_std: standard deviation of the initial weights.
        output_init_std: standard deviation of the initial output projections of attention and MLP.
        begins: the embeddings come before it; False for later pipeline stages of a stack.
        ends: the final norm, and in the last stack the head, come after it; False for earlier stages.
        fp8: matmuls in fp8; None without.
        fp32_residual: the residual stream is fp32 beside 16-bit weights.
    """

    num_layers: int
    hidden_size: int
    block: str
    hidden_dropout: float
    attention: AttentionSlice
    rotary: RotarySlice | None
    norm: NormSlice
    mlp: MLPSlice
    moe: MoESlice | None
    init_std: float
    output_init_std: float
    recompute: RecomputeSlice | None
    offload: OffloadSlice | None
    begins: bool = True
    ends: bool = True
    fp8: Fp8Slice | None = None
    fp32_residual: bool = False

    @property
    def is_own_block(self) -> bool:
        """True if the layers are a block of a user's own."""
        return is_own_block(self.block)

    @property
    def why_experts_without_fp8(self) -> str:
        """Why experts multiply in the run's precision though linear layers multiply in fp8; empty if they do too."""
        if self.fp8 is None or self.moe is None:
            return ""
        recipe, moe, multiple = self.fp8.recipe, self.moe, 128 if self.fp8.recipe.scaling == "blockwise" else MULTIPLE
        reasons = {
            "grouped fp8 matmuls add no bias (`bias`)": self.mlp.bias,
            "experts have dropout (`moe_dropout`)": moe.dropout > 0,
            "experts are padded to their capacity (`moe_pad_expert_input_to_capacity`)": moe.pad_to_capacity,
            "experts run one after the other (`moe_grouped_gemm`)": moe.implementation == "sequential",
            "the activation is your own (`activation`)": self.mlp.is_own,
            "gradients of their weights would be in fp8 (`fp8_wgrad`)": not recipe.wgrad,
            f"the widths of experts must be multiples of {multiple} (`hidden_size`, `moe_ffn_hidden_size`)": bool(
                self.hidden_size % multiple or moe.ffn_hidden_size % multiple
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def recomputed_modules(
        self, layer: int, *, offloading: bool, whole: bool | None = None
    ) -> frozenset[RecomputeModule]:
        """Return the modules of a layer that are recomputed; none if the layer is recomputed as a whole.

        Args:
            layer: 0-based index of the layer.
            offloading: CPU offloading is active, which needs a GPU.
            whole: the layer is recomputed as a whole; None: as one of a model without a pipeline.
        """
        if whole is None:
            whole = self.recompute is not None and layer < self.recompute.layers
        if whole:
            return frozenset()
        modules = frozenset[RecomputeModule]() if self.recompute is None else self.recompute.modules
        if not offloading or self.offload is None or layer >= self.offload.layers:
            return modules
        return modules | self.offload.recomputed_modules & self.effective_modules(range(layer, layer + 1))

    def effective_modules(self, layers: range) -> frozenset[RecomputeModule]:
        """Return the modules that some of these layers have and that can be recomputed."""
        moe = self.moe
        return effective_modules(
            moe.layers[layers.start : layers.stop] if moe is not None else (),
            shared_expert=moe is not None and moe.shared_ffn_hidden_size is not None,
            post_ln=self.block == "post_ln",
        )


def stack_slice(keys: StackKeys, fp8: Fp8Keys, *, causal: bool, positions: int) -> StackSlice:
    """Resolve a stack, of a T5 or not, for sequences of up to `positions` tokens, with the model's `fp8` keys."""
    scaled = keys.init_method_std / math.sqrt(2 * keys.num_layers)
    moe, in_fp8 = moe_slice(keys), fp8_slice(fp8, keys.num_layers, keys.transformer_engine)
    return StackSlice(
        num_layers=keys.num_layers,
        hidden_size=keys.hidden_size,
        block=keys.transformer_block_type,
        hidden_dropout=keys.hidden_dropout,
        attention=attention_slice(
            keys,
            causal=causal,
            max_length=positions if keys.position_embedding_type in BOUNDED_POSITION_TYPES else None,
            fp8=in_fp8 is not None and in_fp8.attention,
        ),
        rotary=rotary_slice(keys, positions=positions),
        norm=norm_slice(keys),
        mlp=mlp_slice(keys),
        moe=moe,
        init_std=keys.init_method_std,
        output_init_std=scaled if keys.use_scaled_init_method else keys.init_method_std,
        recompute=recompute_slice(keys, with_experts=moe.layers if moe else ()),
        offload=offload_slice(keys),
        fp8=in_fp8,
        fp32_residual=keys.fp32_residual_connection,
    )


# ---------------------------------------------------------------- rules


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _enumerate(values: list[int]) -> str:
    """Format as "1, 2 or 3"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def _nearest(values: list[int], target: int, count: int = 6) -> list[int]:
    """Return the `count` values nearest to `target`, ascending."""
    return sorted(sorted(values, key=lambda value: abs(value - target))[:count])


def heads_divide_hidden_size(keys: StackKeys) -> Iterator[Finding]:
    """Without `kv_channels`, the hidden size is divided evenly among the heads."""
    if keys.kv_channels is None and keys.hidden_size % keys.num_attention_heads:
        valid = _nearest(divisors(keys.hidden_size), keys.num_attention_heads)
        yield Finding.error(
            ("num_attention_heads", "hidden_size", "kv_channels"),
            f"`hidden_size` ({keys.hidden_size}) must be a multiple of `num_attention_heads` "
            f"({keys.num_attention_heads}) unless `kv_channels` is set.",
            f"use num_attention_heads={_enumerate(valid)}, or set kv_channels",
        )


def groups_divide_heads(keys: StackKeys) -> Iterator[Finding]:
    """Every key/value group is shared by the same number of query heads."""
    heads, groups = keys.num_attention_heads, keys.num_query_groups
    if groups is not None and heads % groups:
        yield Finding.error(
            ("num_query_groups", "num_attention_heads"),
            f"`num_attention_heads` ({heads}) must be a multiple of `num_query_groups` ({groups}).",
            f"use num_query_groups={_enumerate(divisors(heads))}",
        )


def tanh_form_needs_gelu(keys: StackKeys) -> Iterator[Finding]:
    """`openai_gelu` applies to GELU only."""
    if keys.openai_gelu and mlp_slice(keys).nonlinearity != "gelu_tanh":
        yield Finding.error(
            ("openai_gelu", "activation"),
            f"`openai_gelu` (True) is the tanh form of GELU and cannot be combined with `activation` "
            f"({keys.activation}).",
            "use openai_gelu=False, or activation=gelu, geglu or fast-geglu",
        )


def backend_fits_family_switch(keys: StackKeys) -> Iterator[Finding]:
    """`attention_backend` must not be excluded by `use_flash_attention`."""
    backend, switch = keys.attention_backend, keys.use_flash_attention
    if backend == "auto" or switch is None:
        return
    family = _family(backend)
    if switch and family not in ("flash", "fused"):
        excluded, allowed = "allows flash and fused attention only", "flash or fused"
    elif not switch and family == "flash":
        excluded, allowed = "excludes flash attention", "fused or unfused"
    else:
        return
    yield Finding.error(
        ("attention_backend", "use_flash_attention"),
        f"`attention_backend` ({backend}) contradicts `use_flash_attention` ({switch}), which {excluded}.",
        f"use use_flash_attention=null, or attention_backend={allowed}",
    )


def backend_fits_transformer_engine(keys: StackKeys) -> Iterator[Finding]:
    """`attention_backend` must not be excluded by `transformer_engine`, which has no effect on a named backend."""
    backend, switch = keys.attention_backend, keys.transformer_engine
    if switch is False and backend.startswith("te_"):
        yield Finding.error(
            ("attention_backend", "transformer_engine"),
            f"`attention_backend` ({backend}) contradicts `transformer_engine` (False), which excludes "
            "TransformerEngine's attention.",
            "use transformer_engine=null, or attention_backend=auto",
        )
    elif switch and backend in BACKENDS_BY_NAME and not backend.startswith("te_"):
        yield Finding.warning(
            ("transformer_engine", "attention_backend"),
            f"`transformer_engine` (True) has no effect on attention with `attention_backend` ({backend}), which "
            "is not TransformerEngine's.",
            f"use attention_backend={_family(backend) if _family(backend) != 'named' else 'auto'}",
        )


def softmax_fusion_needs_unfused_backend(keys: StackKeys) -> Iterator[Finding]:
    """`masked_softmax_fusion` has an effect with the `unfused` backend only."""
    if keys.masked_softmax_fusion:
        return
    backend = keys.attention_backend
    excluded = "use_flash_attention" if keys.use_flash_attention else ""
    if backend not in ("auto", "unfused"):
        excluded = "attention_backend"
    if excluded:
        yield Finding.warning(
            ("masked_softmax_fusion", excluded),
            f"`masked_softmax_fusion` (False) has no effect with `{excluded}` ({getattr(keys, excluded)}): it is an "
            "option of the `unfused` backend.",
            f"~model.masked_softmax_fusion, or {excluded}={'unfused' if excluded == 'attention_backend' else 'null'}",
        )


def _family(backend: str) -> str:
    """Return the family of a backend; families and `auto` are returned unchanged."""
    return BACKENDS_BY_NAME[backend].family if backend in BACKENDS_BY_NAME else backend


def qkv_bias_is_part_of_bias(keys: StackKeys) -> Iterator[Finding]:
    """`qkv_bias` has no effect with `bias`, which applies to every linear layer."""
    if keys.qkv_bias and keys.bias:
        yield Finding.warning(
            ("qkv_bias", "bias"),
            "`qkv_bias` (True) has no effect with `bias` (True): every linear layer has a bias.",
            "use bias=False for a bias on query, key and value only",
        )


def fp32_residual_needs_norms_of_branches(keys: StackKeys) -> Iterator[Finding]:
    """An fp32 residual stream needs a norm before each branch, which rounds it."""
    block = keys.transformer_block_type
    if keys.fp32_residual_connection and (block == "post_ln" or is_own_block(block)):
        yield Finding.error(
            ("fp32_residual_connection", "transformer_block_type"),
            "`fp32_residual_connection` (True) needs a norm at the input of each branch, which "
            f"`transformer_block_type` ({block}) {'does' if block == 'post_ln' else 'may'} not have.",
            "use fp32_residual_connection=False, or transformer_block_type=pre_ln",
        )


STACK_RULES: tuple[Callable[[StackKeys], Iterator[Finding]], ...] = (
    heads_divide_hidden_size,
    groups_divide_heads,
    *POSITION_RULES,
    tanh_form_needs_gelu,
    backend_fits_family_switch,
    backend_fits_transformer_engine,
    softmax_fusion_needs_unfused_backend,
    qkv_bias_is_part_of_bias,
    fp32_residual_needs_norms_of_branches,
)


def stack_rules(keys: StackKeys, *, causal: bool) -> Iterator[Finding]:
    """All cross-field checks for one stack, causal or bidirectional, of a T5 or not."""
    for rule in STACK_RULES:
        yield from rule(keys)
    for rule in DIRECTION_RULES:
        yield from rule(keys, causal)
    yield from moe_rules(keys)
    yield from recompute_rules(keys)
    yield from offload_rules(keys)
