"""Model FLOPs of a training step in closed form, and peak FLOP/s of GPUs, for MFU."""

from __future__ import annotations

import re

from ...models.config.batch_shape import BatchSpec
from ...models.config.bert import BertKeys
from ...models.config.families import FamilyKeys
from ...models.config.gpt import GPTKeys
from ...models.config.moe import moe_slice
from ...models.config.positions import head_dim_of, resolve_window
from ...models.config.stack import StackKeys, mlp_slice
from ...models.config.t5 import T5Keys

# Dense (no sparsity) bf16 tensor-core peaks in TFLOP/s with fp32 accumulation, by the name the driver reports.
# NVIDIA's data sheets list twice these values, with sparsity. Verified with secondary sources: A100, H100 SXM and PCIe,
# H200 SXM, L4, L40, L40S, A10, A30, A40, B200, RTX 4090. Not verified: the NVL variants, GH200, GB200, H20, H800, A800,
# RTX 6000 Ada, RTX 5090; check them before quoting an MFU.
_BF16_PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB200", 2500),
    (r"B200", 2250),
    (r"GH200", 989),
    (r"H200 NVL", 835.5),
    (r"H200", 989),
    (r"H100 NVL", 835.5),
    (r"H100 PCIe", 756),
    (r"H[18]00", 989),
    (r"H20", 148),
    (r"A[18]00", 312),
    (r"A30", 165),
    (r"A40", 149.7),
    (r"A10", 125),
    (r"L40S", 362.05),
    (r"L40", 181.05),
    (r"L4", 121),
    (r"RTX 6000 Ada Generation", 364.2),
    (r"GeForce RTX 4090", 165.2),
    (r"GeForce RTX 5090", 209.5),
)


def matmul_parameters(keys: GPTKeys, vocab_size: int) -> int:
    """Return the matmul parameters active per token: attention, MLP or routed experts, head; no embedding, bias, norm.

    Args:
        keys: model configuration.
        vocab_size: padded vocabulary size V.
    """
    return _stack_parameters(keys) + vocab_size * keys.hidden_size


def training_flops_per_token(keys: GPTKeys, vocab_size: int, sequence_length: int, *, frozen: bool = False) -> float:
    """Return forward and backward FLOPs per token: 6 N + 6 L d s; with frozen weights 4 N + 6 L d s.

    N is `matmul_parameters`; the second term is QK^T and PV, 12 L d s for full attention (PaLM, arXiv 2204.02311,
    appendix B) halved because the mask is causal. With a sliding window of w tokens, s is replaced by 2 w - w^2 / s.
    Recomputed FLOPs do not count.
    """
    return (4.0 if frozen else 6.0) * matmul_parameters(keys, vocab_size) + _causal_attention_flops(
        keys, sequence_length
    )


def training_flops_per_sample(keys: FamilyKeys, vocab_size: int, form: BatchSpec, *, frozen: bool = False) -> float:
    """Return forward and backward FLOPs of a sample, for any family: 6 per active weight and token, plus attention.

    Attention costs 12 L d per query-key pair, half of that with a causal mask. T5's cross-attention projects every
    encoder token to keys and values once in each decoder layer.

    Args:
        keys: model configuration.
        vocab_size: padded vocabulary size V.
        form: sample lengths.
        frozen: weights are frozen, which saves 2 of the 6; added PEFT parameters do not count.
    """
    length, answer = form.seq_length, form.decoder_seq_length
    each = 4.0 if frozen else 6.0
    match keys:
        case T5Keys():
            encoder, decoder = keys.encoder, keys.decoder
            query, key_value = _attention_widths(decoder)
            query_and_output = 2 * decoder.num_layers * decoder.hidden_size * query * answer
            key_and_value = 2 * decoder.num_layers * decoder.hidden_size * key_value * length
            weights = _stack_parameters(encoder) * length + query_and_output + key_and_value
            weights += _stack_parameters(decoder) * answer
            pairs = 12.0 * decoder.num_layers * query * answer * length
            pairs += _bidirectional_attention_flops(encoder, length) + _causal_attention_flops(decoder, answer) * answer
            return each * (weights + vocab_size * decoder.hidden_size * answer) + pairs
        case BertKeys():
            transform = keys.hidden_size**2 if keys.bert.mlm_transform else 0
            weights = _stack_parameters(keys) + transform + vocab_size * keys.hidden_size
            return each * weights * length + _bidirectional_attention_flops(keys, length)
        case _:
            return training_flops_per_token(keys, vocab_size, length, frozen=frozen) * length


def _attention_widths(keys: StackKeys) -> tuple[int, int]:
    """Return the total width of the query heads, H * D, and of the key heads, G * D."""
    groups = keys.num_query_groups or keys.num_attention_heads
    return keys.num_attention_heads * head_dim_of(keys), groups * head_dim_of(keys)


def _stack_parameters(keys: StackKeys) -> int:
    """Return the matmul parameters of a stack active per token: of experts the top-k, times a capacity factor below 1.

    Padding of experts to their capacity does not count, nor does recomputation.
    """
    query, key_value = _attention_widths(keys)
    attention = keys.hidden_size * (query + 2 * key_value) + query * keys.hidden_size
    per_channel = (3 if mlp_slice(keys).gated else 2) * keys.hidden_size
    dense = per_channel * keys.ffn_hidden_size
    moe = moe_slice(keys)
    if moe is None:
        return keys.num_layers * (attention + dense)
    routed = moe.topk * min(1.0, moe.capacity_factor or 1.0)
    expert_parameters = round(routed * per_channel * moe.ffn_hidden_size) + per_channel * (
        moe.shared_ffn_hidden_size or 0
    )
    sparse = sum(moe.layers)
    router = moe.experts * keys.hidden_size
    return keys.num_layers * attention + (keys.num_layers - sparse) * dense + sparse * (router + expert_parameters)


def _causal_attention_flops(keys: StackKeys, tokens: int) -> float:
    """Return the FLOPs of causal attention per token."""
    seen: float = tokens
    window = resolve_window(keys, causal=True)
    if window is not None:
        width = min(window[0] + 1, tokens)
        seen = 2 * width - width**2 / tokens
    return 6 * keys.num_layers * _attention_widths(keys)[0] * seen


def _bidirectional_attention_flops(keys: StackKeys, tokens: int) -> float:
    """Return the FLOPs of bidirectional attention per sample."""
    pairs = float(tokens**2)
    for side in resolve_window(keys, causal=False) or ():
        beyond = tokens - 1 - side if 0 <= side < tokens else 0
        pairs -= beyond * (beyond + 1) / 2
    return 12 * keys.num_layers * _attention_widths(keys)[0] * pairs


def bf16_peak_flops(gpu_name: str) -> float | None:
    """Return the dense bf16 peak FLOP/s of a GPU by its driver name; None for an unknown GPU or a MIG slice."""
    if "MIG" in gpu_name:
        return None
    for pattern, teraflops in _BF16_PEAKS:
        if re.search(rf"\b{pattern}\b", gpu_name):
            return teraflops * 1e12
    return None
