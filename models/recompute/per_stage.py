"""Which layers each stage of a pipeline recomputes in which micro batch. Without torch.

As in NeMo, after arXiv 2205.05198, appendix C: of the micro batches in flight on a rank, some recompute few layers and
the others all, up to the memory of the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..config.memory import RecomputeSlice
from ..parallel.schedule import pass_order
from ..parallel.stages import PipelineSplit, Stage


def in_flight(split: PipelineSplit, rank: int, micro_batches: int) -> int:
    """Return the forwards that a rank has run at most without their backward: those of the warm-up and one.

    Args:
        split: the pipeline.
        rank: rank of the pipeline.
        micro_batches: micro batches of a step.
    """
    order = pass_order(rank, split.ranks, split.chunks, micro_batches)
    return next(number for number, each in enumerate(order) if each.is_backward)


@lru_cache(maxsize=64)
def _forward_numbers(rank: int, ranks: int, chunks: int, micro_batches: int) -> Mapping[tuple[int, int], int]:
    """Return the 0-based place of each forward, by stage and micro batch, among those of its rank in a step."""
    forwards = [each for each in pass_order(rank, ranks, chunks, micro_batches) if not each.is_backward]
    return {(each.stage, each.micro_batch): number for number, each in enumerate(forwards)}


@dataclass(frozen=True, slots=True)
class StageRecompute:
    """Recompute of whole layers in the stages of one rank.

    Attributes:
        recompute: of the stack.
        split: the pipeline.
        rank: rank of the pipeline.
    """

    recompute: RecomputeSlice
    split: PipelineSplit
    rank: int

    def first_layers(self, stage: Stage) -> int:
        """Return the number of first layers of a stage that every micro batch recomputes."""
        fewer = int(self.rank * self.recompute.fewer_per_rank)
        return min(max(0, self.recompute.layers - fewer), len(stage.layers))

    def covers_stage(self, stage: Stage, micro_batch: int, micro_batches: int) -> bool:
        """Return True if a micro batch recomputes all layers of a stage, not only the first ones.

        Args:
            stage: the stage.
            micro_batch: 0-based index in the step.
            micro_batches: micro batches of the step.
        """
        partial = self.recompute.partial_micro_batches
        if partial is None:
            return False
        window = in_flight(self.split, self.rank, micro_batches)
        numbers = _forward_numbers(self.rank, self.split.ranks, self.split.chunks, micro_batches)
        return numbers[stage.number, micro_batch] % window >= partial

    def layers(self, stage: Stage, micro_batch: int, micro_batches: int) -> int:
        """Return the number of first layers of a stage that a micro batch recomputes, see `covers_stage`."""
        return len(stage.layers) if self.covers_stage(stage, micro_batch, micro_batches) else self.first_layers(stage)
