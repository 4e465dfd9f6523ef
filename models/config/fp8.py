"""fp8 matmuls of the layers: keys, what they resolve to, and what they need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field

from ...kernels.fp8.recipe import AmaxAlgorithm, Fp8Recipe, Scaling
from .key_block import ConfigBlock

MULTIPLE = 16
"""Divisor of the widths of an fp8 matmul."""


class Fp8Keys(ConfigBlock):
    """`model.fp8*` in every family (nemo_semantics 1.8)."""

    fp8: bool | None = None
    """Multiply in fp8 in training: the linear layers of attention and MLP, and experts, forward and backward;
    weights and all other arithmetic stay in the run's precision, and validation multiplies with the weights themselves.
    Needs a GPU from sm_89 (Ada, Hopper, Blackwell) and bf16; on a CPU it is emulated, slowly. null: False."""
    fp8_e4m3: bool = False
    """With `fp8`: cast gradients to e4m3 too; takes precedence over `fp8_hybrid`."""
    fp8_hybrid: bool = True
    """With `fp8`: cast activations and weights to e4m3, gradients to e5m2, which has more range and less precision."""
    fp8_recipe: Scaling | None = None
    """With `fp8`: what has a scale of its own. `tensorwise`: a tensor; `rowwise`: a row along the contraction;
    `blockwise`: 1 x 128 tiles of activations and gradients and 128 x 128 blocks of weights (DeepSeek-V3; Hopper only).
    Scales follow from the values that are cast (current scaling); of `delayed`, one for a tensor, from its values in
    former steps, through TransformerEngine only (`transformer_engine: True`). null: `delayed` with
    `transformer_engine: True`, as in NeMo, else `tensorwise`. Megatron's key."""
    fp8_interval: int = Field(1, ge=1)
    """With `fp8_recipe: delayed` or `fp8_dot_product_attention`: steps between new scales; amaxes of those between
    count."""
    fp8_amax_history_len: int = Field(1024, ge=1)
    """With `fp8_recipe: delayed` or `fp8_dot_product_attention`: number of the last updates whose amaxes are kept."""
    fp8_amax_compute_algo: AmaxAlgorithm = "max"
    """With `fp8_recipe: delayed` or `fp8_dot_product_attention`: scales follow from the largest of the amaxes that are
    kept (`max`), or from that of the last update (`most_recent`)."""
    fp8_margin: int = Field(0, ge=0, le=8)
    """With `fp8`: scales are 2^margin times larger, which leaves headroom below the largest fp8 value."""
    fp8_wgrad: bool = True
    """With `fp8`: compute the gradients of weights in fp8 too; False: in the precision of the activations, which are
    then saved in it."""
    reduce_amax: bool = True
    """With `fp8`: tensor-parallel and context-parallel ranks, which hold parts of one tensor, take the scale of the
    whole, so that results do not depend on the layout; False: each takes that of its part, which saves messages. With
    `fp8_recipe: delayed` all ranks with the same layers, once a step, and never False over several."""
    fp8_params: bool = False
    """With `fp8`: keep the weights that multiply in fp8 as their casts alone, a byte per weight (rowwise two);
    validation multiplies with these values. Weights that are trained are cast from fp32 main weights after each update,
    and a distributed optimizer all-gathers their casts; with a PEFT scheme all of them are frozen. Training computes
    the same bits as without."""
    fp8_dot_product_attention: bool = False
    """With `fp8` and `transformer_engine: True`: attention multiplies in fp8 too in training, forward and backward, by
    cuDNN's kernels through TransformerEngine, with delayed scales whatever the recipe. An error where these have no
    such attention: before Hopper, for heads that are not 128 wide on Hopper, with packed documents, padding, a bias, a
    window, a softcap, attention sinks or dropout."""
    first_last_layers_bf16: bool = False
    """With `fp8`: multiply in the run's precision in the first and last layers of each stack. Megatron's key."""
    num_layers_at_start_in_bf16: int = Field(1, ge=0)
    """With `first_last_layers_bf16`: number of first layers of each stack. Megatron's key."""
    num_layers_at_end_in_bf16: int = Field(1, ge=0)
    """With `first_last_layers_bf16`: number of last layers of each stack. Megatron's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Slice:
    """fp8 matmuls of a stack.

    Attributes:
        recipe: formats and scaling.
        layers: True for each layer whose linear layers multiply in fp8.
        reduce_amax: ranks that hold parts of a tensor take the scale of the whole.
        keeps_weights: weights are kept in fp8 alone.
        transformer_engine: `transformer_engine` is True.
        attention: attention multiplies in fp8 too.
    """

    recipe: Fp8Recipe
    layers: tuple[bool, ...]
    reduce_amax: bool
    keeps_weights: bool = False
    transformer_engine: bool = False
    attention: bool = False

    @property
    def uses_transformer_engine(self) -> bool:
        """True if linear layers multiply through TransformerEngine; on a CPU, where it is emulated, they never do."""
        return not self.why_own_kernels

    @property
    def why_own_kernels(self) -> str:
        """Why linear layers multiply by stoker's own kernels on a GPU; empty if through TransformerEngine."""
        if not self.transformer_engine:
            return "`transformer_engine` is not True"
        if self.recipe.scaling == "rowwise":
            return "TransformerEngine has no rowwise scaling"
        if self.recipe.scaling == "blockwise" and self.recipe.margin:
            return "TransformerEngine's blockwise scaling has no margin (`fp8_margin`)"
        return ""

    @property
    def attention_recipe(self) -> Fp8Recipe:
        """Recipe of attention, whose scales are delayed in every recipe."""
        return replace(self.recipe, scaling="delayed")

    @property
    def expert_recipe(self) -> Fp8Recipe:
        """Recipe of experts, which multiply by stoker's own kernels: those have no delayed scaling, and let the tensor
        cores accumulate the products of the backward too, which changes no digit of their error that counts
        (docs/fp8.md).
        """
        scaling: Scaling = "tensorwise" if self.recipe.scaling == "delayed" else self.recipe.scaling
        return replace(self.recipe, scaling=scaling, fast_accumulation_backward=True)

    @property
    def description(self) -> str:
        """Recipe and formats, for logs."""
        formats = self.recipe.forward if self.recipe.forward == self.recipe.backward else "e4m3, gradients e5m2"
        kept = ", weights kept in fp8" if self.keeps_weights else ""
        return f"{self.recipe.scaling} scaling, {formats}{kept}"


def scaling_of(keys: Fp8Keys, transformer_engine: bool | None) -> Scaling:
    """Return what `fp8_recipe` resolves to in a stack with this `transformer_engine`."""
    return keys.fp8_recipe or ("delayed" if transformer_engine else "tensorwise")


def fp8_slice(keys: Fp8Keys, num_layers: int, transformer_engine: bool | None = None) -> Fp8Slice | None:
    """Resolve the keys of fp8 for a stack; None if all of its layers multiply in the run's precision."""
    if not keys.fp8:
        return None
    first = keys.num_layers_at_start_in_bf16 if keys.first_last_layers_bf16 else 0
    last = keys.num_layers_at_end_in_bf16 if keys.first_last_layers_bf16 else 0
    layers = tuple(first <= number < num_layers - last for number in range(num_layers))
    if not any(layers):
        return None
    recipe = Fp8Recipe(
        scaling=scaling_of(keys, transformer_engine),
        amax_history_len=keys.fp8_amax_history_len,
        amax_compute_algo=keys.fp8_amax_compute_algo,
        interval=keys.fp8_interval,
        backward="e4m3" if keys.fp8_e4m3 else "e5m2",
        margin=keys.fp8_margin,
        wgrad=keys.fp8_wgrad,
    )
    return Fp8Slice(
        recipe=recipe,
        layers=layers,
        reduce_amax=keys.reduce_amax,
        keeps_weights=keys.fp8_params,
        transformer_engine=bool(transformer_engine),
        attention=keys.fp8_dot_product_attention,
    )


def check_fp8(fp8: Fp8Slice, device: str, capability: tuple[int, int] | None, dtype: str) -> None:
    """Check that a device trains in fp8, which a CPU emulates.

    Args:
        fp8: recipe of a stack.
        device: device type.
        capability: CUDA compute capability; None on other devices.
        dtype: of the activations, as `bf16`.

    Raises:
        ValueError: it does not.
    """
    if fp8.recipe.scaling == "delayed" and device != "cuda":
        raise ValueError(
            f"`fp8_recipe` (delayed) needs a GPU for TransformerEngine, and this is {device}; use "
            "transformer_engine=null."
        )
    if device == "cpu":
        return
    if device != "cuda" or capability is None:
        raise ValueError(f"`fp8` (True) must be False on {device}, which has no fp8 matmuls; use model.fp8=false.")
    name = ".".join(map(str, capability))
    if capability < (8, 9):
        raise ValueError(
            f"`fp8` (True) needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), and this one has "
            f"{name}; use model.fp8=false."
        )
    if dtype != "bf16":
        raise ValueError(
            f"`fp8` (True) needs activations in bf16 on a GPU, and they are in {dtype}; use trainer.precision=bf16."
        )
    if fp8.recipe.scaling == "blockwise" and capability[0] != 9:
        raise ValueError(
            f"`fp8_recipe` (blockwise) needs a Hopper GPU, whose matmuls scale by blocks (compute capability 9.0), and "
            f"this one has {name}; use model.fp8_recipe=rowwise."
        )
