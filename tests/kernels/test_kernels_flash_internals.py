"""Inside flash attention: places of tiles, lists of packed tiles, the dropout counter, configs, and the custom ops."""

import random

import pytest
import torch
from tiers import DEVICES, cases, full_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from stoker.kernels import flash_attention, reference_attention
from stoker.kernels.attention.dropout import dropout_keep_mask, head_dropout_key, tile_keep_mask
from stoker.kernels.attention.flash import ops
from stoker.kernels.attention.flash.kernel_arguments import tile_list
from stoker.kernels.attention.flash.portable.tile import (
    keys_before,
    queries_after,
    rounded,
    section_bounds,
    tile_sections,
)
from stoker.kernels.attention.flash.portable.tile_configs import tile_config
from stoker.kernels.dropout import dropout_threshold
from stoker.kernels.launch import HAS_TRITON, jit, tl

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")


@jit
def _kept_kernel(out_pointer, rng_pointer, sequence, head, threshold, SIZE: tl.constexpr):
    head_key, first = head_dropout_key(rng_pointer, sequence, head)
    query, key = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    kept = tile_keep_mask(head_key, first, query, key, threshold)
    tl.store(out_pointer + query * SIZE + key, kept.to(tl.int32))


@jit
def _sections_kernel(
    out_pointer, first, last, length, low, high, reach, BLOCK: tl.constexpr, HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr, HAS_DISTANCE: tl.constexpr,
):  # fmt: skip
    bounds = tile_sections(first, last, length, low, low, high, high, reach, BLOCK, HAS_LOW, HAS_HIGH, HAS_DISTANCE)
    for section in range(3):
        plain_begin, plain_end, edge_end = section_bounds(section, bounds)
        tl.store(out_pointer + 3 * section, plain_begin)
        tl.store(out_pointer + 3 * section + 1, plain_end)
        tl.store(out_pointer + 3 * section + 2, edge_end)


@jit
def _chunk_sections_kernel(out_pointer, first, last, length, left, chunk, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    if OF_KEYS:
        ends = queries_after(first, left, chunk, True), queries_after(last, left, chunk, True)
        bounds = tile_sections(first, last, length, 0, 0, ends[0], ends[1], 0, BLOCK, True, True, False)
    else:
        begins = keys_before(first, left, chunk, True), keys_before(last, left, chunk, True)
        bounds = tile_sections(first, last, length, begins[0], begins[1], 0, 0, 0, BLOCK, True, True, False)
    for section in range(0, 3, 2):
        plain_begin, plain_end, edge_end = section_bounds(section, bounds)
        tl.store(out_pointer + 3 * (section // 2), plain_begin)
        tl.store(out_pointer + 3 * (section // 2) + 1, plain_end)
        tl.store(out_pointer + 3 * (section // 2) + 2, edge_end)


@jit
def _rounding_kernel(in_pointer, out_pointer, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out_pointer + place, rounded(tl.load(in_pointer + place), tl.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rng", [(0, 0, 0, 0, 0), (-7, 5, 3, 2, 9), (2**62 + 3, 2**33 + 1, 2**31 - 5, 7, 2**31 - 3)])
def test_dropout_is_the_same_in_triton_and_torch(device, rng):
    state = torch.tensor(rng, dtype=torch.int64, device=device)
    mask = dropout_keep_mask(state, 0.3, batch=1, heads=2, queries=16, keys=16, first_sequence=3)
    kept = torch.empty(16, 16, dtype=torch.int32, device=device)
    _kept_kernel[(1,)](kept, state, 3, 1, dropout_threshold(0.3), SIZE=16)
    assert torch.equal(mask[0, 1], kept.bool())


def test_a_rank_draws_its_slice_of_the_dropout_mask():
    """Some of the heads, queries and keys of each sequence."""
    whole = dropout_keep_mask(torch.tensor([1, 2]), 0.3, batch=2, heads=4, queries=12, keys=20)
    part = dropout_keep_mask(torch.tensor([1, 2, 10, 2, 6]), 0.3, batch=2, heads=2, queries=6, keys=10)
    assert torch.equal(part, whole[:, 2:, 6:, 10:])


def test_sections_visit_each_tile_as_it_must_be_visited():
    draw = random.Random(0)
    for _ in range(150):
        block, length = 4, draw.randint(0, 40)
        first = draw.randint(-20, 40)
        last = first + draw.randint(0, 7)
        low, high, reach = draw.randint(-1, 25), draw.randint(-1, 25), draw.randint(1, 12)
        with_distance = draw.random() < 0.5
        out = torch.zeros(3, 3, dtype=torch.int32)
        _sections_kernel[(1,)](
            out, first, last, length, low, high, reach, BLOCK=block, HAS_LOW=low >= 0, HAS_HIGH=high >= 0,
            HAS_DISTANCE=with_distance,
        )  # fmt: skip
        visited: dict[int, str] = {}
        for section, (plain_begin, plain_end, edge_end) in enumerate(out.tolist()):
            if (section == 0 and low < 0) or (section == 1 and not with_distance):
                continue  # as the kernels do
            for start in range(plain_begin, plain_end, block):
                assert start not in visited
                visited[start] = "low" if section == 1 else "high"
            for start in range(plain_end, edge_end, block):
                assert start not in visited
                visited[start] = "edge"
        for start in range(0, max(length, 1), block):
            pairs = [(x, y) for x in range(first, last + 1) for y in range(start, start + block)]
            seen = [y < length and (low < 0 or y - x >= -low) and (high < 0 or y - x <= high) for x, y in pairs]
            if any(seen):
                assert start in visited, (first, last, length, low, high, start)
            kind = visited.get(start)
            if kind in ("low", "high"):
                assert all(seen)
                if with_distance:
                    assert all(y - x <= -reach if kind == "low" else y - x >= reach for x, y in pairs)
            elif kind == "edge" and all(seen):  # an edge tile costs more: only where it must be
                assert with_distance
                assert any(abs(y - x) < reach for x, y in pairs)


@pytest.mark.parametrize("of_keys", [False, True])
def test_tiles_outside_of_a_chunk_are_skipped(of_keys):
    """A tile of queries, or of keys, visits the tiles of its chunks only; all pairs of a plain tile are visible."""
    draw = random.Random(0)
    for _ in range(100):
        block, length, chunk = 4, draw.randint(1, 60), draw.randint(1, 20)
        first = draw.randint(0, length - 1)
        last = min(first + draw.randint(0, 7), length - 1)
        left = draw.choice((1 << 30, draw.randint(0, 12)))
        out = torch.zeros(2, 3, dtype=torch.int32)
        _chunk_sections_kernel[(1,)](out, first, last, length, left, chunk, OF_KEYS=of_keys, BLOCK=block)
        plain, edge = set[int](), set[int]()
        for plain_begin, plain_end, edge_end in out.tolist():
            plain |= set(range(plain_begin, plain_end, block))
            edge |= set(range(plain_end, edge_end, block))
        for start in range(0, length, block):
            pairs = [(x, y) for x in range(first, last + 1) for y in range(start, start + block)]
            pairs = [(y, x) if of_keys else (x, y) for x, y in pairs]
            seen = [k <= q and q - k <= left and q // chunk == k // chunk and max(q, k) < length for q, k in pairs]
            assert any(seen) == (start in plain | edge), (first, last, length, left, chunk, start)
            assert all(seen) == (start in plain), (first, last, length, left, chunk, start)


@pytest.mark.parametrize("lengths", [[5, 0, 64, 1, 0, 33], [0, 0], [97], [3] + [0] * 60])
def test_tile_list_holds_each_tile_once(lengths):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = sum(lengths)
    tiles = tile_list(cu_seqlens, rows, 32).tolist()
    expected = [[s, first] for s, length in enumerate(lengths) for first in range(0, length, 32)]
    assert tiles[0] == [len(expected), 0]
    assert tiles[1 : 1 + len(expected)] == expected


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_to_bf16_is_to_nearest_even(device):
    values = torch.cat([torch.randn(1000), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, float("inf"), 0.0, -0.0])])
    values = torch.cat([values, torch.full((18,), float("nan"))]).to(device)
    out = torch.empty(1024, dtype=torch.bfloat16, device=device)
    _rounding_kernel[(1,)](values, out, SIZE=1024)
    torch.testing.assert_close(out, values.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_every_width_and_gpu_has_a_config():
    for kind in ("forward", "dq", "dkdv", "bias_gradient", "distance_gradient"):
        for head_dim in range(16, 257, 8):
            for capability in (75, 80, 86, 89, 90, 100, 103, 120, 121, None):
                for dtype in (torch.bfloat16, torch.float32):
                    config = tile_config(kind, head_dim, dtype, capability)
                    assert min(config.queries, config.keys) >= 16  # the least a tensor core multiplies
                    if kind == "distance_gradient":
                        assert config.queries == config.keys


def _inputs(queries=20, keys=18, heads=2, groups=1, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).to(device).requires_grad_()

    tensors = {"q": leaf(1, queries, heads, 16), "k": leaf(1, keys, groups, 16), "v": leaf(1, keys, groups, 16)}
    return tensors | {
        "bias": leaf(1, heads, queries, keys),
        "distance_bias": leaf(heads, 9),
        "alibi_slopes": leaf(heads),
    }


def _square_sum(q, k, v, bias, distance_bias, alibi_slopes):
    biases = {"bias": bias, "distance_bias": distance_bias, "alibi_slopes": alibi_slopes}
    out = flash_attention(q * 1.0, k, v, causal=True, **biases)
    assert isinstance(out, torch.Tensor)
    return (out * out).sum()


@full_only
def test_custom_operations_are_well_formed():
    inputs = _inputs()
    padding, rng = torch.arange(18)[None] % 5 != 2, torch.tensor([1, 2])
    tensors, numbers = (None, padding, rng, None, None), (-1, 0, 0.25, 0.0, 0.1, 20, 18, 0)
    call = (*inputs.values(), *tensors, *numbers)
    torch.library.opcheck(ops._flash_attention, call)
    out, lse = ops._flash_attention(*call)
    q, k, v, *biases = (tensor.detach() for tensor in inputs.values())
    gradients = (torch.randn_like(out), torch.randn_like(lse))
    saved = (q, k, v, out.detach(), lse.detach(), *biases)
    needs = (True, True, False, True, True, False, False)
    torch.library.opcheck(ops._flash_attention_backward, (*gradients, *saved, *tensors, *numbers, *needs))


@full_only
def test_custom_operation_is_well_formed_when_packed():
    q, k, v, _, distance_bias, _ = (tensor.detach()[0] for tensor in _inputs().values())
    ends_q, ends_k = torch.tensor([0, 7, 7, 19], dtype=torch.int32), torch.tensor([0, 10, 11, 18], dtype=torch.int32)
    distance_bias = torch.stack([distance_bias, distance_bias]).requires_grad_()
    slopes = torch.tensor([0.1, 0.02]).requires_grad_()
    optional = (None, distance_bias, slopes, None, None, None, ends_q, ends_k)
    call = (q.requires_grad_(), k, v, *optional, 3, -1, 0.25, 2.0, 0.0, 14, 14, 0)
    torch.library.opcheck(ops._flash_attention, call)


@full_only
def test_compiled_and_checkpointed_calls_have_the_same_bits():
    inputs = tuple(_inputs().values())
    expected = torch.autograd.grad(_square_sum(*inputs), inputs)
    compiled = torch.compile(_square_sum, fullgraph=True, backend="aot_eager")
    for loss in (compiled(*inputs), checkpoint(_square_sum, *inputs, use_reentrant=False)):
        assert isinstance(loss, torch.Tensor)
        for gradient, wanted in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
            assert torch.equal(gradient, wanted)


SUBSETS = [("q",), ("k",), ("v",), ("bias",), ("distance_bias",), ("q", "distance_bias"), ("alibi_slopes",)]


@pytest.mark.parametrize("wanted", cases(SUBSETS, fast=3))
def test_any_subset_of_gradients(wanted):
    inputs = _inputs()
    everything = torch.autograd.grad(_square_sum(*inputs.values()), list(inputs.values()))
    some = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in inputs.items()}
    _square_sum(*some.values()).backward()
    for (name, tensor), expected in zip(some.items(), everything, strict=True):
        if name in wanted:
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, expected)
        else:
            assert tensor.grad is None


@full_only
def test_fp64_gradients_are_those_of_finite_differences():
    inputs = tuple(_inputs(queries=5, keys=6, dtype=torch.float64).values())

    def call(q, k, v, bias, distance_bias, alibi_slopes):
        options = {"bias": bias, "distance_bias": distance_bias, "softcap": 3.0, "window_size": (3, 1)}
        return flash_attention(q, k, v, alibi_slopes=alibi_slopes, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_a_second_derivative_is_refused():
    inputs = tuple(_inputs().values())
    gradient = torch.autograd.grad(_square_sum(*inputs), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="flash_attention has no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize(("queries", "keys", "window"), [(20, 18, (-1, -1)), (18, 20, (-1, 0)), (20, 20, (3, 2))])
def test_flops_count_the_visible_pairs(queries, keys, window):
    q, k, v, *_ = _inputs(queries, keys).values()
    with FlopCounterMode(display=False) as counter:
        out = flash_attention(q, k, v, window_size=window)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
    left, right = window
    distances = [j - i - keys + queries for i in range(queries) for j in range(keys)]
    pairs = sum((left < 0 or d >= -left) and (right < 0 or d <= right) for d in distances)
    assert counter.get_total_flops() == 2 * (2 + 5) * pairs * 2 * 16


def test_autocast_decides_the_dtype():
    q, k, v, *_ = _inputs().values()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_a_cpu_tensor_needs_the_interpreter(monkeypatch):
    q, k, v, *_ = _inputs().values()
    monkeypatch.setattr(ops, "INTERPRETED", False)
    with pytest.raises(ValueError, match="flash_attention needs CUDA or, for tests, TRITON_INTERPRET=1"):
        flash_attention(q, k, v)


def test_a_broken_up_tensor_gives_the_bits_of_a_contiguous_one():
    q, k, v, *_ = (tensor.detach() for tensor in _inputs().values())
    columns_apart = torch.stack([q, q], dim=-1).requires_grad_()
    fused = torch.cat([k, v], dim=2).requires_grad_()
    out = flash_attention(columns_apart[..., 0], fused[:, :, :1], fused[:, :, 1:])
    expected = flash_attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(out, expected)
    out.transpose(1, 2).sum().backward()  # a gradient of stride 0
    assert fused.grad is not None
    assert fused.grad.isfinite().all()


def test_packed_rows_of_no_sequence_stay_empty():
    q, k, v, *_ = (tensor.detach()[0].requires_grad_() for tensor in _inputs(queries=20, keys=20).values())
    ends = torch.tensor([0, 9, 12] + [12] * 30, dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 9, "max_seqlen_k": 9}
    out, lse = flash_attention(q, k, v, return_lse=True, **packed)
    assert (out[12:] == 0).all()
    assert (lse[:, 12:] == float("-inf")).all()
    torch.testing.assert_close(out, reference_attention(q, k, v, **packed))
    out.sum().backward()
    assert q.grad is not None
    assert v.grad is not None
    assert (q.grad[12:] == 0).all()
    assert (v.grad[12:] == 0).all()
