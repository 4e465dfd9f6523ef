"""Attention functions compared by scripts/bench/attention.py: ours, PyTorch's, FlexAttention, TransformerEngine.

Each takes and returns tensors (B, S, H, D), the layout of a training step. A peer that does not support a shape raises;
the table then shows why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stoker import kernels
from stoker.kernels import attention_lse
from stoker.kernels.attention.backends.transformer_engine import import_transformer_engine
from stoker.kernels.attention.backends.triton import triton_attention
from stoker.kernels.attention.inputs import AttentionInputs

flash_attention: Any = kernels.flash_attention  # a tensor, or two with `return_lse`
lse_first_attention: Any = kernels.lse_first_attention

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a call: self-attention of `batch` sequences of `tokens` tokens, in bf16.

    Attributes:
        bias: kind of the per-head relative position bias: `t5` (2 R + 1 values over clipped distance), `alibi` (one
            slope), or None.
        reach: R of `t5`. The last of T5's 32 buckets with maximum distance 128 begins at 91.
    """

    head_dim: int
    heads: int
    groups: int
    tokens: int
    batch: int
    causal: bool
    bias: str | None = None
    reach: int = 91

    @property
    def name(self) -> str:
        parts = [f"D{self.head_dim}", f"{self.heads}/{self.groups}", f"B{self.batch} S{self.tokens}"]
        return " ".join([*parts, "causal" if self.causal else "full", *([self.bias] if self.bias else [])])

    @property
    def forward_flops(self) -> float:
        pairs = self.tokens**2 / (2 if self.causal else 1)
        return 4 * self.batch * self.heads * self.head_dim * pairs

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        def draw(heads: int) -> Tensor:
            size = (self.batch, self.tokens, heads, self.head_dim)
            return torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()

        torch.manual_seed(0)
        return draw(self.heads), draw(self.groups), draw(self.groups)

    def table(self) -> Tensor | None:
        """Return the trainable parameter of the bias in fp32: (H, 2 R + 1), or slopes (H,)."""
        if self.bias is None:
            return None
        if self.bias == "t5":
            return torch.randn(self.heads, 2 * self.reach + 1, device="cuda").requires_grad_()
        return torch.logspace(-8, -1, self.heads, 2.0, device="cuda").requires_grad_()

    def arguments(self, table: Tensor | None) -> dict[str, Tensor]:
        """Return the bias as keyword arguments of `flash_attention`."""
        return {} if table is None else {"distance_bias" if self.bias == "t5" else "alibi_slopes": table}

    def matrix(self, table: Tensor) -> Tensor:
        """Return the dense bias (1, H, S, S) in bf16, differentiable in the table."""
        distance = torch.arange(1 - self.tokens, self.tokens, device="cuda")
        if self.bias == "t5":
            values = table[:, distance.clamp(-self.reach, self.reach) + self.reach]
        else:
            values = -table[:, None] * distance.abs()
        return _DenseBias.apply(values.to(torch.bfloat16))[None]


class _DenseBias(torch.autograd.Function):
    """Expand bias values over distance (H, 2 S - 1) to a dense bias (H, S, S).

    The backward pass shifts every row by one, so that sums along diagonals become sums of columns: a few passes at
    memory bandwidth. The gradient of indexing accumulates into few elements and takes a hundred times as long.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        tokens = (values.shape[1] + 1) // 2
        return values.unfold(1, tokens, 1).flip(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        heads, tokens, _ = gradient.shape
        skewed = F.pad(gradient.flip(1), (0, tokens)).flatten(1)[:, :-tokens].view(heads, tokens, 2 * tokens - 1)
        return skewed.sum(1, dtype=torch.float32).to(gradient.dtype)


def ours(shape: Shape) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
        return flash_attention(q, k, v, causal=shape.causal, **shape.arguments(table))

    return attend


def ours_atomic(shape: Shape) -> Attend:
    if shape.head_dim > 128 or shape.tokens < 1024:
        raise ValueError("head width up to 128, from 1,024 tokens on")

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
        return triton_attention(AttentionInputs(q, k, v, causal=shape.causal), atomic=True)

    return attend


def ours_without_bias(shape: Shape) -> Attend:
    return lambda q, k, v, table: flash_attention(q, k, v, causal=shape.causal)


def lse_first(shape: Shape) -> Attend:
    return lambda q, k, v, table: lse_first_attention(q, k, v, causal=shape.causal)


def lse_only(shape: Shape) -> Attend:
    """Stage 1 alone; its log-sum-exp takes the place of the output."""
    return lambda q, k, v, table: attention_lse(q, k, causal=shape.causal)


def _sdpa(backend: SDPBackend, *, with_bias: bool, repeat_groups: bool = False) -> Callable[[Shape], Attend]:
    def build(shape: Shape) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
            if repeat_groups and shape.groups < shape.heads:
                k, v = (x.repeat_interleave(shape.heads // shape.groups, dim=2) for x in (k, v))
            mask = None
            if with_bias and table is not None:
                mask = shape.matrix(table)
                if shape.causal:
                    future = torch.ones(mask.shape[2:], dtype=torch.bool, device="cuda").triu(1)
                    mask = mask.masked_fill(future, -math.inf)
                mask = mask.expand(shape.batch, -1, -1, -1)
            with sdpa_kernel([backend]):
                out = F.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
                    is_causal=shape.causal and mask is None,
                    enable_gqa=shape.groups < shape.heads and not repeat_groups,
                )  # fmt: skip
            return out.transpose(1, 2)

        return attend

    return build


def flex(shape: Shape) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # otherwise each call checks the guards of the graphs of other shapes
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def causal(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return q_index >= k_index

    tokens = shape.tokens
    # torch's default tiles and the table lookup do not fit into shared memory together
    options = {"BLOCK_M": 64, "BLOCK_N": 32} if shape.bias == "t5" else None
    mask = create_block_mask(causal, None, None, tokens, tokens, "cuda") if shape.causal else None

    @cache  # one function object per table: a new one in each call would be compiled again
    def build_score_mod(table: Tensor | None) -> Any:
        def t5(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            assert table is not None
            return score + table[h, (k_index - q_index).clamp(-shape.reach, shape.reach) + shape.reach]

        def alibi(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            assert table is not None
            return score - table[h] * (q_index - k_index).abs()

        if table is None:
            return None
        return t5 if shape.bias == "t5" else alibi

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
        score_mod = build_score_mod(table)
        out = compiled(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), score_mod=score_mod, block_mask=mask,
            enable_gqa=shape.groups < shape.heads, kernel_options=options,
        )  # fmt: skip
        return out.transpose(1, 2)

    return attend


def transformer_engine(shape: Shape) -> Attend:
    te = import_transformer_engine()

    module = te.DotProductAttention(
        shape.heads, shape.head_dim, num_gqa_groups=shape.groups, attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type="causal" if shape.causal else "no_mask",
    )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
        options: dict[str, Any] = {}
        if table is not None:
            options = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": shape.matrix(table)}
        return module(q, k, v, **options).unflatten(-1, (shape.heads, shape.head_dim))

    return attend


PEERS: dict[str, Callable[[Shape], Attend]] = {
    "ours": ours,
    "ours, atomic": ours_atomic,
    "ours, no bias": ours_without_bias,
    "lse_first": lse_first,
    "lse_first stage 1": lse_only,
    "SDPA FA2": _sdpa(SDPBackend.FLASH_ATTENTION, with_bias=False),
    "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION, with_bias=False),
    "SDPA efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION, with_bias=True, repeat_groups=True),
    "FlexAttention": flex,
    "TransformerEngine": transformer_engine,
}
FORWARD_ONLY = ("lse_first stage 1",)
IGNORES_BIAS = ("ours, no bias", "SDPA FA2", "SDPA cuDNN")  # measured without the bias, for comparison
NEEDS_DENSE_BIAS = ("SDPA efficient", "TransformerEngine")  # need the bias as a dense tensor
