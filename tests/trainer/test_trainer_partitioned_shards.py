"""Shards of partitioned parameters: saved by one layout, loaded by any other, with every element once."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from tiers import examples, full_only
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stoker.models.parallel.partition import Partition, RankPart, Section
from stoker.trainer.checkpoint.reader import Checkpoint
from stoker.trainer.checkpoint.sharded_safetensors import open_full_tensors, read_shards, shard_file_name, write_shards
from stoker.trainer.optim.adafactor import Adafactor
from stoker.trainer.optim.adamw import AdamW
from stoker.trainer.optim.ema import EMA
from stoker.trainer.optim.muon import Muon
from stoker.trainer.optim.parameter_sharding import ParameterSharding
from stoker.trainer.utils.errors import UserError
from stoker.trainer.utils.local_shard import LocalShard, chunk_bounds, local_shard, local_shards, row_shard, whole_shard
from stoker.trainer.utils.safetensors_io import DamagedFileError, write_safetensors


@dataclass(frozen=True)
class Layout:
    """`ranks` tensor-parallel ranks; data-parallel ranks replicate `copies` times `shards` row chunks of each part."""

    partition: Partition | None
    ranks: int
    shards: int
    copies: int

    def split(self, full: Tensor) -> list[LocalShard]:
        """The shards of all ranks, with the values of a full tensor."""
        found = []
        for rank in range(self.ranks):
            part = RankPart(self.partition, rank, self.ranks)
            mine = full
            if self.partition is not None:
                dim = self.partition.dim
                mine = torch.cat([full.narrow(dim, each.start, each.size) for each in part.ranges()], dim)
            for shard in range(self.shards):
                first, count = chunk_bounds(len(mine), self.shards, shard)
                local = mine[first : first + count].clone()
                for copy in range(self.copies):
                    found.append(row_shard(local.clone(), first, len(mine), part, copy, self.copies))
        return found


def save(folder: Path, shards: list[dict[str, LocalShard]]) -> list[Path]:
    paths = [folder / shard_file_name("model", rank, len(shards)) for rank in range(len(shards))]
    for path, mine in zip(paths, shards, strict=True):
        write_shards(path, mine)
    return paths


@st.composite
def layouts(draw: st.DrawFn, shape: torch.Size, sections: tuple[int, ...]) -> Layout:
    """A layout of a tensor whose rows are sections of the given sizes."""
    ranks = draw(st.integers(1, 8))
    dim = draw(st.sampled_from([None, 0, 0, 1] if len(shape) > 1 else [None, 0]))
    partition = None
    if dim is not None:
        sizes = sections if dim == 0 else (shape[1],)
        divisors = [[n for n in range(1, ranks + 1) if size % n == 0] for size in sizes]
        partition = Partition(
            dim, tuple(Section(n, draw(st.sampled_from(d))) for n, d in zip(sizes, divisors, strict=True))
        )
    return Layout(partition, ranks, draw(st.integers(1, 5)), draw(st.integers(1, 3)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Layout, Layout]:
    """A tensor of distinct values, and two layouts of it."""
    sections = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 8, 12]), min_size=1, max_size=3)))
    shape = torch.Size((sum(sections), *draw(st.lists(st.sampled_from([1, 3, 4, 8]), max_size=2))))
    full = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
    return full, draw(layouts(shape, sections)), draw(layouts(shape, sections))


_ONE_COLUMN = Layout(Partition(1, (Section(1, 1),)), ranks=1, shards=1, copies=2)


@full_only
@examples(80)
@given(case=cases())
@example((torch.zeros(1, 1), _ONE_COLUMN, _ONE_COLUMN))  # the second copy saves no row of all columns
def test_any_layout_loads_what_any_other_saved(case: tuple[Tensor, Layout, Layout]) -> None:
    full, saving, loading = case
    shards = saving.split(full)
    assert {shard.shape for shard in shards} == {tuple(full.shape)}
    assert sum(shard.part_to_save().local.numel() for shard in shards) == full.numel()
    with TemporaryDirectory() as folder:
        paths = save(Path(folder), [{"w": shard} for shard in shards])
        with open_full_tensors(paths) as tensors:
            assert torch.equal(tensors.read("w"), full)
        for expected in loading.split(full):
            found = expected.with_local(torch.full_like(expected.local, -1))
            read_shards(paths, {"w": found})
            assert torch.equal(found.local, expected.local)
            found.local.fill_(-1)
            found.copy_from_full(full)
            assert torch.equal(found.local, expected.local)


QKV = Partition(0, (Section(8, 4), Section(4, 2), Section(4, 2)))
FULL = torch.arange(80.0).view(16, 5)


def saved_qkv(folder: Path) -> list[Path]:
    return save(folder, [{"w": shard} for shard in Layout(QKV, 4, 1, 1).split(FULL)])


def test_only_one_of_the_ranks_with_the_same_key_groups_saves_them(tmp_path: Path) -> None:
    shares = [shard.part_to_save() for shard in Layout(QKV, 4, 1, 1).split(FULL)]
    assert [[(first, count) for first, count, _ in share.rows] for share in shares] == [
        [(0, 2), (8, 2), (12, 2)],
        [(2, 2)],
        [(4, 2), (10, 2), (14, 2)],
        [(6, 2)],
    ]


def test_shards_without_partition_are_written_as_before(tmp_path: Path) -> None:
    """The entry of consecutive rows is as in checkpoints of older versions, whole tensors have none."""
    shards = {"w": row_shard(FULL[4:9], 4, 16), "empty": row_shard(FULL[16:], 16, 16), "all": whole_shard(FULL)}
    write_shards(tmp_path / "new", shards)
    tensors = {"w": FULL[4:9], "empty": FULL[16:], "all": FULL}
    write_safetensors(tmp_path / "old", tensors, {"rows": '{"w":[4,16],"empty":[16,16]}'})
    assert (tmp_path / "new").read_bytes() == (tmp_path / "old").read_bytes()


def refused(paths: list[Path]) -> str:
    """The one line with which both readers refuse the files."""
    with pytest.raises(DamagedFileError) as error:
        read_shards(paths, {"w": whole_shard(torch.zeros(16, 5))})
    with pytest.raises(DamagedFileError) as other, open_full_tensors(paths) as tensors:
        tensors.read("w")
    assert str(error.value) == str(other.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_and_duplicated_parts_are_named(tmp_path: Path) -> None:
    paths = saved_qkv(tmp_path)
    assert refused([paths[0], *paths[2:]]) == "rows 2 to 4 of w are missing"
    assert refused(paths[:2] + paths[3:]) == "rows 4 to 6 of w are missing"
    assert refused([*paths, paths[1]]) == "rows 2 to 4 of w are duplicated"
    columns = Layout(Partition(1, (Section(5, 5),)), 5, 2, 1)
    (tmp_path / "columns").mkdir()
    paths = save(tmp_path / "columns", [{"w": shard} for shard in columns.split(FULL)])
    assert refused(paths[:-1]) == "rows 8 to 16, columns 4 to 5, of w are missing"
    assert refused(paths[2:]) == "columns 0 to 1 of w are missing"
    assert refused([*paths, paths[0]]) == "rows 0 to 8, columns 0 to 1, of w are duplicated"


def test_whole_numbers_are_not_converted_to_weights(tmp_path: Path) -> None:
    into = {"w": whole_shard(torch.zeros(16, 5))}
    write_safetensors(tmp_path / "bf16.safetensors", {"w": FULL.to(torch.bfloat16)})
    read_shards([tmp_path / "bf16.safetensors"], into, cast=True)
    assert torch.equal(into["w"].local, FULL)
    write_safetensors(tmp_path / "model.safetensors", {"w": FULL.to(torch.int32)})
    with pytest.raises(ValueError, match=r"w is i32 \[16, 5\], the model needs f32 \[16, 5\]"):
        read_shards([tmp_path / "model.safetensors"], into, cast=True)


def file_with(path: Path, entry: object, stored: Tensor = FULL) -> list[Path]:
    write_safetensors(path, {"w": stored}, {"rows": json.dumps({"w": entry})})
    return [path]


MALFORMED = [
    *(-1, 3, None, {}, "ab", [], [0], [0, 16, 0], [0, 16, 0, 5, 5]),
    *([-1, 16], [1, 16], [0, 15], [0.0, 16], [0, True], [False, 16], ["0", 16], [0, -16], [None, 16]),
    *([[0, 8], 16], [[0, 8, 4, 8], 16], [[8, 8, 0, 8], 16], [[0, 8, 8], 16], [[0, 24, 0, -8], 16], [[[0, 16]], 16]),
    *([{"0": 16}, 16], [[0, 16], 16, -1, 5], [[0, 16], 16, 1, 5], [[0, 16], 16, 0, 4], [[0, 16], 16, 0, None]),
    [[0, 0] * 1_000 + [0, 16], 16],
    *([0, 10**4000], [[0, 16], 10**4000], [[0, 16], 16, 0, 10**4000]),
]


@pytest.mark.parametrize("entry", MALFORMED, ids=lambda entry: str(entry)[:40])
def test_malformed_entries_are_refused(tmp_path: Path, entry: object) -> None:
    assert (
        refused(file_with(tmp_path / "x.safetensors", entry)) == "x.safetensors: the rows of w in its header do not fit"
    )


def test_shifted_and_huge_parts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with (
        pytest.raises(DamagedFileError, match="rows 0 to 1 of w are missing"),
        open_full_tensors(file_with(path, [1, 17])) as tensors,
    ):
        tensors.read("w")
    for entry, missing in (([0, 10**18], f"rows 16 to {10**18}"), ([[0, 16], 16, 7, 10**18], "columns 0 to 7")):
        path.unlink()
        with (
            pytest.raises(DamagedFileError, match=f"{missing} of w are missing"),
            open_full_tensors(file_with(path, entry)) as tensors,
        ):
            tensors.read("w")


def test_many_ranges_take_linear_time(tmp_path: Path) -> None:
    """A header with very many ranges is refused before any two of them are compared."""
    entry = [[number for row in range(100_000) for number in (2 * row, 1)], 200_000]
    paths = file_with(tmp_path / "x.safetensors", entry, torch.empty(100_000, 0))
    start = time.process_time()
    with pytest.raises(DamagedFileError, match="do not fit"):
        read_shards(paths, {"w": whole_shard(torch.zeros(200_000, 0))})
    assert time.process_time() - start < 2


def test_data_parallel_replicas_share_what_their_part_saves() -> None:
    shares: list[LocalShard] = []
    for rank in range(4):
        for replica in range(2):
            local = next(shard.local for shard in Layout(QKV, 4, 1, 1).split(FULL)[rank:])
            shares.append(local_shard(local, RankPart(QKV, rank, 4, replica, 2)).part_to_save())
    assert [len(share.local) for share in shares] == [3, 3, 2, 0, 3, 3, 2, 0]
    saved = [row for share in shares for first, size, _ in share.rows for row in range(first, first + size)]
    assert sorted(saved) == list(range(16))


def local_model(rank: int, rows: RankPart) -> tuple[nn.Parameter, dict[str, RankPart]]:
    local = next(shard.local for shard in Layout(QKV, 4, 1, 1).split(FULL)[rank:])
    return nn.Parameter(local.bfloat16()), {"w": rows}


def test_optimizer_state_and_average_know_their_place(tmp_path: Path) -> None:
    shards: list[dict[str, LocalShard]] = []
    for rank in range(4):
        weight, parts = local_model(rank, RankPart(QKV, rank, 4))
        optimizer = AdamW([("w", weight)], lr=0.1, main_weights=True, sharding=ParameterSharding(parts=parts))
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        average = EMA({"w": weight}, decay=0.5, parts=parts)
        shards.append(optimizer.local_shards() | average.local_shards())
    paths = save(tmp_path, shards)
    with open_full_tensors(paths) as tensors:
        assert tensors.specs.keys() == {"w", "w.main", "w.exp_avg", "w.exp_avg_sq"}
        assert {spec.shape for spec in tensors.specs.values()} == {(16, 5)}
        whole = nn.Parameter(FULL.bfloat16())
        alone = AdamW([("w", whole)], lr=0.1, main_weights=True)
        for _ in range(2):
            whole.grad = torch.ones_like(whole)
            alone.step()
        for name, shard in alone.local_shards().items():
            assert torch.equal(tensors.read(name), shard.local), name


@pytest.mark.parametrize("kind", [Muon, Adafactor])
def test_optimizers_that_need_whole_matrices_of_experts_say_so(kind: Any) -> None:
    experts: Any = [("experts.up", nn.Parameter(torch.zeros(2, 4, 4)))]
    whole, split = (Partition(0, (Section(4, 2),)), Partition(1, (Section(8, 2),)))
    build = partial(kind, experts, lr=0.1)
    build(sharding=ParameterSharding(parts={"experts.up": RankPart(whole, 0, 2)}))
    with pytest.raises(
        UserError, match=r"`experts.up` is a stack of matrices that are split over 2 ranks, but .* whole"
    ):
        build(sharding=ParameterSharding(parts={"experts.up": RankPart(split, 0, 2)}))


@pytest.mark.parametrize("kind", [partial(Adafactor, beta1=0.9), partial(AdamW, scale_parameter=True), Muon])
def test_ranks_that_share_experts_update_them_as_one(kind: Any) -> None:
    """Matrices of experts and their biases, of which each rank has its own, and a matrix that both have."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"experts.up": (4, 6, 5), "experts.up_bias": (4, 6), "output.weight": (6, 5)}
    weights, *gradients = [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in range(4)
    ]
    barrier, sent = threading.Barrier(2), [torch.zeros(0)] * 2

    def train(rank: int | None) -> dict[str, Tensor]:
        def mine(full: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: t if rank is None or n == "output.weight" else t[2 * rank :][:2] for n, t in full.items()}

        def total(tensor: Tensor) -> Tensor:
            assert rank is not None
            sent[rank] = tensor
            barrier.wait(60)
            found = sent[0] + sent[1]
            barrier.wait(60)
            return found

        held = {name: nn.Parameter(tensor.clone()) for name, tensor in mine(weights).items()}
        sharding = None
        if rank is not None:
            share = RankPart(Partition(0, (Section(4, 2),)), rank, 2, axis="expert")
            parts = {name: share if "experts" in name else RankPart(None, 0, 1, rank, 2) for name in shapes}
            sharding = ParameterSharding(parts=parts, sum_over_experts=total)
        optimizer = kind(held.items(), lr=0.1, sharding=sharding)
        for gradient in gradients:
            for name, tensor in mine(gradient).items():
                held[name].grad = tensor.clone()
            optimizer.step()
        return {name: parameter.detach() for name, parameter in held.items()}

    whole = train(None)
    with ThreadPoolExecutor(2) as pool:
        for rank, found in enumerate(pool.map(train, range(2))):
            for name, tensor in found.items():
                expected = whole[name] if name == "output.weight" else whole[name][2 * rank :][:2]
                torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-14)


class Attention(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(5, QKV.local_size(), bias=False)
        self.norm = nn.LayerNorm(5, bias=False)
        self.qkv.partitions = {"weight": RankPart(QKV, rank, 4)}  # pyrefly: ignore[bad-argument-type]
        self.default_partition = RankPart(None, rank, 4)


def test_a_checkpoint_of_one_rank_loads_on_four(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"qkv.weight": FULL, "norm.weight": FULL[0]})
    for rank, expected in enumerate(Layout(QKV, 4, 1, 1).split(FULL)):
        model = Attention(rank)
        Checkpoint(tmp_path, None, (path.name,)).load_weights(model)  # pyrefly: ignore[bad-argument-type]
        assert torch.equal(model.qkv.weight, expected.local)
        assert torch.equal(model.norm.weight, FULL[0])


def test_fsdp_shards_the_part_of_a_rank_again(tmp_path: Path) -> None:
    """Of four tensor-parallel times two FSDP ranks; partitions outlive `fully_shard` and `to_empty`."""
    shards: list[dict[str, LocalShard]] = []
    for rank in range(4):
        for place in range(2):
            dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=2)
            try:
                with torch.device("meta"):
                    model = Attention(rank)
                fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
                model.to_empty(device="cpu")
                mine = local_shards(model, dict(model.named_parameters()))
            finally:
                dist.destroy_process_group()
            mine["qkv.weight"].copy_from_full(FULL)
            mine["norm.weight"].copy_from_full(FULL[0])
            shards.append(mine)
    assert shards[1]["qkv.weight"].local.tolist() == FULL[[9, 12, 13]].tolist()
    assert shards[1]["norm.weight"].num_replicas == 4
    with open_full_tensors(save(tmp_path, shards)) as tensors:
        assert torch.equal(tensors.read("qkv.weight"), FULL)
        assert torch.equal(tensors.read("norm.weight"), FULL[0])
