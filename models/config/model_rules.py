"""Cross-field rules of a model, each a small pure function from keys to findings.

Paths are relative to the block that holds the keys: `model` for GPT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...kernels.attention.backend_support import BACKENDS_BY_NAME
from .gpt import GPTKeys
from .key_block import Finding
from .memory_rules import recompute_rules
from .moe_rules import moe_rules
from .offload_rules import offload_rules
from .position_rules import (
    DIRECTION_RULES,
    POSITION_RULES,
    position_table_covers_sample,
    window_is_shorter_than_sequences,
)
from .slices import mlp_slice
from .stack import StackKeys


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
        yield Finding(
            "error",
            ("num_attention_heads", "hidden_size", "kv_channels"),
            f"`hidden_size` ({keys.hidden_size}) must be a multiple of `num_attention_heads` "
            f"({keys.num_attention_heads}) unless `kv_channels` is set.",
            f"use num_attention_heads={_enumerate(valid)}, or set kv_channels",
        )


def groups_divide_heads(keys: StackKeys) -> Iterator[Finding]:
    """Every key/value group is shared by the same number of query heads."""
    heads, groups = keys.num_attention_heads, keys.num_query_groups
    if groups is not None and heads % groups:
        yield Finding(
            "error",
            ("num_query_groups", "num_attention_heads"),
            f"`num_attention_heads` ({heads}) must be a multiple of `num_query_groups` ({groups}).",
            f"use num_query_groups={_enumerate(divisors(heads))}",
        )


def tanh_form_needs_gelu(keys: StackKeys) -> Iterator[Finding]:
    """`openai_gelu` applies to GELU only."""
    if keys.openai_gelu and mlp_slice(keys).nonlinearity != "gelu_tanh":
        yield Finding(
            "error",
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
    yield Finding(
        "error",
        ("attention_backend", "use_flash_attention"),
        f"`attention_backend` ({backend}) contradicts `use_flash_attention` ({switch}), which {excluded}.",
        f"use use_flash_attention=null, or attention_backend={allowed}",
    )


def backend_fits_transformer_engine(keys: StackKeys) -> Iterator[Finding]:
    """`attention_backend` must not be excluded by `transformer_engine`, which has no effect on a named backend."""
    backend, switch = keys.attention_backend, keys.transformer_engine
    if switch is False and backend.startswith("te_"):
        yield Finding(
            "error",
            ("attention_backend", "transformer_engine"),
            f"`attention_backend` ({backend}) contradicts `transformer_engine` (False), which excludes "
            "TransformerEngine's attention.",
            "use transformer_engine=null, or attention_backend=auto",
        )
    elif switch and backend in BACKENDS_BY_NAME and not backend.startswith("te_"):
        yield Finding(
            "warning",
            ("transformer_engine", "attention_backend"),
            f"`transformer_engine` (True) has no effect with `attention_backend` ({backend}), which is not "
            "TransformerEngine's.",
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
        yield Finding(
            "warning",
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
        yield Finding(
            "warning",
            ("qkv_bias", "bias"),
            "`qkv_bias` (True) has no effect with `bias` (True): every linear layer has a bias.",
            "use bias=False for a bias on query, key and value only",
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
)


def stack_rules(keys: StackKeys, *, causal: bool, is_t5: bool = False) -> Iterator[Finding]:
    """All cross-field checks for one stack, causal or bidirectional, of a T5 or not."""
    for rule in STACK_RULES:
        yield from rule(keys)
    for rule in DIRECTION_RULES:
        yield from rule(keys, causal)
    yield from moe_rules(keys, of_t5=is_t5)
    yield from recompute_rules(keys, is_t5=is_t5)
    yield from offload_rules(keys)


def gpt_rules(keys: GPTKeys) -> Iterator[Finding]:
    """All cross-field checks for GPT; paths are relative to `model`."""
    yield from stack_rules(keys, causal=True)
    yield from position_table_covers_sample(keys)
    yield from window_is_shorter_than_sequences(keys)
