"""fp8 casts, scaled matmuls and linear layers."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import DEVICES, cases, extra, full_only
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stoker.kernels.activations import FUSED_ACTIVATIONS
from stoker.kernels.fp8.cast_kernels import triton_amax, triton_cast
from stoker.kernels.fp8.expert_rows import _align_rows, aligned_assignments, triton_align_rows
from stoker.kernels.fp8.experts import fp8_experts
from stoker.kernels.fp8.gated_mlp import fp8_gated_mlp
from stoker.kernels.fp8.linear import fp8_linear
from stoker.kernels.fp8.operands import DTYPES, Quantized, Source, dequantize
from stoker.kernels.fp8.quantize import _amax, _cast, amaxes, quantize, transpose
from stoker.kernels.fp8.recipe import MAX_VALUE, Format, Fp8Recipe, Granularity, Scaling
from stoker.kernels.fp8.reference import produce, reference_amax, reference_cast, row_dots
from stoker.kernels.fp8.row_cast import _backward_amax, _row_cast, triton_backward_amax, triton_row_cast
from stoker.kernels.fp8.scaled_matmul import scaled_matmul
from stoker.kernels.fp8.weight_cast import cast_weight
from stoker.kernels.gated_activation import gated_activation
from stoker.kernels.moe.assignments import Assignments, sorted_assignments

GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row", "tile", "block")
SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise", "blockwise")
FORMATS: tuple[Format, ...] = ("e4m3", "e5m2")
BLOCKS = {"tensor": None, "row": (1, None), "tile": (1, 128), "block": (128, 128)}


def expected_cast(matrix: Tensor, format: Format, granularity: Granularity) -> Tensor:
    """Return the values of the cast in fp64: the nearest number of the format, block by block."""
    high, wide = BLOCKS[granularity] or (None, None)
    high, wide = high or max(len(matrix), 1), wide or max(matrix.shape[1], 1)
    every = torch.arange(256, dtype=torch.uint8).view(DTYPES[format]).double()
    numbers = every[every.isfinite()].unique()
    values = torch.empty(matrix.shape, dtype=torch.float64)
    for top, left in product(range(0, len(matrix), high), range(0, matrix.shape[1], wide)):
        block = matrix[top : top + high, left : left + wide].double()
        scale = block.abs().max() / MAX_VALUE[format]
        nearest = (block[..., None] / scale - numbers).abs().argmin(-1)
        values[top : top + high, left : left + wide] = numbers[nearest] * scale
    return values


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_both_casts_are_the_nearest_numbers_of_the_format(granularity: Granularity, format: Format) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(140, 136) * torch.randn(140, 1).exp()).bfloat16()
    pair = quantize(matrix, format, granularity)
    assert pair.rows is not None
    assert pair.columns is not None
    rows, columns = dequantize(pair.rows, torch.float64), dequantize(pair.columns, torch.float64)
    for got, source in ((rows, matrix.double()), (columns[:, :140], matrix.t().double())):
        distance = (expected_cast(source, format, granularity) - source).abs()
        assert ((got - source).abs() <= distance + 1e-6 * source.abs()).all()
    assert not columns[:, 140:].any()
    assert pair.columns.data.shape[1] % 16 == 0


def sources(producer: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], str]:
    """Return the tensors that a producer takes, of odd sizes where it may, and an activation."""
    torch.manual_seed(0)
    if producer.endswith("norm"):
        inputs, (gain, bias, mean) = torch.randn(133, 80).to(dtype), torch.randn(3, 133)
        others = [torch.rand(133) + 0.5, gain[:80].to(dtype), mean, bias[:80].to(dtype)]
        return [inputs, *others[: 2 if producer == "rms_norm" else 4]], ""
    order, gates = torch.randperm(140)[:133].int(), torch.rand(70, 2)
    order[[3, 70]] = -1
    if producer == "gather":
        return [torch.randn(70, 80).to(dtype), order, torch.zeros(70, 2, dtype=torch.int32)], ""
    of_experts, kind = producer.startswith("experts' "), producer.removeprefix("experts' ")
    widths = [256 if kind.startswith("gated") else 80]
    widths += [128 if kind.startswith("gated") else 80] if kind.endswith("backward") else []
    tensors = [torch.randn(133, width).to(dtype) for width in widths]
    return tensors + [order, gates] * of_experts, "" if producer == "none" else "silu"


ACTIVATIONS = ("activation", "gated", "activation_backward", "gated_backward")
KERNEL_CASES = [
    (producer, granularity)
    for producer in (
        "none", "gather", *ACTIVATIONS, *(f"experts' {name}" for name in ACTIVATIONS), "rms_norm", "layer_norm",
    )
    for granularity in GRANULARITIES
    if producer == "none" or granularity != "block"
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("producer", "granularity"), cases(KERNEL_CASES, fast=9))
def test_kernels_equal_the_reference(device: str, producer: str, granularity: Granularity) -> None:
    tensors, activation = sources(producer)
    tensors = [tensor.to(device) for tensor in tensors]
    producer = producer.removeprefix("experts' ")
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    exact, product = produce(producer, wide, activation)
    none = torch.empty(0, device=device)
    amax: tuple[Tensor, Tensor] = none, none
    product_amax = none
    if granularity in ("tensor", "row"):
        amax = triton_amax(tensors, producer, activation, granularity, True, True)
        expected = reference_amax(exact, granularity), reference_amax(exact.t(), granularity)
        torch.testing.assert_close(amax[0], expected[0], rtol=1e-5, atol=0)
        if granularity == "row":
            torch.testing.assert_close(amax[1], expected[1], rtol=1e-5, atol=0)
        product_amax = reference_amax(product.t(), granularity)
    with_product = "e4m3" if producer.endswith("backward") else ""
    formats: tuple[Format, Format, Format] = "e5m2", "e5m2", "e4m3"
    results = triton_cast(
        tensors, producer, activation, *amax, formats[0], granularity, 1, True, True, product_amax, with_product
    )
    torch.testing.assert_close(results[6].double(), row_dots(producer, wide, activation), rtol=1e-5, atol=1e-5)
    matrices = [(exact, amax[0]), (exact.t(), amax[0] if granularity == "tensor" else amax[1])]
    matrices += [(product.t(), product_amax)] if with_product else []
    for number, (matrix, largest) in enumerate(matrices):
        data, scale = results[2 * number : 2 * number + 2]
        got = dequantize(Quantized(data, scale, granularity), torch.float64)[:, : matrix.shape[1]]
        _, wanted_scale = reference_cast(matrix, largest, formats[number], granularity, 1)
        torch.testing.assert_close(scale[:, : wanted_scale.shape[1]] if scale.ndim == 2 else scale, wanted_scale)
        # within half a step of the format, relative or of the subnormals
        step = 2.0 ** -(3 if formats[number] == "e4m3" else 2)
        smallest = 2.0 ** -(6 if formats[number] == "e4m3" else 14)
        block = torch.ones_like(data, dtype=torch.float64)[:, : matrix.shape[1]]
        steps = dequantize(Quantized(block.to(DTYPES["e4m3"]), scale, granularity), torch.float64)
        error = (got - matrix).abs()
        assert (error <= 1.0001 * step / 2 * torch.maximum(matrix.abs(), smallest * steps)).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, for inf and NaN
@pytest.mark.parametrize(("granularity", "spoiled"), cases(product(GRANULARITIES, (False, True)), fast=5))
def test_kernels_round_as_the_reference_does(granularity: Granularity, spoiled: bool) -> None:
    tensors, _ = sources("none")
    tensors[0][6:8] = 0.0
    tensors[0][9] = torch.linspace(-1e-6, 1e-6, 80)
    if spoiled:
        tensors[0][3, 5], tensors[0][70, 2] = torch.inf, torch.nan
    amax = torch.empty(0), torch.empty(0)
    if granularity in ("tensor", "row"):
        amax = _amax(tensors, "none", "", granularity, True, True)
        for got, expected in zip(triton_amax(tensors, "none", "", granularity, True, True), amax, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    for format in FORMATS:
        arguments: Any = (tensors, "none", "", *amax, format, granularity, 0, True, True)
        results = triton_cast(*arguments), _cast(*arguments)
        for got, expected in zip(*results, strict=True):
            assert got.stride() == expected.stride()
            assert spoiled or torch.equal(got.float(), expected.float())
        for first in (0, 2):
            got, expected = (dequantize(Quantized(*of[first : first + 2], granularity)) for of in results)  # pyrefly: ignore[bad-argument-count, bad-argument-type]
            assert torch.equal(got.isfinite(), expected.isfinite())
            assert torch.equal(got[got.isfinite()], expected[got.isfinite()])
            assert spoiled == (not got.isfinite().all())


def test_custom_operations_are_well_formed() -> None:
    for producer, granularity in cases(KERNEL_CASES[::3], fast=4):
        tensors, activation = sources(producer, torch.float32)
        head: tuple[Any, ...] = (tensors, producer.removeprefix("experts' "), activation)
        if granularity in ("tensor", "row"):
            torch.library.opcheck(_amax, (*head, granularity, True, True))
        amax = _amax(*head, granularity, True, True) if granularity in ("tensor", "row") else (torch.empty(0),) * 2
        torch.library.opcheck(_cast, (*head, *amax, "e4m3", granularity, 0, True, True))
    for gated in (True, False):
        torch.library.opcheck(_row_cast, (torch.randn(5, 64), "gated" if gated else "activation", "silu", "e4m3", 0))
    order, gates = torch.tensor([3, -1, 0], dtype=torch.int32), torch.rand(2, 2)
    torch.library.opcheck(_backward_amax, (*torch.rand(3, 3), order, gates))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, for inf and NaN
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [80, *extra(2051, 8200)])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_are_cast_in_one_pass_as_in_two(gated: bool, width: int, device: str) -> None:
    torch.manual_seed(0)
    projected = torch.randn(5, width * (1 + gated), device=device).bfloat16()
    projected[1] = 0
    producer = "gated" if gated else "activation"
    data, scale, amax, peaks = triton_row_cast(projected, producer, "silu", "e4m3", 1)
    exact, _ = produce(producer, [projected.double()], "silu")
    torch.testing.assert_close(amax, reference_amax(exact, "row"), rtol=1e-5, atol=0)
    expected, expected_scale = reference_cast(exact, amax, "e4m3", "row", 1)
    assert torch.equal(scale, expected_scale)
    assert (data.float() != expected.float()).float().mean() < 1e-3  # a few round the other way
    *_, expected_peaks = _row_cast(projected.double(), producer, "silu", "e4m3", 1)
    torch.testing.assert_close(peaks, expected_peaks, rtol=1e-5, atol=0)
    spoiled = projected.clone()
    spoiled[2, 3], spoiled[3, 4] = torch.inf, torch.nan
    for found in triton_row_cast(spoiled, producer, "silu", "e4m3", 1)[1:]:
        assert found.isfinite().flatten().tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_a_bound_of_the_gradient_is_found_before_it(device: str) -> None:
    tensors, _ = sources("experts' gated_backward", torch.float32)
    projected, outer, order, gates = (tensor.to(device) for tensor in tensors)
    gradient, product = produce("gated_backward", [projected, outer, order, gates], "silu")
    _, _, amax, peaks = triton_row_cast(projected, "gated", "silu", "e4m3", 0)
    arguments = reference_amax(outer, "row"), amax, peaks, order, gates
    found = triton_backward_amax(*arguments)
    torch.testing.assert_close(found, _backward_amax(*(x.double() if x.is_floating_point() else x for x in arguments)))
    torch.testing.assert_close(found[1], product.abs().amax().float())
    assert gradient.abs().amax() <= found[0] <= 8 * gradient.abs().amax()
    for number in range(3):  # NaN of any of them
        spoiled = [tensor.clone() for tensor in arguments]
        spoiled[number][0] = torch.nan
        assert triton_backward_amax(*spoiled).isnan().tolist() == [number != 1, number == 1]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scales_with_margin(granularity: Granularity) -> None:
    matrix = torch.randn(33, 160, generator=torch.Generator().manual_seed(1))
    plain = quantize(matrix, "e4m3", granularity, columns=False).rows
    wider = quantize(matrix, "e4m3", granularity, columns=False, margin=2).rows
    assert plain is not None
    assert wider is not None
    assert torch.equal(wider.scale, plain.scale * 4)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_special_values(granularity: Granularity) -> None:
    def values_of(matrix: Tensor) -> Tensor:
        pair = quantize(matrix, "e4m3", granularity)
        assert pair.rows is not None
        assert pair.columns is not None
        assert torch.equal(dequantize(pair.columns)[:, : len(matrix)].isfinite().all(), torch.tensor(rows_finite))
        return dequantize(pair.rows)

    rows_finite = True
    assert not values_of(torch.zeros(5, 32)).any()
    assert values_of(torch.zeros(0, 32)).shape == (0, 32)
    tiny = torch.full((5, 32), 2.0**-130)
    assert values_of(tiny).abs().max() <= 2.0**-129
    rows_finite = False
    for value in (torch.inf, -torch.inf, torch.nan):
        spoiled = torch.ones(5, 32)
        spoiled[2, 3] = value
        assert not values_of(spoiled)[2, 3].isfinite()


def test_transposed_and_strided_matrices_are_cast_alike() -> None:
    matrix = torch.randn(64, 48)
    for other in (matrix.t().contiguous().t(), torch.stack((matrix, matrix), 2)[:, :, 0]):
        pairs = [quantize(x, "e4m3", "tile") for x in (matrix, other)]
        for got, expected in zip(*pairs, strict=True):
            assert got is not None
            assert expected is not None
            assert torch.equal(got.data.float(), expected.data.float())
            assert torch.equal(got.scale, expected.scale)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_reduced_maxima_are_those_of_the_whole_tensor(granularity: Granularity) -> None:
    whole = torch.randn(64, 32)
    seen: list[Tensor] = []

    def reduce(bits: Tensor) -> Tensor:
        seen.append(bits)
        return torch.maximum(bits, other.view(torch.int32)) if bits.numel() == other.numel() else bits

    first, second = whole.chunk(2)
    other = amaxes(second, granularity, rows=granularity == "tensor")[0 if granularity == "tensor" else 1]
    got = amaxes(first, granularity, rows=granularity == "tensor", reduce=reduce)[0 if granularity == "tensor" else 1]
    expected = whole.abs().amax() if granularity == "tensor" else whole.abs().amax(0)
    assert torch.equal(got, expected.view_as(got))
    other = torch.full_like(other, torch.nan)
    spoiled = amaxes(first, granularity, rows=granularity == "tensor", reduce=reduce)
    assert spoiled[0 if granularity == "tensor" else 1].isnan().all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_are_those_of_the_rounded_operands(scaling: Scaling) -> None:
    recipe = Fp8Recipe(scaling)
    torch.manual_seed(0)
    a = quantize(torch.randn(37, 160, dtype=torch.float64), "e5m2", recipe.inputs).rows
    b = quantize(torch.randn(48, 160, dtype=torch.float64), "e4m3", recipe.weights).rows
    assert a is not None
    assert b is not None
    exact = dequantize(a, torch.float64) @ dequantize(b, torch.float64).t()
    assert torch.equal(scaled_matmul(a, b, torch.float64), exact)
    assert torch.allclose(scaled_matmul(a, b, torch.float32).double(), exact, rtol=1e-5, atol=1e-5)


def linear_and_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    output = function(*tensors)
    outer = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output).sin()
    return output, *torch.autograd.grad(output, tensors, outer)


def linear_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (3, 11, 160), (48, 160), (48,)
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)  # pyrefly: ignore[bad-return]


@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_linear_layer_multiplies_the_casts(scaling: Scaling, wgrad: bool) -> None:
    recipe = Fp8Recipe(scaling, wgrad=wgrad)
    inputs, weight, bias = linear_inputs()
    results = linear_and_gradients(lambda x, w, b: fp8_linear(x, w, b, recipe), inputs, weight, bias)
    outer = torch.linspace(-1, 1, results[0].numel(), dtype=torch.float64).view(-1, 48).sin()

    def values(matrix: Tensor, format: Format, granularity: Granularity) -> tuple[Tensor, Tensor]:
        pair = quantize(matrix, format, granularity)
        first, second = (dequantize(x, torch.float64) for x in pair if isinstance(x, Quantized))
        return first, second[:, : len(matrix)]

    x, x_columns = values(inputs.flatten(0, 1), "e4m3", recipe.inputs)
    w, w_columns = values(weight, "e4m3", recipe.weights)
    g, g_columns = values(outer, "e5m2", recipe.inputs)
    expected_wgrad = g_columns @ x_columns.t() if wgrad else outer.t() @ inputs.flatten(0, 1)
    expected = x @ w.t() + bias, g @ w_columns.t(), expected_wgrad, outer.sum(0)
    for got, wanted in zip(results, expected, strict=True):
        assert torch.allclose(got.view_as(wanted), wanted, rtol=1e-12, atol=1e-12)
    plain = linear_and_gradients(F.linear, inputs, weight, bias)
    for got, wanted in zip(results, plain, strict=True):
        assert (got - wanted).norm() < 0.08 * wanted.norm()


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_kept_casts_of_a_weight_change_nothing(scaling: Scaling, columns: bool) -> None:
    recipe = Fp8Recipe(scaling)
    inputs, weight, bias = linear_inputs()
    expected = linear_and_gradients(lambda x, w, b: fp8_linear(x, w, b, recipe), inputs, weight, bias)
    kept = cast_weight(torch.ones_like(weight), recipe, columns=columns)
    assert cast_weight(weight, recipe, columns=columns, out=kept) is kept
    got = linear_and_gradients(lambda x, w, b: fp8_linear(x, w, b, recipe, cast=kept), inputs, weight, bias)
    assert all(torch.equal(first, second) for first, second in zip(got, expected, strict=True))
    if not columns and recipe.transposes_weights:  # the backward reads the cast, not the weight
        with torch.no_grad():
            unread = torch.full_like(weight, torch.nan).requires_grad_()
        got = linear_and_gradients(lambda x, w, b: fp8_linear(x, w, b, recipe, cast=kept), inputs, unread, bias)
        assert all(torch.equal(first, second) for first, second in zip(got, expected, strict=True))


def test_the_transposed_fp8_input_is_all_that_is_saved() -> None:
    inputs, weight, _ = linear_inputs(torch.bfloat16)
    recipe, saved = Fp8Recipe(), list[Tensor]()
    cast = cast_weight(weight, recipe)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        fp8_linear(inputs, weight, None, recipe, cast=cast)
    assert cast.columns is not None
    own = [x for x in saved if x.data_ptr() not in (cast.columns.data.data_ptr(), cast.columns.scale.data_ptr())]
    assert sum(x.numel() * x.itemsize for x in own) == 160 * 48 + 4  # 33 tokens padded to 48, and a scale


@pytest.mark.parametrize("scaling", ["blockwise", *extra("tensorwise", "rowwise")])
def test_a_linear_layer_compiles_to_one_graph(scaling: Scaling) -> None:
    torch._dynamo.reset()
    recipe = Fp8Recipe(scaling)
    inputs, weight, bias = linear_inputs(torch.bfloat16)

    def function(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fp8_linear(inputs, weight, bias, recipe, reduce=torch.clone, weight_reduce=torch.clone)

    expected = linear_and_gradients(function, inputs, weight, bias)
    got = linear_and_gradients(torch.compile(function, backend="aot_eager", fullgraph=True), inputs, weight, bias)
    assert all(torch.equal(first, second) for first, second in zip(got, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_the_transpose_of_a_cast_is_exact(device: str, granularity: Granularity, format: Format) -> None:
    pair = quantize(torch.randn(144, 272, device=device), format, granularity, columns=False)
    assert pair.rows is not None
    found = transpose(pair.rows)
    assert torch.equal(dequantize(found), dequantize(pair.rows).t())
    if granularity == "block":
        assert found.scale.stride(0) == 4  # as cuBLAS reads them
    one = torch.full((1,), MAX_VALUE[format], device=device)
    by_kernel = triton_cast([pair.rows.data], "none", "", one, one, format, "tensor", 0, False, True)[2]
    assert torch.equal(by_kernel.view(torch.uint8), pair.rows.data.view(torch.uint8).t())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_weight_kept_in_fp8_multiplies_as_its_casts(scaling: Scaling) -> None:
    recipe = Fp8Recipe(scaling)
    inputs, weight, _ = linear_inputs()
    wanted = linear_and_gradients(lambda x: fp8_linear(x, weight.detach(), None, recipe), inputs)
    kept = cast_weight(weight, recipe, columns=scaling == "rowwise")
    got = linear_and_gradients(lambda x: fp8_linear(x, kept.rows.data, None, recipe, cast=kept), inputs)
    assert all(torch.equal(first, second) for first, second in zip(got, wanted, strict=True))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("producer", ["rms_norm", "layer_norm", "activation"])
def test_an_input_that_is_cast_from_its_source_is_not_read(producer: str, scaling: Scaling) -> None:
    recipe = Fp8Recipe(scaling)
    tensors, activation = sources(producer, torch.float64)
    source = Source(producer, tuple(tensor.double() for tensor in tensors), activation)  # pyrefly: ignore[bad-argument-type]
    made, _ = produce(producer, list(source.tensors), activation)
    weights = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((96, 80), (64, 48))]
    unread = torch.full_like(made, torch.nan)

    def linear(inputs: Tensor, weight: Tensor, source: Source | None = None) -> Tensor:
        return fp8_linear(inputs, weight, None, recipe, source=source)

    def mlp(inputs: Tensor, up: Tensor, down: Tensor, source: Source | None = None) -> Tensor:
        return fp8_gated_mlp(inputs, up, down, "silu", recipe, source=source)

    for function, weight in ((linear, weights[:1]), (mlp, weights)):
        expected = linear_and_gradients(function, made.requires_grad_(), *weight)
        got = linear_and_gradients(partial(function, source=source), unread.requires_grad_(), *weight)
        for first, second in zip(got, expected, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def mlp_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (3, 11, 64), (256, 64), (48, 128)
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)  # pyrefly: ignore[bad-return]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("activation", cases(sorted(FUSED_ACTIVATIONS), fast=2))
def test_the_fused_gated_mlp_equals_its_parts(scaling: Scaling, activation: str) -> None:
    recipe = Fp8Recipe(scaling)

    def parts(inputs: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inner = gated_activation(fp8_linear(inputs, up, None, recipe), activation)
        return fp8_linear(inner, down, None, recipe)

    inputs = mlp_inputs()
    expected = linear_and_gradients(parts, *inputs)
    got = linear_and_gradients(lambda x, up, down: fp8_gated_mlp(x, up, down, activation, recipe), *inputs)
    for first, second in zip(got, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_the_gated_mlp_compiles_to_one_graph_with_kept_casts() -> None:
    torch._dynamo.reset()
    recipe = Fp8Recipe()
    inputs = mlp_inputs(torch.bfloat16)
    casts = {"up_cast": cast_weight(inputs[1], recipe), "down_cast": cast_weight(inputs[2], recipe)}

    def function(inputs: Tensor, up: Tensor, down: Tensor, **casts: Any) -> Tensor:
        return fp8_gated_mlp(inputs, up, down, "silu", recipe, reduce=torch.clone, **casts)

    expected = linear_and_gradients(function, *inputs)
    compiled = torch.compile(partial(function, **casts), backend="aot_eager", fullgraph=True)
    got = linear_and_gradients(compiled, *inputs)
    assert all(torch.equal(first, second) for first, second in zip(got, expected, strict=True))


def routed(dtype: torch.dtype) -> tuple[Assignments, list[Tensor]]:
    """Return assignments of 20 tokens to 2 of 3 experts, some dropped, and hidden, gates, up and down."""
    torch.manual_seed(0)
    experts = torch.stack([torch.randperm(3)[:2] for _ in range(20)])
    shapes = (20, 128), (20, 2), (3, 256, 128), (3, 128, 128)
    tensors = [(torch.randn(shape, dtype=dtype) * 0.3).requires_grad_() for shape in shapes]
    return sorted_assignments(experts, 3, torch.rand(20, 2) > 0.2), tensors


@pytest.mark.parametrize("multiple", [16, 128])
def test_aligned_assignments_move_the_rows_of_an_expert_together(multiple: int) -> None:
    whole = torch.tensor([0] * 2 * multiple + [2] * multiple).view(-1, 1)  # and none for two of four experts
    for assignments in (routed(torch.float32)[0], sorted_assignments(whole, 4)):
        aligned, kept = aligned_assignments(assignments, multiple), assignments.places >= 0
        torch.library.opcheck(_align_rows, (*assignments, multiple))
        for got, expected in zip(triton_align_rows(*assignments, multiple), aligned, strict=True):
            assert torch.equal(got, expected)
        starts, ends = (torch.cat((torch.zeros(1), x.ends)) for x in (assignments, aligned))
        assert torch.equal(ends.diff(), (starts.diff() / multiple).ceil() * multiple)
        assert torch.equal(aligned.places >= 0, kept)
        numbers = torch.arange(kept.numel()).view(kept.shape)[kept]
        assert torch.equal(aligned.order[aligned.places[kept].long()], numbers.int())
        assert (aligned.order >= 0).sum() == kept.sum()
        assert torch.equal(*(torch.searchsorted(x.ends, x.places[kept], right=True) for x in (assignments, aligned)))


@pytest.mark.parametrize(
    ("scaling", "backward", "gated"),
    cases(product(("tensorwise", "rowwise", "blockwise"), FORMATS, (True, False)), fast=2),
)
def test_experts_by_the_kernels_equal_their_emulation(scaling: Scaling, gated: bool, backward: Format) -> None:
    recipe = Fp8Recipe(scaling, backward=backward)
    assignments, tensors = routed(torch.float32)
    if not gated:
        tensors[2] = tensors[2].detach()[:, :128].requires_grad_()

    def experts(*tensors: Tensor) -> Tensor:
        hidden, gates, up, down = tensors
        options: Any = {"nonlinearity": "silu", "gated": gated, "recipe": recipe}
        return 1e4 * fp8_experts(hidden, gates, up, down, assignments, **options)  # gradients of another magnitude

    got = linear_and_gradients(experts, *tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = linear_and_gradients(experts, *exact)
    plain = linear_and_gradients(partial(plain_experts, assignments, gated), *exact)
    for first, second, third in zip(got, expected, plain, strict=True):
        assert (first - second).norm() < 1e-3 * second.norm()  # a few values round the other way
        assert (second - third).norm() < 0.15 * third.norm()


@full_only
@pytest.mark.parametrize("scaling", SCALINGS)
def test_experts_compile_to_one_graph_and_are_recomputed(scaling: Scaling) -> None:
    torch._dynamo.reset()
    assignments, tensors = routed(torch.bfloat16)

    def experts(*tensors: Tensor) -> Tensor:
        hidden, gates, up, down = tensors
        options: Any = {"nonlinearity": "silu", "gated": True, "recipe": Fp8Recipe(scaling)}
        return fp8_experts(
            hidden, gates, up, down, assignments, reduce=torch.clone, weight_reduce=torch.clone, **options
        )

    expected = linear_and_gradients(experts, *tensors)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    recomputed = partial(checkpoint, experts, use_reentrant=False)
    for function in (compiled, recomputed):
        got = linear_and_gradients(function, *tensors)
        assert all(torch.equal(first, second) for first, second in zip(got, expected, strict=True))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_experts_that_no_token_arrives_at_have_gradients_of_zero(scaling: Scaling) -> None:
    width = 128 if scaling == "blockwise" else 32
    shapes = (0, width), (0, 2), (3, 2 * width, width), (3, width, width)
    tensors = hidden, gates, up, down = [torch.randn(shape).requires_grad_() for shape in shapes]
    none = sorted_assignments(torch.empty(0, 2, dtype=torch.int64), 3)
    options: Any = {"nonlinearity": "silu", "gated": True, "recipe": Fp8Recipe(scaling)}
    fp8_experts(hidden, gates, up, down, none, **options).sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        assert not tensor.grad.any()


def plain_experts(
    assignments: Assignments, gated: bool, hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """Return the same as `experts` in high precision, token by token."""

    def activation(inputs: Tensor) -> Tensor:
        return gated_activation(inputs, "silu") if gated else F.silu(inputs)

    ends, rows = assignments.ends, []
    for token, places in enumerate(assignments.places.tolist()):
        total = torch.zeros_like(hidden[0])
        for slot, place in enumerate(places):
            if place >= 0:
                expert = int((ends <= place).sum())
                total = total + gates[token, slot] * (down[expert] @ activation(up[expert] @ hidden[token]))
        rows.append(1e4 * total)
    return torch.stack(rows)


def test_widths_that_fp8_cannot_multiply_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        fp8_linear(torch.randn(2, 16), torch.randn(8, 16), None, Fp8Recipe())
    with pytest.raises(ValueError, match=r"\(N, 16\)"):
        fp8_linear(torch.randn(2, 16), torch.randn(16, 32), None, Fp8Recipe())
