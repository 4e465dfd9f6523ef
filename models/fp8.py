"""fp8 matmuls: the plan that lets the linear layers of a model multiply in fp8, and the casts of their weights.

Parameters keep their names and dtypes, and so do checkpoints. Embeddings, head, routers and adapters are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from torch import nn

from .config.fp8 import MULTIPLE, Fp8Slice
from .config.stack import StackSlice
from .layer import Layer
from .layers.fp8_linear import Fp8Linear, with_fp8
from .layers.mlp import MLP
from .moe.moe_layer import MoE
from .parallel.collectives import TensorParallel
from .parallel.context import ContextParallel
from .parallel.fp8 import AmaxReduce, Fp8Product
from .parallel.linear import ColumnParallelLinear, RowParallelLinear
from .peft.ia3 import IA3InputLinear, IA3OutputLinear
from .peft.lora import LoRALinear
from .peft.lora_mlp import LoRAMLP
from .stack import Stack

_PROJECTIONS = ("qkv", "query", "kv", "output", "up", "down")
_Splits = ColumnParallelLinear | RowParallelLinear
_Multiplies = _Splits | Fp8Linear | LoRALinear | IA3InputLinear | IA3OutputLinear


def apply_fp8(
    stacks: Sequence[Stack],
    slices: Sequence[StackSlice],
    tensor_parallel: TensorParallel | None = None,
    context_parallel: ContextParallel | None = None,
) -> None:
    """Let the linear layers of attention and MLP multiply in fp8 in training, in place.

    Args:
        stacks: stacks of a model on the meta device, split over the tensor-parallel ranks and with PEFT modules if it
            is; all layers, of a pipeline too.
        slices: their slices.
        tensor_parallel: the tensor-parallel ranks; None for one.
        context_parallel: the context-parallel ranks; None for one.

    Raises:
        ValueError: the widths of a matrix are no multiples of 16.
    """
    for stack, part in zip(stacks, slices, strict=True):
        if part.fp8 is None:
            continue
        for number, is_fp8 in enumerate(part.fp8.layers):
            if not is_fp8:
                continue
            layer = cast(Layer, stack.layers[number])
            for module in _parts(layer):
                if isinstance(module, LoRAMLP):
                    module.fused = False
                for name in _PROJECTIONS:
                    linear = getattr(module, name, None)
                    if isinstance(linear, nn.Linear):
                        setattr(
                            module, name, _multiply_in_fp8(linear, name, part.fp8, tensor_parallel, context_parallel)
                        )


def _parts(layer: Layer) -> Iterator[nn.Module]:
    """Yield the modules with linear layers."""
    yield layer.attention
    if layer.cross_attention is not None:
        yield layer.cross_attention
    mlp = layer.mlp.shared if isinstance(layer.mlp, MoE) else layer.mlp
    if isinstance(mlp, MLP):
        yield mlp


def _multiply_in_fp8(
    linear: nn.Linear,
    name: str,
    fp8: Fp8Slice,
    tensor_parallel: TensorParallel | None,
    context_parallel: ContextParallel | None,
) -> nn.Linear:
    """Return the layer, or an equal one in its place, that multiplies in fp8."""
    for width in linear.weight.shape:
        if width % MULTIPLE:
            of = "" if tensor_parallel is None else f" on each of {tensor_parallel.size} tensor-parallel ranks"
            raise ValueError(
                f"`fp8` (True) needs matrices whose widths are multiples of {MULTIPLE}, and `{name}` is "
                f"{linear.weight.shape[0]} x {linear.weight.shape[1]}{of}; use fp8=false, or other widths."
            )
    replaced = with_fp8(linear) if type(linear) is nn.Linear else linear
    assert isinstance(replaced, _Multiplies)
    groups: list[str] = [] if context_parallel is None else [context_parallel.group]
    weight_groups: list[str] = []
    if tensor_parallel is not None and isinstance(linear, _Splits):
        groups.append(tensor_parallel.group)
        weight_groups.append(tensor_parallel.group)
    agrees = fp8.reduce_amax and fp8.recipe.scaling == "tensorwise"
    replaced.fp8 = Fp8Product(
        fp8.recipe,
        AmaxReduce(tuple(groups)) if agrees and groups else None,
        AmaxReduce(tuple(weight_groups)) if agrees and weight_groups else None,
    )
    return replaced


def fp8_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that multiply in fp8, by name."""
    return {
        name: cast(nn.Linear, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "fp8", None), Fp8Product)
    }


def cast_fp8_weights(layers: Sequence[nn.Linear]) -> None:
    """Cast the weights of fp8 layers for all micro batches of a step, frozen ones once."""
    for layer in layers:
        product = layer.fp8
        assert isinstance(product, Fp8Product)
        if product.cast is None or layer.weight.requires_grad:
            product.cast_weight(layer.weight)
