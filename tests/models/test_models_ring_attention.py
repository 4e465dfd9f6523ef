"""The calls of a ring, with the flash kernels and in plain torch, are attention of whole sequences, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ring_in_one_process import RingInOneProcess
from tiers import extra

from stoker.kernels.attention.inputs import AttentionInputs
from stoker.kernels.attention.packed_sequences import PackedSequences
from stoker.kernels.attention.reference import dense_attention
from stoker.models.parallel.ring_attention import RingAttention

HEADS, TOKENS = 4, 24

CASES: list[tuple[dict[str, Any], str]] = [
    ({"causal": True}, ""),
    ({"causal": True, "softcap": 2.0}, "documents"),
    ({"causal": True, "window_size": (5, 0)}, "slopes"),
    ({"window_size": (4, 3)}, "padding"),
    *extra(
        ({}, ""),
        ({}, "documents"),
        ({}, "padding"),
        ({"causal": True, "window_size": (1, 0)}, ""),
        ({"causal": True, "window_size": (9, 0)}, "distances"),
        ({"causal": True}, "distances"),
        ({}, "distances"),
        ({}, "slopes"),
        ({"window_size": (0, 11)}, "distances"),
    ),
]


@pytest.mark.parametrize(
    ("options", "others", "flash"),
    [*((*case, False) for case in CASES), (*CASES[1], True), *extra(*((*case, True) for case in CASES))],
)
def test_a_ring_is_attention_to_all_keys(options: dict[str, Any], others: str, flash: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = random(2, TOKENS, HEADS, 16), *(random(2, TOKENS, 2, 16) for _ in range(2))
    inputs, documents, packed = AttentionInputs(q, k, v, **options), None, None
    if others == "documents":
        documents = (torch.arange(TOKENS)[None, :, None] >= torch.tensor([[3, 14, 20], [1, 2, 9]])[:, None]).sum(-1)
        documents = documents.int()
        causal = options.get("causal", False)
        packed = PackedSequences.from_documents(documents, dtype=q.dtype, causal=causal)
    elif others == "padding":
        inputs = inputs._replace(key_padding_mask=torch.arange(TOKENS) < torch.tensor([[17], [5]]))
    elif others == "slopes":
        inputs = inputs._replace(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64))
    elif others == "distances":
        inputs = inputs._replace(distance_bias=random(HEADS, 2 * 6 + 1))
    q, k, v = (each.requires_grad_() for each in (q, k, v))
    wanted, _ = dense_attention(inputs._replace(packed=packed))
    out_gradient = random(*q.shape)
    wanted_gradients = torch.autograd.grad(wanted, (q, k, v), out_gradient)
    with torch.no_grad():
        ring = RingInOneProcess(inputs, 2 if flash else 3, flash=flash, documents=documents)
        found = ring.forward()
        gradients = ring.backward(out_gradient)
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-13)
    for gradient, each in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, each, rtol=0, atol=1e-12)


def test_a_ring_refuses_sinks_and_chunks() -> None:
    """Each block would count the sinks once more, and its chunks from its own first key."""
    q = torch.zeros(1, 4, 2, 16)
    ring = RingAttention(0, 2, "", (True, True), flash=False)
    with pytest.raises(ValueError, match=r"`sinks` \(2,\) must be None in a ring"):
        ring(AttentionInputs(q, q, q, causal=True, sinks=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"`attention_chunk` \(2\) must be 0 in a ring"):
        ring(AttentionInputs(q, q, q, causal=True, attention_chunk=2))
