"""fp8 matmuls: the plan that lets linear layers and attention multiply in fp8, and the casts of weights.

Parameters keep their names and dtypes, and so do checkpoints. Embeddings, head, routers and adapters are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..kernels.attention.backends.transformer_engine import TEAttention
from ..kernels.fp8.delayed_scaling import LINEAR, DelayedScaling, Pass
from ..kernels.fp8.te_attention import ATTENTION, TEFp8Attention
from .config.fp8 import MULTIPLE, Fp8Slice
from .config.stack import StackSlice
from .layer import Layer
from .layers.attention import Attention
from .layers.fp8_linear import Fp8Linear, with_fp8
from .layers.mlp import MLP
from .moe.experts import Experts
from .moe.moe_layer import MoE
from .parallel.collectives import TensorParallel
from .parallel.context import ContextParallel
from .parallel.expert import ExpertParallel
from .parallel.fp8 import AmaxReduce, Fp8Product, TEProduct
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
    expert_parallel: ExpertParallel | None = None,
) -> None:
    """Let the linear layers of attention and MLP, experts and attention multiply in fp8 in training, in place.

    Args:
        stacks: stacks of a model on the meta device, split over the tensor-parallel ranks and with PEFT modules if it
            is; all layers, of a pipeline too.
        slices: their slices.
        tensor_parallel: the tensor-parallel ranks; None for one.
        context_parallel: the context-parallel ranks; None for one.
        expert_parallel: the expert-parallel ranks; None for one.

    Raises:
        ValueError: the widths of a matrix are no multiples of 16.
    """
    tensor, tokens, owners = _groups(tensor_parallel), _groups(context_parallel), _groups(expert_parallel)
    for stack, part in zip(stacks, slices, strict=True):
        if part.fp8 is None:
            continue
        for layer in (cast(Layer, stack.layers[number]) for number, is_fp8 in enumerate(part.fp8.layers) if is_fp8):
            for module in _parts(layer):
                if isinstance(module, LoRAMLP):
                    module.fused = False
                for name in _PROJECTIONS:
                    linear = getattr(module, name, None)
                    if isinstance(linear, nn.Linear):
                        _check_widths(linear, name, tensor_parallel)
                        replaced = with_fp8(linear) if type(linear) is nn.Linear else linear
                        assert isinstance(replaced, _Multiplies)
                        own = tensor if isinstance(linear, _Splits) else ()
                        replaced.fp8 = _product(part.fp8, (*own, *tokens), own)
                        setattr(module, name, replaced)
                if isinstance(module, Attention) and part.fp8.attention:
                    _multiply_in_fp8(module, part.fp8)
            experts = layer.mlp.experts if isinstance(layer.mlp, MoE) else None
            if type(experts) is Experts and not part.why_experts_without_fp8:
                shared = tensor if tensor_parallel is not None and tensor_parallel.sequence else ()
                groups = (*shared, *tokens, *owners)
                up, down = (_product(part.fp8, groups, owners, experts=True) for _ in range(2))
                experts.fp8 = up, down


def _multiply_in_fp8(attention: Attention, fp8: Fp8Slice) -> None:
    """Let an attention multiply in fp8 in training; the backend chosen for that serves layers that do not."""
    chosen = attention.backends.get("training")  # none on the meta device
    deterministic = isinstance(chosen, TEAttention) and chosen.deterministic
    attention.fp8_core = TEFp8Attention(fp8.attention_recipe, deterministic)
    if chosen is not None:
        attention.backends["training"] = attention.fp8_core


def _groups(ranks: TensorParallel | ContextParallel | ExpertParallel | None) -> tuple[str, ...]:
    return () if ranks is None else (ranks.group,)


def _product(
    fp8: Fp8Slice, groups: tuple[str, ...], weight_groups: tuple[str, ...], *, experts: bool = False
) -> Fp8Product:
    """Return a product whose inputs are split over the ranks of these groups, and its weight over those."""
    recipe = fp8.expert_recipe if experts else fp8.recipe
    kind = TEProduct if fp8.uses_transformer_engine and not experts else Fp8Product
    agrees = fp8.reduce_amax and recipe.scaling == "tensorwise"
    return kind(
        recipe,
        AmaxReduce(groups) if agrees and groups else None,
        AmaxReduce(weight_groups) if agrees and weight_groups else None,
    )


def _parts(layer: Layer) -> Iterator[nn.Module]:
    """Yield the modules with linear layers."""
    yield layer.attention
    if layer.cross_attention is not None:
        yield layer.cross_attention
    mlp = layer.mlp.shared if isinstance(layer.mlp, MoE) else layer.mlp
    if isinstance(mlp, MLP):
        yield mlp


def _check_widths(linear: nn.Linear, name: str, tensor_parallel: TensorParallel | None) -> None:
    for width in linear.weight.shape:
        if width % MULTIPLE:
            of = "" if tensor_parallel is None else f" on each of {tensor_parallel.size} tensor-parallel ranks"
            raise ValueError(
                f"`fp8` (True) needs matrices whose widths are multiples of {MULTIPLE}, and `{name}` is "
                f"{linear.weight.shape[0]} x {linear.weight.shape[1]}{of}; use model.fp8=false, or other widths."
            )


def fp8_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers and experts that multiply in fp8, by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, "fp8", None) is not None}


def build_delayed_scaling(
    model: nn.Module, device: torch.device, reduce: Callable[[Tensor], None] | None = None
) -> DelayedScaling | None:
    """Give linear layers and attention of a model on its device the state of delayed scaling; None without.

    Args:
        model: from `build_model`.
        device: its device.
        reduce: maximum over the ranks with the same stages of the pipeline, in place; None for one.
    """
    users: dict[str, TEProduct | TEFp8Attention] = {}
    for name, module in model.named_modules():
        user = module.fp8_core if isinstance(module, Attention) else getattr(module, "fp8", None)
        if isinstance(user, TEProduct | TEFp8Attention) and user.recipe.scaling == "delayed":
            users[name] = user
    if not users:
        return None
    (recipe,) = {user.recipe for user in users.values()}
    operands: dict[str, tuple[Pass, ...]] = {
        name: LINEAR if isinstance(user, TEProduct) else ATTENTION for name, user in users.items()
    }
    state = DelayedScaling(operands, recipe, device, reduce)
    for name, user in users.items():
        user.scales = state.scales(name)
    return state


def cast_fp8_weights(modules: Iterable[nn.Module]) -> None:
    """Cast the weights of `fp8_modules` for all micro batches of a step, frozen ones once."""
    for module in modules:
        for product, weight in _weights(module):
            if weight.requires_grad or not product.is_cast_current:
                product.cast_weight(weight)


def keep_fp8_weights(modules: Iterable[nn.Module]) -> None:
    """Keep the weights of `fp8_modules` in fp8 alone."""
    for module in modules:
        for product, weight in _weights(module):
            product.keep_in_fp8(weight)


def weights_in_fp8(model: nn.Module) -> dict[nn.Parameter, Fp8Product]:
    """Return the parameters that are kept in fp8 alone."""
    found = (pair for module in fp8_modules(model).values() for pair in _weights(module))
    return {weight: product for product, weight in found if product.is_alone}


def _weights(module: nn.Module) -> list[tuple[Fp8Product, nn.Parameter]]:
    if isinstance(module, Experts):
        assert module.fp8 is not None
        return list(zip(module.fp8, (module.up, module.down), strict=True))
    assert isinstance(module, _Multiplies)
    assert module.fp8 is not None
    assert isinstance(module.weight, nn.Parameter)
    return [(module.fp8, module.weight)]
