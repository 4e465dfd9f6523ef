"""Orders of the passes of a pipeline, beside those of torch, and the simulated step."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import looped
from torch.distributed.pipelining import schedules

from stoker.models.parallel.schedule import (
    PipelinePass,
    StageTimes,
    bubble_fraction,
    pass_order,
    simulate_step,
)

SINGLE = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 8, 13)))
INTERLEAVED = [
    (ranks, chunks, micro)
    for ranks, chunks, micro in itertools.product((2, 3, 4), (2, 3), (1, 2, 3, 4, 6, 8, 10, 12))
    if micro % max(1, micro // ranks) == 0
]


def passes(actions: list[Any]) -> list[PipelinePass]:
    """Passes of torch's actions, which also have None for waiting, and reductions of gradients."""
    kinds = {"F": False, "B": True}
    return [
        PipelinePass(each.stage_index, each.microbatch_index, kinds[each.computation_type.value])
        for each in actions
        if each is not None and each.computation_type.value in kinds
    ]


class RecordingStage:
    """Stage whose passes are recorded by the schedules of torch, and which sends nothing."""

    def __init__(self, number: int) -> None:
        self.stage_index = number
        self.passes: list[PipelinePass] = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.passes.append(PipelinePass(self.stage_index, micro_batch, False))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.passes.append(PipelinePass(self.stage_index, micro_batch, True))

    def __getattr__(self, name: str) -> Any:
        if name not in {f"get_{way}_{kind}_ops" for way in ("fwd", "bwd") for kind in ("send", "recv")}:
            assert name in ("perform_reduce_grad", "has_backward"), name
        return lambda *_: []


@looped(("ranks", "micro_batches"), SINGLE)
def test_orders_with_one_stage_are_those_of_torch(ranks: int, micro_batches: int) -> None:
    """Its schedules are run; `_get_pipeline_order` numbers the micro batches of the last rank from 1."""
    kind: Any = schedules.ScheduleGPipe if micro_batches < ranks else schedules.Schedule1F1B
    nothing = ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses")
    for rank in range(ranks):
        stage, inputs = RecordingStage(rank), ([()] * micro_batches, [{}] * micro_batches)
        schedule: Any = SimpleNamespace(
            _stage=stage, _num_stages=ranks, _n_microbatches=micro_batches, scale_grads=False,
            _has_backward=True, _check_inputs=lambda *_, inputs=inputs: inputs,
            **{name: lambda *_: None for name in nothing},
        )  # fmt: skip
        kind._step_microbatches(schedule)
        assert list(pass_order(rank, ranks, 1, micro_batches)) == stage.passes


@looped(("ranks", "chunks", "micro_batches"), INTERLEAVED)
def test_orders_with_several_stages_are_those_of_torch(ranks: int, chunks: int, micro_batches: int) -> None:
    in_round = micro_batches // max(1, micro_batches // ranks)
    schedule: Any = SimpleNamespace(
        n_local_stages=chunks, microbatches_per_round=in_round, pp_group_size=ranks, _n_microbatches=micro_batches
    )
    kind: Any = schedules.ScheduleInterleaved1F1B
    for rank in range(ranks):
        torchs = kind._calculate_single_rank_operations(schedule, rank)
        assert list(pass_order(rank, ranks, chunks, micro_batches)) == passes(torchs)


def test_interleaved_stages_refuse_unequal_rounds() -> None:
    with pytest.raises(ValueError, match="9 micro batches are not a multiple of 2 rounds of 4 ranks"):
        pass_order(0, 4, 2, 9)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(1, 1, 3), (4, 1, 8), (4, 1, 4), (4, 2, 8), (2, 3, 6)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(ranks: int, chunks: int, micro_batches: int) -> None:
    step = simulate_step([times(1.0, 2.0, micro_batches)] * (ranks * chunks), ranks, micro_batches)
    assert step.bubble == pytest.approx(bubble_fraction(ranks, chunks, micro_batches))
    assert step.seconds == 3.0 * (micro_batches * chunks + ranks - 1)


def test_a_step_waits_for_the_slowest_stage_and_for_messages() -> None:
    """Two ranks: 1F1B with a second stage twice as slow, then with messages of half a second."""
    step = simulate_step([times(1.0, 2.0, 3), times(2.0, 4.0, 3)], 2, 3)
    assert step.seconds == 1.0 + 3 * 6.0 + 2.0
    assert step.busy == (9.0, 18.0)
    assert step.ends == (21.0, 19.0)
    slow = simulate_step([times(1.0, 2.0, 1, send=0.5), times(1.0, 2.0, 1, send_back=0.25)], 2, 1)
    assert slow.seconds == 6.75
    first = [(each.kind, each.start, each.end) for each in slow.events() if each.stage == 0]
    assert first == [("forward", 0.0, 1.0), ("backward", 4.75, 6.75)]


def test_recomputation_of_some_micro_batches_is_part_of_their_backward_passes() -> None:
    times = StageTimes(forward=1.0, backward=2.0, recompute=(1.0, 0.0))
    step = simulate_step([times], 1, 2)
    assert step.seconds == 7.0
    assert [(each.micro_batch, each.kind, each.start, each.end) for each in step.events()] == [
        (0, "forward", 0.0, 1.0), (0, "recompute", 1.0, 2.0), (0, "backward", 2.0, 4.0),
        (1, "forward", 4.0, 5.0), (1, "backward", 5.0, 7.0),
    ]  # fmt: skip


def times(forward: float, backward: float, micro_batches: int, **messages: float) -> StageTimes:
    return StageTimes(forward=forward, backward=backward, recompute=(0.0,) * micro_batches, **messages)
