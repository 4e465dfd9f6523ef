"""The Hopper kernels: what they serve, that they compile without a GPU, and on one that they are right."""

import dataclasses
import gc
import itertools
import math
from typing import Any

import pytest
import torch
from attention_cases import Case, Problem, assert_accurate, build, run
from fork_server import ForkServer
from tiers import cases, extra, full_only, spread
from torch._subclasses.fake_tensor import FakeTensorMode

from stoker.kernels import flash_attention
from stoker.kernels.attention.backend_support import (
    FUSED_BACKWARD_FROM,
    AttentionCall,
    InstalledSoftware,
    accumulates_dq,
    uses_hopper_kernels,
)
from stoker.kernels.attention.call_spec import Bias
from stoker.kernels.attention.flash import ops
from stoker.kernels.attention.flash.hopper import delta as delta_module
from stoker.kernels.attention.flash.hopper import documents, launchers, supported_calls
from stoker.kernels.attention.flash.hopper.delta import allocate_row_statistics, compute_delta_and_lse_base_2
from stoker.kernels.attention.flash.hopper.distance_bias import distance_gradient, distance_table, num_bands
from stoker.kernels.attention.flash.hopper.documents import document_bounds, document_tile_order
from stoker.kernels.attention.flash.hopper.fused_backward import num_visits, visit
from stoker.kernels.attention.flash.hopper.supported_calls import make_tma_compatible
from stoker.kernels.attention.flash.hopper.tile_scheduler import (
    balance_tiles,
    key_tiles_per_query_tile,
    pair_tiles,
    query_tiles_per_key_tile,
)
from stoker.kernels.attention.flash.kernel_arguments import FlashAttentionParams as FlashProblem
from stoker.kernels.attention.reference import reference_attention
from stoker.kernels.launch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])
CAUSAL = pytest.mark.parametrize("causal", [False, True])


# ---------------------------------------------------------------- without a GPU


@pytest.mark.parametrize(
    ("head_dim", "changes", "served"),
    [
        (128, {"alibi_slopes": torch.zeros(2)}, True),
        (256, {"alibi_slopes": torch.zeros(2)}, False),
        (64, {"distance_bias": torch.zeros(2, 1027)}, False),
        *extra(
            (64, {}, True),
            (64, {"alibi_slopes": torch.zeros(2), "distance_bias": torch.zeros(2, 3)}, False),
            (64, {"distance_bias": torch.zeros(2, 1025)}, True),
            (64, {"scale": -0.125}, False),
        ),
    ],
    ids=str,
)
def test_gate(monkeypatch: pytest.MonkeyPatch, head_dim: int, changes: dict[str, Any], served: bool) -> None:
    """As on a Hopper GPU with a Triton that has Gluon."""
    monkeypatch.setattr(supported_calls, "INTERPRETED", False)
    for condition in ("has_gluon", "is_hopper"):
        monkeypatch.setattr(supported_calls, condition, lambda *_: True)
    none = None
    call = FlashProblem(none, none, none, none, none, none, none, none, -1, 0, 0.125, 0.0, 0.0, 100, 100)
    call = call._replace(**changes)
    with FakeTensorMode():
        q = torch.empty(1, 100, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    assert supported_calls.supports(q, q, q, call) == served


def test_what_tma_cannot_read_is_copied() -> None:
    tensor = torch.randn(2, 33, 4, 64).bfloat16()
    fused = torch.randn(2, 33, 3 * 4 * 64).bfloat16().view(2, 33, 3, 4, 64)
    for readable in (tensor, fused[:, :, 1], tensor.transpose(1, 2).contiguous().transpose(1, 2)):
        assert make_tma_compatible(readable) is readable
    unreadable = {
        "heads expanded": tensor[:, :, :1].expand(2, 33, 4, 64),
        "width not last": tensor.transpose(1, 3).contiguous().transpose(1, 3),
        "rows of 130 bytes": torch.randn(2, 33, 4, 65).bfloat16()[..., :64],
        "begins at 2 bytes": torch.randn(2 * 33 * 256 + 1).bfloat16()[1:].view(2, 33, 4, 64),
    }
    for why, other in unreadable.items():
        copy = make_tma_compatible(other)
        assert copy is not other, why
        assert torch.equal(copy, other), why
        assert make_tma_compatible(copy) is copy, why


@CAUSAL
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4096, 4096), (1000, 3000), (3000, 1000), (1, 77)])
def test_order_holds_each_tile_once_and_no_program_works_much_longer(queries, keys, by_keys, causal) -> None:
    visits = (query_tiles_per_key_tile if by_keys else key_tiles_per_query_tile)(queries, keys, 128, 64, causal)
    pairs, programs = 30, 132
    for together in (1, 4, 30):
        lists = balance_tiles(visits, pairs, together, min(programs, len(visits) * pairs))
        tiles = [(tile, pair) for _, *rest in lists for tile, pair in zip(rest[::2], rest[1::2], strict=True)]
        assert sorted(tiles) == [(tile, pair) for tile in range(len(visits)) for pair in range(pairs)]
        assert all(len(numbers) == 1 + 2 * numbers[0] for numbers in lists)
        loads = [sum(visits[tile] + 1 for tile in numbers[1::2]) for numbers in lists]
        assert max(loads) <= sum(loads) / len(loads) + max(visits) + 1


@CAUSAL
@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (100, 333), (333, 100), (64, 1)])
def test_visits_are_the_tiles_that_hold_a_visible_pair(queries, keys, causal) -> None:
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    visible = (j <= i + keys - queries) | (not causal)
    by_query = torch.zeros(-(-queries // 128) * 128, -(-keys // 64) * 64, dtype=torch.bool)
    by_query[:queries, :keys] = visible
    tiles = by_query.view(-1, 128, by_query.shape[1] // 64, 64).any(3).any(1).sum(1)
    assert key_tiles_per_query_tile(queries, keys, 128, 64, causal) == tiles.clamp(min=1).tolist()
    by_key = torch.zeros(-(-queries // 64) * 64, -(-keys // 128) * 128, dtype=torch.bool)
    by_key[:queries, :keys] = visible
    assert query_tiles_per_key_tile(queries, keys, 128, 64, causal) == by_key.view(
        -1, 64, by_key.shape[1] // 128, 128).any(3).any(1).sum(0).tolist()  # fmt: skip


@pytest.mark.parametrize("reach", cases([1, 2, 63, 64, 65, 100, 128], fast=2))
@pytest.mark.parametrize(("queries", "keys"), cases([(64, 64), (130, 300), (300, 130), (1, 200)], fast=2))
def test_gradient_of_a_distance_bias_from_sums_of_tiles(queries: int, keys: int, reach: int) -> None:
    """The layout that the kernels leave their sums in, filled here from a whole matrix of gradients."""
    batch, heads, offset = 2, 3, keys - queries
    dense = torch.randn(batch, heads, queries, keys, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    far = torch.zeros(batch, heads, queries, dtype=torch.float64)
    sums = torch.zeros(batch, heads, -(-keys // 128) * 2, num_bands(reach), 128, dtype=torch.float64)
    for key in range(0, keys, 64):
        for query in range(0, queries, 64):
            tile = dense[:, :, query : query + 64, key : key + 64]
            if key - (query + 63) - offset >= reach:
                far[:, :, query : query + 64] += tile.sum(3)
            elif key + 63 - query - offset > -reach:
                band = query // 64 - ((key - offset - reach - 63) // 64 + 1)
                diagonal = 64 + torch.arange(tile.shape[3]) - torch.arange(tile.shape[2])[:, None]
                sums[:, :, key // 64, band].index_add_(2, diagonal.flatten(), tile.flatten(2))
    expected = torch.zeros(heads, 2 * reach + 1, dtype=torch.float64)
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] - offset
    expected.index_add_(1, distance.clamp(-reach, reach).flatten() + reach, dense.sum(0).flatten(1))
    total = dense.sum((0, 2, 3))
    assert torch.allclose(distance_gradient(sums, far, total, reach, offset), expected)


@pytest.mark.parametrize("with_lse_gradient", [False, True])
def test_delta_and_base_2(with_lse_gradient: bool) -> None:
    """Of a gradient with its heads first and of one row, and an empty row of each head."""
    for batch, rows in ((2, 70), (1, 1)):
        out = torch.randn(batch, rows, 3, 16)
        gradient = torch.randn(batch, 3, rows, 16).transpose(1, 2)
        lse, lse_gradient = torch.randn(batch, 3, rows), torch.randn(batch, 3, rows)
        lse[:, :, rows // 2] = float("-inf")
        delta, base_2, zeros = compute_delta_and_lse_base_2(
            out, lse, gradient, lse_gradient if with_lse_gradient else None
        )
        expected = (out * gradient).sum(3).transpose(1, 2) - (lse_gradient if with_lse_gradient else 0)
        assert torch.allclose(delta[..., :rows], expected.masked_fill(lse == float("-inf"), 0.0), atol=1e-5)
        assert torch.allclose(base_2[..., :rows], (lse / math.log(2)).masked_fill(lse == float("-inf"), math.inf))
        assert delta.stride(1) % 4 == 0
        assert zeros.shape == (batch, 3, -(-rows // 64))
        assert not zeros.any()


DOCUMENTS = [[0, 3, 3, 70, 200, 333], [0, 333, 333, 333], [0, 64, 128, 300], [0, 0, 1, 2, 3, 4, 5], [0, 0]]


@pytest.mark.parametrize("entries", DOCUMENTS)
def test_bounds_of_documents(entries: list[int]) -> None:
    rows = 333
    strided = torch.tensor([[entry, -1] for entry in entries], dtype=torch.int32)[:, 0]
    begins, ends = document_bounds(strided, rows)
    for row in range(rows):
        document = next(((a, b) for a, b in itertools.pairwise(entries) if a <= row < b), (rows, row))
        assert (begins[row], ends[row]) == document


@pytest.mark.parametrize(
    ("by_keys", "together", "entries"), spread([(False, 5), (True, 8), (False, 2), (True, 1)], DOCUMENTS)
)
def test_tiles_of_documents_are_dealt_once_each_and_evenly(
    monkeypatch: pytest.MonkeyPatch, entries: list[int], by_keys: bool, together: int
) -> None:
    monkeypatch.setattr(documents, "num_multiprocessors", lambda _: 7)
    rows, pairs, tile, columns = 333, 5, 16, 32
    begins, ends = document_bounds(torch.tensor(entries, dtype=torch.int32), rows)
    order = document_tile_order(ends if by_keys else begins, tile, columns, pairs, together, by_keys=by_keys)
    tiles = -(-rows // tile)
    visits = []
    for first in range(0, rows, tile):
        last = min(first + tile, rows) - 1
        low, high = (first, int(ends[last]) - 1) if by_keys else (int(begins[first]), last)
        visits.append(max(high // columns - low // columns + 1, 0))
    lists = [row[1 : 1 + 2 * row[0]].view(-1, 2).tolist() for row in order]
    dealt = [(first, pair) for entries in lists for first, pair in entries]
    assert sorted(dealt) == list(itertools.product(range(tiles), range(pairs)))
    costs = [[(pair // together, -visits[first]) for first, pair in entries] for entries in lists]
    assert all(each == sorted(each) for each in costs)
    loads = [sum(visits[first] for first, _ in entries) for entries in lists]
    assert max(loads) - min(loads) <= (max(visits) + 1) * -(-pairs // together)


# tiles of keys, tiles of queries in one of keys, heads in a group, groups, multiprocessors
@pytest.mark.parametrize(
    "shape",
    cases([(32, 2, 1, 64, 132), (8, 1, 4, 60, 132), (128, 2, 1, 6, 132), (2, 1, 3, 500, 4), (10, 2, 2, 3, 16)], fast=3),
)
def test_tiles_of_keys_take_turns_without_waiting(shape: tuple[int, ...]) -> None:
    """With a causal mask, all programs in step: each tile of queries is visited once by each tile of keys, in turn."""
    tiles, per_keys, heads, pairs, programs = shape
    lists = pair_tiles(tiles, pairs, programs)
    assert 0 < len(lists) <= programs
    seen: dict[tuple[int, ...], tuple[int, int]] = {}
    for numbers in lists:
        assert numbers[0] * 2 == len(numbers) - 1
        step = 0
        for tile, pair in zip(numbers[1::2], numbers[2::2], strict=True):
            for phase, head in itertools.product(range(2), range(heads)):
                for j in range(num_visits.fn(tile, phase, tiles * per_keys, per_keys, True)):
                    query_tile, turn = visit.fn(tile, phase, j, tiles * per_keys, per_keys, True, True)
                    freely = visit.fn(tile, phase, j, tiles * per_keys, per_keys, True, False)
                    assert freely == (query_tile, min(turn, 1)), "without an order all but the first wait for it only"
                    assert seen.setdefault((pair, head, query_tile, turn), (step, tile)) == (step, tile)
                    step += 1
    for pair, head, query_tile in itertools.product(range(pairs), range(heads), range(tiles * per_keys)):
        visits = [seen.pop((pair, head, query_tile, turn)) for turn in range(query_tile // per_keys + 1)]
        assert sorted(tile for _, tile in visits) == list(range(len(visits)))
        assert all(a < b for (a, _), (b, _) in itertools.pairwise(visits))
    assert not seen


def test_pairs_of_tiles_are_left_to_other_kernels_where_programs_would_be_idle() -> None:
    assert pair_tiles(32, 64, 132)
    assert pair_tiles(4, 3, 132)
    assert not pair_tiles(266, 16, 132), "a head has more programs than there are multiprocessors"
    assert not pair_tiles(120, 3, 132), "two heads, then one, of 60 programs each"
    assert not pair_tiles(2, 20, 132), "a list of three tiles takes longer than two kernels"


def test_without_a_mask_tiles_of_keys_take_turns_in_the_order_of_all_lists() -> None:
    """So whose turn is before has been started before: no list has an earlier tile of keys after a later one."""
    assert num_visits.fn(3, 0, 7, 2, False) == 7
    assert [visit.fn(3, 0, j, 7, 2, False, True) for j in range(7)] == [(j, 3) for j in range(7)]
    assert [visit.fn(3, 0, j, 7, 2, False, False) for j in range(7)] == [((j + 6) % 7, 1) for j in range(7)]
    pairs = 30
    for programs in (5, 132):
        lists = balance_tiles(query_tiles_per_key_tile(1000, 3000, 64, 128, False), pairs, 1, programs)
        for _, *rest in lists:
            turns = [(pair, tile) for tile, pair in zip(rest[::2], rest[1::2], strict=True)]
            assert turns == sorted(turns)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_kernel_for_all_gradients_from_a_length_on(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, causal: bool
) -> None:
    """The plan counts the sums of dQ of what the kernels take."""
    monkeypatch.setattr(launchers, "paired_tile_order", lambda *_: torch.zeros(1))
    monkeypatch.setattr(launchers, "_order_of_keys", lambda *_: torch.zeros(1))
    shortest = FUSED_BACKWARD_FROM.get((head_dim, causal), 1 << 30)
    shapes: list[tuple[int, int, Bias]] = [
        (2048, 2048, "none"), (4096, 4096, "none"), (4160, 4160, "none"), (16384, 16384, "none"), (4096, 16384, "none"),
        (16384, 16384, "slopes"), (16384, 16384, "distance_with_gradient"),
    ]  # fmt: skip
    for queries, keys, bias in shapes:
        call = AttentionCall(
            device="cuda", capability=(9, 0), dtype="bf16", batch=1, heads=4, groups=2, head_dim=head_dim,
            queries=queries, keys=keys, causal=causal, bias=bias, reach=64 if "distance" in bias else 0, training=True,
        )  # fmt: skip
        with FakeTensorMode():
            q, k = (torch.empty(1, n, heads, head_dim) for n, heads in ((queries, 4), (keys, 2)))
            none = None
            problem = FlashProblem(
                none, torch.empty(4, 129) if "distance" in bias else None, torch.empty(4) if bias == "slopes" else None,
                none, none, none, none, none, -1, 0 if causal else -1, 0.1, 0.0, 0.0, queries, keys,
            )  # fmt: skip
            taken = launchers.fused_order(q, k, problem) is not None
        assert taken == (keys >= shortest and bias == "none" and (not causal or queries == keys != 4160))
        assert accumulates_dq("triton", call) == taken
        assert not accumulates_dq("triton", dataclasses.replace(call, capability=(8, 0)))
        assert accumulates_dq("sdpa_cudnn", call)


def test_queries_and_keys_of_other_documents_are_left_to_the_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for condition, value in (("has_gluon", True), ("is_hopper", True)):
        monkeypatch.setattr(supported_calls, condition, lambda *_, value=value: value)
    monkeypatch.setattr(supported_calls, "INTERPRETED", False)
    with FakeTensorMode():
        q = torch.empty(64, 4, 64, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, 20, 64], dtype=torch.int32)
    spread = torch.tensor([0, 10, 20, 50, 64], dtype=torch.int32)
    pairs = [(ends, ends, True), (ends, ends[:], True), (ends, ends[:2], False), (ends, ends.clone(), False)]
    pairs += [(spread[::2], spread[:3], False)]
    for ends, key_ends, served in pairs:
        fields = (None, None, None, None, None, None, ends, key_ends, -1, 0, 0.1, 0.0, 0.0, 64, 64)
        assert supported_calls.supports(q, q, q, FlashProblem(*fields)) == served


def test_table_of_distances_holds_every_tile_that_is_not_far() -> None:
    bias = torch.randn(2, 7)
    table, extent = distance_table(bias, 0.5)
    for half, step in zip(table, (1, -1), strict=True):
        distances = torch.arange(-extent, extent + 1)[:, None] + torch.tensor([0, step])
        assert torch.equal(half, bias[:, distances.clamp(-3, 3) + 3] / 0.5)
    assert extent >= 3 + 64 + 128


@pytest.mark.parametrize(
    "change",
    [
        {}, {"dtype": "fp16"}, {"dtype": "fp32"}, {"head_dim": 64}, {"head_dim": 96}, {"head_dim": 256},
        {"causal": False}, {"softcap": 30.0}, {"dropout": 0.1}, {"window": (8, 0)}, {"padding": True},
        {"bias": "dense"}, {"bias": "distance_with_gradient"}, {"bias": "distance", "head_dim": 256},
        {"bias": "distance", "reach": 512}, {"bias": "distance_with_gradient", "reach": 513},
        {"bias": "slopes"}, {"bias": "slopes_with_gradient", "head_dim": 64}, {"bias": "slopes", "head_dim": 256},
        {"bias": "slopes", "window": (8, 0)}, {"sinks": True}, {"sinks": True, "bias": "slopes"}, {"value_dim": 64},
        {"attention_chunk": 8}, {"packed": True}, {"packed": True, "head_dim": 64}, {"packed": True, "head_dim": 256},
        {"packed": True, "causal": False}, {"packed": True, "sinks": True}, {"packed": True, "bias": "slopes"},
    ],
)  # fmt: skip
def test_the_dispatcher_knows_what_the_gate_lets_in(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    monkeypatch.setattr(supported_calls, "INTERPRETED", False)
    monkeypatch.setattr(supported_calls, "is_hopper", lambda device: True)
    facts: dict[str, Any] = {"dtype": "bf16", "head_dim": 128, "causal": True} | change
    call = AttentionCall(
        device="cuda", capability=(9, 0), batch=2, heads=4, groups=2, queries=32, keys=32, training=True, **facts
    )
    with FakeTensorMode():
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[call.dtype]
        q, k = (torch.empty(2, 32, heads, call.head_dim, device="cuda", dtype=dtype) for heads in (4, 2))
        ends = torch.empty(3, device="cuda", dtype=torch.int32) if call.packed else None
        problem = FlashProblem(
            torch.empty(4, 32, 32, device="cuda") if call.bias == "dense" else None,
            torch.empty(4, 2 * (call.reach or 2) + 1, device="cuda") if call.bias_is_distance_table else None,
            torch.empty(4, device="cuda") if call.bias_is_alibi else None,
            torch.empty(4, device="cuda") if call.sinks else None,
            torch.empty(2, 32, device="cuda", dtype=torch.bool) if call.padding else None,
            None, ends, ends, call.window[0] if call.window else -1, 0 if call.causal else -1, 0.1, call.softcap,
            call.dropout, 32, 32, call.attention_chunk,
        )  # fmt: skip
        v = torch.empty(2, 32, 2, call.value_dim or call.head_dim, device="cuda", dtype=dtype)
        q, k, v = (each.flatten(0, 1) if call.packed else each for each in (q, k, v))
        assert supported_calls.supports(q, k, v, problem) == uses_hopper_kernels(
            call, InstalledSoftware(torch=(2, 11), triton=(3, 6))
        )


@full_only
def test_every_kernel_compiles_and_keeps_its_loops_in_registers(compilers: ForkServer) -> None:
    """Spilled scalars cost nothing; a spilled tile would be kilobytes."""
    rows = compilers.call("hopper_compile", "compiled")
    assert len(rows) == 67
    for row in rows:
        assert row["wgmma"] >= (12 if row["kernel"] == "lse" else 24), row
        assert row["awaited"] <= row["wgmma"] / 3, row
        assert row["shared"] <= 227 * 1024, row
        assert row["stack"] <= (640 if row.get("HAS_DISTANCE") else 200), row
        if row["kernel"] in ("dkdv", "fused", "short"):
            assert row["vector_stores"] >= 16, row


# ---------------------------------------------------------------- on a GPU


def only_on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")


def served(case: Case, dtype: torch.dtype) -> Problem:
    """The tensors of a case that the Hopper kernels take, which is checked by counting their launches elsewhere."""
    only_on_hopper()
    return build(case, dtype, "cuda")


@pytest.fixture
def hopper_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Answers of the gate, call by call."""
    answers: list[bool] = []
    serves = ops.supports

    def watched(*arguments: Any) -> bool:
        answers.append(serves(*arguments))
        return answers[-1]

    monkeypatch.setattr(ops, "supports", watched)
    return answers


@pytest.mark.gpu
@HALF
@CAUSAL
@HEAD_DIMS
def test_accuracy(hopper_calls: list[bool], head_dim: int, causal: bool, dtype: torch.dtype) -> None:
    only_on_hopper()
    lengths = [(1, 1), (1, 200), (64, 64), (65, 65), (127, 300), (129, 128), (257, 513), (513, 257), (1000, 1000)]
    for queries, keys in lengths:
        case = Case(head_dim=head_dim, causal=causal, queries=queries, keys=keys, heads=4, groups=2)
        assert_accurate(flash_attention, case, dtype, "cuda")
    many = Case(head_dim=head_dim, causal=causal, queries=700, keys=700, batch=3, heads=40, groups=8)
    assert_accurate(flash_attention, many, dtype, "cuda")
    assert len(hopper_calls) == 2 * (len(lengths) + 1)
    assert all(hopper_calls)


def watch_launches(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Return a list that receives the number of keys of each call of a launcher of the backward pass."""
    lengths: list[int] = []
    launch = getattr(launchers, name)

    def watched(saved: Any, *arguments: Any) -> Any:
        lengths.append(saved.k.shape[1])
        return launch(saved, *arguments)

    monkeypatch.setattr(launchers, name, watched)
    return lengths


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compute all gradients in one kernel at any length; the list receives the number of keys of each call."""
    for key in itertools.product((64, 128), (False, True)):
        monkeypatch.setitem(FUSED_BACKWARD_FROM, key, 0)
    return watch_launches(monkeypatch, "launch_fused_backward")


@pytest.mark.gpu
@HALF
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_accuracy_of_the_fused_backward(
    fused_calls: list[int], head_dim: int, causal: bool, dtype: torch.dtype
) -> None:
    """Of heads that take one program, several, and fewer programs than there are heads."""
    only_on_hopper()
    shapes = [(512, 512, 2, 8, 4), (768, 768, 2, 6, 6), (1280, 1280, 3, 40, 8)]
    shapes += [] if causal else [(1, 1, 1, 1, 1), (300, 77, 2, 4, 2), (77, 300, 2, 4, 1), (1000, 1000, 3, 40, 8)]
    for queries, keys, batch, heads, groups in shapes:
        case = Case(
            head_dim=head_dim, causal=causal, queries=queries, keys=keys, batch=batch, heads=heads, groups=groups
        )
        assert_accurate(flash_attention, case, dtype, "cuda")
    sinks = Case(head_dim=head_dim, causal=causal, queries=512, keys=512, batch=2, heads=8, groups=4, sinks=True)
    assert_accurate(flash_attention, sinks, dtype, "cuda")
    assert fused_calls == [*(keys for _, keys, *_ in shapes), 512]


@pytest.mark.gpu
@HALF
def test_accuracy_of_the_backward_of_few_queries(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Of heads that take a program each, and several; keys and queries that end within a tile."""
    only_on_hopper()
    lengths = watch_launches(monkeypatch, "launch_short_backward")
    shapes = [(114, 512, 8, 12), (128, 128, 6, 11), (1, 77, 9, 8), (64, 1000, 30, 12), (100, 300, 2, 40)]
    for queries, keys, batch, heads in shapes:
        case = Case(head_dim=64, causal=False, queries=queries, keys=keys, batch=batch, heads=heads, groups=heads)
        assert_accurate(flash_attention, case, dtype, "cuda")
        assert_accurate(flash_attention, dataclasses.replace(case, sinks=True), dtype, "cuda")
    assert lengths == [keys for _, keys, *_ in shapes for _ in range(2)]


@pytest.mark.gpu
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fused_backward_has_the_same_bits_on_busy_streams_and_in_a_graph(
    fused_calls: list[int], head_dim: int, causal: bool
) -> None:
    """Programs wait for each other, so none may be kept from running."""
    problem = served(
        Case(head_dim=head_dim, causal=causal, queries=2048, keys=2048, batch=2, heads=16, groups=4), torch.bfloat16
    )
    tensors = list(problem.tensors.values())
    upstream = torch.randn_like(tensors[0])

    def gradients() -> tuple[torch.Tensor, ...]:
        out: Any = flash_attention(*tensors, causal=causal)
        return torch.autograd.grad(out, tensors, upstream)

    first = gradients()
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 8:
        with torch.cuda.stream(stream):
            results.append(gradients())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for _ in range(3):
        graph.replay()
        results.append(tuple(tensor.clone() for tensor in captured))
    assert len(fused_calls) == 1 + 32 + 1
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, first, strict=True))


@pytest.mark.gpu
@HALF
@CAUSAL
@pytest.mark.parametrize("reach", [1, 2, 31, 64, 100, 128, 300, 512])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_accuracy_with_a_distance_bias(
    hopper_calls: list[bool], head_dim: int, reach: int, causal: bool, dtype: torch.dtype
) -> None:
    only_on_hopper()
    for queries, keys in ((1, 1), (64, 64), (130, 300), (300, 130), (1000, 1000)):
        case = Case(head_dim=head_dim, causal=causal, queries=queries, keys=keys, heads=4, groups=2, reach=reach)
        assert_accurate(flash_attention, case, dtype, "cuda")
    assert all(hopper_calls)


@pytest.mark.gpu
@CAUSAL
@pytest.mark.parametrize(("head_dim", "bias"), [*itertools.product((64, 128), ("", "reach", "slopes")), (256, "")])
def test_gradients_of_some_tensors(
    monkeypatch: pytest.MonkeyPatch, hopper_calls: list[bool], head_dim: int, bias: str, causal: bool
) -> None:
    """Without a gradient of the log-sum-exp, and with frozen tensors; row statistics are computed before they are read.

    A frozen q or bias moves the sums of delta to another kernel, so the last bits may differ.
    """
    only_on_hopper()
    for module in (launchers, delta_module):
        monkeypatch.setattr(
            module,
            "allocate_row_statistics",
            lambda lse: tuple(each.fill_(math.nan) for each in allocate_row_statistics(lse)),
        )
    more: dict[str, Any] = {"reach": 100} if bias == "reach" else {"slopes": bias == "slopes"}
    for queries, keys in ((257, 513), (513, 257), (70, 70)):
        case = Case(head_dim=head_dim, causal=causal, queries=queries, keys=keys, heads=4, groups=2, **more)
        problem = served(case, torch.bfloat16)
        exact = run(reference_attention, problem.detached(torch.float64), lse_gradient=False, rounded=torch.bfloat16)
        names = tuple(problem.tensors)
        for wanted in (names, ("q",), ("k", "v"), ("q", "k", "v"), names[1:]):
            frozen = {name: problem.tensors[name].detach() for name in names if name not in wanted}
            ours = run(flash_attention, problem.with_tensors(**frozen), lse_gradient=False, wanted=wanted)
            for name in wanted:
                error = (ours[f"d{name}"].double() - exact[f"d{name}"]).norm() / exact[f"d{name}"].norm()
                assert error < (0.01 if name in "qkv" else 0.1), (wanted, name, error)
    assert all(hopper_calls)


@pytest.mark.gpu
@HALF
@pytest.mark.parametrize("head_dim", [64, 128])
def test_accuracy_with_packed_documents(hopper_calls: list[bool], head_dim: int, dtype: torch.dtype) -> None:
    only_on_hopper()
    for lengths in ([1], [300], [64, 64, 128], [1, 1, 700, 3, 513, 90], [5] * 70, [2000, 30, 1000, 1]):
        pairs = tuple((length, length) for length in lengths)
        case = Case(head_dim=head_dim, causal=True, lengths=pairs, heads=4, groups=2)
        assert_accurate(flash_attention, case, dtype, "cuda")
    many = Case(head_dim=head_dim, causal=True, lengths=((900, 900), (600, 600)) * 3, heads=40, groups=8)
    assert_accurate(flash_attention, many, dtype, "cuda")
    assert all(hopper_calls)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_after_all_documents_see_nothing(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    """As with the portable kernels: output and gradients 0, the log-sum-exp -inf; with empty documents between."""
    only_on_hopper()
    ends = torch.tensor([0, 100, 100, 357, 400, 400, 400], dtype=torch.int32, device="cuda")
    for rows in (400, 401, 777):
        q, k, v = (torch.randn(rows, heads, head_dim, device="cuda").bfloat16() for heads in (4, 2, 2))
        for tensor in (q, k, v):
            tensor[400:] = math.nan
        options: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 300, "max_seqlen_k": 300}
        problem = Problem({"q": q, "k": k, "v": v}, {"causal": True, **options}).detached()
        ours = run(flash_attention, problem)
        with monkeypatch.context() as patched:
            patched.setattr(ops, "supports", lambda *_: False)
            theirs = run(flash_attention, problem)
        frozen = run(flash_attention, problem.with_tensors(q=q), wanted=("k", "v"))
        for name in ("dk", "dv"):
            assert (frozen[name] - ours[name]).norm() < 0.01 * ours[name].norm(), name
        out: Any = flash_attention(*problem.tensors.values(), **problem.options)
        out.mul_(2)  # no view
        for name, tensor in ours.items():
            if name == "lse":
                assert (tensor[:, 400:] == float("-inf")).all()
                assert torch.allclose(tensor[:, :400], theirs[name][:, :400], atol=1e-5)
                continue
            assert not tensor[400:].any(), name
            assert (tensor.double() - theirs[name].double()).norm() < 0.01 * theirs[name].double().norm(), name


@pytest.mark.gpu
@HALF
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_accuracy_with_slopes(hopper_calls: list[bool], head_dim: int, causal: bool, dtype: torch.dtype) -> None:
    only_on_hopper()
    for queries, keys in ((1, 1), (64, 64), (130, 300), (300, 130), (1000, 1000), (3000, 3000)):
        case = Case(head_dim=head_dim, causal=causal, queries=queries, keys=keys, heads=4, groups=2, slopes=True)
        assert_accurate(flash_attention, case, dtype, "cuda")
    assert all(hopper_calls)


@pytest.mark.gpu
@HALF
@CAUSAL
@HEAD_DIMS
def test_accuracy_with_sinks(hopper_calls: list[bool], head_dim: int, causal: bool, dtype: torch.dtype) -> None:
    only_on_hopper()
    for queries, keys in ((1, 1), (64, 64), (130, 300), (300, 130), (1000, 1000)):
        case = Case(head_dim=head_dim, causal=causal, queries=queries, keys=keys, heads=4, groups=2, sinks=True)
        assert_accurate(flash_attention, case, dtype, "cuda")
    assert all(hopper_calls)


@pytest.mark.gpu
@CAUSAL
@HEAD_DIMS
def test_portable_kernels_are_as_accurate(monkeypatch: pytest.MonkeyPatch, head_dim: int, causal: bool) -> None:
    monkeypatch.setattr(ops, "supports", lambda *_: False)
    for reach in (0, 100):
        case = Case(head_dim=head_dim, causal=causal, queries=257, keys=300, heads=4, groups=2, reach=reach)
        assert_accurate(flash_attention, case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@CAUSAL
@pytest.mark.parametrize(
    ("head_dim", "bias", "length"),
    [(64, "reach", 2000), (128, "reach", 2000), (64, "slopes", 2000), (64, "", 4096), (128, "", 2000), (256, "", 2000)],
)
def test_same_bits_each_time(head_dim: int, bias: str, length: int, causal: bool) -> None:
    more: dict[str, Any] = {"reach": 128} if bias == "reach" else {"slopes": bias == "slopes"}
    case = Case(head_dim=head_dim, causal=causal, queries=length, keys=length, heads=8, groups=4, **more)
    problem = served(case, torch.bfloat16)
    first = run(flash_attention, problem)
    for _ in range(20):
        for name, tensor in run(flash_attention, problem).items():
            assert torch.equal(tensor, first[name]), name


@pytest.mark.gpu
def test_views_and_odd_gradients(hopper_calls: list[bool]) -> None:
    """Views into one fused projection, heads before rows, and a gradient that is expanded from one number."""
    only_on_hopper()
    fused = torch.randn(2, 300, 3, 8, 64, device="cuda").bfloat16()
    q, k, v = (tensor.requires_grad_() for tensor in fused.unbind(2))
    swapped = [tensor.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_() for tensor in (q, k, v)]
    plain = [tensor.detach().contiguous().requires_grad_() for tensor in (q, k, v)]
    results = []
    for tensors in (plain, swapped, (q, k, v)):
        out: Any = flash_attention(*tensors, causal=True)
        results.append([out, *torch.autograd.grad(out.sum(), tensors)])
    assert all(hopper_calls)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.gpu
def test_memory_of_a_distance_bias_grows_with_the_rows() -> None:
    only_on_hopper()
    peaks = []
    for length in (4096, 8192, 16384):
        problem = served(Case(batch=1, head_dim=64, heads=4, groups=4, queries=length, keys=length, reach=128),
                         torch.bfloat16)  # fmt: skip
        gc.collect()  # what earlier cases left would be freed in a run, below its peak
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(flash_attention, problem)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] < 4.4 * peaks[0]
