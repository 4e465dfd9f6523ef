"""Resolved configuration of parameter-efficient fine-tuning, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .peft import InitMethod, PeftKeys
from .slices import StackSlice

Projection = Literal["attention_qkv", "attention_dense", "mlp_fc1", "mlp_fc2"]
_GROUPS: dict[str, tuple[Projection, ...]] = {
    "attention": ("attention_qkv", "attention_dense"),
    "mlp": ("mlp_fc1", "mlp_fc2"),
    "all": get_args(Projection),
}
PROJECTIONS: frozenset[Projection] = frozenset(get_args(Projection))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSelection:
    """Selected layers of each stack.

    Attributes:
        numbers: layer numbers, counted from 1; None for all.
    """

    numbers: frozenset[int] | None = None

    def includes(self, index: int) -> bool:
        """Return True if the layer with this 0-based index is selected."""
        return self.numbers is None or index + 1 in self.numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASlice:
    """Low-rank updates of linear layers.

    Attributes:
        targets: projections of a layer that get updates.
        rank: rank of the updates.
        alpha: updates are multiplied by alpha / rank.
        dropout: dropout probability of the input of the first matrix, in training.
        column_init: initialization of the first matrix (A).
        row_init: initialization of the second matrix (B).
        layers: layers that get updates.
        canonical: separate matrices for each projection of a fused matrix.
    """

    targets: frozenset[Projection]
    rank: int
    alpha: float
    dropout: float
    column_init: InitMethod
    row_init: InitMethod
    layers: LayerSelection
    canonical: bool

    @property
    def scale(self) -> float:
        """Factor of the updates."""
        return self.alpha / self.rank

    @property
    def updates_all_norm_consumers(self) -> bool:
        """True if every projection that reads a norm of the residual stream has an update, in every layer."""
        return self.layers.numbers is None and {"attention_qkv", "mlp_fc1"} <= self.targets

    def spares_norms(self, stack: StackSlice) -> bool:
        """Return True if compiled projections with updates save the residual, saved anyway, instead of its norm."""
        return stack.norm.kind == "rmsnorm" and stack.block != "post_ln" and not self.dropout

    def can_fuse_mlp(self, stack: StackSlice) -> bool:
        """Return True if the LoRA MLP can be fused: both projections updated, with only a gated activation between."""
        mlp, both = stack.mlp, {"mlp_fc1", "mlp_fc2"} <= self.targets
        between = mlp.bias or mlp.dropout > 0 or self.dropout > 0 or stack.block == "normformer"
        return both and mlp.gated and not between


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlice:
    """Bottleneck MLPs after attention and MLP; attributes as in `AdapterTuningKeys`."""

    width: int
    dropout: float
    norm_position: Literal["pre", "post"] | None
    column_init: InitMethod
    row_init: InitMethod
    layers: LayerSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSlice:
    """Trained virtual tokens prepended to a sequence; attributes as in `PTuningKeys`."""

    virtual_tokens: int
    bottleneck: int
    embedding: int
    init_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IA3Slice:
    """Trained factors of keys, values and MLP activations."""

    layers: LayerSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveSlice:
    """The model's own parameters whose names contain one of these substrings."""

    names: tuple[str, ...]


PeftSlice = LoRASlice | AdapterSlice | PromptSlice | IA3Slice | SelectiveSlice


def peft_dropout(peft: PeftSlice | None) -> float:
    """Return the dropout probability of the fine-tuning modules in the layers; 0 for none."""
    return peft.dropout if isinstance(peft, LoRASlice | AdapterSlice) else 0.0


def peft_slice(keys: PeftKeys) -> PeftSlice | None:
    """Resolve the keys; None for full fine-tuning."""
    match keys.peft_scheme:
        case "lora":
            lora = keys.lora_tuning
            return LoRASlice(
                targets=frozenset(_projections(lora.target_modules)),
                rank=lora.adapter_dim,
                alpha=lora.adapter_dim if lora.alpha is None else lora.alpha,
                dropout=lora.adapter_dropout,
                column_init=lora.column_init_method,
                row_init=lora.row_init_method,
                layers=_layers(lora.layer_selection),
                canonical=lora.variant == "canonical",
            )
        case "adapter":
            adapter = keys.adapter_tuning
            return AdapterSlice(
                width=adapter.adapter_dim,
                dropout=adapter.adapter_dropout,
                norm_position=adapter.norm_position,
                column_init=adapter.column_init_method,
                row_init=adapter.row_init_method,
                layers=_layers(adapter.layer_selection),
            )
        case "ptuning":
            prompt = keys.p_tuning
            return PromptSlice(
                virtual_tokens=prompt.virtual_tokens,
                bottleneck=prompt.bottleneck_dim,
                embedding=prompt.embedding_dim,
                init_std=prompt.init_std,
            )
        case "ia3":
            return IA3Slice(layers=_layers(keys.ia3_tuning.layer_selection))
        case "selective":
            return SelectiveSlice(names=tuple(keys.selective_tuning.tunable_base_param_names or ()))
        case _:
            return None


def _layers(numbers: list[int] | None) -> LayerSelection:
    return LayerSelection(numbers=None if numbers is None else frozenset(numbers))


def _projections(names: Sequence[str]) -> Iterator[Projection]:
    for name in names:
        group: tuple[Projection, ...] = _GROUPS.get(name, (name,))  # type: ignore[arg-type]
        yield from group
