"""Inputs of one attention call: the record that the backends, checks, reference and flash kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .packed_sequences import PackedSequences


class AttentionInputs(NamedTuple):
    """Inputs of softmax(cap(scale * q k^T) + biases, over the visible keys) v.

    A tuple of tensors, which torch.compile supports as an argument. Several documents in one row come in two forms:
    `packed` for dense tensors, in the backends; the cumulative lengths for packed tensors, in `flash_attention` and
    `reference_attention`.

    Attributes:
        q: (batch, queries, heads, head_dim), or packed (total queries, heads, head_dim).
        k: (batch, keys, groups, head_dim), or packed; query head h uses group h // (heads / groups).
        v: like `k`, of any head width (MLA: keys 192, values 128), which is that of the output.
        bias: added to the scores, dtype of q or fp32, broadcastable to (batch, heads, queries, keys); dense tensors
            only. -inf masks a key.
        distance_bias: fp32 (fp64 for fp64) (heads, 2 R + 1); entry [h, R + d] is added for a key at distance d = j - (i
            + keys - queries), clipped to [-R, R].
        alibi_slopes: fp32 (fp64 for fp64) (heads,); -slope * |d| is added for a key at distance d, in addition to the
            other biases.
        sinks: fp32 (fp64 for fp64) (heads,), attention sinks: each adds exp(sink) to the denominator of the softmax of
            its head's rows, as a key with this score and value 0 would (gpt-oss, arXiv 2508.10925; zeros are the
            off-by-one softmax). The log-sum-exp includes it, so a query that sees no key has the sink's.
        key_padding_mask: bool (batch, keys), False for padding; dense tensors only.
        causal: mask later keys; both sequences end at the same token (bottom-right aligned).
        window_size: keys visible to the left and to the right of a query, inclusive; -1 for all. None for no window.
        softmax_scale: factor of the scores; None is 1 / sqrt(head_dim).
        softcap: cap * tanh(score / cap) bounds the scaled scores, before a bias is added; 0 for none.
        dropout_p: probability of dropping an attention weight; the others are scaled by 1 / (1 - dropout_p).
        rng: int64 (2,), the key of the dropout mask, of which the low 32 bits count, on the device of q; or (5,), with
            the places in the whole attention of the first key, the first head and the first query, so that a rank
            draws its slice of the mask. Backends other than this package's draw from PyTorch's default generator.
        packed: documents of dense rows that hold several, which do not attend to each other; prepared with the same
            `causal`.
        cu_seqlens_q: int32 (sequences + 1), cumulative sequence lengths of a packed `q`, starting with 0. Entries may
            repeat; tokens after the last entry belong to no sequence.
        cu_seqlens_k: the same for `k` and `v`.
        max_seqlen_q: upper bound of the lengths in `cu_seqlens_q`.
        max_seqlen_k: upper bound of the lengths in `cu_seqlens_k`.
        attention_chunk: a query sees keys of its own chunk of this many tokens only, counted from the first key of its
            sequence or document (Llama 4, FlashAttention 3's argument); with `causal` only. 0 for one chunk.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    distance_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    key_padding_mask: Tensor | None = None
    causal: bool = False
    window_size: Sequence[int] | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    rng: Tensor | None = None
    packed: PackedSequences | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    attention_chunk: int = 0

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def given_options(self) -> list[str]:
        """Return the names of the options given to a backend besides scale and causal mask."""
        options = {
            "window_size": self.window_size is not None,
            "attention_chunk": bool(self.attention_chunk),
            "softcap": bool(self.softcap),
            "bias": self.bias is not None,
            "distance_bias": self.distance_bias is not None,
            "alibi_slopes": self.alibi_slopes is not None,
            "sinks": self.sinks is not None,
            "key_padding_mask": self.key_padding_mask is not None,
            "dropout_p": bool(self.dropout_p),
            "packed": self.packed is not None,
        }
        return [name for name, is_given in options.items() if is_given]

    @property
    def queries(self) -> int:
        """Query length of dense tensors."""
        return self.q.shape[1]

    @property
    def keys(self) -> int:
        """Key length of dense tensors."""
        return self.k.shape[1]
