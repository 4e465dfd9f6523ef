"""Partitions of parameters over tensor-parallel ranks, and the initial weights of each rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from torch import nn

from stoker.models.init import InitRules, initial_parameter, initial_rows, initialize_
from stoker.models.parallel.partition import Partition, RankPart, Section, partitions_of
from stoker.models.random_tiles import draw_normal

QKV = Partition(0, (Section(8, 4), Section(4, 2), Section(4, 2)))
"""[q | k | v] with two key groups, for four ranks."""


def test_each_rank_holds_its_part_of_every_section() -> None:
    held = [[(each.start, each.size) for each in QKV.ranges(rank, 4)] for rank in range(4)]
    assert held == [
        [(0, 2), (8, 2), (12, 2)],
        [(2, 2), (8, 2), (12, 2)],
        [(4, 2), (10, 2), (14, 2)],
        [(6, 2), (10, 2), (14, 2)],
    ]
    assert [each.replica for rank in range(4) for each in QKV.ranges(rank, 4)] == [0, 0, 0, 0, 1, 1] * 2
    assert {(each.num_replicas) for each in QKV.ranges(3, 4)} == {1, 2}
    assert (QKV.full_size, QKV.local_size()) == (16, 6)
    assert RankPart(QKV, 1, 4).full_shape((6, 5)) == (16, 5)


@examples(100)
@given(data=st.data(), ranks=st.integers(1, 8))
def test_every_index_is_held_by_all_its_replicas(data: st.DataObject, ranks: int) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, ranks)), min_size=1, max_size=3))
    partition = Partition(0, tuple(Section(size * parts, parts) for size, parts in sizes))
    holders: dict[int, set[tuple[int, int]]] = {}
    for rank in range(ranks):
        ranges = partition.ranges(rank, ranks)
        assert sum(each.size for each in ranges) == partition.local_size()
        for each in ranges:
            for index in range(each.start, each.start + each.size):
                holders.setdefault(index, set()).add((each.replica, each.num_replicas))
    assert sorted(holders) == list(range(partition.full_size))
    for copies in holders.values():
        assert copies == {(replica, len(copies)) for replica in range(len(copies))}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Partition(0, (Section(6, 4),)), "6 is split into 4"),
        (lambda: Partition(0, (Section(4, 0),)), "4 is split into 0"),
        (lambda: Partition(0, ()), "at least one"),
        (lambda: Partition(1, (Section(4, 2), Section(4, 2))), "one for columns"),
        (lambda: Partition(2, (Section(4, 2),)), "must be 0 or 1"),
        (lambda: RankPart(QKV, 0, 2), r"more parts \(4\) than there are ranks \(2\)"),
        (lambda: RankPart(QKV, 4, 4), r"`rank` \(4\) must be below"),
        (lambda: RankPart(QKV, 0, 4).full_shape((5, 5)), "must have size 6 along dimension 0"),
        (lambda: RankPart(Partition(1, (Section(4, 2),)), 0, 2).full_shape((2,)), "must have size 2 along dimension 1"),
    ],
)
def test_what_cannot_be_split_is_refused(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()


class Attention(nn.Module):
    """Holds its part of two weights, and all of a norm's."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(5, 6)
        self.output = nn.Linear(4, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        rows = RankPart(QKV, rank, 4)
        self.qkv.partitions = {"weight": rows, "bias": rows}  # pyrefly: ignore[bad-argument-type]
        self.output.partitions = {"weight": RankPart(Partition(1, (Section(16, 4),)), rank, 4)}  # pyrefly: ignore[bad-argument-type]
        self.default_partition = RankPart(None, rank, 4)


def test_parameters_without_a_partition_are_replicated() -> None:
    parts = partitions_of(Attention(2))
    assert parts["qkv.bias"].partition is QKV
    assert parts["norm.weight"] == RankPart(None, 2, 4)
    assert set(parts) == {"qkv.weight", "qkv.bias", "output.weight", "norm.weight", "norm.bias"}
    assert partitions_of(nn.Linear(2, 2)) == {}


def test_forgotten_and_misnamed_partitions_are_errors() -> None:
    """They would be saved as if all ranks held the same rows."""
    model = Attention(0)
    del model.default_partition
    with pytest.raises(ValueError, match=r"`default_partition` of the model must be set, since `qkv` has partitions"):
        partitions_of(model)
    model = Attention(0)
    model.qkv.partitions = {"kernel": RankPart(QKV, 0, 4)}  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match=r"`qkv\.partitions` must name parameters or buffers, but names kernel"):
        partitions_of(model)


GOLDEN = [-1.1137416362762451, 1.609079360961914, 0.30844682455062866, 2.2267956733703613]


@examples(40)
@given(data=st.data())
def test_any_rows_and_columns_are_drawn_alone(data: st.DataObject) -> None:
    shape = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 600))
    starts = sorted(data.draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=5)))
    rows = [(low, high - low) for low, high in pairwise(starts)][::2]
    left = data.draw(st.integers(0, shape[1]))
    columns = left, data.draw(st.integers(0, shape[1] - left))
    full = draw_normal(7, shape, [(0, shape[0])])
    wanted = torch.cat([full[first : first + size, left : left + columns[1]] for first, size in rows])
    assert torch.equal(draw_normal(7, shape, rows, columns), wanted)


def test_streams_have_not_changed() -> None:
    """Of NumPy, which documents that it may change them; the initial weights of all models would change."""
    drawn = draw_normal(7, (300, 600), [(0, 300)])
    assert [drawn[row, column].item() for row, column in ((0, 0), (127, 255), (128, 256), (299, 599))] == GOLDEN
    assert drawn.mean().abs() < 0.01
    assert (drawn.std() - 1).abs() < 0.01
    assert (drawn.pow(4).mean() - 3).abs() < 0.1
    tiles = drawn[:256, :512].view(2, 128, 2, 256).transpose(1, 2).reshape(4, -1)
    assert (torch.corrcoef(tiles) - torch.eye(4)).abs().max() < 0.03


def test_rows_of_a_part_are_those_of_the_full_parameter() -> None:
    """As FSDP shards the part of a rank again: of [q | k | v], and of a stack of experts."""
    rules = InitRules(seed=3, std=1.0, output_std=0.5, norm_weight=1.0)
    full = initial_parameter("qkv.weight", torch.Size((16, 5)), rules)
    part = RankPart(QKV, 3, 4)
    own = torch.cat([full[each.start : each.start + each.size] for each in part.ranges()])
    for first, count in ((0, 6), (1, 3), (5, 1), (6, 0)):
        assert torch.equal(
            initial_rows("qkv.weight", torch.Size((6, 5)), rules, part, first, count), own[first:][:count]
        )
    stack = initial_parameter("experts.up", torch.Size((6, 200, 3)), rules)
    experts = RankPart(Partition(0, (Section(6, 2),)), 1, 2)
    assert torch.equal(initial_rows("experts.up", torch.Size((3, 200, 3)), rules, experts, 1, 2), stack[4:])


def test_each_rank_initializes_its_part_of_the_full_parameter() -> None:
    rules = InitRules(seed=3, std=1.0, output_std=0.5, norm_weight=1.0)
    full = {"qkv.weight": initial_parameter("qkv.weight", torch.Size((16, 5)), rules)}
    full["output.weight"] = initial_parameter("output.weight", torch.Size((5, 16)), rules)
    for rank in range(4):
        model = Attention(rank)
        initialize_(model, rules)
        rows = [row for each in QKV.ranges(rank, 4) for row in range(each.start, each.start + each.size)]
        assert torch.equal(model.qkv.weight, full["qkv.weight"][rows])
        assert torch.equal(model.output.weight, full["output.weight"][:, 4 * rank : 4 * rank + 4])
        assert model.norm.weight.tolist() == [1.0] * 5
