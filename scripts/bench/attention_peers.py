"""The attention functions that scripts/bench/attention.py compares: ours, PyTorch's, FlexAttention, TransformerEngine.

Each takes (batch, tokens, heads, head_dim) tensors, as a training step has them, and returns that layout. A peer that
cannot run raises; the table then shows why.
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

from stoker.kernels import attention_lse, flash_attention, lse_first_attention
from stoker.kernels.attention.backends.transformer_engine import import_transformer_engine

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One kind of call: self attention of `batch` sequences of `tokens`, in bf16.

    Attributes:
        bias: how a per-head `table` becomes a bias of the scores: `t5` (2 R + 1 numbers over clipped distance), `alibi`
            (one slope), or None.
        reach: R of `t5`. The last of T5's 32 buckets with their largest distance of 128 begins at 91.
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
        """The trainable parameter of the bias, fp32: (heads, 2 R + 1), or slopes (heads,)."""
        if self.bias is None:
            return None
        if self.bias == "t5":
            return torch.randn(self.heads, 2 * self.reach + 1, device="cuda").requires_grad_()
        return torch.logspace(-8, -1, self.heads, 2.0, device="cuda").requires_grad_()

    def arguments(self, table: Tensor | None) -> dict[str, Tensor]:
        """The bias as `flash_attention` takes it."""
        return {} if table is None else {"distance_bias" if self.bias == "t5" else "alibi_slopes": table}

    def matrix(self, table: Tensor) -> Tensor:
        """The bias written out, (1, heads, tokens, tokens) in bf16, differentiable in the table."""
        distance = torch.arange(1 - self.tokens, self.tokens, device="cuda")
        if self.bias == "t5":
            of_distance = table[:, distance.clamp(-self.reach, self.reach) + self.reach]
        else:
            of_distance = -table[:, None] * distance.abs()
        return _WrittenOut.apply(of_distance.to(torch.bfloat16))[None]


class _WrittenOut(torch.autograd.Function):
    """(heads, 2 S - 1), a number for each distance, to (heads, S, S).

    Backward, the sums along diagonals are those of columns, once every row is shifted by one: a few passes at the speed
    of memory. The gradient of indexing adds to few places many times, which takes a hundred times as long.
    """

    @staticmethod
    def forward(ctx: Any, of_distance: Tensor) -> Tensor:
        tokens = (of_distance.shape[1] + 1) // 2
        return of_distance.unfold(1, tokens, 1).flip(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        heads, tokens, _ = gradient.shape
        wide = F.pad(gradient.flip(1), (0, tokens)).flatten(1)[:, :-tokens].view(heads, tokens, 2 * tokens - 1)
        return wide.sum(1, dtype=torch.float32).to(gradient.dtype)


def ours(shape: Shape) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
        return flash_attention(q, k, v, causal=shape.causal, **shape.arguments(table))

    return attend


def ours_without_bias(shape: Shape) -> Attend:
    return lambda q, k, v, table: flash_attention(q, k, v, causal=shape.causal)


def lse_first(shape: Shape) -> Attend:
    return lambda q, k, v, table: lse_first_attention(q, k, v, causal=shape.causal)


def lse_only(shape: Shape) -> Attend:
    """Stage 1; its log-sum-exp stands in for an output."""
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
                    hidden = torch.ones(mask.shape[2:], dtype=torch.bool, device="cuda").triu(1)
                    mask = mask.masked_fill(hidden, -math.inf)
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

    torch.compiler.reset()  # graphs of other shapes would be looked through at each call
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def earlier(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return q_index >= k_index

    tokens = shape.tokens
    # the tiles that torch chooses do not fit into shared memory beside the look-up
    options = {"BLOCK_M": 64, "BLOCK_N": 32} if shape.bias == "t5" else None
    mask = create_block_mask(earlier, None, None, tokens, tokens, "cuda") if shape.causal else None

    @cache  # one function object for one table: a new one each call would be compiled each call
    def score_mod_of(table: Tensor | None) -> Any:
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
        score_mod = score_mod_of(table)
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
IGNORES_BIAS = ("ours, no bias", "SDPA FA2", "SDPA cuDNN")  # measured beside a bias as the price without one
WRITES_BIAS_OUT = ("SDPA efficient", "TransformerEngine")
