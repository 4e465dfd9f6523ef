"""Model FLOPs of a training step by closed formula, and the peaks of cards they are compared with (MFU)."""

from __future__ import annotations

import re

from ..models.config.gpt import GPTKeys
from ..models.config.slices import head_dim_of, mlp_slice

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
    """Weights every token is multiplied with: attention, MLP and the head; no embedding table, biases or norms.

    Args:
        keys: the model.
        vocab_size: rows of the head, padding included.
    """
    query = keys.num_attention_heads * head_dim_of(keys)
    key_value = (keys.num_query_groups or keys.num_attention_heads) * head_dim_of(keys)
    attention = keys.hidden_size * (query + 2 * key_value) + query * keys.hidden_size
    mlp = (3 if mlp_slice(keys).gated else 2) * keys.hidden_size * keys.ffn_hidden_size
    return keys.num_layers * (attention + mlp) + vocab_size * keys.hidden_size


def training_flops_per_token(keys: GPTKeys, vocab_size: int, sequence_length: int) -> float:
    """Forward and backward FLOPs per token: 6 N + 6 L d s.

    N is `matmul_parameters`; the second term is QK^T and PV, 12 L d s for full attention (PaLM, arXiv 2204.02311,
    appendix B) halved because the mask is causal. Recomputed FLOPs do not count.
    """
    attention = 6 * keys.num_layers * keys.num_attention_heads * head_dim_of(keys) * sequence_length
    return 6.0 * matmul_parameters(keys, vocab_size) + attention


def bf16_peak(card: str) -> float | None:
    """Dense bf16 FLOP/s of a card by its driver name; None for an unknown card or a MIG slice."""
    if "MIG" in card:
        return None
    for pattern, teraflops in _BF16_PEAKS:
        if re.search(rf"\b{pattern}\b", card):
            return teraflops * 1e12
    return None
