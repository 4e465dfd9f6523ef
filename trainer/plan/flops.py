"""Model FLOPs of a training step by closed formula, and the peaks of cards they are compared with (MFU)."""

from __future__ import annotations

import re

from ...models.config.batch_shape import SampleForm
from ...models.config.bert import BertKeys
from ...models.config.families import FamilyKeys
from ...models.config.gpt import GPTKeys
from ...models.config.moe_slice import moe_slice
from ...models.config.position_slices import head_dim_of
from ...models.config.slices import mlp_slice, window_of
from ...models.config.stack import StackKeys
from ...models.config.t5 import T5Keys

# Dense (no sparsity) bf16 tensor-core peaks in TFLOP/s with fp32 accumulation, by the name the driver reports.
# NVIDIA's data sheets print twice these, for the sparse case. Compared with secondary sources: A100, H100 SXM and PCIe,
# H200 SXM, L4, L40, L40S, A10, A30, A40, B200, RTX 4090. Not compared with any yet: the NVL forms, GH200, GB200, H20,
# H800, A800, RTX 6000 Ada, RTX 5090; look them up before quoting an MFU of those.
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
    """Weights a token is multiplied with: attention, MLP or its experts, head; no embedding table, biases or norms.

    Args:
        keys: the model.
        vocab_size: rows of the head, padding included.
    """
    return _stack_parameters(keys) + vocab_size * keys.hidden_size


def training_flops_per_token(keys: GPTKeys, vocab_size: int, sequence_length: int, *, frozen: bool = False) -> float:
    """Forward and backward FLOPs per token: 6 N + 6 L d s; with frozen weights, which have no gradient, 4 N.

    N is `matmul_parameters`; the second term is QK^T and PV, 12 L d s for full attention (PaLM, arXiv 2204.02311,
    appendix B) halved because the mask is causal. A window of w tokens makes s of it 2 w - w^2 / s. Recomputed FLOPs do
    not count.
    """
    return (4.0 if frozen else 6.0) * matmul_parameters(keys, vocab_size) + _one_way(keys, sequence_length)


def training_flops_per_sample(keys: FamilyKeys, vocab_size: int, form: SampleForm, *, frozen: bool = False) -> float:
    """Forward and backward FLOPs of a sample of any family: 6 per weight and token it meets, and those of attention.

    Attention costs 12 L d for each pair of a query and a key, half of that where a causal mask hides half of them. The
    cross-attention of T5 turns every token of the encoder into keys and values once in each layer of the decoder.

    Args:
        keys: the model.
        vocab_size: rows of the head, padding included.
        form: the sample.
        frozen: the weights get no gradient, which costs 2 of the 6; what is trained beside them does not count.
    """
    length, answer = form.length, form.decoder_length
    each = 4.0 if frozen else 6.0
    match keys:
        case T5Keys():
            encoder, decoder = keys.encoder, keys.decoder
            query, key_value = _attention_widths(decoder)
            asked = 2 * decoder.num_layers * decoder.hidden_size * query * answer
            read = 2 * decoder.num_layers * decoder.hidden_size * key_value * length
            weights = _stack_parameters(encoder, of_t5=True) * length + asked + read
            weights += _stack_parameters(decoder, of_t5=True) * answer
            pairs = 12.0 * decoder.num_layers * query * answer * length
            pairs += _both_ways(encoder, length) + _one_way(decoder, answer) * answer
            return each * (weights + vocab_size * decoder.hidden_size * answer) + pairs
        case BertKeys():
            transform = keys.hidden_size**2 if keys.bert.mlm_transform else 0
            weights = _stack_parameters(keys) + transform + vocab_size * keys.hidden_size
            return each * weights * length + _both_ways(keys, length)
        case _:
            return training_flops_per_token(keys, vocab_size, length, frozen=frozen) * length


def _attention_widths(keys: StackKeys) -> tuple[int, int]:
    """Channels of all query heads, and of all key heads."""
    groups = keys.num_query_groups or keys.num_attention_heads
    return keys.num_attention_heads * head_dim_of(keys), groups * head_dim_of(keys)


def _stack_parameters(keys: StackKeys, *, of_t5: bool = False) -> int:
    """Weights of a stack that a token is multiplied with: of experts those it goes to, as far as they may take it.

    Rows that fill an expert up to its capacity do not count, as recomputed FLOPs do not.
    """
    query, key_value = _attention_widths(keys)
    attention = keys.hidden_size * (query + 2 * key_value) + query * keys.hidden_size
    per_channel = (3 if mlp_slice(keys).gated else 2) * keys.hidden_size
    dense = per_channel * keys.ffn_hidden_size
    moe = moe_slice(keys, of_t5=of_t5)
    if moe is None:
        return keys.num_layers * (attention + dense)
    taken = moe.topk * min(1.0, moe.capacity_factor or 1.0)
    of_experts = round(taken * per_channel * moe.ffn_hidden_size) + per_channel * (moe.shared_ffn_hidden_size or 0)
    sparse = sum(moe.layers)
    router = moe.experts * keys.hidden_size
    return keys.num_layers * attention + (keys.num_layers - sparse) * dense + sparse * (router + of_experts)


def _one_way(keys: StackKeys, tokens: int) -> float:
    """FLOPs of causal attention per token."""
    seen: float = tokens
    window = window_of(keys, causal=True)
    if window is not None:
        width = min(window[0] + 1, tokens)
        seen = 2 * width - width**2 / tokens
    return 6 * keys.num_layers * _attention_widths(keys)[0] * seen


def _both_ways(keys: StackKeys, tokens: int) -> float:
    """FLOPs of the attention of a whole sample where tokens see each other both ways."""
    pairs = float(tokens**2)
    for side in window_of(keys, causal=False) or ():
        beyond = tokens - 1 - side if 0 <= side < tokens else 0
        pairs -= beyond * (beyond + 1) / 2
    return 12 * keys.num_layers * _attention_widths(keys)[0] * pairs


def bf16_peak(card: str) -> float | None:
    """Dense bf16 FLOP/s of a card by its driver name; None for an unknown card or a MIG slice."""
    if "MIG" in card:
        return None
    for pattern, teraflops in _BF16_PEAKS:
        if re.search(rf"\b{pattern}\b", card):
            return teraflops * 1e12
    return None
