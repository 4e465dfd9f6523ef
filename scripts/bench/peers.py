"""Peers of the training-step benchmark, each set up as its users would for speed, with the same shape and data.

Shape (`conf/model/llama_1b.yaml`): 24 layers, hidden 2048, 16 heads, 4 query groups, SwiGLU 5632, vocabulary 32000.
Every builder returns `step(tokens, labels)`: forward, backward, clip to 1.0, AdamW; tokens and labels (B, S) int64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, _foreach_copy_, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Geometry of the benchmark model and of one micro batch."""

    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    groups: int = 4
    ffn: int = 5632
    vocab: int = 32000
    sequence: int = 4096
    micro_batch: int = 4


Weights = Literal["fp32", "main", "bf16"]
"""Weights in fp32 under bf16 autocast, in bf16 with fp32 main weights and moments, or all in bf16."""
Peers = dict[str, tuple[str, Callable[[Shape], Step]]]
"""Name -> title, builder."""


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)


def finish_step(loss: Tensor, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> Tensor:
    """Backward pass, clipping to 1.0 and update; return the loss."""
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def with_random_tokens(step: Step, shape: Shape) -> Callable[[], object]:
    """Return a train step that draws new random tokens each time."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def run() -> object:
        size = (shape.micro_batch, shape.sequence + 1)
        drawn = torch.randint(0, shape.vocab, size, device="cuda", generator=generator)
        return step(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())

    return run


def autocast_step(loss_of: Callable[[Tensor, Tensor], Tensor], model: nn.Module, *, enabled: bool = True) -> Step:
    """Train step with fp32 weights under bf16 autocast, the common setup with Hugging Face and Lightning.

    With weights in bf16, for which it is not `enabled`, gradients and moments are in bf16 too.
    """
    optimizer = build_optimizer(model)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            loss = loss_of(tokens, labels)
        return finish_step(loss, model.parameters(), optimizer)

    return step


def main_weights_step(loss_of: Callable[[Tensor, Tensor], Tensor], model: nn.Module) -> Step:
    """Train step with weights in bf16, and fp32 main weights and moments in the optimizer."""
    weights: list[Tensor] = list(model.parameters())
    mains = nn.ParameterList(each.detach().float() for each in weights)
    optimizer = build_optimizer(mains)
    copies, gradients = [each.detach() for each in mains], [torch.zeros_like(each) for each in mains]
    for each, gradient in zip(mains, gradients, strict=True):
        each.grad = gradient

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        with torch.no_grad():
            _foreach_copy_(gradients, [each.grad for each in weights if each.grad is not None])
            optimizer.step()
            _foreach_copy_(weights, copies)
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def plain_step(model: nn.Module, weights: Weights) -> Step:
    """Train step of a model in plain torch, compiled as a whole."""
    if weights != "fp32":
        for parameter in model.parameters():  # not the buffers, angles of positions
            parameter.data = parameter.data.bfloat16()
    run = torch.compile(model)
    return main_weights_step(run, model) if weights == "main" else autocast_step(run, model, enabled=weights == "fp32")


def hf_llama(shape: Shape, *, whole: bool = False) -> Step:
    """Train step of transformers' LlamaForCausalLM with SDPA, layers (or the whole model) compiled, bf16 autocast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=shape.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    return hf_step(model, [model] if whole else model.model.layers)


def hf_step(model: nn.Module, compiled: Iterable[nn.Module]) -> Step:
    """Train step of a model of transformers with the given modules compiled.

    If those are its layers, the mask is built outside of compiled code, where transformers detects that it is causal
    and omits it.
    """
    model.train()
    for module in compiled:
        module.compile()

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return autocast_step(loss_of, model)


class PlainBlock(nn.Module):
    """Llama layer in plain torch, with cuDNN attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.width = shape, shape.hidden // shape.heads
        self.norm1 = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * shape.groups) * self.width, bias=False)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def rotate(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
        return rotated.to(x.dtype)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads, groups = self.shape.heads, self.shape.groups
        parts = self.qkv(self.norm1(x)).view(batch, length, heads + 2 * groups, self.width).transpose(1, 2)
        q, k, v = parts.split((heads, groups, groups), dim=1)
        q, k = self.rotate(q, cosine, sine), self.rotate(k, cosine, sine)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, -1))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class PlainGPT(nn.Module):
    """Llama model in plain torch: embedding, blocks, norm, untied head, loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        width = shape.hidden // shape.heads
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(shape.sequence)[:, None] * frequencies
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def plain_torch(shape: Shape, *, weights: Weights) -> Step:
    """Train step of Llama in plain torch, with cuDNN attention."""
    with torch.device("cuda"):
        return plain_step(PlainGPT(shape), weights)


PEERS: Peers = {
    "hf": ("HF Llama, each layer compiled, SDPA, bf16 autocast", hf_llama),
    "hf_whole": ("HF Llama, the whole model compiled, SDPA, bf16 autocast", partial(hf_llama, whole=True)),
    "plain": ("plain torch, compiled, forced cuDNN SDPA, bf16 autocast", partial(plain_torch, weights="fp32")),
    "plain_main": (
        "plain torch, compiled, forced cuDNN SDPA, bf16 weights, fp32 main weights",
        partial(plain_torch, weights="main"),
    ),
    "plain_bf16": (
        "plain torch, compiled, forced cuDNN SDPA, pure bf16 weights and moments",
        partial(plain_torch, weights="bf16"),
    ),
}
