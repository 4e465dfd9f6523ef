"""Distribution of layers over the stages of a pipeline."""

from __future__ import annotations

import pytest

from stoker.models.parallel.stages import PipelineSplit


@pytest.mark.parametrize(
    ("split", "layers", "sizes"),
    [
        (PipelineSplit(ranks=2), (8,), [4, 4]),
        (PipelineSplit(ranks=2, chunks=2), (8,), [2, 2, 2, 2]),
        (PipelineSplit(ranks=3, counts_embedding=True), (8,), [2, 3, 3]),
        (PipelineSplit(ranks=3, counts_loss=True), (8,), [3, 3, 2]),
        (PipelineSplit(ranks=2, chunks=2, counts_embedding=True, counts_loss=True), (6,), [1, 2, 2, 1]),
        (PipelineSplit(ranks=4, first_layers=1, last_layers=3), (8,), [1, 2, 2, 3]),
        (PipelineSplit(ranks=2, chunks=2, first_layers=2), (8,), [1, 3, 1, 3]),
        (PipelineSplit(ranks=3, last_layers=4), (8,), [2, 2, 4]),
        (PipelineSplit(ranks=3, encoder_ranks=1), (6, 4), [6, 2, 2]),
    ],
)
def test_layers_are_distributed_as_the_keys_say(
    split: PipelineSplit, layers: tuple[int, ...], sizes: list[int]
) -> None:
    stages = split.stages(*layers)
    assert [len(stage.layers) for stage in stages] == sizes
    for stack, count in enumerate(layers):
        own = [stage for stage in stages if stage.stack == stack]
        assert [number for stage in own for number in stage.layers] == list(range(count))
        assert [stage.begins for stage in own] == [True] + [False] * (len(own) - 1)
        assert [stage.ends for stage in own] == [False] * (len(own) - 1) + [True]
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]
    for rank in range(split.ranks):
        assert [stage.number for stage in split.stages_of(rank, layers)] == list(range(rank, len(stages), split.ranks))


@pytest.mark.parametrize(
    ("split", "layers"),
    [
        (PipelineSplit(ranks=3), (8,)),
        (PipelineSplit(ranks=2, chunks=3), (8,)),
        (PipelineSplit(ranks=4), (2,)),
        (PipelineSplit(ranks=2, first_layers=3, last_layers=3), (8,)),
        (PipelineSplit(ranks=3, first_layers=9), (8,)),
        (PipelineSplit(ranks=3, encoder_ranks=2), (3, 4)),
        (PipelineSplit(ranks=3, encoder_ranks=0), (3, 3)),
    ],
)
def test_layers_that_do_not_divide_are_an_error(split: PipelineSplit, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layers"):
        split.stages(*layers)
