"""Stages of a pipeline: which layers, embeddings and head of a model each of them has. Without torch.

A rank has one stage, or with interleaving (virtual stages) several: stage s is on rank s % ranks of the pipeline, as in
Megatron-LM (arXiv 2104.04473, section 2.2). Each stage has layers of one stack; those of a T5's encoder come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a stack, perhaps none, and what comes before and after them.

    Attributes:
        number: 0-based number of the stage; the input of each is the output of the one before.
        stack: index of the stack in forward order.
        layers: 0-based numbers of its layers in the whole stack.
        begins: the stage has the embeddings of its stack.
        ends: the stage has the final norm of its stack, and the head and the loss if that is the last stack.
        last: the stage ends the model.
    """

    number: int
    stack: int
    layers: range
    begins: bool
    ends: bool
    last: bool

    @property
    def starts(self) -> bool:
        """True for the first stage of the model, which receives nothing."""
        return self.number == 0


class StageInput(NamedTuple):
    """A stage to run, and what it receives.

    Attributes:
        stage: the stage.
        received: output of the stage before: the residual stream (B, S, H), or with sequence parallelism the rank's
            share of it, and in decoder stages of a T5 after the first one also the encoder's output (B, S, H); empty
            for the first stage.
        micro_batch: 0-based index of the micro batch in the step.
        micro_batches: micro batches of the step.
    """

    stage: Stage
    received: tuple[Tensor, ...] = ()
    micro_batch: int = 0
    micro_batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """How the layers of a model are distributed over the ranks of a pipeline.

    Attributes:
        ranks: ranks of the pipeline (`pipeline_model_parallel_size`).
        chunks: stages of each rank (`virtual_pipeline_model_parallel_size`).
        encoder_ranks: ranks with the encoder of a T5, the first ones (`pipeline_model_parallel_split_rank`).
        first_layers: layers of the first rank (`num_layers_in_first_pipeline_stage`); None: as many as the others.
        last_layers: layers of the last rank (`num_layers_in_last_pipeline_stage`); None likewise.
        counts_embedding: the embeddings count as a layer (`account_for_embedding_in_pipeline_split`).
        counts_loss: the head and the loss count as a layer (`account_for_loss_in_pipeline_split`).
    """

    ranks: int
    chunks: int = 1
    encoder_ranks: int = 0
    first_layers: int | None = None
    last_layers: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks."""
        return self.ranks * self.chunks

    def stages(self, *num_layers: int) -> tuple[Stage, ...]:
        """Return all stages, first to last.

        Args:
            num_layers: layers of each stack, in forward order.

        Raises:
            ValueError: the layers cannot be distributed so.
        """
        if len(num_layers) == 1:
            sizes = [self._sizes(num_layers[0])]
        else:
            parts = (self.encoder_ranks, self.ranks - self.encoder_ranks)
            sizes = [[_share(layers, ranks)] * ranks for layers, ranks in zip(num_layers, parts, strict=True)]
        found: list[Stage] = []
        for stack, counts in enumerate(sizes):
            first = 0
            for index, count in enumerate(counts):
                ends = index == len(counts) - 1
                last = ends and stack == len(sizes) - 1
                layers = range(first, first + count)
                found.append(Stage(len(found), stack, layers, index == 0, ends, last))
                first += count
        return tuple(found)

    def rank_of(self, stage: Stage) -> int:
        """Return the rank of the pipeline that has a stage."""
        return stage.number % self.ranks

    def stages_of(self, rank: int, num_layers: Sequence[int]) -> tuple[Stage, ...]:
        """Return the stages of a rank of the pipeline, first to last; `num_layers` as in `stages`."""
        return tuple(stage for stage in self.stages(*num_layers) if self.rank_of(stage) == rank)

    def most_layers(self, stack: int, num_layers: Sequence[int]) -> int:
        """Return the most layers that a stage has of a stack; `num_layers` as in `stages`."""
        return max(len(stage.layers) for stage in self.stages(*num_layers) if stage.stack == stack)

    def _sizes(self, layers: int) -> list[int]:
        """Return the number of layers of each stage of a model of one stack."""
        if self.first_layers is None and self.last_layers is None:
            count = _share(layers + self.counts_embedding + self.counts_loss, self.num_stages)
            sizes = [count] * self.num_stages
            sizes[0] -= self.counts_embedding
            sizes[-1] -= self.counts_loss
            return sizes
        ends = {0: self.first_layers, self.ranks - 1: self.last_layers}
        given = {rank: count for rank, count in ends.items() if count is not None}
        rest, others = layers - sum(given.values()), self.ranks - len(given)
        if rest < 0 or (others == 0 and rest):
            raise ValueError(f"the first and last stage have {sum(given.values())} of {layers} layers")
        middle = _share(rest, others) if others else 0
        return [_share(given.get(rank, middle), self.chunks) for rank in range(self.ranks)] * self.chunks


def whole_stacks(*num_layers: int) -> tuple[Stage, ...]:
    """Return the stages of a model without a pipeline: each is a whole stack; `num_layers` as in `stages`."""
    last = len(num_layers) - 1
    return tuple(Stage(n, n, range(layers), True, True, n == last) for n, layers in enumerate(num_layers))


def _share(layers: int, parts: int) -> int:
    if parts < 1 or layers % parts or layers < parts:
        raise ValueError(f"{layers} layers cannot be distributed evenly over {parts} stages")
    return layers // parts
