"""Which ranks share what, in Megatron's order of the axes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from stoker.models.parallel.layout import AXES, Coordinates, ParallelLayout

layouts = st.builds(
    ParallelLayout,
    data=st.integers(1, 4),
    tensor=st.sampled_from([1, 2, 4]),
    context=st.integers(1, 3),
    pipeline=st.integers(1, 3),
)


def test_groups_are_those_of_the_example_in_megatron() -> None:
    """16 ranks, tensor 2, pipeline 4: the example in the docstring of `initialize_model_parallel`."""
    layout = ParallelLayout(tensor=2, pipeline=4, data=2)
    assert layout.groups("tensor") == [(n, n + 1) for n in range(0, 16, 2)]
    assert layout.groups("data") == [
        (0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)
    ]  # fmt: skip
    assert layout.groups("pipeline") == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert layout.coordinates(11) == Coordinates(pipeline=2, data=1, context=0, tensor=1)


def test_experts_are_spread_over_neighbouring_ranks_of_a_stage() -> None:
    layout = ParallelLayout(tensor=2, data=4, pipeline=2, expert=4)
    assert layout.expert_groups() == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert layout.expert_data_groups()[:2] == [(0, 4), (1, 5)]
    assert layout.expert_data_groups()[-1] == (11, 15)


@given(layouts, st.sets(st.sampled_from(AXES), min_size=1))
@examples(60)
def test_every_rank_is_in_one_group_of_each_kind(layout: ParallelLayout, axes: set) -> None:
    ranks = range(layout.world_size)
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(ranks)
    for rank in ranks:
        place = layout.coordinates(rank)
        assert layout.rank(place) == rank
        group = layout.group_of(rank, *axes)
        assert rank in group
        fixed = [axis for axis in AXES if axis not in axes]
        others = [layout.coordinates(other) for other in group]
        assert all(getattr(other, axis) == getattr(place, axis) for other in others for axis in fixed)


def test_a_rank_outside_is_an_error_and_a_description_names_what_is_shared() -> None:
    with pytest.raises(ValueError, match="from 0 to 7"):
        ParallelLayout(data=8).coordinates(8)
    assert ParallelLayout().description == "one rank"
    layout = ParallelLayout(data=2, tensor=4, sequence=True, expert=2)
    assert layout.description == "tensor 4 (sequence parallel), data 2, expert 2"
