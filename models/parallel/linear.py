"""Linear layers and embeddings split over the tensor-parallel ranks (Megatron-LM, arXiv 1909.08053, section 3).

A layer multiplies by a column-parallel matrix, whose outputs are split, then by a row-parallel one, whose inputs are:
one communication for the pair in each pass. All keep the names and the order of the parameters of the layers that they
replace, and hold this rank's part of them.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.embedding import embedding
from .collectives import SharedRows, TensorParallel, column_linear, reduce_partial, row_linear, sum_partial
from .fp8 import Fp8Product, dense_weight, fp8_column_linear
from .layout import ParallelLayout
from .partition import Partition, RankPart, even_partition, set_partitions
from .traffic import Collective


class ColumnParallelLinear(nn.Linear):
    """Linear layer that computes this rank's part of the outputs: rows of the weight.

    Args:
        linear: layer of this rank's shape.
        ranks: the tensor-parallel ranks.
        rows: how the ranks split the rows of the weight.
        gathers: the input is sharded over tokens where the residual stream is; False for an input that all ranks have.

    Attributes:
        fp8: how it multiplies in training; None: in the dtype of its inputs.
    """

    fp8: Fp8Product | None = None

    def __init__(self, linear: nn.Linear, ranks: TensorParallel, rows: Partition, *, gathers: bool = True) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta", dtype=linear.weight.dtype
        )
        self.ranks = ranks
        self.rows = rows
        self.gathers = gathers
        set_partitions(self, {name: ranks.part(rows) for name, _ in self.named_parameters()})
        self.shared_rows = shared_rows(ranks.part(rows))

    def forward(self, input: Tensor) -> Tensor:
        """Map (batch, tokens, in), or the rank's share of the tokens, to (batch, tokens, out / ranks)."""
        gathers = self.gathers and self.ranks.shards_tokens
        if self.fp8 is not None and self.training:
            matrices = input, self.weight, self.bias, self.fp8
            return fp8_column_linear(*matrices, self.ranks, gathers=gathers, shared=self.shared_rows)
        weight = dense_weight(self.weight, self.fp8, input.dtype)
        return column_linear(input, weight, self.bias, self.ranks, gathers=gathers, shared=self.shared_rows)


def shared_rows(part: RankPart) -> tuple[SharedRows, ...]:
    """Return the local rows that several ranks hold: key and value heads, where these are fewer than ranks."""
    found: list[SharedRows] = []
    start = 0
    for each in part.ranges():
        if each.num_replicas > 1:
            found.append((start, each.size, each.num_replicas))
        start += each.size
    return tuple(found)


class RowParallelLinear(nn.Linear):
    """Linear layer that reads this rank's part of the inputs: columns of the weight. The bias is added to the sum.

    Args:
        linear: layer of this rank's shape.
        ranks: the tensor-parallel ranks.

    Attributes:
        fp8: how it multiplies in training; None: in the dtype of its inputs.
    """

    fp8: Fp8Product | None = None

    def __init__(self, linear: nn.Linear, ranks: TensorParallel) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta", dtype=linear.weight.dtype
        )
        self.ranks = ranks
        self.columns = even_partition(1, ranks.size, linear.in_features * ranks.size)
        set_partitions(self, {"weight": ranks.part(self.columns)})

    def forward(self, input: Tensor) -> Tensor:
        """Map (batch, tokens, in / ranks) to (batch, tokens, out), or to the rank's share of the tokens."""
        if self.fp8 is not None and self.training:
            return self.add_bias(sum_partial(self.fp8.linear(input, self.weight, None), self.ranks))
        return self.add_bias(row_linear(input, dense_weight(self.weight, self.fp8, input.dtype), self.ranks))

    def add_bias(self, output: Tensor) -> Tensor:
        """Return the sum of the ranks' products with the bias."""
        return output if self.bias is None else output + self.bias.to(output.dtype)


class VocabularyParallelEmbedding(nn.Embedding):
    """Embedding table of which each rank holds the rows of its part of the vocabulary.

    Args:
        table: embedding of this rank's shape.
        ranks: the tensor-parallel ranks.
    """

    def __init__(self, table: nn.Embedding, ranks: TensorParallel) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim, device="meta", dtype=table.weight.dtype)
        self.ranks = ranks
        set_partitions(self, {"weight": ranks.part(even_partition(0, ranks.size, table.num_embeddings * ranks.size))})

    @property
    def first_token(self) -> int:
        """First token of this rank's part."""
        return self.ranks.rank * self.num_embeddings

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings (..., embedding_dim) of tokens of the whole vocabulary."""
        local = input - self.first_token
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        found = embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_partial(found.masked_fill(elsewhere[..., None], 0.0), self.ranks)


def gather_vocabulary(logits: Tensor, ranks: TensorParallel) -> Tensor:
    """Return logits (..., padded_vocab_size) of the whole vocabulary, for generation; not differentiable."""
    return ranks.gather(logits.detach()).movedim(0, -2).flatten(-2)


# ---------------------------------------------------------------- cost


def column_traffic(
    num_bytes: int,
    mesh: ParallelLayout,
    *,
    gathers: bool,
    trained: bool = True,
    shared: tuple[int, ...] = (),
    gathered_bytes: int | None = None,
) -> tuple[Collective, ...]:
    """Return the traffic of a column-parallel linear layer.

    Args:
        num_bytes: of its input of all ranks.
        mesh: the ranks.
        gathers: the ranks share its tokens.
        trained: the weight has a gradient.
        shared: bytes of each section of the weight, or of the bias, of which several ranks have the same part.
        gathered_bytes: of its input of all ranks as it is gathered, in fp8; None: `num_bytes`.
    """
    sums = tuple(Collective("tensor", "all-reduce", size, "backward") for size in shared if trained)
    if not gathers:
        return (Collective("tensor", "all-reduce", num_bytes, "backward", overlaps=trained), *sums)
    size = num_bytes if gathered_bytes is None else gathered_bytes
    gathered = Collective("tensor", "all-gather", size, "forward", overlaps=mesh.overlap_gather)
    again = (gathered._replace(during="backward", overlaps=True),) if trained else ()
    return (gathered, *again, Collective("tensor", "reduce-scatter", num_bytes, "backward", overlaps=trained), *sums)


def row_traffic(num_bytes: int, mesh: ParallelLayout) -> tuple[Collective, ...]:
    """Return the traffic of a row-parallel linear layer with an output of these bytes."""
    if not mesh.sequence:
        return (Collective("tensor", "all-reduce", num_bytes, "forward"),)
    return (
        Collective("tensor", "reduce-scatter", num_bytes, "forward", overlaps=mesh.overlap_scatter),
        Collective("tensor", "all-gather", num_bytes, "backward", overlaps=mesh.overlap_gather),
    )


def embedding_traffic(num_bytes: int) -> tuple[Collective, ...]:
    """Return the traffic of a vocabulary-parallel embedding with an output of these bytes."""
    return (Collective("tensor", "all-reduce", num_bytes, "forward"),)
