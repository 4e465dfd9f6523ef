"""fp8 products of weights, whole or split over the tensor-parallel ranks, and scales that ranks agree on.

In tensorwise scaling a scale follows from all values of a tensor, of which a rank may have some channels (tensor
parallelism) or tokens (sequence and context parallelism): the ranks take the maximum of their amaxes. Scales of rows
and blocks are those of the values that a rank has. Key and value heads that several tensor-parallel ranks share are an
exception: each rank casts the gradient that its own query heads give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.autocast import autocast
from ...kernels.fp8.delayed_scaling import DelayedScales
from ...kernels.fp8.linear import fp8_linear
from ...kernels.fp8.operands import DTYPES, Quantized, Source, dequantize
from ...kernels.fp8.quantize import quantize
from ...kernels.fp8.recipe import Fp8Recipe
from ...kernels.fp8.scaled_matmul import scaled_matmul
from ...kernels.fp8.te_linear import runs_on, te_cast_weight, te_linear
from ...kernels.fp8.weight_cast import WeightCast, backward_cast, cast_tensors, cast_weight, forward_cast
from ...kernels.launch import disable_compile
from .collectives import (
    SharedRows,
    TensorParallel,
    gather_again,
    gather_tokens,
    scatter_tokens,
    sum_rows,
    sum_shared_gradient,
)

_ops: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class AmaxReduce:
    """Elementwise maximum over the ranks of these process groups."""

    groups: tuple[str, ...]

    def __call__(self, bits: Tensor) -> Tensor:
        """Return the maximum of int32 tensors."""
        for group in self.groups:
            bits = _ops.wait_tensor(_ops.all_reduce(bits, "max", group))
        return bits


@dataclass
class Fp8Product:
    """How a module multiplies by a weight in fp8 in training.

    Attributes:
        recipe: formats and scaling.
        reduce: over the ranks that hold parts of its inputs or outputs; None: of the values of the rank.
        weight_reduce: over the ranks that hold parts of the weight.
        cast: cast of the weight, which holds until it changes, and of its transpose where the backward cannot transpose
            it; None: each forward and backward casts it.
        is_alone: the weight is its cast, see `keep_in_fp8`.
    """

    recipe: Fp8Recipe
    reduce: AmaxReduce | None = None
    weight_reduce: AmaxReduce | None = None
    cast: WeightCast | None = None
    is_alone: bool = False

    @property
    def reads_source(self) -> bool:
        """True if it casts inputs from what makes them; not without fp8 weight gradients, which save the inputs."""
        return self.recipe.wgrad

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, source: Source | None = None) -> Tensor:
        """Return `F.linear(inputs, weight, bias)`; `source` as in `fp8_linear`."""
        return fp8_linear(
            inputs,
            weight,
            bias,
            self.recipe,
            cast=self.cast,
            reduce=self.reduce,
            weight_reduce=self.weight_reduce,
            source=source,
        )

    @property
    def is_cast_current(self) -> bool:
        """True if there is a cast of a weight that does not change."""
        return self.cast is not None

    @torch.no_grad()
    def cast_weight(self, weight: Tensor) -> None:
        """Cast the weight (N, K), or experts (E, N, K) as one weight, into the memory of the cast before."""
        options: dict[str, Any] = {"columns": not self.recipe.transposes_weights, "reduce": self.weight_reduce}
        self.cast = cast_weight(weight.flatten(0, -2), self.recipe, out=self.cast, **options)

    @torch.no_grad()
    def cast_rows(self, values: Tensor, amax: Tensor, rows: Tensor) -> None:
        """Cast some rows of a weight, with the amax (1,) of all of it, into these rows of the cast.

        A rank without rows gives one of zeros, from which it gets the scale.
        """
        assert self.cast is not None
        fresh = quantize(
            values,
            self.recipe.forward,
            self.recipe.weights,
            columns=False,
            amax=(amax, amax),
            margin=self.recipe.margin,
        ).rows
        assert fresh is not None
        rows.copy_(fresh.data[: rows.shape[0]])
        self.cast.rows.scale.copy_(fresh.scale)

    @torch.no_grad()
    def keep_in_fp8(self, weight: Tensor) -> None:
        """Cast a weight and free its memory: the parameter keeps shape and dtype, of which its gradient is.

        All of its elements are one NaN, so that no use of them goes unnoticed: torch refuses to write them.
        """
        self.cast_weight(weight)
        self.is_alone = True
        weight.data = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device).expand(weight.shape)


def dense_weight(weight: Tensor, product: Fp8Product | None, dtype: torch.dtype) -> Tensor:
    """Return a weight, or the values of one that is kept in fp8, in this dtype."""
    if product is None or not product.is_alone:
        return weight
    assert product.cast is not None
    return dequantize(product.cast.rows).to(dtype).view(weight.shape)


@dataclass
class TEProduct(Fp8Product):
    """A product through TransformerEngine; by stoker's kernels on a CPU, which has no delayed scaling.

    Attributes:
        scales: state of delayed scaling of the module, once the model is on its device.
        te_cast: as `cast`, in TransformerEngine's layout.
    """

    scales: DelayedScales | None = None
    te_cast: Any = None

    @property
    def reads_source(self) -> bool:
        """False: TransformerEngine casts the inputs themselves."""
        return False

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, source: Source | None = None) -> Tensor:
        """Return `F.linear(inputs, weight, bias)`."""
        if not runs_on(inputs):
            return super().linear(inputs, weight, bias, source)
        return self._te_linear(inputs, weight, bias)

    @disable_compile
    def _te_linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute it where torch.compile does not see the cast, whose guards fail: it is no plain tensor."""
        reduces = {"reduce": self.reduce, "weight_reduce": self.weight_reduce}
        return te_linear(inputs, weight, bias, self.recipe, scales=self.scales, cast=self.te_cast, **reduces)

    @torch.no_grad()
    def cast_weight(self, weight: Tensor) -> None:
        """Cast the weight anew into the memory of the casts before."""
        if not runs_on(weight):
            super().cast_weight(weight)
        else:
            self.te_cast = te_cast_weight(weight, self.recipe, self.scales, self.weight_reduce, out=self.te_cast)

    @property
    def is_cast_current(self) -> bool:
        """True if there is a cast of a weight that does not change; delayed scales do."""
        return self.recipe.scaling != "delayed" and (self.te_cast is not None or super().is_cast_current)


class _ColumnInput(torch.autograd.Function):
    """The input of a column-parallel layer: gathered over its tokens, or as it is; its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, size: int, group: str, gathers: bool) -> Tensor:
        ctx.size, ctx.group, ctx.gathers, ctx.shape = size, group, gathers, hidden.shape
        return _wait(gather_tokens(hidden, size, group))[None] if gathers else hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gathers:
            gradient = _wait(scatter_tokens(gradients[0], ctx.size, ctx.group))
        else:
            gradient = _wait(_ops.all_reduce(gradients[0].contiguous(), "sum", ctx.group))
        return gradient.view(ctx.shape), None, None, None


class _Fp8ColumnLinear(torch.autograd.Function):
    """`collectives.column_linear` in fp8.

    Sharded over tokens, the input is gathered in both passes: in tensorwise scaling as fp8, whose transpose the
    backward pass needs; else as it is, for scales along the tokens are others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        row_data: Tensor | None,
        row_scale: Tensor | None,
        column_data: Tensor | None,
        column_scale: Tensor | None,
        product: Fp8Product,
        rank: int,
        size: int,
        group: str,
        gathers: bool,
        shared: Sequence[SharedRows],
    ) -> Tensor:
        recipe, needs_weight = product.recipe, ctx.needs_input_grad[1]
        gathers_fp8 = gathers and recipe.scaling == "tensorwise" and recipe.wgrad
        flat = hidden.flatten(0, -2)
        if gathers and not gathers_fp8:
            flat = _wait(gather_tokens(hidden, size, group))
        transposed = needs_weight and recipe.wgrad and not gathers
        pair = quantize(
            flat, recipe.forward, recipe.inputs, columns=transposed, reduce=product.reduce, margin=recipe.margin
        )
        rows = pair.rows
        assert rows is not None
        kept: tuple[Tensor | None, Tensor | None] = (hidden if needs_weight else None, None)
        if pair.columns is not None:
            kept = pair.columns[:2]
        elif gathers_fp8 and needs_weight:
            kept = rows[:2]
        if gathers_fp8:
            rows = rows._replace(data=_gather_fp8(rows.data, size, group))
        cast = row_data, row_scale, column_data, column_scale
        weight_rows, kept_weight = forward_cast(weight, cast, recipe, product.weight_reduce)
        output = scaled_matmul(rows, weight_rows, hidden.dtype, fast_accumulation=True)
        ctx.save_for_backward(*kept, *kept_weight)
        ctx.product, ctx.place, ctx.gathers, ctx.gathers_fp8 = product, (rank, size, group), gathers, gathers_fp8
        ctx.shared, ctx.hidden, ctx.weight_dtype = shared, (hidden.shape, hidden.dtype), weight.dtype
        return output[None] if gathers else output.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept, kept_scale, *kept_weight = ctx.saved_tensors
        product: Fp8Product = ctx.product
        (rank, size, group), (shape, dtype), recipe = ctx.place, ctx.hidden, product.recipe
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        gradient, fast = gradients[0].flatten(0, -2), recipe.fast_accumulation_backward
        whole = None
        if ctx.gathers and needs_weight:
            tokens = kept.view(torch.uint8)[None] if ctx.gathers_fp8 else kept
            whole = gather_again(tokens, gradient, size, group)
        pair = quantize(
            gradient,
            recipe.backward,
            recipe.inputs,
            rows=needs_input,
            columns=needs_weight and recipe.wgrad,
            reduce=product.reduce,
            margin=recipe.margin,
        )
        hidden_gradient = weight_gradient = None
        if needs_input:
            assert pair.rows is not None
            columns = backward_cast(tuple(kept_weight), recipe, product.weight_reduce)
            partial = scaled_matmul(pair.rows, columns, dtype, fast_accumulation=fast)
            if ctx.gathers:
                hidden_gradient = scatter_tokens(partial, size, group)
            else:
                hidden_gradient = _ops.all_reduce(partial, "sum", group)
        if needs_weight:
            inputs = kept if whole is None else _wait(whole)
            if pair.columns is None:
                weight_gradient = gradient.t() @ inputs.flatten(0, -2)
            else:
                columns = _transposed_inputs(inputs, kept_scale, ctx.gathers, ctx.gathers_fp8, product)
                weight_gradient = scaled_matmul(pair.columns, columns, ctx.weight_dtype, fast_accumulation=fast)
            weight_gradient = sum_rows(weight_gradient.to(ctx.weight_dtype), ctx.shared, rank, size, group)
        if hidden_gradient is not None:
            hidden_gradient = _wait(hidden_gradient).view(shape)
        return hidden_gradient, weight_gradient, *(None,) * 10


def _transposed_inputs(
    inputs: Tensor, scale: Tensor | None, gathers: bool, gathers_fp8: bool, product: Fp8Product
) -> Quantized:
    """Return the cast of the transpose of a column-parallel layer's input."""
    recipe = product.recipe
    if gathers and not gathers_fp8:
        pair = quantize(inputs, recipe.forward, recipe.inputs, rows=False, reduce=product.reduce, margin=recipe.margin)
        assert pair.columns is not None
        return pair.columns
    assert scale is not None
    if not gathers_fp8:
        return Quantized(inputs, scale, recipe.inputs)
    padded = torch.nn.functional.pad(inputs.t(), (0, -inputs.shape[0] % 16))  # zeros of uint8 are zeros of fp8
    return Quantized(padded.contiguous().view(DTYPES[recipe.forward]), scale, recipe.inputs)


def _gather_fp8(tokens: Tensor, size: int, group: str) -> Tensor:
    return _wait(gather_tokens(tokens.view(torch.uint8)[None], size, group)).view(tokens.dtype)


def _wait(tensor: Tensor) -> Tensor:
    return _ops.wait_tensor(tensor)


def fp8_column_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    product: Fp8Product,
    ranks: TensorParallel,
    *,
    gathers: bool,
    shared: Sequence[SharedRows] = (),
) -> Tensor:
    """Return `collectives.column_linear`, with all products in fp8; arguments as there."""
    hidden, bias = autocast(hidden, bias)
    if isinstance(product, TEProduct) and runs_on(hidden):
        whole: Any = _ColumnInput.apply(hidden, ranks.size, ranks.group, gathers)
        output = product.linear(whole, sum_shared_gradient(weight, shared, ranks), None)
        return output if bias is None else output + sum_shared_gradient(bias, shared, ranks)
    place = ranks.rank, ranks.size, ranks.group
    output = _Fp8ColumnLinear.apply(hidden, weight, *cast_tensors(product.cast), product, *place, gathers, shared)
    assert isinstance(output, Tensor)
    return output if bias is None else output + sum_shared_gradient(bias, shared, ranks)
