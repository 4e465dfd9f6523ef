"""Peers of the training-step benchmark of GPT-2 124M; see `peers.py`.

Shape (`conf/model/gpt2_124m.yaml`): 12 layers, hidden 768, 12 heads, tanh GELU 3072, biases, learned positions, tied
embeddings, no dropout, vocabulary 50257 padded to 50304.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peers import Peers, Shape, Step, Weights, hf_step, plain_step
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

GPT2 = Shape(layers=12, hidden=768, heads=12, groups=12, ffn=3072, vocab=50304, sequence=1024, micro_batch=32)


def hf_gpt2(shape: Shape) -> Step:
    """Train step of transformers' GPT2LMHeadModel with SDPA, each layer compiled, bf16 autocast."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Any = {"n_layer": shape.layers, "n_embd": shape.hidden, "n_head": shape.heads, "n_inner": shape.ffn}
    sizes |= {"vocab_size": shape.vocab, "n_positions": shape.sequence}
    sizes |= dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    with torch.device("cuda"):
        model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
    return hf_step(model, model.transformer.h)


class PlainBlock(nn.Module):
    """GPT-2 layer in plain torch."""

    def __init__(self, shape: Shape, attention: SDPBackend) -> None:
        super().__init__()
        self.heads, self.attention = shape.heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.hidden)
        self.up = nn.Linear(shape.hidden, shape.ffn)
        self.down = nn.Linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(dim=2)
        with sdpa_kernel(self.attention):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """GPT-2 in plain torch: embeddings, blocks, norm, tied head, loss."""

    def __init__(self, shape: Shape, attention: SDPBackend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Parameter(torch.zeros(shape.sequence, shape.hidden))
        self.blocks = nn.ModuleList(PlainBlock(shape, attention) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def plain_torch(shape: Shape, *, attention: SDPBackend, weights: Weights = "fp32") -> Step:
    """Train step of GPT-2 in plain torch."""
    with torch.device("cuda"):
        return plain_step(PlainGPT2(shape, attention), weights)


PEERS: Peers = {
    "hf": ("HF GPT-2, each layer compiled, SDPA, bf16 autocast", hf_gpt2),
    "plain": (
        "plain torch, compiled, forced cuDNN SDPA, bf16 autocast",
        partial(plain_torch, attention=SDPBackend.CUDNN_ATTENTION),
    ),
    "plain_flash": (
        "plain torch, compiled, forced flash SDPA, bf16 autocast",
        partial(plain_torch, attention=SDPBackend.FLASH_ATTENTION),
    ),
    "plain_main": (
        "plain torch, compiled, forced cuDNN SDPA, bf16 weights, fp32 main weights",
        partial(plain_torch, attention=SDPBackend.CUDNN_ATTENTION, weights="main"),
    ),
}
