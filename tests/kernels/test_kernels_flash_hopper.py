"""The Hopper kernels: what they serve, that they compile without a GPU, and on one that they are right."""

import math
from typing import Any

import pytest
import torch
from attention_cases import Case, Problem, assert_accurate, build, run
from fork_server import ForkServer
from tiers import cases, extra, full_only
from torch._subclasses.fake_tensor import FakeTensorMode

from stoker.kernels import flash_attention
from stoker.kernels.attention.backend_support import AttentionCall, InstalledSoftware, uses_hopper_kernels
from stoker.kernels.attention.flash import ops
from stoker.kernels.attention.flash.hopper import supported_calls
from stoker.kernels.attention.flash.hopper.delta import compute_delta_and_lse_base_2
from stoker.kernels.attention.flash.hopper.distance_bias import distance_gradient, distance_table, num_bands
from stoker.kernels.attention.flash.hopper.supported_calls import make_tma_compatible
from stoker.kernels.attention.flash.hopper.tile_scheduler import (
    balance_tiles,
    key_tiles_per_query_tile,
    query_tiles_per_key_tile,
)
from stoker.kernels.attention.flash.kernel_arguments import FlashAttentionParams as FlashProblem
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
        delta, base_2 = compute_delta_and_lse_base_2(out, lse, gradient, lse_gradient if with_lse_gradient else None)
        expected = (out * gradient).sum(3).transpose(1, 2) - (lse_gradient if with_lse_gradient else 0)
        assert torch.allclose(delta[..., :rows], expected.masked_fill(lse == float("-inf"), 0.0), atol=1e-5)
        assert torch.allclose(base_2[..., :rows], (lse / math.log(2)).masked_fill(lse == float("-inf"), math.inf))
        assert delta.stride(1) % 4 == 0


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
        {"attention_chunk": 8},
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
        problem = FlashProblem(
            torch.empty(4, 32, 32, device="cuda") if call.bias == "dense" else None,
            torch.empty(4, 2 * (call.reach or 2) + 1, device="cuda") if call.bias_is_distance_table else None,
            torch.empty(4, device="cuda") if call.bias_is_alibi else None,
            torch.empty(4, device="cuda") if call.sinks else None,
            torch.empty(2, 32, device="cuda", dtype=torch.bool) if call.padding else None,
            None, None, None, call.window[0] if call.window else -1, 0 if call.causal else -1, 0.1, call.softcap,
            call.dropout, 32, 32, call.attention_chunk,
        )  # fmt: skip
        v = torch.empty(2, 32, 2, call.value_dim or call.head_dim, device="cuda", dtype=dtype)
        assert supported_calls.supports(q, k, v, problem) == uses_hopper_kernels(
            call, InstalledSoftware(torch=(2, 11), triton=(3, 6))
        )


@full_only
def test_every_kernel_compiles_and_keeps_its_loops_in_registers(compilers: ForkServer) -> None:
    """Spilled scalars cost nothing; a spilled tile would be kilobytes."""
    rows = compilers.call("hopper_compile", "compiled")
    assert len(rows) == 54
    for row in rows:
        assert row["wgmma"] >= (12 if row["kernel"] == "lse" else 24), row
        assert row["shared"] <= 227 * 1024, row
        assert row["stack"] <= (640 if row.get("HAS_DISTANCE") else 200), row


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
    """What the gate answered, call by call."""
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
@pytest.mark.parametrize(("head_dim", "bias"), [(64, "reach"), (128, "reach"), (64, "slopes"), (256, "")])
def test_same_bits_each_time(head_dim: int, bias: str, causal: bool) -> None:
    more: dict[str, Any] = {"reach": 128} if bias == "reach" else {"slopes": bias == "slopes"}
    case = Case(head_dim=head_dim, causal=causal, queries=2000, keys=2000, heads=8, groups=4, **more)
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
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(flash_attention, problem)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] < 4.4 * peaks[0]
