"""Feed-forward network of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.activations import (
    FUSED_ACTIVATIONS,
    NONLINEARITIES,
    SAVES_INTERMEDIATE,
    SAVES_ONLY_OUTPUT,
    add_activation,
)
from ...kernels.bias_gradients import biased_activation
from ...kernels.fp8.gated_mlp import can_fuse_gated_mlp, fp8_gated_mlp
from ...kernels.fp8.operands import Source
from ...kernels.gated_activation import gated_activation
from ...kernels.gated_down_projection import gated_projection
from ...kernels.launch import triton_runs_on
from ..config.dense_stack import OWN_ACTIVATION, MLPSlice
from ..config.extensions import ExtensionError, load_extension
from ..config.stack import StackSlice
from ..memory.recompute import RecomputableModule, run_with_recomputed_input
from ..parallel.fp8 import Fp8Product, TEProduct
from ..parallel.linear import column_traffic, row_traffic
from ..parallel.traffic import Collective
from .cost import Matrix, PartMemory, SavedTensors, StackInputs, Weights
from .dropout import ACTIVATION, LORA_DOWN, LORA_UP, DropoutMask, LayerDropout, require_dropout
from .fp8_linear import Fp8Linear, reads_source
from .fused_linear import can_detach_bias, linear_add_residual, norm_linear
from .norm import LayerNorm, RMSNorm, build_norm, norm_saved_bytes, norm_saves_input


class MLP(RecomputableModule):
    """Up projection, nonlinearity, down projection. Gated: the rows of `up` are [gate | up], one matrix.

    Recomputed: everything between the projections.

    Args:
        hidden_size: width of the residual stream.
        ffn_hidden_size: width between the two projections.
        nonlinearity: a name in `kernels.activations.NONLINEARITIES`.
        gated: multiply the activated gate with the up projection.
        bias: bias on both projections.
        dropout: dropout after the nonlinearity, in training.
        inner_norm: norm before the down projection (NormFormer, arXiv 2110.09456); None without.

    Attributes:
        first_channel: place of the first channel between the projections among those of all tensor-parallel ranks.
    """

    first_channel: int = 0

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        nonlinearity: str,
        gated: bool,
        bias: bool,
        dropout: float,
        inner_norm: LayerNorm | RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        self.gated = gated
        self.dropout = dropout
        self.has_dropout = dropout > 0
        self.up = nn.Linear(hidden_size, ffn_hidden_size * (2 if gated else 1), bias=bias)
        self.inner_norm: nn.Module | None = inner_norm
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        norm: LayerNorm | RMSNorm | None = None,
        residual: Tensor | None = None,
        dropout: LayerDropout | None = None,
        source: Source | None = None,
        output_bias: Tensor | None = None,
    ) -> Tensor:
        """Map (batch, tokens, hidden_size) to the same shape.

        Args:
            hidden: already normed unless `norm` is given.
            norm: norm to apply to `hidden` without saving its output; None if it has been applied.
            residual: residual stream to add the output to, shaped like `hidden`; None without.
            dropout: dropouts of the layer in this forward; None outside training or without dropout.
            source: see `BranchInput`.
            output_bias: see `BranchInput`.
        """
        up_mask = inner_mask = down_mask = None
        if dropout is not None:
            up_mask = dropout.of_stream(LORA_UP)
            inner_mask = dropout.of_channels(ACTIVATION, self.first_channel)
            down_mask = dropout.of_channels(LORA_DOWN, self.first_channel)
        if self._is_fp8_function(norm):
            output = (
                self._fp8_function(hidden, source)
                if norm is None
                else run_with_recomputed_input(norm, self._fp8_function, hidden)
            )
            return output if residual is None else residual + output
        activates = not (self.gated or self.is_recomputed) and self.nonlinearity in FUSED_ACTIVATIONS
        bias = None  # whose gradient the activation computes
        if norm is not None:
            projected, residual = norm_linear(norm, self.up, hidden, residual, up_mask)
        elif activates and can_detach_bias(self.up, hidden):
            bias = self.up.bias
            projected = F.linear(hidden, self.up.weight, bias.detach())
        else:
            projected = linear_add_residual(None, self.up, hidden, up_mask, source)
        if not self.is_recomputed:
            inner, source = self._inner(projected, inner_mask, bias), self._inner_source(projected)
            return linear_add_residual(residual, self.down, inner, down_mask, source, output_bias)
        fusable = self.inner_norm is None and not self.dropout and type(self.down) is nn.Linear
        fusable = fusable and self.nonlinearity in FUSED_ACTIVATIONS
        if self.gated and fusable and triton_runs_on(projected):
            output = gated_projection(projected, self.down.weight, self.down.bias, self.nonlinearity)
        else:
            inner = partial(self._inner, dropout=inner_mask)
            output = run_with_recomputed_input(
                inner, partial(linear_add_residual, None, self.down, dropout=down_mask), projected
            )
        return output if residual is None else residual + output

    def _is_fp8_function(self, norm: LayerNorm | RMSNorm | None) -> bool:
        """Return True if all of the MLP is one function in fp8; not if an eager layer would repeat it for the norm."""
        up, down = self.up, self.down
        if not self.training or type(up) is not Fp8Linear or type(down) is not Fp8Linear:
            return False
        if up.fp8 is None or isinstance(up.fp8, TEProduct) or down.fp8 is None:
            return False
        if not (norm is None or torch.compiler.is_compiling()):
            return False
        plain = up.bias is None and self.inner_norm is None and not self.dropout and down.weight.requires_grad
        return plain and self.gated and can_fuse_gated_mlp(up.fp8.recipe, down.in_features, self.nonlinearity)

    def _fp8_function(self, hidden: Tensor, source: Source | None = None) -> Tensor:
        up, down = self.up.fp8, self.down.fp8
        assert isinstance(up, Fp8Product)
        assert isinstance(down, Fp8Product)
        return fp8_gated_mlp(
            hidden,
            self.up.weight,
            self.down.weight,
            self.nonlinearity,
            up.recipe,
            up_cast=up.cast,
            down_cast=down.cast,
            reduce=up.reduce,
            source=source,
        )

    def _inner_source(self, projected: Tensor) -> Source | None:
        """Return what makes the input of the down projection, if that reads it (`reads_source`)."""
        changed = self.inner_norm is not None or self.dropout
        if changed or self.nonlinearity not in FUSED_ACTIVATIONS or not reads_source(self.down):
            return None
        rows = projected.detach().flatten(0, -2)
        return Source("gated" if self.gated else "activation", (rows,), self.nonlinearity)

    def _inner(self, projected: Tensor, dropout: DropoutMask | None = None, bias: Tensor | None = None) -> Tensor:
        """Apply everything between the projections: nonlinearity, with the gradient of `bias`, norm, dropout."""
        if bias is not None:
            inner = biased_activation(projected, bias, self.nonlinearity)
        elif self.gated:
            inner = gated_activation(projected, self.nonlinearity)
        else:
            inner = NONLINEARITIES[self.nonlinearity](projected)
        if self.inner_norm is not None:
            inner = self.inner_norm(inner)
        if self.training and self.dropout:
            inner = require_dropout(dropout).apply(inner, self.dropout)
        return inner


def load_activation(mlp: MLPSlice) -> None:
    """Add an activation of a user's own to `NONLINEARITIES`; built-in ones are there.

    Raises:
        LookupError, ValueError: it is not registered, or cannot be imported.
    """
    if mlp.is_own:
        name = mlp.nonlinearity.removeprefix(OWN_ACTIVATION)
        add_activation(mlp.nonlinearity, partial(_run_activation, name, load_extension("activation", name)))


def _run_activation(name: str, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    output = function(inputs)
    if output.shape != inputs.shape or output.dtype != inputs.dtype:
        raise ExtensionError(
            f"the activation {name} must return {tuple(inputs.shape)} of {inputs.dtype}, as its input is, but returned "
            f"{tuple(output.shape)} of {output.dtype}."
        )
    return output


def build_mlp(stack: StackSlice, ffn_hidden_size: int | None = None) -> MLP:
    """Build the MLP of a layer, or one of another width, such as a shared expert."""
    mlp = stack.mlp
    load_activation(mlp)
    width = ffn_hidden_size or mlp.ffn_hidden_size
    return MLP(
        stack.hidden_size,
        width,
        nonlinearity=mlp.nonlinearity,
        gated=mlp.gated,
        bias=mlp.bias,
        dropout=mlp.dropout,
        inner_norm=build_norm(stack.norm, width) if stack.block == "normformer" else None,
    )


# ---------------------------------------------------------------- cost


def mlp_weights(stack: StackSlice, width: int, number: int = 1, *, experts: bool = False) -> Weights:
    """Return the weights of an MLP of `width` without norms, or of this `number` of experts."""
    hidden, up = stack.hidden_size, width * (2 if stack.mlp.gated else 1)
    inputs = "expert rows" if experts else "tokens"
    matrices = Matrix("up", hidden * up, inputs, number), Matrix("down", hidden * width, inputs, number)
    return Weights(matrices, number * (up + hidden) * stack.mlp.bias)


def saves_only_output(mlp: MLPSlice) -> bool:
    """Return True if the backward of the activation needs its output instead of its input."""
    return mlp.nonlinearity in SAVES_ONLY_OUTPUT and not mlp.gated  # a gate needs both


def mlp_traffic(inputs: StackInputs) -> tuple[Collective, ...]:
    """Return the traffic of a dense MLP."""
    mesh, whole = inputs.mesh, inputs.outer_elements * inputs.widths.compute
    amaxes = inputs.amax_traffic() * 2
    if mesh.tensor == 1:
        return amaxes
    trained = "mlp_fc1" in inputs.trained_projections
    gathered = inputs.gathered_bytes
    up = column_traffic(whole, mesh, gathers=mesh.sequence, trained=trained, gathered_bytes=gathered)
    return (*amaxes, *up, *row_traffic(whole, mesh))


def is_fp8_function(stack: StackSlice, width: int, *, compiled: bool, split: bool) -> bool:
    """Return True if an MLP of `width` is one function in fp8, which saves only the output of fc1 between its
    projections; not with LoRA, nor if the ranks `split` it.
    """
    mlp, fp8 = stack.mlp, stack.fp8
    modules = frozenset[str]() if stack.recompute is None else stack.recompute.modules
    repeats_norm = not compiled and "norm" in modules
    if fp8 is None or fp8.uses_transformer_engine or split or not mlp.gated or mlp.bias or mlp.dropout:
        return False
    if stack.block == "normformer" or repeats_norm:
        return False
    return can_fuse_gated_mlp(fp8.recipe, width, mlp.nonlinearity)


def mlp_memory(inputs: StackInputs, width: int) -> PartMemory:
    """Return the memory of an MLP of `width`, or of a shared expert."""
    mlp, e, elements = inputs.stack.mlp, inputs.widths.compute, inputs.tokens * width
    ups = 2 if mlp.gated else 1
    recompute_inputs = elements * e if saves_only_output(mlp) else 0
    if inputs.fused_lora_mlp:  # working: gradients of the input of fc2 and of the outputs of fc1
        saved = (SavedTensors("mlp", ups * elements * e),)
        return PartMemory(saved, (1 + ups) * elements * e, recompute_inputs=recompute_inputs)
    in_fp8 = inputs.fp8 is not None and not inputs.frozen_matrices
    if in_fp8 and is_fp8_function(
        inputs.stack, width, compiled=inputs.compiled, split=inputs.mesh.tensor > 1
    ):  # working: the gradient of the input of fc2; those of the outputs of fc1 in fp8
        return PartMemory((SavedTensors("mlp", ups * elements * e),), (e + 2 * ups) * elements)
    norm, itemsize = inputs.stack.norm, inputs.widths.branch
    has_norm, norm_keeps = inputs.stack.block == "normformer", norm_saves_input(norm, itemsize)
    trains_down = "mlp_fc2" in inputs.trained_projections
    kept: list[SavedTensors] = []
    if not saves_only_output(mlp):
        kept.append(SavedTensors("mlp", ups * elements * e))
        if mlp.nonlinearity in SAVES_INTERMEDIATE and not mlp.gated and not inputs.compiled:
            kept.append(SavedTensors("activation", elements * e, "mlp_activation"))
    elif inputs.compiled:  # a sign mask; not needed if a norm saves the result itself
        kept.append(SavedTensors("activation", 0 if has_norm else elements, "mlp_activation"))
    else:  # the result, unless the next operation saves it too
        next_saves_it = norm_keeps if has_norm else trains_down and not mlp.dropout and not inputs.saves_fp8
        kept.append(SavedTensors("activation", 0 if next_saves_it else elements * e, "mlp_activation"))
    if trains_down:  # the compiler does not repeat a cast
        again = None if inputs.compiled and inputs.saves_fp8 else "mlp_activation"
        kept.append(SavedTensors("activation", inputs.saved_input_bytes(inputs.tokens, width), again))
    if has_norm:
        inner = elements * e if inputs.compiled or norm_keeps else 0
        if not inputs.compiled:
            inner += norm_saved_bytes(norm, elements, itemsize)
        kept.append(SavedTensors("activation", inner, "mlp_activation"))
    # the gradient of the result, then those of the outputs of fc1; by then the result is freed, unless it is read
    reads_result = saves_only_output(mlp) and not inputs.compiled
    return PartMemory(tuple(kept), (2 if reads_result else ups) * elements * e, recompute_inputs=recompute_inputs)
